// What a KV cache holds, and products with it. Included inside each instruction set.
//
//   Bf16Kv  bf16; queries and weights of positions meet it in bf16
//   Int8Kv  whole numbers of 8 bits, and in front of a block's panels the scales of its positions, f32 [128]; what they are
//           multiplied with is in fixed point (fixed_point.h), so that sums over a row of K and over the positions of a
//           block are exact
//
// A format has
//   Number, X               elements of a block, and of what its panels are multiplied with
//   row_elements            a block has that many elements more for a position's scale
//   stored(row)             a row of K or V in numbers; its scale goes into the block
//   take_query              q of a head to X; returns the unit
//   Weights                 those of a row to X, a vector after the other: of `count` positions, and 0 behind them, which
//                           may have no scales; finish() returns the unit
//   in_tiles                tiles of AMX multiply it, where there are some
//   Args, in_units          for tile_of_rows: the units of its rows, and its outputs' scales from the first on, or null
namespace ISA {
namespace {

struct Bf16Kv {
    using Number = bf16;
    using X = bf16;
    using Args = TileArgs;
    static constexpr bool in_tiles = true;
    static constexpr int64_t row_elements = 0, header = 0;

    INLINE const float *scales(const bf16 *) { return nullptr; }
    INLINE const bf16 *stored(const bf16 *row, int64_t, bf16 *, bf16 *, int64_t) { return row; }

    INLINE float take_query(const bf16 *q, int64_t head_dim, bf16 *out) {
        memcpy(out, q, head_dim * sizeof(bf16));
        return 1.0f;
    }
    struct Weights {
        bf16 *out;

        Weights(bf16 *to, const float *, float *, int64_t) : out(to) {}
        INLINE_MEMBER void put(int64_t i, f32v weight) { store_bf16(out + i, weight); }
        INLINE_MEMBER float finish() { return 1.0f; }
    };
    INLINE void in_units(Args &, const float *, const float *, int64_t) {}
};

// out[r][16 p + i], of whole numbers: += units[r] * sum, or = units[r] * sum * scales[16 p + i].
struct WholeTileArgs : TileArgsOf<int16_t, int8_t> {
    const float *units, *scales;
};

struct Int8Kv {
    using Number = int8_t;
    using X = int16_t;
    using Args = WholeTileArgs;
    static constexpr bool in_tiles = false;
    static constexpr int64_t row_elements = sizeof(float), header = kv_block_positions * row_elements;

    INLINE const float *scales(const int8_t *block) { return reinterpret_cast<const float *>(block); }

    // numbers i8 [head_dim], with room for whole vectors.
    INLINE const int8_t *stored(const bf16 *row, int64_t head_dim, int8_t *numbers, int8_t *block, int64_t offset) {
        const float scale = quantise(row, head_dim, [&](int64_t i, i32v whole) { store(numbers + i, narrowed<i8v>(whole)); });
        memcpy(block + offset * row_elements, &scale, sizeof scale);
        return numbers;
    }

    INLINE float take_query(const bf16 *q, int64_t head_dim, int16_t *out) { return fix_block(q, head_dim, out); }

    struct Weights {
        int16_t *out;
        const float *scales;
        float *scaled;
        int64_t count;
        u32v tops = {};

        Weights(int16_t *to, const float *of, float *room, int64_t number)
            : out(to), scales(of), scaled(room), count(number) {}

        INLINE_MEMBER void put(int64_t i, f32v weight) {
            weight *= load_f32(scales + i, count - i);
            store(scaled + i, weight);
            tops = max(tops, (u32v)weight);
        }

        INLINE_MEMBER float finish() {
            const FixedUnit fixed = fixed_unit(max_of(tops) >> 23 & 255);
            for (int64_t i = 0; i < count; i += lanes)
                store(out + i, narrowed<i16v>(nearest(load<f32v>(scaled + i) * fixed.inverse)));
            return fixed.unit;
        }
    };

    INLINE void in_units(Args &args, const float *units, const float *scales, int64_t first) {
        args.units = units;
        args.scales = scales + first;
    }
};

typedef int8_t pair8v __attribute__((vector_size(lanes * 2)));

// Pairs of i8, widened to 16 bits.
INLINE quadv load_pairs(const int8_t *p) {
#if ISA_LANES == 16
    return (quadv)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
#elif ISA_LANES == 8
    return (quadv)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
    typedef int16_t pairv __attribute__((vector_size(lanes * 4)));
    return (quadv)__builtin_convertvector(load<pair8v>(p), pairv);
#endif
}

// Rows and panels whose sums registers hold.
#if ISA_LANES == 16
constexpr int whole_rows = tile_rows, whole_panels = tile_panels;
#else
constexpr int whole_rows = strip_rows, whole_panels = 1;
#endif

template <int R, int P, bool fetching>
void whole_tile(const WholeTileArgs &args) {
    constexpr int vectors = panel_rows / lanes;
    const int16_t *const x = args.x;
    const int64_t stride = args.x_stride, pairs = args.pairs, ahead = args.ahead;
    const int8_t *panels[P];
    i32v sum[R][P][vectors] = {};
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) panels[p] = args.panels[p];
    for (int64_t k = 0; k < pairs; k++) {
        quadv line[P][vectors];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            if (fetching) __builtin_prefetch(panels[p] + k * line_elements + ahead, 0, 2);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) line[p][v] = load_pairs(panels[p] + k * line_elements + 2 * lanes * v);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const i32v pair = splat_pair(x + r * stride + 2 * k);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) sum[r][p][v] = multiply_pairs(line[p][v], pair, sum[r][p][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                const int64_t at = p * panel_rows + v * lanes;
                float *out = args.out + r * args.out_stride + at;
                const f32v whole = whole_to_float(sum[r][p][v]), unit = splat(args.units[r]);
                store(out, args.accumulate ? multiply_add(whole, unit, load<f32v>(out))
                                           : whole * unit * load<f32v>(args.scales + at));
            }
}

template <int P>
void tile_of_rows(int64_t rows, WholeTileArgs args) {
    constexpr int across = P < whole_panels ? P : whole_panels;
    const WholeTileArgs all = args;
    for (int64_t p = 0; p < P; p += across)
        for (int64_t r = 0; r < rows; r += whole_rows) {
            for (int64_t i = 0; i < across; i++) args.panels[i] = all.panels[p + i];
            args.x = all.x + r * all.x_stride;
            args.units = all.units + r;
            if (!all.accumulate) args.scales = all.scales + p * panel_rows;
            args.out = all.out + r * all.out_stride + p * panel_rows;
            with_rows(rows - r < whole_rows ? rows - r : whole_rows, [&](auto known) {
                if (all.ahead != 0) whole_tile<known.count, across, true>(args);
                else whole_tile<known.count, across, false>(args);
            });
        }
}

}  // namespace
}  // namespace ISA
