// Products of whole numbers: weights i8 with a scale per output, x quantised to 8 bits with a scale per row. Sums are exact
// in 32 bits for up to 131072 inputs, so that results are the same bits in any order, on any machine. Included inside each
// instruction set.
//
// A [N][K] matrix (out, in) is cut into panels of 16 outputs, N padded to a multiple of 16 and K to one of 4 with zeros:
//   scales   f32 [16]
//   begin    i32 [16]              -128 times the sum of an output's numbers: x is stored as x + 128
//   lines    i8 [K / 4][16][4]     one operand of vpdpbusd each
namespace ISA {
namespace {

INLINE int64_t quad_count(int64_t cols) { return (cols + quad - 1) / quad; }

// A grouped format by name, whose products are these. Rows are widened so many inputs at a time.
struct W8A8 {
    static constexpr int64_t inputs = 32;
};

template <>
struct GroupedPanel<W8A8> {
    static constexpr int64_t header = 2 * panel_rows * 4;
    static int64_t size(int64_t cols) { return header + quad_count(cols) * line_bytes; }
};

// Input `first` and `count` - 1 more of output r of a panel, rounded to bf16.
template <>
INLINE_MEMBER void widen_row<W8A8>(const uint8_t *panel, int64_t group, int64_t r, bf16 *out, int64_t count) {
    const float scale = load<float>(panel + r * 4);
    const uint8_t *lines = panel + GroupedPanel<W8A8>::header + group * W8A8::inputs / quad * line_bytes;
    float wide[W8A8::inputs] = {};
    for (int64_t k = 0; k < count; k++)
        wide[k] = scale * static_cast<int8_t>(lines[k / quad * line_bytes + r * quad + k % quad]);
    for (int64_t k = 0; k < count; k += lanes) store_bf16(out + k, load<f32v>(wide + k), count - k);
}

// A number of x: 128 is added to it. AVX2 multiplies pairs of 16 bits, in the order of a quad; but a few rows as bytes with a sign,
// because to widen weights would take longer.
using QuantisedNumber = std::conditional_t<ISA_LANES == 8, int16_t, uint8_t>;
using FewNumber = std::conditional_t<ISA_LANES == 8, int8_t, uint8_t>;
constexpr int64_t quantised_quad = quad * sizeof(QuantisedNumber);  // in bytes

// Bytes of a quantised row of x, with room for whole vectors, and no power of two: a tile of rows is in several sets of a
// cache.
INLINE int64_t quantised_size(int64_t cols) {
    return ((cols + line_bytes - 1) / line_bytes * line_bytes + line_bytes) * static_cast<int64_t>(sizeof(QuantisedNumber));
}

// out Number [cols], in room for quantised_size bytes, = x / scale, with 128 added unless it has a sign; returns the scale.
template <class Number>
INLINE float quantise_row(const bf16 *x, int64_t cols, uint8_t *out) {
    return quantise(x, cols, [&](int64_t i, i32v whole) {
        if constexpr (std::is_same_v<Number, int16_t>) store(out + i * 2, narrowed<i16v>(in_quad_order(whole + 128)));
        else store(out + i, narrowed<i8v>(std::is_same_v<Number, int8_t> ? whole : whole + 128));
    });
}

// What the sums i32 [16] of a panel and numbers of x begin with.
template <class Number>
INLINE void begin_panel(const uint8_t *panel, int32_t *sums) {
    if (std::is_same_v<Number, int8_t>) memset(sums, 0, line_bytes);
    else memcpy(sums, panel + line_bytes, line_bytes);
}

// sums f32 [16] = sums i32 [16] in units of both scales.
INLINE void scale_sums(const int32_t *sums, const uint8_t *panel, float scale, float *out) {
    for (int64_t v = 0; v < panel_rows; v += lanes) {
        const f32v whole = __builtin_convertvector(load<i32v>(sums + v), f32v);
        store(out + v, whole * scale * load<f32v>(reinterpret_cast<const float *>(panel) + v));
    }
}

constexpr int64_t most_tile_panels = 8;

// sums[r][16 p + i] += quads `from` to `until` - 1 of x[r] * panel p's output i, for r < R, p < P. `ahead` is as in
// tile.h, from line `from` on.
struct IntegerTileArgs {
    const uint8_t *x;
    int64_t x_stride;
    const uint8_t *panels[most_tile_panels];
    int64_t from, until;
    int32_t *sums;
    int64_t sums_stride;
    int64_t ahead = 0, ahead_step = line_bytes;
};

#if ISA_LANES == 16

template <int R, int P, bool fetching>
void integer_tile(const IntegerTileArgs &args) {
    const uint8_t *const x = args.x;
    const int64_t stride = args.x_stride, until = args.until, sums_stride = args.sums_stride;
    const int64_t ahead = args.from * line_bytes + args.ahead, ahead_step = args.ahead_step;
    int32_t *const sums = args.sums;
    const uint8_t *lines[P];
    __m512i sum[R][P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) lines[p] = args.panels[p] + GroupedPanel<W8A8>::header;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) sum[r][p] = _mm512_loadu_si512(sums + r * sums_stride + p * panel_rows);
    for (int64_t k = args.from; k < until; k++) {
        __m512i line[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            if (fetching) __builtin_prefetch(lines[p] + ahead + (k - args.from) * ahead_step, 0, 2);
            line[p] = _mm512_loadu_si512(lines[p] + k * line_bytes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            int32_t four;
            __builtin_memcpy(&four, x + r * stride + k * quad, 4);
            const __m512i inputs = _mm512_set1_epi32(four);
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], inputs, line[p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) _mm512_storeu_si512(sums + r * sums_stride + p * panel_rows, sum[r][p]);
}

#elif ISA_LANES == 8

// Not vpmaddubsw, which saturates: numbers are widened to 16 bits. Sums of all rows with a panel are in registers.
template <int R, int P, bool fetching>
void integer_tile(const IntegerTileArgs &args) {
    typedef int16_t pairv __attribute__((vector_size(lanes * 4)));
    for (int p = 0; p < P; p++) {
        const uint8_t *lines = args.panels[p] + GroupedPanel<W8A8>::header, *soon = lines + args.from * line_bytes + args.ahead;
        int32_t *const sums = args.sums + p * panel_rows;
        i32v sum[R][sum_vectors];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < sum_vectors; v++) sum[r][v] = load<i32v>(sums + r * args.sums_stride + v * lanes);
        for (int64_t k = args.from; k < args.until; k++) {
            if (fetching) __builtin_prefetch(soon + (k - args.from) * args.ahead_step, 0, 2);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                quadv two[sum_vectors];
#pragma GCC unroll 4
                for (int v = 0; v < sum_vectors; v++) {
                    const pairv four = load<pairv>(lines + k * line_bytes + v * lanes * quad);
                    two[v] = (quadv)((half == 0 ? four << 8 : four) >> 8);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const uint8_t *x = args.x + r * args.x_stride + k * quantised_quad;
                    const i32v pair = splat_pair(reinterpret_cast<const int16_t *>(x) + 2 * half);
#pragma GCC unroll 4
                    for (int v = 0; v < sum_vectors; v++) {
                        sum[r][v] = multiply_pairs(two[v], pair, sum[r][v]);
                        settle(sum[r][v]);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < sum_vectors; v++) store(sums + r * args.sums_stride + v * lanes, sum[r][v]);
    }
}

// A tile of a few rows whose numbers are bytes with a sign. It asks for lines. If it were inlined, sums would leave their registers.
template <int R, int P>
NOINLINE void few_integers_tile(const IntegerTileArgs &args) {
    constexpr int V = P * sum_vectors;
    const uint8_t *x[R], *lines[P], *soon[P];
    i32v sum[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) settle_address(x[r] = args.x + r * args.x_stride);
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
        lines[p] = args.panels[p] + GroupedPanel<W8A8>::header;
        soon[p] = lines[p] + args.from * line_bytes + args.ahead;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sum[r][v] = load<i32v>(args.sums + r * args.sums_stride + v * lanes);
    for (int64_t k = args.from; k < args.until; k++) {
        __m256i four[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) four[r] = (__m256i)four_of(reinterpret_cast<const int8_t *>(x[r] + k * quad));
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const int p = v / sum_vectors;
            if (v % sum_vectors == 0) prefetch(soon[p] + (k - args.from) * line_bytes);
            const __m256i line = load<__m256i>(lines[p] + k * line_bytes + v % sum_vectors * lanes * quad);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                sum[r][v] = multiply_quads(line, four[r], sum[r][v]);
                settle(sum[r][v]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(args.sums + r * args.sums_stride + v * lanes, sum[r][v]);
}

#else

template <int R, int P, bool>
void integer_tile(const IntegerTileArgs &args) {
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) {
            const int8_t *lines = reinterpret_cast<const int8_t *>(args.panels[p] + GroupedPanel<W8A8>::header);
            const uint8_t *x = args.x + r * args.x_stride;
            int32_t *out = args.sums + r * args.sums_stride + p * panel_rows;
            for (int64_t k = args.from; k < args.until; k++)
                for (int64_t i = 0; i < panel_rows; i++)
                    for (int64_t j = 0; j < quad; j++) out[i] += lines[k * line_bytes + i * quad + j] * x[k * quad + j];
        }
}

#endif

#if ISA_AMX

// Tiles 0 to 3 have sums of two tiles of rows and two panels, 4 and 5 are x, 6 and 7 weights.
INLINE TileShapes integer_tiles() {
    TileShapes shapes;
    shapes.set(0, 7, tile_lines, line_bytes);
    return shapes;
}

template <bool storing>
INLINE void move_sums(int32_t *sums, int64_t stride) {
    const int64_t bytes = stride * sizeof *sums;
    int32_t *below = sums + tile_lines * stride;
    if (storing) {
        tile_store<0>(sums, bytes), tile_store<1>(sums + panel_rows, bytes);
        tile_store<2>(below, bytes), tile_store<3>(below + panel_rows, bytes);
    } else {
        tile_load<0>(sums, bytes), tile_load<1>(sums + panel_rows, bytes);
        tile_load<2>(below, bytes), tile_load<3>(below + panel_rows, bytes);
    }
}

// As many inputs as a row of a tile has.
INLINE void integer_step(const uint8_t *x, int64_t stride, const uint8_t *first, const uint8_t *second) {
    tile_load<6>(first, line_bytes);
    tile_load<4>(x, stride);
    tile_multiply_u8_i8<0, 4, 6>();
    tile_load<7>(second, line_bytes);
    tile_multiply_u8_i8<1, 4, 7>();
    tile_load<5>(x + tile_lines * stride, stride);
    tile_multiply_u8_i8<2, 5, 6>();
    tile_multiply_u8_i8<3, 5, 7>();
}

constexpr int64_t block_panels = 2;

// Panels `p` and the next of all rows that x and sums have memory for, of a step.
INLINE void integer_rows(int64_t, int64_t p, const IntegerTileArgs &args) {
    const int64_t whole = args.from + (args.until - args.from) / tile_lines * tile_lines, rest = args.until - whole;
    const uint8_t *first = args.panels[p] + GroupedPanel<W8A8>::header, *second = args.panels[p + 1] + GroupedPanel<W8A8>::header;
    int32_t *sums = args.sums + p * panel_rows;
    move_sums<false>(sums, args.sums_stride);
    for (int64_t k = args.from; k < whole; k += tile_lines)
        integer_step(args.x + k * quad, args.x_stride, first + k * line_bytes, second + k * line_bytes);
    if (rest != 0) {
        alignas(64) uint8_t lines[block_panels][tile_bytes] = {};
        memcpy(lines[0], first + whole * line_bytes, rest * line_bytes);
        memcpy(lines[1], second + whole * line_bytes, rest * line_bytes);
        integer_step(args.x + whole * quad, args.x_stride, lines[0], lines[1]);
    }
    move_sums<true>(sums, args.sums_stride);
}

#else

constexpr int64_t block_panels = group_panels;

INLINE void integer_rows(int64_t rows, int64_t, const IntegerTileArgs &args) {
    static_assert(group_panels == tile_panels, "a group is a tile");
    with_rows(rows, [&](auto known) {
        if (tiles_fetch && args.ahead != 0) integer_tile<known.count, tile_panels, tiles_fetch>(args);
        else integer_tile<known.count, tile_panels, false>(args);
    });
}

#endif

// What sums of rows and `panels` panels begin with.
template <class Number>
INLINE void begin_sums(const IntegerTileArgs &args, int64_t rows, int64_t panels) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t p = 0; p < panels; p++)
            begin_panel<Number>(args.panels[p], args.sums + r * args.sums_stride + p * panel_rows);
}

template <>
constexpr int64_t direct_rows<W8A8> = ISA_AMX || ISA_LANES < 8 ? 0 : ISA_LANES == 16 ? tile_rows : 4;

#if ISA_LANES >= 8 && !ISA_AMX

// At most `direct_rows`, in the long streams in which a vector is multiplied. More rows take longer than reading.
template <class Epilogue>
class GroupedRows<W8A8, Epilogue> {
public:
    GroupedRows(const uint8_t *const *weights, const uint8_t *quantised, const float *scales, int64_t rows, int64_t cols,
                int64_t out_cols, const Epilogue &epilogue)
        : weights_(weights), quantised_(quantised), scales_(scales), rows_(rows), cols_(cols), out_cols_(out_cols),
          epilogue_(epilogue) {}

    // Two panels are read at a time, of all weights, with AVX2 and where the machine's own requests run ahead; elsewhere as many as
    // leave their sums in registers.
    void run(Worker &worker) {
        if constexpr (ISA_LANES == 8) run_in<few_panels>(worker);
        else if (reads_ahead) run_in<few_panels>(worker);
        else if (rows_ <= most_eight_rows) run_in<most_tile_panels>(worker);
        else run_in<tile_panels>(worker);
    }

private:
    template <int P>
    void run_in(Worker &worker) {
        using Streams = Panels<P / Epilogue::weights>;
        Chunks chunks = panel_chunks(worker, panel_count(out_cols_), Streams::value, panel_bytes_ * Epilogue::weights);
        each_turn<Streams>(chunks, joined_by(epilogue_), [&](auto some, Turn &turn) { multiply<P, decltype(some)::value>(turn); });
    }

    // Panels of each weight, `some` of them. Where a tile has more, the last one is multiplied again and the result dropped.
    template <int P, int64_t some>
    void multiply(Turn &turn) {
        constexpr int64_t streams = P / Epilogue::weights;
        alignas(line_bytes) int32_t sums[tile_rows * P * panel_rows];
        IntegerTileArgs args;
        args.x = quantised_;
        args.x_stride = quantised_size(cols_);
        args.sums = sums;
        args.sums_stride = P * panel_rows;
        for (int64_t i = 0; i < P; i++) {
            const int64_t p = i % streams;
            args.panels[i] = weights_[i / streams] + turn.place(turn.panel + (p < some ? p : some - 1) * turn.apart, panel_bytes_);
        }
        begin_sums<FewNumber>(args, rows_, P);
        const int64_t quads = quad_count(cols_), last = quads > far_lines ? quads - far_lines : 0;
        multiply_lines<P>(args, 0, last, far_lines * line_bytes);
        multiply_lines<P>(args, last, quads, after_turn(weights_[0], panel_bytes_, turn).distance(args.panels[0] + last * line_bytes));
        for (int64_t p = 0; p < some; p++) finish(turn.panel + p * turn.apart, p, streams, args);
    }

    // Lines `from` to `until` - 1, and asks for what lies `ahead` bytes from each. Where the machine's own requests run ahead, others
    // are in their way: a core holds few at a time.
    template <int P>
    void multiply_lines(IntegerTileArgs &args, int64_t from, int64_t until, int64_t ahead) const {
        args.from = from, args.until = until, args.ahead = ahead;
        with_rows(rows_, [&](auto known) {
#if ISA_LANES == 16
            if constexpr (known.count <= (P == most_tile_panels ? most_eight_rows : tile_rows))
                integer_tile<known.count, P, P != few_panels>(args);
#else
            if constexpr (known.count <= direct_rows<W8A8>) multiply_few<known.count>(args);
#endif
        });
    }

#if ISA_LANES == 8
    // Sums of three rows and more fit registers with one panel, so panels take turns.
    template <int R>
    static void multiply_few(const IntegerTileArgs &args) {
        constexpr int at_once = R > 2 ? 1 : few_panels;
        constexpr int64_t turn_lines = 64;
        for (int64_t line = args.from; line < args.until; line += turn_lines)
            for (int p = 0; p < few_panels; p += at_once) {
                IntegerTileArgs own = args;
                for (int i = 0; i < at_once; i++) own.panels[i] = args.panels[p + i];
                own.sums += p * panel_rows;
                own.from = line, own.until = line + turn_lines < args.until ? line + turn_lines : args.until;
                few_integers_tile<R, at_once>(own);
            }
    }
#endif

    // Output panel `panel`, whose sums are those of stream p of each weight.
    void finish(int64_t panel, int64_t p, int64_t streams, const IntegerTileArgs &args) {
        for (int64_t r = 0; r < rows_; r++) {
            alignas(line_bytes) float line[group_panels * panel_rows];
            for (int64_t w = 0; w < Epilogue::weights; w++) {
                const int64_t i = w * streams + p;
                scale_sums(args.sums + r * args.sums_stride + i * panel_rows, args.panels[i], scales_[r],
                           line + w * PanelGroups<uint8_t, Epilogue>::columns);
            }
            finish_panel(epilogue_, panel, out_cols_, line, r);
        }
    }

    static constexpr int few_panels = 2;
    static constexpr int64_t most_eight_rows = 3;  // whose sums with eight panels fit registers
    static constexpr int64_t far_lines = 32;       // ahead, that are asked for

    const uint8_t *const *weights_;
    const uint8_t *quantised_;
    const float *scales_;
    int64_t rows_, cols_, out_cols_, panel_bytes_ = GroupedPanel<W8A8>::size(cols_);
    Epilogue epilogue_;
};

#endif

template <class Epilogue>
class GroupedGemm<W8A8, Epilogue> {
public:
    GroupedGemm(const bf16 *x, const uint8_t *const *weights, int64_t rows, int64_t cols, int64_t out_cols,
                const Epilogue &epilogue)
        : x_(x), groups_{weights, GroupedPanel<W8A8>::size(cols), rows, out_cols}, cols_(cols),
          epilogue_(epilogue) {}

    void run(Worker &worker) {
        groups_.divide(worker.threads);
        quantise(worker);
        if constexpr (direct_rows<W8A8> > 0)
            if (groups_.rows <= direct_rows<W8A8>)
                return GroupedRows<W8A8, Epilogue>(groups_.weights, quantised_, scales_, groups_.rows, cols_, groups_.out_cols, epilogue_)
                    .run(worker);
        work_in(worker.scratch<char>(work_bytes(groups_.task_rows())));
        [[maybe_unused]] const Registers registers;
        groups_.each_task(worker, [&](const GemmTask &task) { multiply(task); });
    }

    // The following are as in gemm_core.h.
#if ISA_AMX
    struct Registers : Tiles {
        Registers() : Tiles(integer_tiles()) {}
    };
#else
    using Registers = NoRegisters;
#endif
    using Groups = PanelGroups<uint8_t, Epilogue>;
    static constexpr int64_t line_width = group_panels * panel_rows;

    static int64_t work_bytes(int64_t rows) { return rows * line_width * static_cast<int64_t>(sizeof(int32_t)); }
    void work_in(char *memory) { sums_ = reinterpret_cast<int32_t *>(memory); }

    static int64_t kept_bytes(int64_t rows, int64_t cols) { return rows * (quantised_size(cols) + 4); }
    void keep_in(uint8_t *memory, int64_t rows) {
        quantised_ = memory;
        scales_ = reinterpret_cast<float *>(memory + rows * quantised_size(cols_));
    }
    void take(int64_t row, const bf16 *x) { take_as<QuantisedNumber>(row, x); }

    void turn_to(const Groups &groups, int64_t first, const Epilogue &epilogue) {
        groups_ = groups;
        first_ = first;
        epilogue_ = epilogue;
    }

    void multiply(const GemmTask &task) {
        const int64_t quads = quad_count(cols_), rows = task.last - task.first;
        IntegerTileArgs args;
        args.x_stride = quantised_size(cols_);
        args.sums_stride = line_width;
        const bool few = rows <= few_rows;
        const int64_t block = few ? even_block(quads, short_block_lines) : quads_per_block;
        const int64_t kept = groups_.kept(quads > block || block_panels < group_panels);
        const Steps steps = {rows, step_rows};
        for (int64_t p = 0; p < group_panels; p++) args.panels[p] = groups_.panel(task.group, p);
        for (args.from = 0; args.from < quads; args.from = args.until) {
            args.until = args.from + block < quads ? args.from + block : quads;
            const bool last = args.until == quads;
            const int64_t read = last ? groups_.panel_elements : GroupedPanel<W8A8>::header + args.until * line_bytes;
            const Upcoming next = groups_.upcoming(task, read, block * line_bytes);
            for (int64_t p = 0; p < group_panels; p += block_panels)
                for (int64_t step = 0; step < steps.count; step++) {
                    const int64_t at = steps.first(step), row = task.first + at, some = steps.first(step + 1) - at;
                    const bool begins = p == 0, ends = last && p + block_panels == group_panels;
                    args.x = quantised_ + (first_ + row) * args.x_stride;
                    args.sums = sums_ + at * kept;
                    const uint8_t *first = args.panels[0] + GroupedPanel<W8A8>::header + args.from * line_bytes;
                    if (few) next.share(first, args.until - args.from, step, steps.count, args);
                    else if (begins) next.fetch(step, steps.count);
                    if (ends) groups_.expect(epilogue_, task.group, row, some);
                    if (begins && args.from == 0) begin_sums<QuantisedNumber>(args, some, group_panels);
                    integer_rows(some, p, args);
                    if (ends) finish(args, task.group, row, some);
                }
        }
    }

private:
    // Of four panels: 256 KB, which stay in L2 while rows are multiplied. Tiles read two panels at a time: 16 KB, in L1.
    static constexpr int64_t quads_per_block = ISA_AMX ? 128 : 1024;

    template <class Number>
    void take_as(int64_t row, const bf16 *x) {
        scales_[row] = quantise_row<Number>(x, cols_, quantised_ + row * quantised_size(cols_));
    }

    void quantise(Worker &worker) {
        const int64_t whole = groups_.padded_rows();
        const bool few = !std::is_same_v<FewNumber, QuantisedNumber> && groups_.rows <= direct_rows<W8A8>;
        keep_in(worker.shared_scratch<uint8_t>(kept_bytes(whole, cols_)), whole);
        {
            Chunks chunks(worker, groups_.rows, 8, 1);
            for (int64_t row, end; chunks.next(row, end);)
                for (; row < end; row++) {
                    if (few) take_as<FewNumber>(row, x_ + row * cols_);
                    else take(row, x_ + row * cols_);
                }
        }
        worker.barrier();
    }

    void finish(const IntegerTileArgs &args, int64_t column, int64_t row, int64_t rows) {
        for (int64_t r = 0; r < rows; r++) {
            float scaled[line_width];
            for (int64_t p = 0; p < group_panels; p++)
                scale_sums(args.sums + r * line_width + p * panel_rows, args.panels[p], scales_[first_ + row + r],
                           scaled + p * panel_rows);
            groups_.finish(epilogue_, column, row + r, scaled);
        }
    }

    const bf16 *x_;
    PanelGroups<uint8_t, Epilogue> groups_;
    int64_t cols_;
    Epilogue epilogue_;
    uint8_t *quantised_ = nullptr;
    float *scales_ = nullptr;
    int32_t *sums_ = nullptr;
    int64_t first_ = 0;
};

// Panels that are read at a time: as many as leave registers for their sums.
constexpr int most_integer_streams = ISA_LANES == 16 ? 8 : ISA_LANES == 8 ? 2 : 1;

// sums[panel_rows] of each of P panels, `size` bytes apart, times x.
template <class Some>
void integer_panels_times_vector(const uint8_t *first, int64_t size, const uint8_t *x, int64_t quads, int32_t *sums,
                                 const After<uint8_t> &after) {
    constexpr int P = Some::value;
    for (int p = 0; p < P; p++) begin_panel<FewNumber>(first + p * size, sums + p * panel_rows);
#if ISA_LANES == 16
    const uint8_t *lines[P];
    __m512i sum[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
        lines[p] = first + p * size + GroupedPanel<W8A8>::header;
        sum[p] = _mm512_loadu_si512(sums + p * panel_rows);
    }
    const int64_t near_end = quads > prefetch_lines ? quads - prefetch_lines : 0;
    int64_t ahead = prefetch_lines * line_bytes;
    for (int64_t k = 0; k < quads; k++) {
        if (k == near_end) ahead = after.distance(lines[0] + near_end * line_bytes);
        int32_t four;
        __builtin_memcpy(&four, x + k * quad, 4);
        const __m512i inputs = _mm512_set1_epi32(four);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            prefetch(lines[p] + k * line_bytes + ahead + p * Some::skew);
            sum[p] = _mm512_dpbusd_epi32(sum[p], inputs, _mm512_loadu_si512(lines[p] + k * line_bytes));
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) _mm512_storeu_si512(sums + p * panel_rows, sum[p]);
#elif ISA_LANES == 8
    const int64_t near_end = quads > prefetch_lines ? quads - prefetch_lines : 0;
    IntegerTileArgs args = {x, 0, {}, 0, near_end, sums, 0, prefetch_lines * line_bytes};
    for (int p = 0; p < P; p++) args.panels[p] = first + p * size;
    few_integers_tile<1, P>(args);
    args.from = near_end, args.until = quads, args.ahead = after.distance(first + GroupedPanel<W8A8>::header + near_end * line_bytes);
    few_integers_tile<1, P>(args);
#else
    static_assert(P == 1, "one panel at a time");
    const uint8_t *next = first + after.distance(first);
    for (int64_t line = 0; line < prefetch_lines; line++) prefetch(next + line * line_bytes);
    integer_tile<1, 1, false>({x, 0, {first}, 0, quads, sums, 0});
#endif
}

template <class Epilogue>
class GroupedGemv<W8A8, Epilogue> {
public:
    GroupedGemv(const uint8_t *const *weights, int64_t out_cols, int64_t cols, const Epilogue &epilogue)
        : weights_(weights), out_cols_(out_cols), cols_(cols), epilogue_(epilogue) {}

    void run(const bf16 *x, Worker &worker) {
        with_streams<most_integer_streams>([&](auto streams) { run_in<decltype(streams)>(x, worker); });
    }

private:
    template <class Streams>
    void run_in(const bf16 *x, Worker &worker) {
        const int64_t panel_bytes = GroupedPanel<W8A8>::size(cols_) * Epilogue::weights;
        Chunks chunks = panel_chunks(worker, panel_count(out_cols_), Streams::value, panel_bytes);
        each_panels<Streams>(
            chunks, epilogue_,
            [&] {
                quantised_ = worker.scratch<uint8_t>(quantised_size(cols_));
                scale_ = quantise_row<FewNumber>(x, cols_, quantised_);
            },
            [&](auto some, Turn &turn, const Epilogue &epilogue) { multiply<decltype(some)>(turn, epilogue); });
    }

    template <class Some>
    void multiply(Turn &turn, const Epilogue &epilogue) {
        constexpr int64_t weights = Epilogue::weights;
        constexpr int count = Some::value;
        const int64_t size = GroupedPanel<W8A8>::size(cols_), panel = turn.panel, apart = turn.apart;
        int32_t sums[weights][count * panel_rows];
        each_weight<weights>(weights_, size, turn, [&](int64_t w, const uint8_t *own, const After<uint8_t> &after) {
            integer_panels_times_vector<Some>(own, size * apart, quantised_, quad_count(cols_), sums[w], after);
        });
        for (int64_t p = 0; p < count; p++) {
            float row[weights * panel_rows];
            for (int64_t w = 0; w < weights; w++)
                scale_sums(sums[w] + p * panel_rows, weights_[w] + turn.place(panel + p * apart, size), scale_, row + w * panel_rows);
            finish_panel(epilogue, panel + p * apart, out_cols_, row);
        }
    }

    const uint8_t *const *weights_;
    int64_t out_cols_, cols_;
    Epilogue epilogue_;
    uint8_t *quantised_ = nullptr;
    float scale_ = 0;
};

}  // namespace
}  // namespace ISA
