// x in 8 bits, for products with weights in groups (grouped.h): numbers from -127 to 127, and a scale for each group of as many
// inputs as a group of weights has. The sum of a group's products is a whole number, exact in any order and with any
// instruction. It is multiplied with both scales in f32, and groups are summed in f32, in their order: matrices and vectors
// do the same. Included inside each instruction set.
namespace ISA {
namespace {

// A grouped format whose products take x in 8 bits.
template <class Stored>
struct A8 : Stored {};

constexpr int most_byte = 127;

// A group of x: its numbers, each four in the order of a quad, what they are multiples of, and what the sum of its products
// begins with, which takes back the zero of a format's numbers.
template <int64_t inputs>
struct ByteGroup {
    int8_t numbers[inputs];
    float scale;
    int32_t begin;
};

// A row of x: groups, whole blocks, with zeros behind the row's own. `fixed`: the sums of groups in fixed point, as minima are
// multiplied with them (minima.h); it has no numbers.
template <int64_t inputs>
struct ByteRow {
    ByteGroup<inputs> *groups;
    FixedRow fixed;
};

// As FixedRows.
template <int64_t inputs>
struct ByteRows {
    ByteRow<inputs> first;
    int64_t bytes;

    INLINE_MEMBER ByteRow<inputs> row(int64_t r) const {
        return {reinterpret_cast<ByteGroup<inputs> *>(reinterpret_cast<char *>(first.groups) + r * bytes), first.fixed.behind(r * bytes)};
    }
};

// The memory of a row, as FixedSize.
template <class Format>
struct ByteSize {
    using Group = ByteGroup<Format::inputs>;
    int64_t cols;

    FixedSize fixed() const { return {cols, Format::inputs, 0}; }
    int64_t groups_bytes() const { return (fixed().groups() * static_cast<int64_t>(sizeof(Group)) + 63) / 64 * 64; }
    int64_t bytes() const { return groups_bytes() + fixed().bytes(); }
    ByteRow<Format::inputs> at(uint8_t *memory) const {
        return {reinterpret_cast<Group *>(memory), fixed().at(memory + groups_bytes())};
    }
};

// How products with a format take a row of x.
template <class Format>
struct Taken {
    using Size = FixedSize;
    using Row = FixedRow;
    using Rows = FixedRows;
};

template <class Stored>
struct Taken<A8<Stored>> {
    using Size = ByteSize<A8<Stored>>;
    using Row = ByteRow<Stored::inputs>;
    using Rows = ByteRows<Stored::inputs>;
};

template <class Format>
using SizeOf = typename Taken<Format>::Size;

template <class Format>
using RowOf = typename Taken<Format>::Row;

template <class Format>
using RowsOf = typename Taken<Format>::Rows;

template <class Format>
constexpr bool takes_bytes = !std::is_same_v<RowOf<Format>, FixedRow>;

template <class Format>
INLINE SizeOf<Format> size_of(int64_t cols) {
    if constexpr (takes_bytes<Format>) return {cols};
    else return {cols, Format::inputs};
}

// The part of a row that minima are multiplied with.
INLINE const FixedRow &fixed_of(const FixedRow &row) { return row; }
template <int64_t inputs>
INLINE const FixedRow &fixed_of(const ByteRow<inputs> &row) {
    return row.fixed;
}

// Four inputs for every output.
INLINE i32v four_of(const int8_t *x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return four - i32v{};
}

// Each four lanes in the order of a quad: 0, 2, 1, 3.
INLINE i32v in_quad_order(i32v v) {
#if ISA_LANES == 16
    return (i32v)_mm512_shuffle_epi32((__m512i)v, _MM_PERM_DBCA);
#elif ISA_LANES == 8
    return (i32v)_mm256_shuffle_epi32((__m256i)v, 0xd8);
#else
    i32v ordered;
    for (int64_t i = 0; i < lanes; i++) ordered[i / quad * quad + quad_place(i)] = v[i];
    return ordered;
#endif
}

// Stores whole numbers as bytes in the order of quads.
INLINE void store_quads(int8_t *to, i32v whole) {
#if ISA_LANES == 8
    const __m256i fours = _mm256_shuffle_epi8((__m256i)whole, _mm256_set1_epi32(0x0c040800));  // in every 32 of 128 bits
    store(to, _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1))));
#else
    store(to, narrowed<i8v>(in_quad_order(whole)));
#endif
}

// Quantises as many groups as a vector has lanes, of which those behind the first `count` are zeros; totals f32 [lanes] = what
// the sums of their numbers stand for.
template <class Format>
INLINE void quantise_lanes(const bf16 *x, int64_t count, ByteGroup<Format::inputs> *groups, float *totals) {
    constexpr int64_t inputs = Format::inputs;
    i32v vectors[lanes] = {};
#pragma GCC unroll 16
    for (int64_t g = 0; g < count; g++) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < inputs; i += lanes)
            vectors[g] = Max::join(vectors[g], (i32v)(widen(load<u16v>(x + g * inputs + i)) & 0x7fff));
    }
    const f32v most = (f32v)(fold_each<Max>(vectors) << 16), scale = most / 127.0f;
    float inverses[lanes], scales[lanes];
    int32_t begins[lanes];
    store(inverses, select(most < 0x1p-119f, f32v{}, 127.0f / most));  // what is smaller has no inverse
    store(scales, scale);
#pragma GCC unroll 16
    for (int64_t g = 0; g < count; g++) {
        vectors[g] = i32v{};
#pragma GCC unroll 8
        for (int64_t i = 0; i < inputs; i += lanes) {
            const i32v whole = nearest(load_bf16(x + g * inputs + i) * inverses[g]);
            vectors[g] += whole;
            store_quads(groups[g].numbers + i, whole);
        }
    }
    const i32v sums = fold_each<Plus>(vectors);
    store(begins, -Format::zero * sums);
    store(totals, scale * __builtin_convertvector(sums, f32v));
    for (int64_t g = 0; g < count; g++) groups[g].scale = scales[g], groups[g].begin = begins[g];
    for (int64_t g = count; g < lanes; g++) groups[g] = {};
}

// Sums of groups are rounded to as many bits as one digit less than those of x in 16 bits: they are off by at most 2^-16 of the
// largest of a block.
template <class Stored>
constexpr int64_t first_digit<A8<Stored>> = 1;

constexpr float most_of_sum = 32512;  // two digits of 8 bits with a sign reach 32639
static_assert(digit_bits * (sum_digits - 1) == 16, "the digits of a sum are 16 bits");

// The sums of a block's groups, in f32, as whole numbers in one unit.
INLINE void fix_sums(const float *totals, int64_t groups, float *unit, int32_t *sums) {
    u32v tops = {};
    for (int64_t g = 0; g < groups; g += lanes) tops = max(tops, load<u32v>(totals + g) & 0x7fffffff);
    const float largest = float_of_bits(max_of(tops));
    *unit = largest / most_of_sum;
    const float inverse = largest == 0 ? 0.0f : most_of_sum / largest;
    for (int64_t g = 0; g < groups; g += lanes) store(sums + g, nearest(load<f32v>(totals + g) * inverse));
}

// Quantises a row of x by groups.
template <class Format>
NOINLINE void quantise_groups(const bf16 *x, const SizeOf<Format> &size, const RowOf<Format> &row) {
    constexpr int64_t inputs = Format::inputs, block_groups = fixed_inputs / inputs;
    const FixedSize fixed = size.fixed();
    for (int64_t g = 0; g < fixed.groups(); g += lanes) {
        const int64_t behind = size.cols - g * inputs, left = behind > 0 ? behind : 0;
        const bf16 *from = x + g * inputs;
        // With a count that the compiler knows, loops have no ends.
        if (left >= lanes * inputs) {
            quantise_lanes<Format>(from, lanes, row.groups + g, row.fixed.totals + g);
            continue;
        }
        const int64_t count = (left + inputs - 1) / inputs;
        bf16 padded[lanes * inputs];
        memcpy(padded, from, left * sizeof(bf16));
        memset(padded + left, 0, (count * inputs - left) * sizeof(bf16));
        quantise_lanes<Format>(padded, count, row.groups + g, row.fixed.totals + g);
    }
    if constexpr (whole_minima<Format>) {
        for (int64_t block = 0; block < fixed.blocks(); block++)
            fix_sums(row.fixed.totals + block * block_groups, block_groups, row.fixed.units + block,
                     row.fixed.sums + block * block_groups);
        split_sums<Format>(fixed, row.fixed);
    }
}

}  // namespace
}  // namespace ISA
