// Panels of grouped weights (grouped.h) times one vector, with an epilogue (epilogue.h). Included inside each
// instruction set.
//
// Bound by memory where it can be: for each line of weights there are a dozen instructions, so panels are taken several
// at a time, which share each load of x.
namespace ISA {
namespace {

// A vector as a grouped product takes it: whole groups, and their sums if there are minima.
struct GroupedVector {
    const Operand *x;
    const float *sums;

    template <class Format>
    static GroupedVector prepare(const bf16 *x, int64_t cols, Worker &worker) {
        const int64_t groups = group_count<Format>(cols), padded = groups * Format::inputs;
        float *sums = worker.scratch<float>(groups + padded);
        Operand *operands = reinterpret_cast<Operand *>(sums + groups);
        ISA::prepare(x, cols, padded, operands);
        for (int64_t g = 0; Format::has_minimum && g < groups; g++)
            sums[g] = sum_of_group<Format>(x + g * Format::inputs, cols - g * Format::inputs);
        return {operands, sums};
    }
};

#if ISA_LANES == 16

constexpr int64_t grouped_ahead = 1024;  // bytes
constexpr int most_grouped_streams = 8;

// sums[P][panel_rows] = P panels @ x.
template <class Format, int P>
void grouped_panels_times_vector(const uint8_t *first, int64_t size, const GroupedVector &x, int64_t groups,
                                 float *sums) {
    constexpr int64_t group_pairs = Format::inputs / 2;
    const auto format = Format::make();
    f32v total[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) total[p] = f32v{};
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *numbers = GroupedPanel<Format>::numbers(first, g);
        const Operand *pairs = x.x + g * Format::inputs;
        __m512 sum[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) sum[p] = _mm512_setzero_ps();
#pragma GCC unroll 16
        for (int i = 0; i < group_pairs; i += 2) {
            const __m512bh even = (__m512bh)load_pair(pairs + 2 * i), odd = (__m512bh)load_pair(pairs + 2 * i + 2);
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) {
                const uint8_t *own = numbers + p * size;
                constexpr int per_line = group_pairs * line_bytes / Format::number_bytes;
                if (i % per_line == 0) __builtin_prefetch(own + i / per_line * line_bytes + grouped_ahead, 0, 2);
                sum[p] = _mm512_dpbf16_ps(sum[p], format.pair(own, i), even);
                sum[p] = _mm512_dpbf16_ps(sum[p], format.pair(own, i + 1), odd);
            }
        }
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            const auto scales = Scales<Format>::at(first + p * size, g);
            total[p] = scaled<Format>((f32v)sum[p], scales.scale, scales.minimum, splat(x.sums[g]), total[p]);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) store(sums + p * panel_rows, total[p]);
}

#else

constexpr int most_grouped_streams = 1;

// Numbers of a group as f32 [input][output].
template <class Format>
INLINE void widen_group(const uint8_t *numbers, float (*out)[panel_rows]) {
    for (int64_t k = 0; k < Format::inputs; k++)
        for (int64_t r = 0; r < panel_rows; r++) out[k][r] = static_cast<float>(Format::number(numbers, k, r));
}

template <class Format>
INLINE void read_scales(const uint8_t *panel, int64_t group, float *scale, float *minimum) {
    for (int64_t r = 0; r < panel_rows; r++) {
        const auto own = RowScales::at<Format>(panel, group, r);
        scale[r] = own.scale;
        minimum[r] = own.minimum;
    }
}

// out[panel_rows] += a group's share of panel @ x.
template <class Format>
INLINE void add_group(const float (*numbers)[panel_rows], const float *scale, const float *minimum, const float *x,
                      float sum_of_x, float *out) {
    constexpr int64_t vectors = panel_rows / lanes;
    f32v sum[vectors] = {};
    for (int64_t k = 0; k < Format::inputs; k++)
#pragma GCC unroll 4
        for (int64_t v = 0; v < vectors; v++) sum[v] += load<f32v>(numbers[k] + v * lanes) * splat(x[k]);
#pragma GCC unroll 4
    for (int64_t v = 0; v < vectors; v++) {
        store(out + v * lanes, scaled<Format>(sum[v], load<f32v>(scale + v * lanes), load<f32v>(minimum + v * lanes),
                                              splat(sum_of_x), load<f32v>(out + v * lanes)));
    }
}

template <class Format, int P>
void grouped_panels_times_vector(const uint8_t *first, int64_t, const GroupedVector &x, int64_t groups, float *sums) {
    static_assert(P == 1, "one panel at a time");
    float numbers[Format::inputs][panel_rows], scale[panel_rows], minimum[panel_rows];
    for (int64_t r = 0; r < panel_rows; r++) sums[r] = 0;
    for (int64_t g = 0; g < groups; g++) {
        widen_group<Format>(GroupedPanel<Format>::numbers(first, g), numbers);
        read_scales<Format>(first, g, scale, minimum);
        add_group<Format>(numbers, scale, minimum, x.x + g * Format::inputs, x.sums[g], sums);
    }
}

#endif

template <class Format, class Epilogue>
class GroupedGemv {
public:
    GroupedGemv(const uint8_t *const *weights, int64_t out_cols, int64_t cols, const Epilogue &epilogue)
        : weights_(weights), out_cols_(out_cols), cols_(cols), epilogue_(epilogue) {}

    void run(const bf16 *x, Worker &worker) {
        const int64_t least = 65536 / (GroupedPanel<Format>::size(cols_) * Epilogue::weights);
        Chunks chunks(worker, panel_count(out_cols_), most_grouped_streams,
                      least < most_grouped_streams ? least : most_grouped_streams);
        bool prepared = false;
        for (int64_t panel, end; chunks.next(panel, end);) {
            if (!prepared) x_ = GroupedVector::prepare<Format>(x, cols_, worker);
            prepared = true;
            while (panel < end) panel += multiply(panel, end - panel);
        }
    }

private:
    int64_t multiply(int64_t panel, int64_t count) {
        if (count >= 8 && most_grouped_streams >= 8) return multiply<most_grouped_streams>(panel);
        if (count >= 4 && most_grouped_streams >= 4) return multiply<most_grouped_streams < 4 ? 1 : 4>(panel);
        if (count >= 2 && most_grouped_streams >= 2) return multiply<most_grouped_streams < 2 ? 1 : 2>(panel);
        return multiply<1>(panel);
    }

    template <int count>
    int64_t multiply(int64_t panel) {
        constexpr int64_t weights = Epilogue::weights;
        const int64_t size = GroupedPanel<Format>::size(cols_), groups = group_count<Format>(cols_);
        float sums[weights][count * panel_rows];
        for (int64_t w = 0; w < weights; w++)
            grouped_panels_times_vector<Format, count>(weights_[w] + panel * size, size, x_, groups, sums[w]);
        finish_panels<count>(epilogue_, panel, out_cols_, sums);
        return count;
    }

    const uint8_t *const *weights_;
    int64_t out_cols_, cols_;
    Epilogue epilogue_;
    GroupedVector x_ = {};
};

}  // namespace
}  // namespace ISA
