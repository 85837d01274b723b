// Matrix times panels of grouped weights (grouped.h), with an epilogue (gemm_core.h says what one is). Included inside
// each instruction set.
//
// A block of groups of a few panels is widened to 16 bits and multiplied with all rows of a task. A tile is as wide as
// leaves registers for both a group's sums and those of the groups before, scaled.
namespace ISA {
namespace {

constexpr int64_t inputs_per_block = 1024;
constexpr int64_t grouped_panels = 2;  // of a tile
static_assert(tile_panels % grouped_panels == 0, "a task's panels are whole tiles");
static_assert(inputs_per_block % fixed_inputs == 0, "a block is whole blocks of x");

// A group of a tile's panels, widened to pairs of i16; what a step of the product reads lies together.
template <class Format>
struct WideGroup {
    static constexpr int64_t pairs = Format::inputs / 2;
    uint16_t lines[pairs][grouped_panels][line_elements];
    float scale[grouped_panels][panel_rows], minimum[grouped_panels][panel_rows];

    INLINE_MEMBER void widen(const uint8_t *panel, int64_t p, int64_t group) {
        const uint8_t *numbers = GroupedPanel<Format>::numbers(panel, group);
#pragma GCC unroll 8
        for (int i = 0; i < Format::inputs / quad; i++)
            for (int64_t first = 0; first < panel_rows; first += lanes) {
                const quadv four = Format::quad_at(numbers, i, first * quad);
                store(lines[2 * i][p] + 2 * first, four & 0xff);
                store(lines[2 * i + 1][p] + 2 * first, four >> 8);
            }
        for (int64_t first = 0; first < panel_rows; first += lanes) {
            store(scale[p] + first, scale_of<Format>(panel, group, 0, first));
            if (Format::has_minimum) store(minimum[p] + first, scale_of<Format>(panel, group, 1, first));
        }
    }
};

// products[r][16 p + i] += the share of a block of x, at most fixed_inputs of `groups` groups of a tile's panels, for
// r < R, and minima likewise; rows of both are `out_stride` apart. x: rows `x_stride` apart, and their sums of groups and the
// block's unit `sums_stride` apart.
template <class Format>
struct GroupedTileArgs {
    const int16_t *x;
    int64_t x_stride;
    const float *sums_of_x, *unit;
    int64_t sums_stride;
    const WideGroup<Format> *weights;
    int64_t groups;
    float *products, *minima;
    int64_t out_stride;
};

// Sums of a tile, as many rows at a time as registers hold.
constexpr int64_t sum_rows = ISA_LANES == 16 ? tile_rows : 1;
constexpr int64_t tile_width = grouped_panels * panel_rows, tile_vectors = tile_width / lanes;

template <class Format, int R>
INLINE void wide_sums(const WideGroup<Format> &weights, const int16_t *x, int64_t stride, i32v (*sums)[tile_vectors]) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < WideGroup<Format>::pairs; i++) {
        quadv line[tile_vectors];
#pragma GCC unroll 16
        for (int64_t v = 0; v < tile_vectors; v++) line[v] = load<quadv>(weights.lines[i][0] + v * 2 * lanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const i32v pair = splat_pair(x + r * stride + 2 * i);
#pragma GCC unroll 16
            for (int64_t v = 0; v < tile_vectors; v++) sums[r][v] = multiply_pairs(line[v], pair, sums[r][v]);
        }
    }
}

// out[r] += total[r], in the units of the rows.
template <int R>
INLINE void add_blocks(float *out, int64_t out_stride, const f32v (*total)[tile_vectors], const float *unit,
                       int64_t unit_stride) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int64_t v = 0; v < tile_vectors; v++)
            add_block(out + r * out_stride + v * lanes, total[r][v], unit[r * unit_stride]);
}

template <class Format, int R>
void grouped_tile(const GroupedTileArgs<Format> &args) {
    const int64_t sums_stride = args.sums_stride;
    f32v total[R][tile_vectors] = {};
    for (int64_t g = 0; g < args.groups; g++) {
        const WideGroup<Format> &weights = args.weights[g];
        i32v sum[R][tile_vectors];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int64_t v = 0; v < tile_vectors; v++)
                sum[r][v] = first_sum<Format>(args.sums_of_x[r * sums_stride + g]);
        wide_sums<Format, R>(weights, args.x + g * Format::inputs, args.x_stride, sum);
#pragma GCC unroll 8
        for (int64_t v = 0; v < tile_vectors; v++) {
            const f32v scale = load<f32v>(weights.scale[0] + v * lanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) total[r][v] = multiply_add(scale, whole_to_float(sum[r][v]), total[r][v]);
        }
    }
    add_blocks<R>(args.products, args.out_stride, total, args.unit, sums_stride);
    if (!Format::has_minimum) return;
    f32v least[R][tile_vectors] = {};
    for (int64_t g = 0; g < args.groups; g++)
#pragma GCC unroll 8
        for (int64_t v = 0; v < tile_vectors; v++) {
            const f32v minimum = load<f32v>(args.weights[g].minimum[0] + v * lanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                least[r][v] = multiply_add(minimum, splat(args.sums_of_x[r * sums_stride + g]), least[r][v]);
        }
    add_blocks<R>(args.minima, args.out_stride, least, args.unit, sums_stride);
}

template <class Format>
void grouped_tile_of_rows(int64_t rows, GroupedTileArgs<Format> args) {
    if (sum_rows == tile_rows) return with_rows(rows, [&](auto known) { grouped_tile<Format, known.count>(args); });
    for (int64_t r = 0; r < rows; r++) {
        grouped_tile<Format, 1>(args);
        args.x += args.x_stride;
        args.sums_of_x += args.sums_stride;
        args.unit += args.sums_stride;
        args.products += args.out_stride;
        args.minima += args.out_stride;
    }
}

template <class Format, class Epilogue>
class GroupedGemm {
public:
    GroupedGemm(const bf16 *x, const uint8_t *const *weights, int64_t rows, int64_t cols, int64_t out_cols,
                const Epilogue &epilogue)
        : x_(x), groups_{weights, GroupedPanel<Format>::size(cols), rows, out_cols}, size_{cols, Format::inputs},
          epilogue_(epilogue) {}

    void run(Worker &worker) {
        fix(worker);
        const int64_t sums = groups_.task_rows() * line_width;
        constexpr int64_t wide_bytes = tiles_across * sizeof(*wide_);
        char *own = worker.scratch<char>(wide_bytes + areas * sums * sizeof(float));
        wide_ = reinterpret_cast<WideGroup<Format>(*)[groups_per_block]>(own);
        products_ = reinterpret_cast<float *>(own + wide_bytes);
        minima_ = products_ + (areas - 1) * sums;
        groups_.each_task(worker, [&](auto... task) { multiply(task...); });
    }

private:
    static constexpr int64_t line_width = tile_panels * panel_rows, tiles_across = tile_panels / grouped_panels;
    static constexpr int64_t areas = Format::has_minimum ? 2 : 1;  // products, and minima where there are some
    static constexpr int64_t groups_per_block = inputs_per_block / Format::inputs;
    static constexpr int64_t fixed_groups = fixed_inputs / Format::inputs;

    void fix(Worker &worker) {
        fixed_ = worker.shared_scratch<uint8_t>(groups_.rows * size_.bytes());
        {
            Chunks chunks(worker, groups_.rows, 8);
            for (int64_t row, end; chunks.next(row, end);)
                for (; row < end; row++) fix_row(x_ + row * size_.cols, size_, fixed(row));
        }
        worker.barrier();
    }

    FixedRow fixed(int64_t row) const { return size_.at(fixed_ + row * size_.bytes()); }

    void multiply(int64_t column, int64_t first, int64_t last) {
        const int64_t groups = size_.groups();
        memset(products_, 0, (last - first) * line_width * sizeof(float));
        if (Format::has_minimum) memset(minima_, 0, (last - first) * line_width * sizeof(float));
        for (int64_t done = 0; done < groups; done += groups_per_block) {
            const int64_t count = groups - done < groups_per_block ? groups - done : groups_per_block;
            widen(column, done, count);
            for (int64_t row = first; row < last; row += tile_rows) {
                const int64_t rows = last - row < tile_rows ? last - row : tile_rows;
                multiply_rows(row, rows, done, count, (row - first) * line_width);
                if (done + count == groups) finish(column, row, rows, (row - first) * line_width);
            }
        }
    }

    void widen(int64_t column, int64_t first, int64_t count) {
        for (int64_t p = 0; p < tile_panels; p++)
            for (int64_t g = 0; g < count; g++)
                wide_[p / grouped_panels][g].widen(groups_.panel(column, p), p % grouped_panels, first + g);
    }

    void multiply_rows(int64_t row, int64_t rows, int64_t first, int64_t count, int64_t at) const {
        const FixedRow x = fixed(row);
        GroupedTileArgs<Format> args;
        args.x_stride = size_.bytes() / 2;
        args.sums_stride = size_.bytes() / 4;
        args.out_stride = line_width;
        for (int64_t tile = 0; tile < tiles_across; tile++) {
            args.products = products_ + at + tile * tile_width;
            args.minima = minima_ + at + tile * tile_width;
            for (int64_t g = 0; g < count; g += fixed_groups) {
                args.x = x.numbers + (first + g) * Format::inputs;
                args.sums_of_x = x.sums + first + g;
                args.unit = x.units + (first + g) / fixed_groups;
                args.weights = wide_[tile] + g;
                args.groups = count - g < fixed_groups ? count - g : fixed_groups;
                grouped_tile_of_rows<Format>(rows, args);
            }
        }
    }

    void finish(int64_t column, int64_t row, int64_t rows, int64_t at) {
        for (int64_t r = 0; r < rows; r++, at += line_width) {
            for (int64_t p = 0; p < tile_panels; p++)
                finish_sums<Format>(groups_.panel(column, p), products_ + at + p * panel_rows,
                                    minima_ + at + p * panel_rows);
            groups_.finish(epilogue_, column, row + r, products_ + at);
        }
    }

    const bf16 *x_;
    PanelGroups<uint8_t, Epilogue> groups_;
    FixedSize size_;
    Epilogue epilogue_;
    uint8_t *fixed_ = nullptr;
    float *products_ = nullptr, *minima_ = nullptr;
    WideGroup<Format> (*wide_)[groups_per_block] = nullptr;
};

}  // namespace
}  // namespace ISA
