// Weight panels times one vector, with an epilogue (epilogue.h). Included inside each instruction set.
//
// Bound by memory. A core reads fastest from about eight long sequential streams at once, prefetched into
// L2, with few instructions per line, so that its window of loads in flight reaches far: hence several
// panels at a time, and nothing but a prefetch and a product per line.
namespace ISA {
namespace {

// Streams whose sums fit the registers.
constexpr int most_streams = ISA_LANES == 16 ? 8 : ISA_LANES == 8 ? 4 : 2;

template <class Some>
constexpr int64_t skew_elements = Some::skew / static_cast<int64_t>(sizeof(bf16));

#if ISA_LANES == 16

static_assert(panel_rows == lanes, "a line is one operand of vdpbf16ps, and its sums are one register");

using Sum = __m512;

INLINE __m512bh operand_pair(const Operand *x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

// sums[p] += line k of panel p * pair k of x, of `Some` panels. The product is in assembly, because a separate load would
// take a register and a slot of the window for each line, and with them 6 % of the bandwidth. Its last operand
// tells the compiler what is read, so that no store to it is moved or dropped.
template <class Some>
INLINE void add_lines(const bf16 *const *panels, const Operand *x, int64_t k, int64_t ahead, Sum *sums) {
    const __m512bh pair = operand_pair(x + 2 * k);
#pragma GCC unroll 8
    for (int p = 0; p < Some::value; p++) {
        prefetch(panels[p] + (k * line_elements + ahead) + p * skew_elements<Some>);
        asm("vdpbf16ps (%2,%3), %1, %0"
            : "+v"(sums[p])
            : "v"(pair), "r"(panels[p]), "r"(k * 64),
              "m"(*(const bf16(*)[line_elements])(panels[p] + k * line_elements)));
    }
}

#else

static_assert(panel_rows % lanes == 0, "a line is whole registers");

struct Sum {
    f32v part[panel_rows / lanes];
};

INLINE void store(float *sums, const Sum &sum) {
    for (int64_t v = 0; v < panel_rows / lanes; v++) store(sums + v * lanes, sum.part[v]);
}

template <class Some>
INLINE void add_lines(const bf16 *const *panels, const Operand *x, int64_t k, int64_t ahead, Sum *sums) {
    const f32v first = splat(x[2 * k]), second = splat(x[2 * k + 1]);
#pragma GCC unroll 8
    for (int p = 0; p < Some::value; p++) {
        const bf16 *line = panels[p] + k * line_elements;
        prefetch(line + ahead + p * skew_elements<Some>);
#pragma GCC unroll 4
        for (int64_t v = 0; v < panel_rows / lanes; v++) {
            const u32v both = load<u32v>(line + 2 * v * lanes);
            sums[p].part[v] += (f32v)(both << 16) * first;
            sums[p].part[v] += (f32v)(both & 0xffff0000u) * second;
        }
    }
}

#endif

// sums[P][panel_rows] = P panels, `size` elements apart, @ x.
template <class Some>
void panels_times_vector(const bf16 *first, int64_t size, const Operand *x, int64_t pairs, float *sums,
                         const After<bf16> &after) {
    constexpr int P = Some::value;
    const bf16 *panels[P];
    Sum sum[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
        panels[p] = first + p * size;
        sum[p] = Sum{};
    }
    const int64_t last = pairs > prefetch_lines ? pairs - prefetch_lines : 0;
    for (int64_t k = 0; k < last; k++) add_lines<Some>(panels, x, k, prefetch_lines * line_elements, sum);
    const int64_t ahead = after.distance(first + last * line_elements);
    for (int64_t k = last; k < pairs; k++) add_lines<Some>(panels, x, k, ahead, sum);
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) store(sums + p * panel_rows, sum[p]);
}

template <class Epilogue>
class Gemv {
public:
    Gemv(const bf16 *const *weights, int64_t out_cols, int64_t cols, const Epilogue &epilogue)
        : weights_(weights), out_cols_(out_cols), cols_(cols), epilogue_(epilogue) {}

    void run(const bf16 *x, Worker &worker) {
        with_streams<most_streams>([&](auto streams) { run_in<decltype(streams)>(x, worker); });
    }

private:
    template <class Streams>
    void run_in(const bf16 *x, Worker &worker) {
        const int64_t panel_bytes = panel_size(cols_) * static_cast<int64_t>(sizeof(bf16)) * Epilogue::weights;
        Chunks chunks = panel_chunks(worker, panel_count(out_cols_), Streams::value, panel_bytes);
        each_panels<Streams>(
            chunks, epilogue_,
            [&] { x_ = prepare(x, cols_, cols_ + cols_ % 2, worker.scratch<Operand>(cols_ + 1)); },
            [&](auto some, Turn &turn, const Epilogue &epilogue) { multiply<decltype(some)>(turn, epilogue); });
    }

    template <class Some>
    void multiply(Turn &turn, const Epilogue &epilogue) {
        constexpr int64_t weights = Epilogue::weights;
        constexpr int count = Some::value;
        float sums[weights][count * panel_rows];
        const int64_t size = panel_size(cols_);
        each_weight<weights>(weights_, size, turn, [&](int64_t w, const bf16 *own, const After<bf16> &after) {
            panels_times_vector<Some>(own, size * turn.apart, x_, pair_count(cols_), sums[w], after);
        });
        finish_panels<count>(epilogue, turn.panel, turn.apart, out_cols_, sums);
    }

    const bf16 *const *weights_;
    int64_t out_cols_, cols_;
    Epilogue epilogue_;
    const Operand *x_ = nullptr;
};

template <class Epilogue>
void gemv_panels(const bf16 *const *weights, const bf16 *x, int64_t out_cols, int64_t cols,
                 const Epilogue &epilogue, Worker &worker) {
    Gemv<Epilogue>(weights, out_cols, cols, epilogue).run(x, worker);
}

}  // namespace
}  // namespace ISA
