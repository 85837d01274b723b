// Weights in groups, as they come to a core (stages/weights/lanes.py): whole numbers of BITS bits, GROUP inputs of an
// output sharing a scale. A chunk holds GROUPS groups of a panel of LANES outputs, the lanes of a vector:
//   f32 [FACTORS][LANES]          what scales, and minima, are multiples of
//   scales [GROUPS]               u8 [FACTORS][LANES], the second being minima; f16 [LANES] without factors
//   numbers [GROUPS]              [GROUP][LANES], low nibbles first; of 6 bits: low nibbles, then the upper two bits,
//                                 those of a vector of numbers in the low half of a nibble, of the next in the high one
// each part padded to 64 bytes. w = s (q - ZERO) - m, with s and m scales and minima times their factors; that of minima
// is a LIFTth of what it is elsewhere.
#pragma once

#include "tile.h"

constexpr unsigned GROUP = LAYOUT_GROUP, WIDE = LAYOUT_LANES;
static_assert(WIDE == 32, "the lanes of a product of bf16");
static_assert(LANES == WIDE || 2 * LANES == WIDE);
static_assert(GROUP == WIDE, "the sum of a group's inputs is that of a vector's lanes");

// Inputs whose numbers make a vector.
constexpr unsigned TURN = WIDE / LANES;

// 0x4300 as bf16, whose last place is 1: bits below it are added. Numbers are multiplied with this on top.
constexpr unsigned LIFT = LAYOUT_LIFT, LIFT_BITS = 0x4300;
static_assert(LIFT == 128, "what 0x4300 is");
constexpr unsigned ZERO = BITS == 6 ? 32 : 0;

// What is on top of every number. Those of 8 bits are made of two, whose lifts cancel.
constexpr unsigned ABOVE = BITS == 8 ? 0 : LIFT + ZERO;

constexpr unsigned lines(unsigned bytes) { return (bytes + 63) / 64 * 64; }
constexpr unsigned SCALE_BYTES = (FACTORS ? FACTORS : 2) * LANES, NUMBER_BYTES = GROUP * LANES * BITS / 8;
constexpr unsigned SCALES_AT = lines(4 * FACTORS * LANES), NUMBERS_AT = SCALES_AT + lines(GROUPS * SCALE_BYTES);

using Numbers = aie::vector<uint16, WIDE>;
using Lifted = aie::vector<bfloat16, WIDE>;

inline Numbers mask(const Numbers &numbers, uint16 bits) {
    return aie::bit_and(numbers, aie::broadcast<uint16, WIDE>(bits));
}

inline Lifted lift(const Numbers &numbers) {
    return aie::bit_or(numbers, aie::broadcast<uint16, WIDE>(LIFT_BITS)).cast_to<bfloat16>();
}

// Two vectors of a group's numbers, one behind the other.
struct Two {
    Numbers even, odd;
};

template <typename T>
inline Two unpacked(const aie::vector<T, 2 * WIDE> &bytes) {
    return {bytes.template extract<WIDE>(0).unpack().template cast_to<uint16>(),
            bytes.template extract<WIDE>(1).unpack().template cast_to<uint16>()};
}

// Bits of both in one nibble, at the place that they have in the number.
inline Two upper(const uint8 *from) {
    const aie::vector<uint8, WIDE / 2> packed = aie::load_v<WIDE / 2>(from);
    const Numbers both = packed.cast_to<uint4>().unpack().unpack();
    return {mask(aie::upshift(both, 4), 0x30), mask(aie::upshift(both, 2), 0x30)};
}

// Vectors 2 * `index` and 2 * `index` + 1 of a group's numbers.
inline Two numbers_at(const uint8 *numbers, unsigned index) {
    if constexpr (BITS == 8)
        return unpacked<int8>(aie::load_v<2 * WIDE>(reinterpret_cast<const int8 *>(numbers) + index * 2 * WIDE));
    const aie::vector<uint8, WIDE> packed = aie::load_v<WIDE>(numbers + index * WIDE);
    const Two low = unpacked<uint8>(packed.cast_to<uint4>().unpack());
    if constexpr (BITS == 4) return low;
    const Two high = upper(numbers + GROUP * LANES / 2 + index * WIDE / 2);
    return {aie::bit_or(low.even, high.even), aie::bit_or(low.odd, high.odd)};
}

// sum + what a vector of numbers, ABOVE on top, makes with `with`. One of 8 bits is what it is without its sign less what
// the sign stands for, both lifted.
inline aie::accum<accfloat, WIDE> add_products(const aie::accum<accfloat, WIDE> &sum, const Numbers &numbers,
                                               const Lifted &with) {
    if constexpr (BITS == 8)
        return aie::msc(aie::mac(sum, lift(mask(numbers, LIFT - 1)), with), lift(mask(numbers, LIFT)), with);
    return aie::mac(sum, lift(numbers), with);
}

// u8 [LANES] as bf16, exact.
inline aie::vector<bfloat16, LANES> small_numbers(const uint8 *from) {
    const aie::vector<uint8, LANES> bytes = aie::load_v<LANES>(from);
    const aie::vector<int32, LANES> wide = bytes.unpack().unpack().template cast_to<int32>();
    return aie::accum<accfloat, LANES>(aie::to_float<float>(wide)).template to_vector<bfloat16>();
}

// f16 [LANES], not negative, as f32, exact: the exponent moves up by 112. Those below 2^-14, which say 0 there, are made
// as if it were 1 and lose the 2^-14 that this puts on top.
inline aie::vector<float, LANES> halves(const uint8 *from) {
    const aie::vector<uint16, LANES> bits = aie::load_v<LANES>(reinterpret_cast<const uint16 *>(from));
    const aie::vector<int32, LANES> wide = bits.unpack().template cast_to<int32>();
    const aie::vector<int32, LANES> moved = aie::upshift(wide, 13);
    const auto normal = aie::add(moved, aie::broadcast<int32, LANES>(112 << 23)).template cast_to<float>();
    const auto raised = aie::add(moved, aie::broadcast<int32, LANES>(113 << 23)).template cast_to<float>();
    const aie::vector<float, LANES> least = aie::sub(raised, aie::broadcast<float, LANES>(1.0f / 16384));
    return aie::select(normal, least, aie::lt(wide, aie::broadcast<int32, LANES>(1 << 10)));
}

// Factor `which` of a chunk.
inline Pair<LANES> factor(const uint8 *chunk, unsigned which) {
    return split(aie::load_v<LANES>(reinterpret_cast<const float *>(chunk) + which * LANES));
}
