// 2^y for y < 1, rounded to bf16 from within 1.3e-4, and 0 below 2^-126.
//
// The core has an exponential of its own, which joins powers of two by straight lines and rounds y to bf16 first: off by
// up to 6.1 % on [-1, 0] and 49 % on [-100, 0] (measured: mlir-aie, aie_kernels/aie2p/exp2f_vec.cc). So it is made here of
// products of whole numbers, 64 lanes at a time.
//
// y + EXP2_AT is a float from 128 on and below 256, whose upper half ends in the exponent of 2^y as bf16 has it, and whose
// lower half is the fraction f of y. The mantissa of 2^f comes from f (A + f (B + f C)).
#pragma once

#include "tile.h"

namespace {

constexpr float LOG2E = 1.44269504088896341f;
constexpr float EXP2_AT = 255.0f;
// The bits of 128.0: what y + EXP2_AT is at least, and its upper half.
constexpr int32 EXP2_LEAST = 0x43000000;
// A, B and C in 14 bits behind the point; their sum is 1.
constexpr uint16 EXP2_FIT[3] = {11394, 3706, 1284};
// Bits behind the point of those, of f, and of a bf16 mantissa.
constexpr int FIT_BITS = 14, FRACTION_BITS = 16, MANTISSA_BITS = 7;

template <unsigned L>
inline aie::accum<acc32, L> fit(unsigned n) {
    return aie::accum<acc32, L>(aie::broadcast<uint16, L>(EXP2_FIT[n]), FRACTION_BITS);
}

template <unsigned L>
inline aie::vector<bfloat16, L> exp2_of_parts(const aie::vector<uint16, L> &upper, const aie::vector<uint16, L> &f) {
    const aie::vector<uint16, L> last = aie::broadcast<uint16, L>(EXP2_FIT[2]);
    const auto slope = aie::mac(fit<L>(1), f, last).template to_vector<uint16>(FRACTION_BITS);
    const auto factor = aie::mac(fit<L>(0), f, slope).template to_vector<uint16>(FRACTION_BITS);
    const auto mantissa =
        aie::mul<acc32>(f, factor).template to_vector<uint16>(FIT_BITS + FRACTION_BITS - MANTISSA_BITS);
    const auto above = aie::sub(upper, aie::broadcast<uint16, L>(EXP2_LEAST >> 16));
    // What is none has an exponent that is too large, and stays none.
    const auto exponent = aie::min(above, aie::broadcast<uint16, L>(0xff));
    // A mantissa that is rounded up to 1 moves the exponent.
    return aie::add(aie::upshift(exponent, MANTISSA_BITS), mantissa).template cast_to<bfloat16>();
}

// As pairs of halves, of y + EXP2_AT.
template <unsigned L>
inline aie::vector<uint16, 2 * L> exp2_halves(const aie::vector<float, L> &y) {
    return aie::max(y.template cast_to<int32>(), aie::broadcast<int32, L>(EXP2_LEAST)).template cast_to<uint16>();
}

// Of y + EXP2_AT, in two vectors.
template <unsigned L>
inline aie::vector<bfloat16, 2 * L> exp2(const aie::vector<float, L> &first, const aie::vector<float, L> &second) {
    const auto [lower, upper] = aie::interleave_unzip(exp2_halves(first), exp2_halves(second), 1);
    return exp2_of_parts(upper, lower);
}

// Of y + EXP2_AT.
template <unsigned L>
inline aie::vector<bfloat16, L> exp2(const aie::accum<accfloat, L> &y) {
    if constexpr (L == BLOCK) {
        return exp2(y.template extract<HALF>(0).template to_vector<float>(),
                    y.template extract<HALF>(1).template to_vector<float>());
    } else {
        const aie::vector<uint16, 2 * L> halves = exp2_halves(y.template to_vector<float>());
        return exp2_of_parts<L>(aie::filter_odd(halves), aie::filter_even(halves));
    }
}

}  // namespace
