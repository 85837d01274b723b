// Weights in groups, as they come to a core (stages/weights/lanes.py): whole numbers of BITS bits, GROUP inputs of an
// output sharing a scale. A chunk holds GROUPS groups of a panel of LANES outputs, the lanes of a vector:
//   f32 [FACTORS][LANES]          what scales, and minima, are multiples of
//   scales [GROUPS]               u8 [FACTORS][LANES], the second being minima; f16 [LANES] without factors
//   numbers [GROUPS]              [GROUP/8][LANES/8][8 inputs][8 outputs], low nibbles first; of 6 bits: low nibbles, then
//                                 the upper two bits, those of a block in the low half of a nibble, of the next in the high
// each part padded to 64 bytes. w = s (q - ZERO) - m, with s and m scales and minima times their factors.
//
// Products are of whole numbers, which the matrix unit makes 64 of where one of bf16 makes 32 at most and numbers would
// have to be made bf16 first: inputs come in fixed point of 16 bits, a group of them sharing an exponent.
#pragma once

#include "tile.h"

constexpr unsigned GROUP = LAYOUT_GROUP, WIDE = LAYOUT_LANES;
static_assert(WIDE == 32, "the lanes of a product of bf16");
static_assert(LANES == WIDE || 2 * LANES == WIDE);
static_assert(GROUP == WIDE, "the sum of a group's inputs is that of a vector's lanes");

constexpr int ZERO = BITS == 6 ? 32 : 0;

constexpr unsigned lines(unsigned bytes) { return (bytes + 63) / 64 * 64; }
constexpr unsigned SCALE_BYTES = (FACTORS ? FACTORS : 2) * LANES, NUMBER_BYTES = GROUP * LANES * BITS / 8;
constexpr unsigned SCALES_AT = lines(4 * FACTORS * LANES), NUMBERS_AT = SCALES_AT + lines(GROUPS * SCALE_BYTES);

// A block of numbers: of 4 bits without a sign, the others with theirs.
using Number = std::conditional_t<BITS == 4, uint8, int8>;
using Numbers = aie::vector<Number, BLOCK>;

// Two of a group's blocks, one behind the other.
struct Two {
    Numbers even, odd;
};

#if BITS == 8

// Blocks 2 * `index` and 2 * `index` + 1 of a group's numbers.
inline Two numbers_at(const uint8 *numbers, unsigned index) {
    const int8 *from = reinterpret_cast<const int8 *>(numbers) + index * 2 * BLOCK;
    return {aie::load_v<BLOCK>(from), aie::load_v<BLOCK>(from + BLOCK)};
}

#else

template <unsigned Count>
aie::vector<uint8, Count> nibbles(const uint8 *from) {
    return aie::load_v<Count / 2>(from).template cast_to<uint4>().unpack();
}

#if BITS == 6

// `low` bits, and above them two of `both`, which are `shift` bits below their place. None leaves its byte.
inline Numbers joined(const aie::vector<uint8, BLOCK> &low, const aie::vector<uint8, BLOCK> &both, unsigned shift) {
    const aie::vector<uint16, BLOCK / 2> moved = aie::upshift(both.cast_to<uint16>(), shift);
    const auto upper = aie::bit_and(moved, aie::broadcast<uint16, BLOCK / 2>(0x3030)).cast_to<uint8>();
    return aie::sub(aie::bit_or(low, upper).cast_to<int8>(), aie::broadcast<int8, BLOCK>(ZERO));
}

#endif

inline Two numbers_at(const uint8 *numbers, unsigned index) {
    const aie::vector<uint8, 2 * BLOCK> low = nibbles<2 * BLOCK>(numbers + index * BLOCK);
#if BITS == 6
    const aie::vector<uint8, BLOCK> both = nibbles<BLOCK>(numbers + GROUP * LANES / 2 + index * BLOCK / 2);
    return {joined(low.extract<BLOCK>(0), both, 4), joined(low.extract<BLOCK>(1), both, 2)};
#else
    return {low.extract<BLOCK>(0), low.extract<BLOCK>(1)};
#endif
}

#endif

// Powers of two that inputs in fixed point may be multiples of, so that exponents stay what they can be.
constexpr int LEAST_POWER = -100, MOST_POWER = 88;

// f32's exponent of 1, as it lies there.
constexpr int ONE = 127;

struct Fixed {
    float sum;
    int32 power;
    bool finite;
};

// A group of inputs bf16 [GROUP], in place, as int16: multiples of 2^power, the largest of 15 bits. And their sum.
inline Fixed fix(bfloat16 *x) {
    const aie::vector<bfloat16, GROUP> values = aie::load_v<GROUP>(x);
    const auto sizes = aie::bit_and(values.template cast_to<int16>(), aie::broadcast<int16, GROUP>(0x7fff));
    const int32 exponent = aie::reduce_max(sizes) >> 7;
    const int32 wanted = exponent - ONE - 14;
    const int32 power = wanted < LEAST_POWER ? LEAST_POWER : wanted > MOST_POWER ? MOST_POWER : wanted;
    const auto wide = aie::accum<accfloat, GROUP>(values).template to_vector<float>();
    aie::store_v(reinterpret_cast<int16 *>(x), aie::to_fixed<int16>(wide, -power));
    return {aie::reduce_add(wide), power, exponent < 255};
}

// u8 [LANES] times 2^power as bf16, exact.
inline aie::vector<bfloat16, LANES> small_numbers(const uint8 *from, int32 power = 0) {
    const aie::vector<uint16, LANES> wide = aie::load_v<LANES>(from).unpack();
    return aie::accum<accfloat, LANES>(aie::to_float<float>(wide, -power)).template to_vector<bfloat16>();
}

// f16 [LANES], not negative, times 2^power as f32, exact: the exponent moves up by 112 and that. Those below 2^-14, which
// say 0 there, are made as if it were 1 and lose what this puts on top.
inline aie::vector<float, LANES> halves(const uint8 *from, int32 power) {
    const aie::vector<uint16, LANES> bits = aie::load_v<LANES>(reinterpret_cast<const uint16 *>(from));
    const aie::vector<int32, LANES> wide = bits.unpack().template cast_to<int32>();
    const aie::vector<int32, LANES> moved = aie::upshift(wide, 13);
    const auto up = aie::broadcast<int32, LANES>((ONE - 15 + power) << 23);
    const auto top = aie::broadcast<int32, LANES>((ONE - 14 + power) << 23);
    const auto normal = aie::add(moved, up).template cast_to<float>();
    const auto least = aie::sub(aie::add(moved, top).template cast_to<float>(), top.template cast_to<float>());
    return aie::select(normal, least, aie::lt(wide, aie::broadcast<int32, LANES>(1 << 10)));
}

// Factor `which` of a chunk.
inline Pair<LANES> factor(const uint8 *chunk, unsigned which) {
    return split(aie::load_v<LANES>(reinterpret_cast<const float *>(chunk) + which * LANES));
}
