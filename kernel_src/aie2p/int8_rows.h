// Rows of heads of K and V in 8 bits, as a KV cache with kv=int8 holds them (stages/weights/formats/int8_rows.py): a number
// of a row is x divided by the row's scale, the nearest whole number, halves to even; the scale is the largest magnitude
// / 127. A head's part of a position is HEAD_BYTES long: K's numbers, K's scale, V's scale, V's numbers, scales in f32. So
// K and V are a run each, which a program can write alone, and numbers come in whole blocks of EDGE bytes.
#pragma once

#include "tile.h"

namespace {

constexpr unsigned SCALE_BYTES = sizeof(float);
// Of K or V of a head, and of both.
constexpr unsigned ROW_BYTES = HEAD_DIM + SCALE_BYTES, HEAD_BYTES = 2 * ROW_BYTES;
static_assert(HEAD_DIM % 32 == 0 && HEAD_BYTES % EDGE == 0);

// Values with less than this exponent have no inverse that f32 holds; an infinite one has bits of 0x7f80.
constexpr int32 LEAST_EXPONENT = 8;

// Runs of bytes that begin at words.
inline void copy_words(const void *from, unsigned bytes, void *to) {
    for (unsigned word = 0; word < bytes / sizeof(int32); ++word)
        static_cast<int32 *>(to)[word] = static_cast<const int32 *>(from)[word];
}

// The largest magnitude, as bits of bf16: of what is not finite, the most.
inline int32 largest_of(const bfloat16 *x) {
    aie::vector<int16, 32> most = aie::zeros<int16, 32>();
    for (unsigned d = 0; d < HEAD_DIM; d += 32)
        most = aie::max(most, aie::bit_and(aie::load_v<32>(x + d).template cast_to<int16>(), aie::broadcast<int16, 32>(0x7fff)));
    return aie::reduce_max(most);
}

// Numbers i8 [HEAD_DIM] of a row of that many values; returns the scale. Products with an f32 in three bf16 are rounded
// once, as they are elsewhere.
inline float quantise(const bfloat16 *x, int8 *numbers) {
    const int32 largest = largest_of(x);
    const float most = __builtin_bit_cast(float, largest << 16);
    const bool divides = largest >> 7 >= LEAST_EXPONENT && largest < 0x7f80;
    const aie::accum<accfloat, 32> inverse(aie::broadcast<float, 32>(divides ? 127.0f / most : 0.0f));
    const auto high = inverse.template to_vector<bfloat16>();
    const auto rest = without(inverse, high);
    const auto middle = rest.template to_vector<bfloat16>();
    const auto low = without(rest, middle).template to_vector<bfloat16>();
    for (unsigned d = 0; d < HEAD_DIM; d += 32) {
        const auto values = aie::load_v<32>(x + d);
        const auto scaled = aie::mac(aie::mac(aie::mul(low, values), middle, values), high, values);
        const auto whole = aie::to_fixed<int16>(scaled.template to_vector<float>());
        aie::store_v(numbers + d, aie::accum<acc32, 32>(whole).template to_vector<int8>());
    }
    return most / 127.0f;
}

inline void put_scale(float scale, int8 *to) { *reinterpret_cast<int32 *>(to) = __builtin_bit_cast(int32, scale); }

// A row of K: its numbers, then its scale.
inline void put_key(const bfloat16 *x, int8 *to) {
    alignas(64) int8 numbers[HEAD_DIM];
    const float scale = quantise(x, numbers);
    copy_words(numbers, HEAD_DIM, to);
    put_scale(scale, to + HEAD_DIM);
}

// A row of V: its scale, then its numbers.
inline void put_value(const bfloat16 *x, int8 *to) {
    alignas(64) int8 numbers[HEAD_DIM];
    const float scale = quantise(x, numbers);
    put_scale(scale, to);
    copy_words(numbers, HEAD_DIM, to + SCALE_BYTES);
}

}  // namespace
