// Weight panels times one vector, with an epilogue (epilogue.h). Included inside each instruction set.
namespace ISA {
namespace {

// x as the panel product takes it: pairs for vdpbf16ps, floats elsewhere; zero-padded to an even count.
#if ISA_LANES == 16
using Operand = bf16;
#else
using Operand = float;
#endif

INLINE void prepare(const bf16 *x, int64_t cols, Operand *operand) {
    for (int64_t i = 0; i < cols; i++) {
#if ISA_LANES == 16
        operand[i] = x[i];
#else
        operand[i] = to_float(x[i]);
#endif
    }
    if (cols % 2 != 0) operand[cols] = 0;
}

INLINE void prefetch(const bf16 *line) { __builtin_prefetch(line, 0, 3); }

constexpr int64_t prefetch_lines = 32;

#if ISA_LANES == 16

// sums[16] = panel @ x. Independent accumulators over k hide the latency of vdpbf16ps.
INLINE void panel_times_vector(const bf16 *panel, const bf16 *x, int64_t pairs, float *sums) {
    constexpr int ways = 8;
    __m512 sum[ways];
    for (int i = 0; i < ways; i++) sum[i] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + ways <= pairs; k += ways) {
#pragma GCC unroll 8
        for (int i = 0; i < ways; i++) {
            const bf16 *line = panel + (k + i) * line_elements;
            prefetch(line + prefetch_lines * line_elements);
            int32_t pair;
            __builtin_memcpy(&pair, x + 2 * (k + i), 4);
            sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_loadu_si512(line),
                                      (__m512bh)_mm512_set1_epi32(pair));
        }
    }
    for (; k < pairs; k++) {
        int32_t pair;
        __builtin_memcpy(&pair, x + 2 * k, 4);
        sum[0] = _mm512_dpbf16_ps(sum[0], (__m512bh)_mm512_loadu_si512(panel + k * line_elements),
                                  (__m512bh)_mm512_set1_epi32(pair));
    }
    const __m512 low = (sum[0] + sum[1]) + (sum[2] + sum[3]), high = (sum[4] + sum[5]) + (sum[6] + sum[7]);
    _mm512_storeu_ps(sums, low + high);
}

#else

constexpr int panel_vectors = panel_rows / lanes;

INLINE void add_line(const bf16 *line, const float *x, f32v (*sum)[panel_vectors]) {
    prefetch(line + prefetch_lines * line_elements);
    for (int v = 0; v < panel_vectors; v++) {
        const u32v both = load<u32v>(line + 2 * v * lanes);
        sum[0][v] += (f32v)(both << 16) * x[0];
        sum[1][v] += (f32v)(both & 0xffff0000u) * x[1];
    }
}

INLINE void panel_times_vector(const bf16 *panel, const float *x, int64_t pairs, float *sums) {
    constexpr int ways = 2;
    f32v sum[2 * ways][panel_vectors] = {};
    int64_t k = 0;
    for (; k + ways <= pairs; k += ways)
        for (int i = 0; i < ways; i++) add_line(panel + (k + i) * line_elements, x + 2 * (k + i), sum + 2 * i);
    for (; k < pairs; k++) add_line(panel + k * line_elements, x + 2 * k, sum);
    for (int v = 0; v < panel_vectors; v++)
        store(sums + v * lanes, (sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v]));
}

#endif

template <class Epilogue>
void gemv_panels(const bf16 *const *weights, const bf16 *x, int64_t out_cols, int64_t cols,
                 const Epilogue &epilogue, Worker &worker) {
    const int64_t pairs = pair_count(cols), size = panel_size(cols);
    Operand *operand = worker.scratch<Operand>(2 * pairs);
    prepare(x, cols, operand);
    const int64_t chunk = 65536 / size + 1;  // some 128 KB: long streams, yet fine enough to balance
    Chunks chunks(worker, panel_count(out_cols), chunk);
    for (int64_t panel, end; chunks.next(panel, end);) {
        for (; panel < end; panel++) {
            float sums[Epilogue::weights * panel_rows];
            for (int64_t w = 0; w < Epilogue::weights; w++)
                panel_times_vector(weights[w] + panel * size, operand, pairs, sums + w * panel_rows);
            const int64_t column = panel * panel_rows;
            const int64_t count = out_cols - column < panel_rows ? out_cols - column : panel_rows;
            epilogue.row(sums, 0, column, count);
        }
    }
}

}  // namespace
}  // namespace ISA
