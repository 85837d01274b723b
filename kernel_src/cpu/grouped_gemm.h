// Matrix times panels of grouped weights (grouped.h), with an epilogue (gemm_core.h says what one is). Included inside
// each instruction set.
//
// A block of groups of a few panels is widened to 16 bits, with its scales where sums stay whole, and multiplied with all
// rows of a task. A tile is as wide as leaves registers for both a group's sums and those of the groups before, scaled; with
// AVX2, which has few, those of the groups before lie in L1.
namespace ISA {
namespace {

constexpr int64_t inputs_per_block = 1024;
constexpr int64_t grouped_panels = ISA_LANES == 8 ? 1 : 2;  // of a tile: AVX2's registers hold the sums of one, of all rows
static_assert(group_panels % grouped_panels == 0, "a group's panels are whole tiles");
static_assert(inputs_per_block % fixed_inputs == 0, "a block is whole blocks of x");

// out[r][16 p + i] += the share of `groups` groups of a tile's panels and of one block of x, for r < R; rows are `out_stride`
// apart, and those of x as TileRows says.
template <class Format>
struct WideGroup;

template <class Row>
struct TileRows;

template <>
struct TileRows<FixedRow> {
    const int16_t *x;
    int64_t x_stride;
    const float *unit;
    int64_t unit_stride;

    // From a group on, of rows that are `bytes` apart; groups have `inputs`.
    INLINE_MEMBER void begin(const FixedRow &first, int64_t bytes, int64_t group, int64_t inputs) {
        x = first.numbers + group * inputs, x_stride = bytes / 2;
        unit = first.units + group * inputs / fixed_inputs, unit_stride = bytes / 4;
    }
    INLINE_MEMBER void next() { x += x_stride, unit += unit_stride; }
    INLINE_MEMBER int64_t stride() const { return x_stride * static_cast<int64_t>(sizeof *x); }  // in bytes
};

template <int64_t inputs>
struct TileRows<ByteRow<inputs>> {
    const ByteGroup<inputs> *x;
    int64_t x_stride;  // in bytes

    INLINE_MEMBER void begin(const ByteRow<inputs> &first, int64_t bytes, int64_t group, int64_t) {
        x = first.groups + group, x_stride = bytes;
    }
    INLINE_MEMBER const ByteGroup<inputs> *row(int64_t r) const {
        return reinterpret_cast<const ByteGroup<inputs> *>(reinterpret_cast<const char *>(x) + r * x_stride);
    }
    INLINE_MEMBER void next() { x = row(1); }
    INLINE_MEMBER int64_t stride() const { return x_stride; }
};

template <class Format>
struct GroupedTileArgs : TileRows<RowOf<Format>> {
    const WideGroup<Format> *weights;
    int64_t groups;
    float *out;
    int64_t out_stride;

    INLINE_MEMBER void next_row() { this->next(), out += out_stride; }
};

// Sums of a tile, as many rows at a time as registers hold.
constexpr int64_t sum_rows = ISA_LANES >= 8 ? tile_rows : 1;
constexpr int64_t tile_width = grouped_panels * panel_rows, tile_vectors = tile_width / lanes;

// Calls tile(Rows, args) for `rows` rows, sum_rows at a time.
template <class Args, class Tile>
INLINE void each_rows(int64_t rows, Args args, const Tile &tile) {
    if (sum_rows == tile_rows) return with_rows(rows, [&](auto known) { tile(known, args); });
    for (int64_t r = 0; r < rows; r++, args.next_row()) tile(Rows<1>{}, args);
}

// out[r][16 p + i] = minima of all groups of a tile's panels times the sums of groups of x, for r < R.
struct MinimaTileArgs {
    FixedRows x;
    const uint8_t *panels[grouped_panels];
    int64_t groups;
    float *out;
    int64_t out_stride;

    INLINE_MEMBER void next_row() { x.first = x.row(1), out += out_stride; }
};

template <class Format, int R>
void minima_tile(const MinimaTileArgs &args) {
    constexpr int64_t step = fixed_inputs / Format::inputs;
    f32v total[R][tile_vectors] = {};
    for (int64_t g = 0; g < args.groups; g += step)
        add_minima<Format, R, tile_vectors>(args.panels, args.x, g,
                                            g + step < args.groups ? g + step : args.groups, total);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int64_t v = 0; v < tile_vectors; v++) store(args.out + r * args.out_stride + v * lanes, total[r][v]);
}

// Calls minima_tile for `rows` rows.
template <class Format>
INLINE void each_minima_tile(int64_t rows, const MinimaTileArgs &args) {
    each_rows(rows, args, [](auto known, const auto &own) { minima_tile<Format, known.count>(own); });
}

#if ISA_AMX
#include "grouped_tiles.h"
#else

// A group of a tile's panels, widened to pairs of i16; what a step of the product reads lies together.
template <class Format>
struct WideGroup {
    static constexpr int64_t pairs = Format::inputs / 2;
    uint16_t lines[pairs][grouped_panels][line_elements];
    float scale[grouped_panels][panel_rows];

    INLINE_MEMBER void widen(const uint8_t *panel, int64_t p, int64_t group) {
        const uint8_t *numbers = GroupedPanel<Format>::numbers(panel, group), *own = GroupedPanel<Format>::scales(panel, group);
#pragma GCC unroll 8
        for (int i = 0; i < Format::inputs / quad; i++)
            for (int64_t first = 0; first < panel_rows; first += lanes) {
                const quadv four = Format::quad_at(numbers, i, first * quad), times = factor_of(own, first);
                store(lines[2 * i][p] + 2 * first, ((four & 0xff) - Format::zero) * times);
                store(lines[2 * i + 1][p] + 2 * first, ((four >> 8) - Format::zero) * times);
            }
        if (scaled_whole<Format>) return;
        for (int64_t first = 0; first < panel_rows; first += lanes) store(scale[p] + first, Format::at(own, first));
    }

    // What numbers are stored times, for both of a pair.
    INLINE quadv factor_of(const uint8_t *own, int64_t first) {
        if constexpr (scaled_whole<Format>) return (quadv)(Format::whole_at(own, first) * 0x10001);
        else return quadv{} + 1;
    }
};

// A group of a tile's panels in quads of bytes, as products with x in 8 bits take them.
template <class Stored>
struct WideGroup<A8<Stored>> {
    static constexpr int64_t quads = Stored::inputs / quad;
    alignas(line_bytes) uint8_t lines[quads][grouped_panels][line_bytes];
    float scale[grouped_panels][panel_rows];

    INLINE_MEMBER void widen(const uint8_t *panel, int64_t p, int64_t group) {
        const uint8_t *numbers = GroupedPanel<Stored>::numbers(panel, group), *own = GroupedPanel<Stored>::scales(panel, group);
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++)
            for (int64_t first = 0; first < panel_rows; first += lanes)
                store(lines[i][p] + first * quad, Stored::quad_at(numbers, i, first * quad));
        for (int64_t first = 0; first < panel_rows; first += lanes) store(scale[p] + first, Stored::at(own, first));
    }
};

constexpr int64_t product_rows = tile_rows;

template <class Format>
INLINE void split_numbers(int16_t *, int64_t) {}

// With AVX2 all of a group: a loop's end would move each sum.
constexpr int unrolled_pairs = ISA_LANES == 8 ? 16 : 4;

template <class Format, int R>
INLINE void wide_sums(const WideGroup<Format> &weights, const int16_t *x, int64_t stride, i32v (*sums)[tile_vectors]) {
    const int16_t *rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) settle_address(rows[r] = x + r * stride);
#pragma GCC unroll unrolled_pairs
    for (int64_t i = 0; i < WideGroup<Format>::pairs; i++) {
        quadv line[tile_vectors];
#pragma GCC unroll 16
        for (int64_t v = 0; v < tile_vectors; v++) line[v] = load<quadv>(weights.lines[i][0] + v * 2 * lanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const i32v pair = splat_pair(rows[r] + 2 * i);
#pragma GCC unroll 16
            for (int64_t v = 0; v < tile_vectors; v++) {
                sums[r][v] = multiply_pairs(line[v], pair, sums[r][v]);
                settle(sums[r][v]);
            }
        }
    }
}

template <class Format, int R>
void grouped_tile(const GroupedTileArgs<Format> &args) {
    f32v total[R][tile_vectors] = {};
    for (int64_t g = 0; g < args.groups; g++) {
        const WideGroup<Format> &weights = args.weights[g];
        i32v sum[R][tile_vectors] = {};
        wide_sums<Format, R>(weights, args.x + g * Format::inputs, args.x_stride, sum);
#pragma GCC unroll 8
        for (int64_t v = 0; v < tile_vectors; v++) {
            const f32v scale = load<f32v>(weights.scale[0] + v * lanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const f32v whole = whole_to_float(sum[r][v]);
                total[r][v] = scaled_whole<Format> ? total[r][v] + whole : multiply_add(scale, whole, total[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int64_t v = 0; v < tile_vectors; v++)
            add_block(args.out + r * args.out_stride + v * lanes, total[r][v], args.unit[r * args.unit_stride]);
}

// The same with x in 8 bits.
template <class Format, int R>
void byte_tile(const GroupedTileArgs<Format> &args) {
    using Sum = QuadSum<Format>;
    f32v total[R][tile_vectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int64_t v = 0; v < tile_vectors; v++) total[r][v] = load<f32v>(args.out + r * args.out_stride + v * lanes);
    for (int64_t g = 0; g < args.groups; g++) {
        const WideGroup<Format> &weights = args.weights[g];
        Sum sum[R][tile_vectors];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int64_t v = 0; v < tile_vectors; v++) sum[r][v].begin(Format::zero == 0 ? 0 : args.row(r)[g].begin);
#pragma GCC unroll 8
        for (int i = 0; i < Sum::quads; i++) {
            quadv line[tile_vectors];
#pragma GCC unroll 8
            for (int64_t v = 0; v < tile_vectors; v++) line[v] = load<quadv>(weights.lines[i][0] + v * lanes * quad);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const typename Sum::Inputs four = Sum::inputs(args.row(r)[g].numbers + i * quad);
#pragma GCC unroll 8
                for (int64_t v = 0; v < tile_vectors; v++) sum[r][v].add(i, line[v], four);
            }
        }
#pragma GCC unroll 8
        for (int64_t v = 0; v < tile_vectors; v++) {
            const f32v scale = load<f32v>(weights.scale[0] + v * lanes);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                total[r][v] = multiply_add(scale * args.row(r)[g].scale, whole_to_float(sum[r][v].total()), total[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int64_t v = 0; v < tile_vectors; v++) store(args.out + r * args.out_stride + v * lanes, total[r][v]);
}

template <class Format>
INLINE void multiply_groups(int64_t rows, const GroupedTileArgs<Format> &args) {
    each_rows(rows, args, [](auto known, const auto &own) {
        if constexpr (takes_bytes<Format>) byte_tile<Format, known.count>(own);
        else grouped_tile<Format, known.count>(own);
    });
}

template <class Format>
INLINE void multiply_minima(int64_t rows, const MinimaTileArgs &args) {
    each_minima_tile<Format>(rows, args);
}

#endif

template <class Format>
constexpr int64_t wide_groups = inputs_per_block / Format::inputs;  // that are widened at once

// Widens `count` groups of a tile's panels from group `first` on, and asks for `next` meanwhile.
template <class Format>
NOINLINE void widen_panels(WideGroup<Format> (*wide)[wide_groups<Format>], const uint8_t *const *panels, int64_t first, int64_t count,
                           const Upcoming &next) {
    for (int64_t g = 0; g < count; g++) {
        next.fetch(g, count);
        for (int64_t p = 0; p < group_panels; p++) wide[p / grouped_panels][g].widen(panels[p], p % grouped_panels, first + g);
    }
}

template <class Format, class Epilogue>
class GroupedGemm {
public:
    GroupedGemm(const bf16 *x, const uint8_t *const *weights, int64_t rows, int64_t cols, int64_t out_cols,
                const Epilogue &epilogue)
        : x_(x), groups_{weights, GroupedPanel<Format>::size(cols), rows, out_cols}, size_(size_of<Format>(cols)),
          epilogue_(epilogue) {}

    void run(Worker &worker) {
        if constexpr (direct_rows<Format> > 0)
            if (groups_.rows <= direct_rows<Format>)
                return GroupedRows<Format, Epilogue>(x_, groups_.weights, groups_.rows, size_, groups_.out_cols, epilogue_).run(worker);
        groups_.divide(worker.threads);
        fix(worker);
        work_in(worker.scratch<char>(work_bytes(groups_.task_rows())));
        [[maybe_unused]] const Registers registers;
        groups_.each_task(worker, [&](const GemmTask &task) { multiply(task); });
    }

    // The following are as in gemm_core.h.
#if ISA_AMX
    struct Registers : Tiles {
        Registers() : Tiles(product_tiles<Format>()) {}
    };
#else
    using Registers = NoRegisters;
#endif
    using Groups = PanelGroups<uint8_t, Epilogue>;
    static constexpr int64_t line_width = group_panels * panel_rows;

    static int64_t work_bytes(int64_t rows) { return wide_bytes + rows * line_width * static_cast<int64_t>(sizeof(float)); }
    void work_in(char *memory) {
        wide_ = reinterpret_cast<WideGroup<Format>(*)[groups_per_block]>(memory);
        products_ = reinterpret_cast<float *>(memory + wide_bytes);
    }

    static int64_t kept_bytes(int64_t rows, int64_t cols) { return rows * size_of<Format>(cols).bytes(); }
    void keep_in(uint8_t *memory, int64_t) { fixed_ = memory; }
    void take(int64_t row, const bf16 *x) {
        const RowOf<Format> own = size_.at(fixed_ + row * size_.bytes());
        if constexpr (takes_bytes<Format>) return take_row<Format>(x, size_, own);
        else {
            fix_for<Format>(x, size_, own);
            split_numbers<Format>(own.numbers, size_.numbers());
        }
    }

    void turn_to(const Groups &groups, int64_t first, const Epilogue &epilogue) {
        groups_ = groups;
        first_ = first;
        epilogue_ = epilogue;
    }

    void multiply(const GemmTask &task) {
        const int64_t groups = group_count<Format>(size_.cols), rows = task.last - task.first;
        const bool few = rows <= few_rows;
        const int64_t block = few ? fixed_groups : groups_per_block, kept = groups_.kept(groups > block);
        const Steps steps = {rows, step_rows};
        for (int64_t done = 0; done < groups; done += block) {
            const int64_t count = groups - done < block ? groups - done : block;
            const bool last = done + count == groups;
            const Upcoming next = groups_.upcoming(task, last ? groups_.panel_elements : Panel::offset(done + count), Panel::offset(block));
            widen(task.group, done, count, few ? next : Upcoming{});
            for (int64_t step = 0; step < steps.count; step++) {
                const int64_t at = steps.first(step), row = task.first + at, some = steps.first(step + 1) - at;
                float *products = products_ + at * kept;
                if (done == 0) memset(products, 0, some * line_width * sizeof(float));
                if (!few) next.fetch(step, steps.count);
                if (last) groups_.expect(epilogue_, task.group, row, some);
                for (int64_t r = 0; r < some; r += product_rows)
                    multiply_rows(row + r, some - r < product_rows ? some - r : product_rows, done, count, products + r * line_width);
                if (last) finish(task.group, row, some, products);
            }
        }
    }

private:
    using Panel = GroupedPanel<Format>;
    static constexpr int64_t tiles_across = group_panels / grouped_panels;
    static constexpr int64_t groups_per_block = wide_groups<Format>;
    static constexpr int64_t fixed_groups = fixed_inputs / Format::inputs;
    static constexpr int64_t tile_groups = takes_bytes<Format> ? groups_per_block : fixed_groups;  // that a tile sums at once
    static constexpr int64_t wide_bytes = tiles_across * groups_per_block * sizeof(WideGroup<Format>);

    void fix(Worker &worker) {
        keep_in(worker.shared_scratch<uint8_t>(kept_bytes(groups_.padded_rows(), size_.cols)), groups_.rows);
        {
            Chunks chunks(worker, groups_.rows, 8, 1);
            for (int64_t row, end; chunks.next(row, end);)
                for (; row < end; row++) take(row, x_ + row * size_.cols);
        }
        worker.barrier();
    }

    RowOf<Format> taken(int64_t row) const { return size_.at(fixed_ + (first_ + row) * size_.bytes()); }

    void widen(int64_t column, int64_t first, int64_t count, const Upcoming &next) {
        const uint8_t *panels[group_panels];
        for (int64_t p = 0; p < group_panels; p++) panels[p] = groups_.panel(column, p);
        widen_panels<Format>(wide_, panels, first, count, next);
    }

    void multiply_rows(int64_t row, int64_t rows, int64_t first, int64_t count, float *products) const {
        const RowOf<Format> x = taken(row);
        GroupedTileArgs<Format> args;
        args.out_stride = line_width;
        for (int64_t g = 0; g < count; g += tile_groups) {
            args.begin(x, size_.bytes(), first + g, Format::inputs);
            args.groups = count - g < tile_groups ? count - g : tile_groups;
            for (int64_t tile = 0; tile < tiles_across; tile++) {
                args.out = products + tile * tile_width;
                args.weights = wide_[tile] + g;
                multiply_groups(rows, args);
            }
        }
    }

    void finish(int64_t column, int64_t row, int64_t rows, float *products) {
        for (int64_t r = 0; r < rows; r += product_rows)
            finish_rows(column, row + r, rows - r < product_rows ? rows - r : product_rows, products + r * line_width);
    }

    void finish_rows(int64_t column, int64_t row, int64_t rows, float *products) {
        float least[product_rows * line_width];
        for (int64_t tile = 0; Format::has_minimum && tile < tiles_across; tile++) {
            MinimaTileArgs args = {{fixed_of(taken(row)), size_.bytes()}, {}, group_count<Format>(size_.cols), least + tile * tile_width, line_width};
            for (int64_t p = 0; p < grouped_panels; p++) args.panels[p] = groups_.panel(column, tile * grouped_panels + p);
            multiply_minima<Format>(rows, args);
        }
        for (int64_t r = 0; r < rows; r++) {
            float *own = products + r * line_width;
            for (int64_t p = 0; p < group_panels; p++)
                finish_sums<Format>(groups_.panel(column, p), own + p * panel_rows,
                                    least + r * line_width + p * panel_rows);
            groups_.finish(epilogue_, column, row + r, own);
        }
    }

    const bf16 *x_;
    PanelGroups<uint8_t, Epilogue> groups_;
    SizeOf<Format> size_;
    Epilogue epilogue_;
    uint8_t *fixed_ = nullptr;
    int64_t first_ = 0;
    WideGroup<Format> (*wide_)[groups_per_block] = nullptr;
    float *products_ = nullptr;
};

}  // namespace
}  // namespace ISA
