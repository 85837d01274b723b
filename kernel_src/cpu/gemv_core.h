// Weight panels times one vector, with an epilogue (epilogue.h). Included inside each instruction set.
//
// Bound by memory. A core reads fastest from about eight sequential streams at once, prefetched into L2,
// with few instructions per line, so that its window of loads in flight reaches far: hence several panels
// at a time, each cut into equal segments, and nothing but a prefetch and a product per line.
namespace ISA {
namespace {

constexpr int64_t prefetch_lines = 16;

INLINE void prefetch(const bf16 *line) { __builtin_prefetch(line, 0, 2); }

// Starts reading `count` streams that are `size` lines long and follow each other.
INLINE void prefetch_starts(const bf16 *first, int64_t count, int64_t size) {
    for (int64_t k = 0; k < prefetch_lines && k < size; k++)
        for (int64_t i = 0; i < count; i++) prefetch(first + (i * size + k) * line_elements);
}

#if ISA_LANES == 16

using Operand = uint32_t;  // a pair of x

// The pairs of x in the order in which lines meet them: S segments in lockstep, then what is left.
template <int S>
void prepare(const bf16 *x, int64_t cols, Operand *pairs) {
    const int64_t count = pair_count(cols), lines = count / S;
    for (int64_t pair = 0; pair < count; pair++) {
        const int64_t segment = lines == 0 ? S : pair / lines;
        const int64_t at = segment < S ? (pair - segment * lines) * S + segment : pair;
        const bf16 odd = 2 * pair + 1 < cols ? x[2 * pair + 1] : bf16{0};
        pairs[at] = x[2 * pair] | static_cast<uint32_t>(odd) << 16;
    }
}

INLINE __m512bh broadcast(Operand pair) { return (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(pair)); }

// sum += the line at `base + offset` bytes, times a pair. In assembly, because a separate load would
// take a register and a slot of the window for each line, and with them 6 % of the bandwidth.
INLINE void add_line(__m512 &sum, __m512bh pair, const bf16 *base, int64_t offset) {
    asm("vdpbf16ps (%2,%3), %1, %0" : "+v"(sum) : "v"(pair), "r"(base), "r"(offset));
}

template <int P, int S, bool ahead>
INLINE void add_lines(const bf16 *const *streams, const Operand *x, int64_t begin, int64_t end, __m512 *sums) {
    for (int64_t k = begin; k < end; k++) {
#pragma GCC unroll 8
        for (int s = 0; s < S; s++) {
            const __m512bh pair = broadcast(x[k * S + s]);
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) {
                const bf16 *stream = streams[p * S + s];
                if (ahead) prefetch(stream + (k + prefetch_lines) * line_elements);
                add_line(sums[p * S + s], pair, stream, k * 64);
            }
        }
    }
}

// sums[P][16] = P panels @ x; `next` is what will be read after them, or null.
template <int P, int S>
void panels_times_vector(const bf16 *panels, const bf16 *next, const Operand *x, int64_t pairs, float *sums) {
    const int64_t lines = pairs / S;
    const bf16 *streams[P * S];
    __m512 sum[P * S];
#pragma GCC unroll 16
    for (int i = 0; i < P * S; i++) {
        streams[i] = panels + (i / S * pairs + i % S * lines) * line_elements;
        sum[i] = _mm512_setzero_ps();
    }
    const int64_t last = lines > prefetch_lines ? lines - prefetch_lines : 0;
    add_lines<P, S, true>(streams, x, 0, last, sum);
    if (next != nullptr) prefetch_starts(next, P * S, lines);
    add_lines<P, S, false>(streams, x, last, lines, sum);
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) {
        for (int64_t k = S * lines; k < pairs; k++)
            add_line(sum[p * S], broadcast(x[k]), panels + p * pairs * line_elements, k * 64);
        __m512 total = sum[p * S];
#pragma GCC unroll 8
        for (int s = 1; s < S; s++) total += sum[p * S + s];
        _mm512_storeu_ps(sums + p * panel_rows, total);
    }
}

#else

using Operand = float;

template <int S>
void prepare(const bf16 *x, int64_t cols, Operand *operand) {
    for (int64_t i = 0; i < cols; i++) operand[i] = to_float(x[i]);
    if (cols % 2 != 0) operand[cols] = 0;
}

// As above. Widening and two products per line leave no room for segments: P streams.
template <int P, int S>
void panels_times_vector(const bf16 *panels, const bf16 *next, const Operand *x, int64_t pairs, float *sums) {
    constexpr int vectors = panel_rows / lanes;
    f32v sum[P][vectors] = {};
    for (int64_t k = 0; k < pairs; k++) {
        const f32v first = splat(x[2 * k]), second = splat(x[2 * k + 1]);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            const bf16 *line = panels + (p * pairs + k) * line_elements;
            prefetch(line + prefetch_lines * line_elements);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                const u32v both = load<u32v>(line + 2 * v * lanes);
                sum[p][v] += (f32v)(both << 16) * first;
                sum[p][v] += (f32v)(both & 0xffff0000u) * second;
            }
        }
    }
    if (next != nullptr) prefetch_starts(next, P, pairs);
    for (int p = 0; p < P; p++)
        for (int v = 0; v < vectors; v++) store(sums + p * panel_rows + v * lanes, sum[p][v]);
}

#endif

template <class Epilogue, int P, int S>
class Gemv {
public:
    Gemv(const bf16 *const *weights, int64_t out_cols, int64_t cols, const Epilogue &epilogue)
        : weights_(weights), out_cols_(out_cols), cols_(cols), epilogue_(epilogue) {}

    void run(const bf16 *x, Worker &worker) {
        Operand *operand = worker.scratch<Operand>(cols_ + 1);
        prepare<S>(x, cols_, operand);
        x_ = operand;
        Chunks chunks(worker, panel_count(out_cols_), P);
        int64_t panel, end, following, following_end;
        // The next chunk is taken before this one is done, so that its first lines are on their way.
        for (bool more = chunks.next(panel, end); more; panel = following, end = following_end) {
            more = chunks.next(following, following_end);
            if (end - panel == P)
                multiply<P>(panel, more ? following : -1);
            else
                for (; panel < end; panel++) multiply<1>(panel, -1);
        }
    }

private:
    const bf16 *weight(int64_t w, int64_t panel) const {
        return panel < 0 ? nullptr : weights_[w] + panel * panel_size(cols_);
    }

    template <int count>
    void multiply(int64_t panel, int64_t next) {
        constexpr int64_t weights = Epilogue::weights;
        float sums[weights][count * panel_rows];
        for (int64_t w = 0; w < weights; w++)
            panels_times_vector<count, S>(weight(w, panel), w + 1 < weights ? weight(w + 1, panel) : weight(0, next),
                                          x_, pair_count(cols_), sums[w]);
        for (int64_t p = 0; p < count; p++) {
            float row[weights * panel_rows];
            for (int64_t w = 0; w < weights; w++)
                memcpy(row + w * panel_rows, sums[w] + p * panel_rows, panel_rows * sizeof(float));
            const int64_t column = (panel + p) * panel_rows;
            epilogue_.row(row, 0, column, out_cols_ - column < panel_rows ? out_cols_ - column : panel_rows);
        }
    }

    const bf16 *const *weights_;
    int64_t out_cols_, cols_;
    Epilogue epilogue_;
    const Operand *x_ = nullptr;
};

// Streams of some 32 KB: longer ones balance worse over the team, shorter ones read slower. The number
// of segments depends on the shape alone, because the order of summation does.
template <class Epilogue>
void gemv_panels(const bf16 *const *weights, const bf16 *x, int64_t out_cols, int64_t cols,
                 const Epilogue &epilogue, Worker &worker) {
    if (cols <= 4096)
        Gemv<Epilogue, 4, 2>(weights, out_cols, cols, epilogue).run(x, worker);
    else
        Gemv<Epilogue, 2, 4>(weights, out_cols, cols, epilogue).run(x, worker);
}

}  // namespace
}  // namespace ISA
