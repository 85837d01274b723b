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

// A row of x: numbers i16, whole blocks, with zeros behind the row's own; sums of numbers, i32 [groups], and what those
// stand for, which is exact, f32 [groups]; units f32 [blocks].
struct FixedRow {
    int16_t *numbers;
    int32_t *sums;
    float *totals, *units;
};

// The memory of a row, a multiple of 64 bytes: `inputs` of a group.
struct FixedSize {
    int64_t cols, inputs;

    int64_t groups() const { return (cols + inputs - 1) / inputs; }
    int64_t blocks() const { return (cols + fixed_inputs - 1) / fixed_inputs; }
    int64_t bytes() const {
        const int64_t padded = blocks() * fixed_inputs;
        return 2 * padded + (4 * (2 * groups() + blocks()) + 63) / 64 * 64;
    }

    FixedRow at(uint8_t *memory) const {
        int16_t *numbers = reinterpret_cast<int16_t *>(memory);
        int32_t *sums = reinterpret_cast<int32_t *>(numbers + blocks() * fixed_inputs);
        float *totals = reinterpret_cast<float *>(sums + groups());
        return {numbers, sums, totals, totals + groups()};
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
    const uint32_t bits = static_cast<uint32_t>(exponent_bits) << 23;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
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

// One block of `count` values; out has room for whole vectors. Returns its unit.
INLINE float fix_block(const bf16 *x, int64_t count, int16_t *out) {
    const FixedUnit fixed = fixed_unit(largest_magnitude(x, count) >> 7);
    for (int64_t i = 0; i < count; i += lanes)
        store(out + i, __builtin_convertvector(nearest(load_bf16(x + i, count - i) * fixed.inverse), i16v));
    return fixed.unit;
}

INLINE void fix_row(const bf16 *x, const FixedSize &size, const FixedRow &row) {
    const int64_t whole = size.cols / fixed_inputs, rest = size.cols % fixed_inputs;
    for (int64_t block = 0; block < whole; block++)
        row.units[block] = fix_block(x + block * fixed_inputs, fixed_inputs, row.numbers + block * fixed_inputs);
    if (rest != 0) {
        bf16 padded[fixed_inputs] = {};
        memcpy(padded, x + whole * fixed_inputs, rest * sizeof(bf16));
        row.units[whole] = fix_block(padded, fixed_inputs, row.numbers + whole * fixed_inputs);
    }
    for (int64_t group = 0; group < size.groups(); group++) {
        int32_t sum = 0;
        for (int64_t i = 0; i < size.inputs; i++) sum += row.numbers[group * size.inputs + i];
        row.sums[group] = sum;
        row.totals[group] = static_cast<float>(sum) * row.units[group * size.inputs / fixed_inputs];
    }
}

typedef int8_t i8v __attribute__((vector_size(lanes)));

// out i8 [count], with room for whole vectors = x / scale, halves to even; returns the scale, the largest magnitude / 127.
// NaN is the largest bf16 of all, so a row with one has a scale that is none.
INLINE float quantise(const bf16 *x, int64_t count, int8_t *out) {
    const float most = to_float(largest_magnitude(x, count)), inverse = most == 0 ? 0.0f : 127.0f / most;
    for (int64_t i = 0; i < count; i += lanes)
        store(out + i, __builtin_convertvector(nearest(load_bf16(x + i, count - i) * inverse), i8v));
    return most / 127.0f;
}

}  // namespace
}  // namespace ISA
