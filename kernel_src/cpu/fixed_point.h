// x in fixed point, as products of whole numbers take it: blocks of numbers that share a power of two; and x in 8 bits.
// Included inside each instruction set.
//
// A bf16 is a whole number of 8 bits times a power of two; a block has 15 bits. So what is at least 2^-6 of the largest of
// a block is exact, and the rest is off by at most 2^-15 of it: less than rounding the largest to bf16 did.
namespace ISA {
namespace {

constexpr int64_t fixed_inputs = 512;  // of a block
constexpr int fixed_bits = 13;         // below the largest number's own
constexpr int64_t most_fixed = 255 << (fixed_bits - 7);

typedef int16_t i16v __attribute__((vector_size(lanes * 2)));
typedef int8_t i8v __attribute__((vector_size(lanes)));

// Digits of the sum of a group of 32 numbers, which has 20 bits and a sign, as products take them: all have a sign.
#if ISA_LANES == 16
using SumDigit = int8_t;
constexpr int sum_digits = 3;
#else
using SumDigit = int16_t;
constexpr int sum_digits = 2;
#endif
constexpr int digit_bits = 8 * sizeof(SumDigit);
constexpr int64_t digit_groups = fixed_inputs / LAYOUT_GROUP;

// A row of x: numbers i16, whole groups, with zeros behind the row's own; of whole blocks of groups, with zeros behind the row's
// own, sums of numbers, i32 [groups], and what those stand for, which is exact, f32 [groups]; units f32 [blocks]; where minima
// are whole numbers (minima.h), digits of sums [blocks][sum_digits][digit_groups], the highest first.
struct FixedRow {
    int16_t *numbers;
    int32_t *sums;
    float *totals, *units;
    SumDigit *digits;

    // A row that lies `bytes` behind it.
    INLINE_MEMBER FixedRow behind(int64_t bytes) const {
        const auto moved = [&](auto *p) { return reinterpret_cast<decltype(p)>(reinterpret_cast<char *>(p) + bytes); };
        return {moved(numbers), moved(sums), moved(totals), moved(units), moved(digits)};
    }
};

// The memory of a row, a multiple of 64 bytes. A group has `inputs`, a number so many bytes: none where a row keeps no numbers.
struct FixedSize {
    int64_t cols, inputs, number_bytes = 2;

    // Of whole blocks.
    int64_t groups() const { return blocks() * (fixed_inputs / inputs); }
    int64_t blocks() const { return (cols + fixed_inputs - 1) / fixed_inputs; }
    int64_t numbers() const { return (cols + LAYOUT_GROUP - 1) / LAYOUT_GROUP * LAYOUT_GROUP; }
    int64_t bytes() const {
        const int64_t digits = blocks() * digit_groups * sum_digits * sizeof(SumDigit);
        return number_bytes * numbers() + (4 * (2 * groups() + blocks()) + digits + 63) / 64 * 64;
    }

    FixedRow at(uint8_t *memory) const {
        int32_t *sums = reinterpret_cast<int32_t *>(memory + number_bytes * numbers());
        float *totals = reinterpret_cast<float *>(sums + groups());
        float *units = totals + groups();
        return {reinterpret_cast<int16_t *>(memory), sums, totals, units, reinterpret_cast<SumDigit *>(units + blocks())};
    }
};

// As bits: of values that are not finite, NaN is the largest.
INLINE bf16 largest_magnitude(const bf16 *x, int64_t count) {
    bf16 largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const bf16 magnitude = x[i] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

INLINE float power_of_two(int exponent_bits) {
    return float_of_bits(static_cast<uint32_t>(exponent_bits) << 23);
}

// What a number stands for, and what values are multiplied with to become numbers.
struct FixedUnit {
    float unit, inverse;
};

// Of values the largest of which has this exponent, in bits of an f32: NaN where it is not finite.
INLINE FixedUnit fixed_unit(int exponent) {
    const int bounded = exponent > 2 * fixed_bits ? exponent : 2 * fixed_bits;
    if (exponent == 255) return {NAN, 0.0f};
    return {power_of_two(bounded - fixed_bits), power_of_two(2 * 127 + fixed_bits - bounded)};
}

// To i16v or i8v.
template <class Narrow>
INLINE Narrow narrowed(i32v whole) {
#if ISA_LANES == 16
    if constexpr (sizeof(Narrow) == sizeof(i16v)) return (Narrow)_mm512_cvtepi32_epi16((__m512i)whole);
    else return (Narrow)_mm512_cvtepi32_epi8((__m512i)whole);
#else
    return __builtin_convertvector(whole, Narrow);
#endif
}

INLINE i32v widen(i16v numbers) {
#if ISA_LANES == 16
    return (i32v)_mm512_cvtepi16_epi32((__m256i)numbers);
#elif ISA_LANES == 8
    return (i32v)_mm256_cvtepi16_epi32((__m128i)numbers);
#else
    return __builtin_convertvector(numbers, i32v);
#endif
}

// The sums of as many groups of `inputs` numbers as a vector has lanes, 0 behind the first `count`.
template <int64_t inputs>
INLINE i32v sums_of_groups(const int16_t *numbers, int64_t count) {
    i32v sums[lanes] = {};
#pragma GCC unroll 16
    for (int64_t g = 0; g < count; g++)
#pragma GCC unroll 8
        for (int64_t i = 0; i < inputs; i += lanes) sums[g] += widen(load<i16v>(numbers + g * inputs + i));
    return fold_each<Plus>(sums);
}

// One block of `count` values; out has room for whole vectors. Returns its unit.
INLINE float fix_block(const bf16 *x, int64_t count, int16_t *out) {
    const FixedUnit fixed = fixed_unit(largest_magnitude(x, count) >> 7);
    for (int64_t i = 0; i < count; i += lanes)
        store(out + i, narrowed<i16v>(nearest(load_bf16(x + i, count - i) * fixed.inverse)));
    return fixed.unit;
}

template <int64_t inputs>
INLINE void fix_row(const bf16 *x, const FixedSize &size, const FixedRow &row) {
    constexpr int64_t groups = fixed_inputs / inputs;
    for (int64_t i = size.cols; i < size.numbers(); i++) row.numbers[i] = 0;
    for (int64_t block = 0; block < size.blocks(); block++) {
        const int64_t left = size.cols - block * fixed_inputs, count = left < fixed_inputs ? left : fixed_inputs;
        int16_t *numbers = row.numbers + block * fixed_inputs;
        const float unit = row.units[block] = fix_block(x + block * fixed_inputs, count, numbers);
        for (int64_t g = 0; g < groups; g += lanes) {
            const int64_t behind = (count + inputs - 1) / inputs - g, own = behind > 0 ? behind : 0;
            // With a count that the compiler knows, the loop has no end.
            const i32v sums = own >= lanes ? sums_of_groups<inputs>(numbers + g * inputs, lanes) : sums_of_groups<inputs>(numbers + g * inputs, own);
            store(row.sums + block * groups + g, sums);
            store(row.totals + block * groups + g, __builtin_convertvector(sums, f32v) * unit);
        }
    }
}

// Calls put(i, the numbers from i on) for whole vectors of x / scale, halves to even, zeros behind `count`; returns the scale,
// the largest magnitude / 127. NaN is the largest bf16 of all, so a row with one has a scale that is none.
template <class Put>
INLINE float quantise(const bf16 *x, int64_t count, const Put &put) {
    const float most = to_float(largest_magnitude(x, count)), inverse = most == 0 ? 0.0f : 127.0f / most;
    for (int64_t i = 0; i < count; i += lanes) put(i, nearest(load_bf16(x + i, count - i) * inverse));
    return most / 127.0f;
}

}  // namespace
}  // namespace ISA
