// Minima of groups of weights (grouped.h) times the sums of groups of x, for matrices and vectors alike. Included inside
// each instruction set.
//
// Where minima are whole numbers, so is their product with the sums of a block of x, which has 32 bits: it is exact, and is
// made from the digits of sums. Otherwise it is summed in f32, group by group.
namespace ISA {
namespace {

template <class Format>
constexpr bool whole_minima = Format::has_minimum && Format::factors != 0;

// The first digit that a sum of a group may have.
template <class Format>
constexpr int64_t first_digit = 0;

static_assert(most_fixed * fixed_inputs * 255 <= INT32_MAX, "minima times the sums of a block have 32 bits");

// Rows of x, `bytes` apart in memory.
struct FixedRows {
    FixedRow first;
    int64_t bytes;

    INLINE_MEMBER FixedRow row(int64_t r) const { return first.behind(r * bytes); }
};

// The lowest digits of some groups' sums, each beside the group's minimum in its quad; returns what is above them.
INLINE i32v split_digit(i32v sums, SumDigit *digits) {
#if ISA_LANES == 16
    const __m128i low = (__m128i)narrowed<i8v>(sums);
    store(digits, _mm_shuffle_epi8(low, _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)));
    return (sums - (i32v)_mm512_cvtepi8_epi32(low)) >> digit_bits;
#else
    const i16v low = narrowed<i16v>(sums);
    store(digits, low);
    return (sums - __builtin_convertvector(low, i32v)) >> digit_bits;
#endif
}

// The next i32 sums: a quad of bytes without a sign for each output, times four digits.
INLINE i32v multiply_digits(quadv four, const SumDigit *digits, i32v sum) {
#if ISA_LANES == 16
    int32_t all;
    __builtin_memcpy(&all, digits, 4);
    return (i32v)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)four, _mm512_set1_epi32(all));
#else
    return multiply_pairs(four >> 8, splat_pair(digits + 2), multiply_pairs(four & 0xff, splat_pair(digits), sum));
#endif
}

// The highest digit of a group's sum; each next one is `digit_groups` further.
INLINE SumDigit *digits_of(const FixedRow &row, int64_t group) {
    return row.digits + group / digit_groups * digit_groups * sum_digits + group % digit_groups;
}

// The digits of a row's sums, where minima are multiplied with them.
template <class Format>
INLINE void split_sums(const FixedSize &size, const FixedRow &row) {
    for (int64_t g = 0; whole_minima<Format> && g < size.groups(); g += lanes) {
        SumDigit *digits = digits_of(row, g);
        i32v sums = load<i32v>(row.sums + g);
        for (int64_t digit = sum_digits - 1; digit >= 0; digit--) sums = split_digit(sums, digits + digit * digit_groups);
    }
}

// Fixes a row of x, as products with a format need it.
template <class Format>
NOINLINE void fix_for(const bf16 *x, const FixedSize &size, const FixedRow &row) {
    fix_row<Format::inputs>(x, size, row);
    split_sums<Format>(size, row);
}

// Vector v of the outputs of some panels: minima from `group` on, as many as a vector has.
template <class Format, class V>
INLINE V minima_at(const uint8_t *const *panels, int64_t group, int64_t v) {
    return load<V>(GroupedPanel<Format>::minima(panels[v / sum_vectors], group) + v % sum_vectors * lanes * quad);
}

// total[r][v] += minima times sums of groups `from` to `until` of a block, for R rows of x and V vectors of outputs of
// panels.
template <class Format, int R, int V>
INLINE void add_minima(const uint8_t *const *panels, const FixedRows &x, int64_t from, int64_t until, f32v (*total)[V]) {
    if constexpr (whole_minima<Format>) {
        const int64_t block = from * Format::inputs / fixed_inputs;
        i32v sum[R][V] = {};
#pragma GCC unroll 4
        for (int64_t digit = first_digit<Format>; digit < sum_digits; digit++) {
            const int64_t digits = (block * sum_digits + digit) * digit_groups - from;
#pragma GCC unroll 8
            for (int r = 0; digit != first_digit<Format> && r < R; r++)
#pragma GCC unroll 8
                for (int64_t v = 0; v < V; v++) sum[r][v] <<= digit_bits;
            for (int64_t g = from; g < until; g += quad)
#pragma GCC unroll 8
                for (int64_t v = 0; v < V; v++) {
                    const quadv four = minima_at<Format, quadv>(panels, g, v);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++)
                        sum[r][v] = multiply_digits(four, x.row(r).digits + digits + g, sum[r][v]);
                }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int64_t v = 0; v < V; v++)
                total[r][v] = multiply_add(splat(x.row(r).units[block]), whole_to_float(sum[r][v]), total[r][v]);
    } else {
        for (int64_t g = from; g < until; g++)
#pragma GCC unroll 8
            for (int64_t v = 0; v < V; v++) {
                const f32v minimum = minima_at<Format, f32v>(panels, g, v);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
                    total[r][v] = multiply_add(minimum, splat(x.row(r).totals[g]), total[r][v]);
            }
    }
}

// Whole minima of V vectors of outputs times the sums of one block of one row, a quad of groups at a time: read in the
// order of memory, in between the numbers, which streams from memory want. The sums are add_minima's.
template <class Format, int V>
struct MinimaOfBlock {
    i32v sum[V][sum_digits];

    INLINE_MEMBER void add(const uint8_t *const *panels, const FixedRow &x, int64_t group) {
        const SumDigit *digits = digits_of(x, group);
#pragma GCC unroll 8
        for (int64_t v = 0; v < V; v++) {
            const quadv four = minima_at<Format, quadv>(panels, group, v);
#pragma GCC unroll 4
            for (int64_t digit = first_digit<Format>; digit < sum_digits; digit++)
                sum[v][digit] = multiply_digits(four, digits + digit * digit_groups, sum[v][digit]);
        }
    }

    INLINE_MEMBER void finish(float unit, f32v *total) {
#pragma GCC unroll 8
        for (int64_t v = 0; v < V; v++) {
            i32v whole = sum[v][first_digit<Format>];
            for (int64_t digit = first_digit<Format> + 1; digit < sum_digits; digit++) whole = (whole << digit_bits) + sum[v][digit];
            total[v] = multiply_add(splat(unit), whole_to_float(whole), total[v]);
        }
    }
};

}  // namespace
}  // namespace ISA
