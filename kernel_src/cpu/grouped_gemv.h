// Panels of grouped weights (grouped.h) times one vector, with an epilogue (epilogue.h). Included inside each
// instruction set.
//
// Bound by memory where it can be: for each line of weights there are a few instructions, and panels are taken several at a
// time, which share each load of x. Two are read fastest: the machine's own requests run far enough ahead, and ours bring
// what is due next into L1. But a long x does not stay there beside what streams by, and then more panels share it.
namespace ISA {
namespace {

constexpr int most_grouped_streams = ISA_LANES == 16 ? 8 : ISA_LANES == 8 ? 2 : 1;
constexpr int narrow_streams = ISA_LANES == 16 ? 2 : most_grouped_streams;

// Whether so few panels are read that lines are asked for one group ahead.
template <class Some>
constexpr bool is_near = ISA_LANES == 16 && Some::value <= narrow_streams && Some::soon == 0;

// While a line of a group's numbers is read, asks for `asked`, and into L1 for what is read `soon` groups later.
template <class Format, class Some>
INLINE void ask(const uint8_t *line, const uint8_t *asked) {
    prefetch<is_near<Some>>(asked);
    if (Some::soon != 0) prefetch<true>(line + Some::soon * Format::number_bytes);
}

// The addresses of a group: of its inputs in R rows of x, of its numbers in P panels, and of what is asked for with these. With several
// rows each is kept in a register. The compiler would keep the sum of each address and offset, for which there are too few.
template <int R, int P>
struct RowsAndPanels {
    const int16_t *rows[R];
    const uint8_t *panels[P], *asked[P];

    INLINE_MEMBER RowsAndPanels(const int16_t *x, int64_t x_stride, const uint8_t *numbers, int64_t size, int64_t ahead, int64_t skew) {
        for (int r = 0; r < R; r++) rows[r] = x + r * x_stride;
        for (int p = 0; p < P; p++) panels[p] = numbers + p * size, asked[p] = panels[p] + ahead + p * skew;
        if (R == 1) return;
        for (int r = 0; r < R; r++) settle_address(rows[r]);
        for (int p = 0; p < P; p++) settle_address(panels[p]), settle_address(asked[p]);
    }
};

#if ISA_LANES == 16

// Whether a vector x is taken in bytes.
template <class Format>
constexpr bool by_bytes = true;

// sums[r * P + p] of a group of P panels, `size` bytes apart, times R rows of x, split into bytes. Rows of x are `x_stride`
// numbers apart, and `sums_of_x`, those of a row's group, `sums_stride`. What lies `ahead` bytes from the group's numbers begins
// to be read.
template <class Format, class Some, int R>
INLINE void sums_of_rows(const uint8_t *numbers, int64_t size, int64_t ahead, const int16_t *x, int64_t x_stride,
                         const int32_t *sums_of_x, int64_t sums_stride, i32v *sums) {
    constexpr int P = Some::value;
    constexpr int quads = Format::inputs / quad, per_line = quads * line_bytes / Format::number_bytes;
    const RowsAndPanels<R, P> at(x, x_stride, numbers, size, ahead, Some::skew);
    __m512i low[R * P], high[R * P];
#pragma GCC unroll 8
    for (int v = 0; v < R * P; v++) {
        low[v] = (__m512i)(-Format::zero * sums_of_x[v / P * sums_stride] - i32v{});
        high[v] = _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int i = 0; i < quads; i++) {
        __m512i lower[R], upper[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            lower[r] = (__m512i)splat_pair(at.rows[r] + i * quad);
            upper[r] = (__m512i)splat_pair(at.rows[r] + i * quad + 2);
        }
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            const int64_t line = i / per_line * line_bytes;
            if (i % per_line == 0) ask<Format, Some>(at.panels[p] + line, at.asked[p] + line);
            const __m512i four = (__m512i)Format::quad_at(at.panels[p], i, 0);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                low[r * P + p] = _mm512_dpbusd_epi32(low[r * P + p], four, lower[r]);
                high[r * P + p] = _mm512_dpbusd_epi32(high[r * P + p], four, upper[r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < R * P; v++) sums[v] = (i32v)_mm512_add_epi32(_mm512_slli_epi32(high[v], 8), low[v]);
}

#else

// x may be taken in bytes: its numbers are split into two, as for vpdpbusd, and each byte is multiplied with a number of a
// weight by vpmaddubsw, which sums products in pairs to 16 bits. Returns the sums of how many quads these hold, where bytes
// of x have magnitudes up to `most_of_byte`.
template <class Format>
constexpr int quads_in_16_bits(int most_of_byte) {
    int quads = Format::inputs / quad;
    while (quads > 0 && quads * 2 * (Format::zero + Format::most) * most_of_byte > INT16_MAX) quads /= 2;
    return quads;
}

constexpr int most_of_low = 128, most_of_high = (most_fixed + 128) >> 8;

// Whether a vector x is taken in bytes, which multiplies a quad of weights as it lies. Where sums have to be widened four times
// a group, that takes as long as it saves; and so do two sums for each output, of rows whose sums then do not fit registers.
template <class Format>
constexpr bool by_bytes = ISA_LANES == 8 && 2 * quads_in_16_bits<Format>(most_of_low) >= Format::inputs / quad;

#if ISA_LANES == 8

// The sum of `all` quads of products of bytes: of `quads` at a time in 16 bits, then in 32.
template <int quads, int all>
struct ByteSum {
    __m256i narrow, wide;

    INLINE_MEMBER void add(int i, __m256i numbers, __m256i x) {
        const __m256i products = _mm256_maddubs_epi16(numbers, x);
        narrow = i % quads == 0 ? products : _mm256_add_epi16(narrow, products);
        settle(narrow);
        if ((i + 1) % quads != 0) return;
        const __m256i widened = _mm256_madd_epi16(narrow, _mm256_set1_epi16(1));
        wide = i < quads ? widened : _mm256_add_epi32(wide, widened);
        if (i + 1 < all) settle(wide);
    }
};

// As sums_of_rows, of one row in bytes. One walk for both, with what each does to a quad as its argument, takes 8 % longer with
// g++ 12.
template <class Format, class Some>
INLINE void sums_by_bytes(const uint8_t *numbers, int64_t size, int64_t ahead, const int16_t *x, int32_t sum_of_x, i32v *sums) {
    constexpr int P = Some::value, V = P * sum_vectors;
    constexpr int quads = Format::inputs / quad, per_line = quads * line_bytes / Format::number_bytes;
    ByteSum<quads_in_16_bits<Format>(most_of_low), quads> low[V];
    ByteSum<quads_in_16_bits<Format>(most_of_high), quads> high[V];
#pragma GCC unroll 8
    for (int i = 0; i < quads; i++) {
        const __m256i lower = (__m256i)splat_pair(x + i * quad), upper = (__m256i)splat_pair(x + i * quad + 2);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const uint8_t *own = numbers + v / sum_vectors * size;
            if (i % per_line == 0 && v % sum_vectors == 0)
                ask<Format, Some>(own + i / per_line * line_bytes, own + i / per_line * line_bytes + ahead);
            const __m256i four = (__m256i)Format::quad_at(own, i, v % sum_vectors * lanes * quad);
            low[v].add(i, four, lower);
            high[v].add(i, four, upper);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; v++)
        sums[v] = -Format::zero * sum_of_x + (i32v)_mm256_add_epi32(_mm256_slli_epi32(high[v].wide, 8), low[v].wide);
}

#endif

// As with AVX512, of x in pairs: sums[r * P * sum_vectors + v]. What a row is multiplied with next is in registers for all rows,
// whose numbers come from memory.
template <class Format, class Some, int R>
INLINE void sums_of_rows(const uint8_t *numbers, int64_t size, int64_t ahead, const int16_t *x, int64_t x_stride,
                         const int32_t *sums_of_x, int64_t sums_stride, i32v *sums) {
    constexpr int P = Some::value, V = P * sum_vectors;
    constexpr int quads = Format::inputs / quad, per_line = quads * line_bytes / Format::number_bytes;
    const RowsAndPanels<R, P> at(x, x_stride, numbers, size, ahead, Some::skew);
#pragma GCC unroll 8
    for (int v = 0; v < R * V; v++) sums[v] = -Format::zero * sums_of_x[v / V * sums_stride] - i32v{};
#pragma GCC unroll 8
    for (int i = 0; i < quads; i++) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++)
            if (i % per_line == 0) ask<Format, Some>(at.panels[p] + i / per_line * line_bytes, at.asked[p] + i / per_line * line_bytes);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            quadv two[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) two[v] = pairs_at<Format>(at.panels[v / sum_vectors], i, half, v % sum_vectors * lanes * quad);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const i32v pair = splat_pair(at.rows[r] + i * quad + 2 * half);
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) {
                    i32v &sum = sums[r * V + v];
                    sum = multiply_pairs(two[v], pair, sum);
                    settle(sum);
                }
            }
        }
    }
}

#endif

#if ISA_LANES >= 8

// Numbers as products of bytes take them: of four, the low bytes and then the high ones, in the order of a quad. Low bytes are
// signed, and high ones what is left of the number.
INLINE void split_bytes(int16_t *numbers, int64_t count) {
    const __m128i order = _mm_set_epi64x(0x0f0b0d090e0a0c08, 0x0703050106020400);
    for (int64_t i = 0; i < count; i += 2 * lanes) {
        const quadv some = load<quadv>(numbers + i), bytes = (some & 0xff) | ((some + 128) & 0xff00);
#if ISA_LANES == 16
        store(numbers + i, _mm512_shuffle_epi8((__m512i)bytes, _mm512_broadcast_i32x4(order)));
#else
        store(numbers + i, _mm256_shuffle_epi8((__m256i)bytes, _mm256_broadcastsi128_si256(order)));
#endif
    }
}

#endif

// A group's sum of products with x in 8 bits, of a vector of outputs: quads of weights are added to it in their order.
template <class Format>
struct QuadSum {
    static constexpr int quads = Format::inputs / quad;

#if ISA_LANES == 16
    using Inputs = __m512i;
    __m512i sum;

    INLINE Inputs inputs(const int8_t *x) { return (__m512i)four_of(x); }
    INLINE_MEMBER void begin(int32_t first) { sum = _mm512_set1_epi32(first); }
    INLINE_MEMBER void add(int, quadv numbers, Inputs x) { sum = _mm512_dpbusd_epi32(sum, (__m512i)numbers, x); }
    INLINE_MEMBER i32v total() const { return (i32v)sum; }
#elif ISA_LANES == 8
    static constexpr int narrow_quads = quads_in_16_bits<Format>(most_byte);
    static_assert(narrow_quads > 0 || Format::zero == 128, "other numbers are bytes with a sign");

    struct SignedSum {
        i32v wide;

        INLINE_MEMBER void add(int i, __m256i numbers, __m256i x) {
            wide = multiply_quads(_mm256_xor_si256(numbers, _mm256_set1_epi8(-128)), x, i == 0 ? i32v{} : wide);
            settle(wide);
        }
    };

    using Inputs = __m256i;
    int32_t start;
    std::conditional_t<(narrow_quads > 0), ByteSum<(narrow_quads > 0 ? narrow_quads : 1), quads>, SignedSum> sum;

    INLINE Inputs inputs(const int8_t *x) { return (__m256i)four_of(x); }
    INLINE_MEMBER void begin(int32_t first) { start = narrow_quads > 0 ? first : 0; }
    INLINE_MEMBER void add(int i, quadv numbers, Inputs x) { sum.add(i, (__m256i)numbers, x); }
    INLINE_MEMBER i32v total() const { return start + (i32v)sum.wide; }
#else
    // Of four inputs, the low bytes of two pairs, and the high ones.
    struct Inputs {
        i32v first, second;
    };

    int32_t start;
    i32v sum;

    INLINE Inputs inputs(const int8_t *x) {
        typedef int16_t pairv __attribute__((vector_size(lanes * 4)));
        const pairv four = (pairv)four_of(x);
        return {(i32v)((four << 8) >> 8), (i32v)(four >> 8)};
    }

    INLINE_MEMBER void begin(int32_t first) { start = first; }
    INLINE_MEMBER void add(int i, quadv numbers, const Inputs &x) {
        const i32v some = multiply_pairs(numbers & 0xff, x.first, i == 0 ? i32v{} : sum);
        sum = multiply_pairs(numbers >> 8, x.second, some);
    }
    INLINE_MEMBER i32v total() const { return start + sum; }
#endif
};

// sums[r * P * sum_vectors + v] of a group of P panels, `size` bytes apart, times group g of R rows.
template <class Format, class Some, int R>
INLINE void sums_of_group(const FixedRows &x, int64_t g, const uint8_t *numbers, int64_t size, int64_t ahead, i32v *sums) {
    sums_of_rows<Format, Some, R>(numbers, size, ahead, x.first.numbers + g * Format::inputs, x.bytes / 2, x.first.sums + g,
                                         x.bytes / 4, sums);
}

template <class Format, class Some, int R>
INLINE void sums_of_group(const ByteRows<Format::inputs> &x, int64_t g, const uint8_t *numbers, int64_t size, int64_t ahead, i32v *sums) {
    constexpr int P = Some::value, V = P * sum_vectors;
    constexpr int quads = Format::inputs / quad, per_line = quads * line_bytes / Format::number_bytes;
    QuadSum<Format> sum[R * V];
#pragma GCC unroll 8
    for (int v = 0; v < R * V; v++) sum[v].begin(Format::zero == 0 ? 0 : x.row(v / V).groups[g].begin);
#pragma GCC unroll 8
    for (int i = 0; i < quads; i++) {
        typename QuadSum<Format>::Inputs four[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) four[r] = QuadSum<Format>::inputs(x.row(r).groups[g].numbers + i * quad);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            const uint8_t *own = numbers + v / sum_vectors * size;
            const uint8_t *first = own + i / per_line * line_bytes;
            if (i % per_line == 0 && v % sum_vectors == 0)
                ask<Format, Some>(first, first + ahead + v / sum_vectors * Some::skew);
            const quadv line = Format::quad_at(own, i, v % sum_vectors * lanes * quad);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r * V + v].add(i, line, four[r]);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < R * V; v++) sums[v] = sum[v].total();
}

// The same of a vector.
template <class Format, class Some>
INLINE void sums_of_group(const FixedRow &x, int64_t g, const uint8_t *numbers, int64_t size, int64_t ahead, i32v *sums) {
#if ISA_LANES == 8
    if constexpr (by_bytes<Format>)
        return sums_by_bytes<Format, Some>(numbers, size, ahead, x.numbers + g * Format::inputs, x.sums[g], sums);
#endif
    sums_of_group<Format, Some, 1>({x, 0}, g, numbers, size, ahead, sums);
}

template <class Format, class Some>
INLINE void sums_of_group(const ByteRow<Format::inputs> &x, int64_t g, const uint8_t *numbers, int64_t size, int64_t ahead, i32v *sums) {
    sums_of_group<Format, Some, 1>({x, 0}, g, numbers, size, ahead, sums);
}

// The total of groups with group g of a row, whose sum is `sum`; `own` are its scales, of which that of output `first` counts.
template <class Format>
INLINE f32v add_group(f32v total, i32v sum, const FixedRow &, int64_t, const uint8_t *own, int64_t first) {
    if constexpr (scaled_whole<Format>) return total + whole_to_float(sum * Format::whole_at(own, first));
    else return multiply_add(Format::at(own, first), whole_to_float(sum), total);
}

template <class Format>
INLINE f32v add_group(f32v total, i32v sum, const ByteRow<Format::inputs> &x, int64_t g, const uint8_t *own, int64_t first) {
    return multiply_add(Format::at(own, first) * x.groups[g].scale, whole_to_float(sum), total);
}

// The total of groups where a block of x begins, and what becomes of it where the block ends: in fixed point blocks are
// summed in units of their own, in bytes the total goes on.
template <class Format>
INLINE f32v begin_block(const float *sums) {
    return takes_bytes<Format> ? load<f32v>(sums) : f32v{};
}

template <class Format>
INLINE void end_block(float *sums, f32v total, const RowOf<Format> &x, int64_t block) {
    if constexpr (takes_bytes<Format>) store(sums, total);
    else add_block(sums, total, x.units[block]);
}

// A row of x as products of a vector take it.
template <class Format>
INLINE void take_row(const bf16 *x, const FixedSize &size, const FixedRow &row) {
    fix_for<Format>(x, size, row);
#if ISA_LANES >= 8
    if (by_bytes<Format>) split_bytes(row.numbers, size.numbers());
#endif
}

template <class Format>
INLINE void take_row(const bf16 *x, const ByteSize<Format> &size, const ByteRow<Format::inputs> &row) {
    quantise_groups<Format>(x, size, row);
}

// Where vector v of the sums of several panels is: its panel's scales of a group, and its first output there.
template <class Format>
struct PanelScales {
    const uint8_t *own;
    int64_t output;

    INLINE_MEMBER PanelScales(const uint8_t *first, int64_t size, int64_t group, int64_t v)
        : own(GroupedPanel<Format>::scales(first + v / sum_vectors * size, group)), output(v % sum_vectors * lanes) {}
};

// Starts reading what lies before the numbers of a block of P panels, if the group is the first of one: its scales, and of
// the panel's first block the header.
template <class Format, class Some>
INLINE void prefetch_scales(const uint8_t *first, int64_t size, int64_t group) {
    using Panel = GroupedPanel<Format>;
    constexpr int64_t P = Some::value;
    if (group % Panel::block_groups != 0) return;
    const uint8_t *line = group == 0 ? first : Panel::scales(first, group);
    for (; line < Panel::numbers(first, group); line += line_bytes)
        for (int64_t p = 0; p < P; p++) prefetch<is_near<Some>>(line + p * (size + Some::skew));
}

template <class Format>
constexpr int wide_streams = Format::wide_streams < most_grouped_streams ? Format::wide_streams : most_grouped_streams;

// How many groups ahead.
template <class Format, class Some>
INLINE int64_t groups_ahead() {
    constexpr int64_t block = GroupedPanel<Format>::block;
    return is_near<Some> ? 1 : (prefetch_lines * line_bytes + block - 1) / block * GroupedPanel<Format>::block_groups;
}

// sums[P][panel_rows] = P panels, `size` bytes apart, @ x.
template <class Format, class Some>
void grouped_panels_times_vector(const uint8_t *first, int64_t size, const RowOf<Format> &x, int64_t groups, float *sums,
                                 const After<uint8_t> &after) {
    using Panel = GroupedPanel<Format>;
    constexpr int P = Some::value;
    constexpr int64_t block_groups = fixed_inputs / Format::inputs, vectors = P * sum_vectors;
    const int64_t far = groups_ahead<Format, Some>();
    const int64_t near_end = groups > far ? groups - far : 0;
    const uint8_t *fetched = first;  // where group `offset` from the one at hand begins to be read
    int64_t offset = far;
    f32v minima[1][vectors] = {};
    const uint8_t *panels[P];
    for (int64_t p = 0; p < P; p++) panels[p] = first + p * size;
    for (int64_t i = 0; i < P * panel_rows; i++) sums[i] = 0;
    for (int64_t from = 0; from < groups; from += block_groups) {
        const int64_t until = from + block_groups < groups ? from + block_groups : groups;
        f32v total[vectors];
#pragma GCC unroll 8
        for (int64_t v = 0; v < vectors; v++) total[v] = begin_block<Format>(sums + v * lanes);
        MinimaOfBlock<Format, vectors> least = {};
        for (int64_t g = from; g < until; g++) {
            if (g == near_end) {
                const int64_t distance = after.distance(first);
                fetched = first + distance;
                offset = distance == 0 ? 0 : -near_end;
            }
            if constexpr (whole_minima<Format>)
                if (g % quad == 0) least.add(panels, fixed_of(x), g);
            const uint8_t *numbers = Panel::numbers(first, g);
            const int64_t ahead = Panel::numbers(fetched, g + offset) - numbers;
            i32v sum[vectors];
            prefetch_scales<Format, Some>(fetched, size, g + offset);
            sums_of_group<Format, Some>(x, g, numbers, size, ahead, sum);
#pragma GCC unroll 8
            for (int64_t v = 0; v < vectors; v++) {
                const PanelScales<Format> scales(first, size, g, v);
                total[v] = add_group<Format>(total[v], sum[v], x, g, scales.own, scales.output);
            }
        }
#pragma GCC unroll 8
        for (int64_t v = 0; v < vectors; v++) end_block<Format>(sums + v * lanes, total[v], x, from / block_groups);
        if constexpr (whole_minima<Format>)
            least.finish(fixed_of(x).units[from / block_groups], minima[0]);
        else if constexpr (Format::has_minimum)
            add_minima<Format, 1, vectors>(panels, {fixed_of(x), 0}, from, until, minima);
    }
    for (int64_t p = 0; p < P; p++)
        finish_sums<Format>(first + p * size, sums + p * panel_rows, reinterpret_cast<const float *>(minima[0] + p * sum_vectors));
}

// Calls run(Panels): how many streams are read of panels with so many columns.
template <class Format, class Run>
INLINE void with_grouped_streams(int64_t cols, const Run &run) {
    if (!reads_ahead) run(AskingPanels<most_grouped_streams>{});
    else if (cols <= Format::narrow_inputs) run(Panels<narrow_streams>{});
    else run(Panels<wide_streams<Format>>{});
}

template <class Format, class Epilogue>
class GroupedGemv {
public:
    GroupedGemv(const uint8_t *const *weights, int64_t out_cols, int64_t cols, const Epilogue &epilogue)
        : weights_(weights), out_cols_(out_cols), cols_(cols), epilogue_(epilogue) {}

    void run(const bf16 *x, Worker &worker) {
        if (reads_ahead && is_short()) return run_in<Panels<1>>(x, worker);
        with_grouped_streams<Format>(cols_, [&](auto streams) { run_in<decltype(streams)>(x, worker); });
    }

private:
    // Whether a product is over before the machine's own requests for several streams run far enough ahead. Then a worker reads all
    // of its share as one stream, which does not begin anew with each chunk. A longer x does not stay in L1 beside one.
    bool is_short() const {
        constexpr int64_t most_bytes = 1 << 22, most_inputs = 2048;
        return ISA_LANES == 16 && cols_ <= most_inputs && panel_count(out_cols_) * GroupedPanel<Format>::size(cols_) <= most_bytes;
    }

    // Where few streams are read and an output has as many weights, each of them is a stream.
    static constexpr bool paired = Epilogue::weights > 1 && Epilogue::weights == narrow_streams;

    template <class Streams>
    void run_in(const bf16 *x, Worker &worker) {
        const int64_t panel_bytes = GroupedPanel<Format>::size(cols_) * Epilogue::weights;
        Chunks chunks = panel_chunks(worker, panel_count(out_cols_), Streams::value, panel_bytes);
        each_panels<std::conditional_t<paired && Streams::value <= narrow_streams, Panels<1>, Streams>>(
            chunks, epilogue_,
            [&] { prepare(x, worker); },
            [&](auto some, Turn &turn, const Epilogue &epilogue) { multiply<decltype(some)>(turn, epilogue); });
    }

    void prepare(const bf16 *x, Worker &worker) {
        const SizeOf<Format> size = size_of<Format>(cols_);
        x_ = size.at(worker.scratch<uint8_t>(size.bytes()));
        take_row<Format>(x, size, x_);
    }

    template <class Some>
    void multiply(Turn &turn, const Epilogue &epilogue) {
        constexpr int64_t weights = Epilogue::weights;
        constexpr int count = Some::value;
        const int64_t size = GroupedPanel<Format>::size(cols_), groups = group_count<Format>(cols_);
        float sums[weights][count * panel_rows];
        if constexpr (paired && count == 1)
            grouped_panels_times_vector<Format, Panels<weights>>(weights_[0] + turn.panel * size, weights_[1] - weights_[0], x_, groups,
                                                         sums[0], after_turn(weights_[0], size, turn));
        else
            each_weight<weights>(weights_, size, turn, [&](int64_t w, const uint8_t *own, const After<uint8_t> &after) {
                grouped_panels_times_vector<Format, Some>(own, size * turn.apart, x_, groups, sums[w], after);
            });
        finish_panels<count>(epilogue, turn.panel, turn.apart, out_cols_, sums);
    }

    const uint8_t *const *weights_;
    int64_t out_cols_, cols_;
    Epilogue epilogue_;
    RowOf<Format> x_ = {};
};

}  // namespace
}  // namespace ISA
