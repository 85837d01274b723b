// The inner product kernel: a block of rows times a few panels. Included inside each instruction set.
namespace ISA {
namespace {

constexpr int64_t tile_rows = 6;
constexpr int64_t tile_panels = 4;

// Whether tiles ask for what is read soon. Without vectors of 8 arithmetic takes longer than memory.
constexpr bool tiles_fetch = lanes >= 8;

// out[r][16 p + i] (+)= sum over `pairs` pairs of x[r] * panel p's row i, for r < R, p < P.
// x, rows `x_stride` elements apart; panels, lines of 16 x 2; out f32.
template <class X, class Number>
struct TileArgsOf {
    const X *x;
    int64_t x_stride;
    const Number *panels[tile_panels];
    int64_t pairs;
    float *out;
    int64_t out_stride;
    bool accumulate;
    // If `ahead` is not 0: a tile that reads line k of a panel asks for what lies `ahead` + k * `ahead_step` elements after the
    // panel's first line, into L2. Tiles of several steps share what is asked for, each with a step of part of a line.
    int64_t ahead = 0, ahead_step = line_elements;
};

using TileArgs = TileArgsOf<bf16, bf16>;

#if ISA_LANES == 16

static_assert(panel_rows == lanes, "a line is one operand of vdpbf16ps, and its sums are one register");

INLINE __m512i load_pair(const bf16 *x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return _mm512_set1_epi32(pair);
}

// R * P accumulators hide the latency of vdpbf16ps; each line of a panel serves R rows, each pair of
// x P panels, so that loads stay well below one per vdpbf16ps.
template <int R, int P, bool fetching>
void tile(const TileArgs &args) {
    const bf16 *const x = args.x;
    const int64_t ahead = args.ahead, ahead_step = args.ahead_step;
    const int64_t stride = args.x_stride, pairs = args.pairs, out_stride = args.out_stride;
    float *const out = args.out;
    const bf16 *panels[P];
    __m512 sum[R][P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) panels[p] = args.panels[p];
    if (args.accumulate) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) sum[r][p] = _mm512_loadu_ps(out + r * out_stride + p * panel_rows);
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) sum[r][p] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh line[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            if (fetching) __builtin_prefetch(panels[p] + k * ahead_step + ahead, 0, 2);
            line[p] = (__m512bh)_mm512_loadu_si512(panels[p] + k * line_elements);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512bh pair = (__m512bh)load_pair(x + r * stride + 2 * k);
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], line[p], pair);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) _mm512_storeu_ps(out + r * out_stride + p * panel_rows, sum[r][p]);
}

#else

static_assert(panel_rows % lanes == 0, "a line is whole registers");
constexpr int panel_vectors = panel_rows / lanes;
constexpr int64_t strip_pairs = 256;

// Rows that one panel is multiplied with at a time: as many as leave the accumulators in registers.
#if ISA_LANES == 8 || defined(__aarch64__)
constexpr int strip_rows = 6;
#else
constexpr int strip_rows = 2;
#endif

// x: f32 strips [R][2 * strip_pairs]. With `fetching`, asks for what is at `soon` and each `soon_step` elements from there.
template <int R, bool fetching>
INLINE void strip_times_panel(const float *x, const bf16 *panel, int64_t pairs, float *out, int64_t out_stride,
                              const bf16 *soon, int64_t soon_step) {
    f32v sum[R][panel_vectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < panel_vectors; v++) sum[r][v] = load<f32v>(out + r * out_stride + v * lanes);
    for (int64_t k = 0; k < pairs; k++) {
        if (fetching) __builtin_prefetch(soon + k * soon_step, 0, 2);
        // One column of the pair after the other: both at once would not fit the registers.
#pragma GCC unroll 2
        for (int column = 0; column < 2; column++) {
            f32v weights[panel_vectors];
#pragma GCC unroll 4
            for (int v = 0; v < panel_vectors; v++) {
                const u32v both = load<u32v>(panel + k * line_elements + 2 * v * lanes);
                weights[v] = column == 0 ? (f32v)(both << 16) : (f32v)(both & 0xffff0000u);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const f32v factor = splat(x[r * 2 * strip_pairs + 2 * k + column]);
#pragma GCC unroll 4
                for (int v = 0; v < panel_vectors; v++) sum[r][v] += weights[v] * factor;
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < panel_vectors; v++) store(out + r * out_stride + v * lanes, sum[r][v]);
}

// Widens a strip of x once for all panels, which then cost one widening per line for all rows.
template <int R, int P, bool fetching>
void tile(const TileArgs &args) {
    if (!args.accumulate)
        for (int r = 0; r < R; r++)
            for (int64_t i = 0; i < P * panel_rows; i++) args.out[r * args.out_stride + i] = 0;
    for (int64_t done = 0; done < args.pairs; done += strip_pairs) {
        const int64_t pairs = args.pairs - done < strip_pairs ? args.pairs - done : strip_pairs;
        float x[R][2 * strip_pairs];
        for (int r = 0; r < R; r++)
            for (int64_t i = 0; i < 2 * pairs; i += lanes)
                store(x[r] + i, load_bf16(args.x + r * args.x_stride + 2 * done + i, 2 * pairs - i));
        for (int p = 0; p < P; p++) {
            const bf16 *panel = args.panels[p] + done * line_elements;
            const bf16 *soon = args.panels[p] + args.ahead + done * args.ahead_step;
            float *out = args.out + p * panel_rows;
            constexpr int whole = R / strip_rows * strip_rows;
            for (int r = 0; r < whole; r += strip_rows)
                strip_times_panel<strip_rows, fetching>(x[r], panel, pairs, out + r * args.out_stride, args.out_stride, soon,
                                                        args.ahead_step);
            if (R > whole)
                strip_times_panel<(R > whole ? R - whole : 1), fetching>(x[whole % R], panel, pairs, out + whole * args.out_stride,
                                                                         args.out_stride, soon, args.ahead_step);
        }
    }
}

#endif

// A number of rows that is known at compile time.
template <int R>
struct Rows {
    static constexpr int count = R;
};

// Calls `tile` with `rows`, at most tile_rows, as Rows.
template <class Tile>
INLINE void with_rows(int64_t rows, const Tile &tile) {
    static_assert(tile_rows == 6, "one case per number of rows");
    switch (rows) {
    case 1: return tile(Rows<1>{});
    case 2: return tile(Rows<2>{});
    case 3: return tile(Rows<3>{});
    case 4: return tile(Rows<4>{});
    case 5: return tile(Rows<5>{});
    default: return tile(Rows<6>{});
    }
}

template <int P, bool fetching>
void tile_of_rows(int64_t rows, const TileArgs &args) {
    with_rows(rows, [&](auto known) { tile<known.count, P, fetching>(args); });
}

template <int P>
void tile_of_rows(int64_t rows, const TileArgs &args) {
    if constexpr (tiles_fetch)
        if (args.ahead != 0) return tile_of_rows<P, true>(rows, args);
    tile_of_rows<P, false>(rows, args);
}

}  // namespace
}  // namespace ISA
