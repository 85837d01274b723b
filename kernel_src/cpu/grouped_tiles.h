// How a matrix meets a group of weights in tiles (amx.h): part of grouped_gemm.h, for instruction set amx. Sums are the same
// whole numbers as elsewhere.

// Tile `sums` = a group of x, in tile `of_x`, times the weights in tile 6.
template <int sums, int of_x>
INLINE void multiply_part(const uint8_t *x, int64_t stride) {
    tile_load<of_x>(x, stride);
    tile_zero<sums>();
    tile_multiply_i8<sums, of_x, 6>();
}

// As bytes: x = 256 high + low, with a sign both, weights in quads, in whose order x is. Each has a tile. A row's groups are
// `group_bytes` apart.
template <class Format>
struct Parts {
    static constexpr int64_t inputs = Format::inputs, x_bytes = inputs, group_bytes = 2 * inputs;

    INLINE void split(int16_t *numbers, int64_t count) {
        for (int64_t first = 0; first < count; first += inputs) {
            int8_t parts[2][inputs];
            for (int64_t i = 0; i < inputs; i++) {
                const int16_t number = numbers[first + i / quad * quad + quad_place(i)];
                parts[0][i] = static_cast<int8_t>(number);
                parts[1][i] = static_cast<int8_t>((number - parts[0][i]) >> 8);
            }
            memcpy(numbers + first, parts, sizeof parts);
        }
    }

    alignas(64) int32_t low[tile_lines][panel_rows], high[tile_lines][panel_rows];

    template <int at>
    INLINE void multiply(const uint8_t *x, int64_t stride) {
        multiply_part<at, 4>(x, stride);
        multiply_part<at + 1, 5>(x + x_bytes, stride);
    }

    template <int at>
    INLINE_MEMBER void keep() {
        tile_store<at>(low, sizeof *low);
        tile_store<at + 1>(high, sizeof *high);
    }

    INLINE_MEMBER void add(f32v scale, const uint8_t *, int64_t, f32v *total) const {
#pragma GCC unroll 16
        for (int64_t r = 0; r < tile_lines; r++) {
            const i32v upper = load<i32v>(high[r]), lower = load<i32v>(low[r]);
            if constexpr (scaled_whole<Format>) {
                // A product is rounded once: the lower part is exact.
                static_assert(128 * Format::most * inputs * 255 < 1 << 24, "a whole number of f32");
                total[r] += multiply_add(whole_to_float(upper), 256.0f * scale, whole_to_float(lower) * scale);
            } else {
                total[r] = multiply_add(scale, whole_to_float((upper << 8) + lower), total[r]);
            }
        }
    }
};

// x in 8 bits has one tile.
template <class Stored>
struct Parts<A8<Stored>> {
    using Group = ByteGroup<Stored::inputs>;
    static constexpr int64_t x_bytes = Stored::inputs, group_bytes = sizeof(Group);

    alignas(64) int32_t sums[tile_lines][panel_rows];

    template <int at>
    INLINE void multiply(const uint8_t *x, int64_t stride) {
        multiply_part<at, 4>(x, stride);
    }

    template <int at>
    INLINE_MEMBER void keep() {
        tile_store<at>(sums, sizeof *sums);
    }

    INLINE_MEMBER void add(f32v scale, const uint8_t *x, int64_t stride, f32v *total) const {
#pragma GCC unroll 16
        for (int64_t r = 0; r < tile_lines; r++) {
            const Group *group = reinterpret_cast<const Group *>(x + r * stride);
            total[r] = multiply_add(scale * group->scale, whole_to_float(load<i32v>(sums[r])), total[r]);
        }
    }
};

// A group of a tile's panels, widened to bytes with a sign.
template <class Format>
struct WideGroup {
    static constexpr int64_t quads = Format::inputs / quad;
    alignas(64) uint8_t lines[grouped_panels][quads][line_bytes];
    float scale[grouped_panels][panel_rows];

    INLINE_MEMBER void widen(const uint8_t *panel, int64_t p, int64_t group) {
        typedef uint8_t bytesv __attribute__((vector_size(lanes * quad)));
        const uint8_t *numbers = GroupedPanel<Format>::numbers(panel, group);
#pragma GCC unroll 8
        for (int i = 0; i < quads; i++)
            store(lines[p][i], (bytesv)Format::quad_at(numbers, i, 0) - static_cast<uint8_t>(Format::zero));
        store(scale[p], Format::at(GroupedPanel<Format>::scales(panel, group), 0));
    }
};

// Numbers of a row become their parts, in place.
template <class Format>
INLINE void split_numbers(int16_t *numbers, int64_t count) {
    Parts<Format>::split(numbers, count);
}

// Tiles 0 to 3 have sums, 4 and 5 parts of x, 6 weights.
template <class Format>
INLINE TileShapes product_tiles() {
    TileShapes shapes;
    shapes.set(0, 3, tile_lines, line_bytes);
    shapes.set(4, 5, tile_lines, Parts<Format>::x_bytes);
    shapes.set(6, 6, WideGroup<Format>::quads, line_bytes);
    return shapes;
}

// One panel of a tile, and 16 rows. Rows are `stride` bytes apart; groups of both lie one behind the other.
template <class Format>
struct TileOperands {
    const uint8_t *x;
    int64_t stride;
    const WideGroup<Format> *weights;
    int64_t panel;

    INLINE_MEMBER const uint8_t *group(int64_t g) const { return x + Parts<Format>::group_bytes * g; }

    template <int at>
    INLINE_MEMBER void multiply(int64_t g) const {
        tile_load<6>(weights[g].lines[panel][0], line_bytes);
        Parts<Format>::template multiply<at>(group(g), stride);
    }

    INLINE_MEMBER void add(const Parts<Format> &sums, int64_t g, f32v *total) const {
        sums.add(load<f32v>(weights[g].scale[panel]), group(g), stride, total);
    }
};

// While a group is multiplied, the sums of the one before leave their tiles, and those before them are added.
template <class Format>
void grouped_tile(const GroupedTileArgs<Format> &args, int64_t p) {
    const TileOperands<Format> own = {reinterpret_cast<const uint8_t *>(args.x), args.stride(), args.weights, p};
    const int64_t groups = args.groups;
    float *const out = args.out + p * panel_rows;
    Parts<Format> even, odd;
    f32v total[tile_lines];
#pragma GCC unroll 16
    for (int64_t r = 0; r < tile_lines; r++) total[r] = begin_block<Format>(out + r * args.out_stride);
    own.template multiply<0>(0);
    even.template keep<0>();
    if (1 < groups) own.template multiply<2>(1);
    for (int64_t g = 0; g < groups; g += 2) {
        if (g + 2 < groups) own.template multiply<0>(g + 2);
        odd.template keep<2>();
        own.add(even, g, total);
        if (g + 1 == groups) break;
        if (g + 3 < groups) own.template multiply<2>(g + 3);
        even.template keep<0>();
        own.add(odd, g + 1, total);
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < tile_lines; r++)
        if constexpr (takes_bytes<Format>) store(out + r * args.out_stride, total[r]);
        else add_block(out + r * args.out_stride, total[r], args.unit[r * args.unit_stride]);
}

// Rows of a tile, with what memory there is behind `rows` of them.
constexpr int64_t product_rows = tile_lines;

template <class Format>
INLINE void multiply_groups(int64_t, const GroupedTileArgs<Format> &args) {
    for (int64_t p = 0; p < grouped_panels; p++) grouped_tile(args, p);
}

// Tiles 0 to 2 have sums by digits, 4 digits of rows, 6 minima of a block's groups, in quads.
INLINE TileShapes minima_tiles() {
    TileShapes shapes;
    shapes.set(0, 2, tile_lines, line_bytes);
    shapes.set(4, 4, tile_lines, digit_groups);
    shapes.set(6, 6, digit_groups / quad, line_bytes);
    return shapes;
}

// Digits of 16 rows' sums of a block times the minima in tile 6.
template <int digit>
INLINE void multiply_digit(const SumDigit *digits, int64_t stride, int32_t *sums) {
    tile_load<4>(digits + digit * digit_groups, stride);
    tile_zero<digit>();
    tile_multiply_i8_u8<digit, 4, 6>();
    tile_store<digit>(sums + digit * tile_lines * panel_rows, line_bytes);
}

// As MinimaOfBlock, for 16 rows of all of a panel's blocks.
template <class Format>
void whole_minima_tile(const MinimaTileArgs &args, int64_t p) {
    using Panel = GroupedPanel<Format>;
    static_assert(sum_digits == 3 && sizeof(SumDigit) == 1 && Panel::block_groups == quad, "a block of x has four lines of minima");
    f32v total[tile_lines] = {};
    for (int64_t g = 0; g < args.groups; g += digit_groups) {
        const int64_t left = (args.groups - g + quad - 1) / quad, lines = digit_groups / quad;
        alignas(64) uint8_t some[lines][line_bytes] = {};
        for (int64_t i = 0; left < lines && i < left; i++) memcpy(some[i], Panel::minima(args.panels[p], g + i * quad), line_bytes);
        if (left < lines) tile_load<6>(some, line_bytes);
        else tile_load<6>(Panel::minima(args.panels[p], g), Panel::block);
        alignas(64) int32_t sums[sum_digits][tile_lines][panel_rows];
        const SumDigit *digits = digits_of(args.x.first, g);
        if constexpr (first_digit<Format> == 0) multiply_digit<0>(digits, args.x.bytes, sums[0][0]);
        multiply_digit<1>(digits, args.x.bytes, sums[0][0]);
        multiply_digit<2>(digits, args.x.bytes, sums[0][0]);
#pragma GCC unroll 16
        for (int64_t r = 0; r < tile_lines; r++) {
            const i32v highest = first_digit<Format> == 0 ? load<i32v>(sums[0][r]) << digit_bits : i32v{};
            const i32v high = highest + load<i32v>(sums[1][r]);
            const i32v whole = (high << digit_bits) + load<i32v>(sums[2][r]);
            total[r] = multiply_add(splat(args.x.row(r).units[g / digit_groups]), whole_to_float(whole), total[r]);
        }
    }
    for (int64_t r = 0; r < tile_lines; r++) store(args.out + r * args.out_stride + p * panel_rows, total[r]);
}

template <class Format>
INLINE void multiply_minima(int64_t rows, MinimaTileArgs args) {
    if constexpr (whole_minima<Format>) {
        Tiles::take(minima_tiles());
        for (int64_t p = 0; p < grouped_panels; p++) whole_minima_tile<Format>(args, p);
        Tiles::take(product_tiles<Format>());
    } else {
        for (int64_t r = 0; r < rows; r += tile_rows) {
            each_minima_tile<Format>(rows - r < tile_rows ? rows - r : tile_rows, args);
            for (int64_t i = 0; i < tile_rows; i++) args.next_row();
        }
    }
}
