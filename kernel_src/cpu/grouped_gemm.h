// Matrix times panels of grouped weights (grouped.h), with an epilogue (gemm_core.h says what one is). Included inside
// each instruction set.
//
// A block of groups of a few panels is widened to whole numbers in bf16, which is exact, and multiplied with all rows of
// a task. A tile is as wide as leaves registers for both a group's sums and those of the groups before, scaled.
namespace ISA {
namespace {

constexpr int64_t inputs_per_block = 1024;
constexpr int64_t grouped_panels = 2;  // of a tile
static_assert(tile_panels % grouped_panels == 0, "a task's panels are whole tiles");

// A group of a tile's panels, widened; what a step of the product reads lies together.
#if ISA_LANES == 16
template <class Format>
struct WideGroup {
    static constexpr int64_t pairs = Format::inputs / 2;
    bf16 lines[pairs][grouped_panels][line_elements];
    float scale[grouped_panels][panel_rows], minimum[grouped_panels][panel_rows];

    INLINE_MEMBER void widen(const uint8_t *panel, int64_t p, int64_t group) {
        const auto format = Format::make();
        const uint8_t *numbers = GroupedPanel<Format>::numbers(panel, group);
#pragma GCC unroll 16
        for (int i = 0; i < pairs; i++) _mm512_storeu_si512(lines[i][p], (__m512i)format.pair(numbers, i));
        const auto scales = Scales<Format>::at(panel, group);
        store(scale[p], scales.scale);
        store(minimum[p], scales.minimum);
    }
};
#else
template <class Format>
struct WideGroup {
    float numbers[grouped_panels][Format::inputs][panel_rows];
    float scale[grouped_panels][panel_rows], minimum[grouped_panels][panel_rows];

    INLINE_MEMBER void widen(const uint8_t *panel, int64_t p, int64_t group) {
        widen_group<Format>(GroupedPanel<Format>::numbers(panel, group), numbers[p]);
        read_scales<Format>(panel, group, scale[p], minimum[p]);
    }
};
#endif

// out[r][16 p + i] += the share of `groups` groups of a tile's panels, for r < R; rows of out are `out_stride` apart.
// x: rows of whole groups, `x_stride` apart; sums_of_x: per row and group, `sums_stride` apart.
template <class Format>
struct GroupedTileArgs {
    const bf16 *x;
    int64_t x_stride;
    const float *sums_of_x;
    int64_t sums_stride;
    const WideGroup<Format> *weights;
    int64_t groups;
    float *out;
    int64_t out_stride;
};

#if ISA_LANES == 16

template <class Format, int R>
void grouped_tile(const GroupedTileArgs<Format> &args) {
    constexpr int P = grouped_panels;
    const bf16 *x = args.x;
    const int64_t stride = args.x_stride;
    __m512 total[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) total[r][p] = _mm512_loadu_ps(args.out + r * args.out_stride + p * panel_rows);
    for (int64_t g = 0; g < args.groups; g++, x += Format::inputs) {
        const WideGroup<Format> &weights = args.weights[g];
        __m512 sum[R][P];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) sum[r][p] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int64_t i = 0; i < WideGroup<Format>::pairs; i++) {
            __m512bh line[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) line[p] = (__m512bh)_mm512_loadu_si512(weights.lines[i][p]);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m512bh pair = (__m512bh)load_pair(x + r * stride + 2 * i);
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], line[p], pair);
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const f32v scale = load<f32v>(weights.scale[p]), minimum = load<f32v>(weights.minimum[p]);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const f32v sum_of_x = splat(Format::has_minimum ? args.sums_of_x[r * args.sums_stride + g] : 0);
                total[r][p] = (__m512)scaled<Format>((f32v)sum[r][p], scale, minimum, sum_of_x, (f32v)total[r][p]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) _mm512_storeu_ps(args.out + r * args.out_stride + p * panel_rows, total[r][p]);
}

#else

template <class Format, int R>
void grouped_tile(const GroupedTileArgs<Format> &args) {
    for (int64_t g = 0; g < args.groups; g++)
        for (int64_t r = 0; r < R; r++) {
            float x[Format::inputs];
            for (int64_t i = 0; i < Format::inputs; i += lanes)
                store(x + i, load_bf16(args.x + r * args.x_stride + g * Format::inputs + i));
            const float sum_of_x = Format::has_minimum ? args.sums_of_x[r * args.sums_stride + g] : 0;
            const WideGroup<Format> &weights = args.weights[g];
            for (int64_t p = 0; p < grouped_panels; p++)
                add_group<Format>(weights.numbers[p], weights.scale[p], weights.minimum[p], x, sum_of_x,
                                  args.out + r * args.out_stride + p * panel_rows);
        }
}

#endif

template <class Format>
void grouped_tile_of_rows(int64_t rows, const GroupedTileArgs<Format> &args) {
    with_rows(rows, [&](auto known) { grouped_tile<Format, known.count>(args); });
}

template <class Format, class Epilogue>
class GroupedGemm {
public:
    GroupedGemm(const bf16 *x, const uint8_t *const *weights, int64_t rows, int64_t cols, int64_t out_cols,
                const Epilogue &epilogue)
        : x_(x), groups_{weights, GroupedPanel<Format>::size(cols), rows, out_cols}, cols_(cols),
          epilogue_(epilogue) {}

    void run(Worker &worker) {
        if (Format::has_minimum) sum_groups(worker);
        const int64_t task_rows = groups_.task_rows();
        constexpr int64_t wide_bytes = tiles_across * sizeof(*wide_);
        char *own = worker.scratch<char>(wide_bytes + task_rows * line_width * sizeof(float));
        wide_ = reinterpret_cast<WideGroup<Format>(*)[groups_per_block]>(own);
        sums_ = reinterpret_cast<float *>(own + wide_bytes);
        groups_.each_task(worker, [&](auto... task) { multiply(task...); });
    }

private:
    static constexpr int64_t line_width = tile_panels * panel_rows, tiles_across = tile_panels / grouped_panels;
    static constexpr int64_t groups_per_block = inputs_per_block / Format::inputs;

    void sum_groups(Worker &worker) {
        const int64_t groups = group_count<Format>(cols_);
        sums_of_x_ = worker.shared_scratch<float>(groups_.rows * groups);
        {
            Chunks chunks(worker, groups_.rows, 8);
            for (int64_t row, end; chunks.next(row, end);)
                for (; row < end; row++)
                    for (int64_t g = 0; g < groups; g++)
                        sums_of_x_[row * groups + g] =
                            sum_of_group<Format>(x_ + row * cols_ + g * Format::inputs, cols_ - g * Format::inputs);
        }
        worker.barrier();
    }

    void multiply(int64_t column, int64_t first, int64_t last) {
        const int64_t groups = group_count<Format>(cols_);
        memset(sums_, 0, (last - first) * line_width * sizeof(float));
        for (int64_t done = 0; done < groups; done += groups_per_block) {
            const int64_t count = groups - done < groups_per_block ? groups - done : groups_per_block;
            widen(column, done, count);
            for (int64_t row = first; row < last; row += tile_rows) {
                const int64_t rows = last - row < tile_rows ? last - row : tile_rows;
                multiply_rows(row, rows, done, count, sums_ + (row - first) * line_width);
                if (done + count == groups) finish(column, row, rows, sums_ + (row - first) * line_width);
            }
        }
    }

    void widen(int64_t column, int64_t first, int64_t count) {
        for (int64_t p = 0; p < tile_panels; p++)
            for (int64_t g = 0; g < count; g++)
                wide_[p / grouped_panels][g].widen(groups_.panel(column, p), p % grouped_panels, first + g);
    }

    void multiply_rows(int64_t row, int64_t rows, int64_t first, int64_t count, float *sums) const {
        const int64_t groups = group_count<Format>(cols_), whole = cols_ / Format::inputs;
        GroupedTileArgs<Format> args;
        args.x = x_ + row * cols_ + first * Format::inputs;
        args.x_stride = cols_;
        args.sums_of_x = sums_of_x_ + row * groups + first;
        args.sums_stride = groups;
        args.out_stride = line_width;
        for (int64_t tile = 0; tile < tiles_across; tile++) {
            args.weights = wide_[tile];
            args.out = sums + tile * grouped_panels * panel_rows;
            args.groups = first + count <= whole ? count : count - 1;
            if (args.groups > 0) grouped_tile_of_rows<Format>(rows, args);
            if (args.groups < count) multiply_last(rows, args);
        }
    }

    // A last group that is not whole: x has nothing behind its rows to be multiplied with zeros.
    void multiply_last(int64_t rows, GroupedTileArgs<Format> args) const {
        bf16 x[tile_rows][Format::inputs] = {};
        const int64_t left = cols_ % Format::inputs, done = args.groups;
        for (int64_t r = 0; r < rows; r++)
            memcpy(x[r], args.x + r * cols_ + done * Format::inputs, left * sizeof(bf16));
        args.x = x[0];
        args.x_stride = Format::inputs;
        args.sums_of_x += done;
        args.weights += done;
        args.groups = 1;
        grouped_tile_of_rows<Format>(rows, args);
    }

    void finish(int64_t column, int64_t row, int64_t rows, const float *sums) {
        for (int64_t r = 0; r < rows; r++) groups_.finish(epilogue_, column, row + r, sums + r * line_width);
    }

    const bf16 *x_;
    PanelGroups<uint8_t, Epilogue> groups_;
    int64_t cols_;
    Epilogue epilogue_;
    float *sums_of_x_ = nullptr, *sums_ = nullptr;
    WideGroup<Format> (*wide_)[groups_per_block] = nullptr;
};

}  // namespace
}  // namespace ISA
