// SwiGLU's activation: out = silu(gate) * up, silu(gate) = gate / (1 + exp(-gate)), bf16 in and out, rounded where
// transformers rounds: silu, and its product. GELU: with its tanh approximation, gate / (1 + exp(-y)), y = 2 sqrt(2 / pi)
// (gate + 0.044715 gate^3), where this says silu.
//
// e = exp(-|gate|) is rounded to bf16 (exp2.h): where the gate is negative, silu has that rounding besides its own. 1/(1+e)
// on (1, 2] is good to 2^-13.
#pragma once

#include "exp2.h"

#ifndef GELU
#define GELU 0
#endif

namespace {

// 1/d on [1, 2] within 1/75, from d^0 on: what is left of 1 - d p(d) is the Chebyshev polynomial of degree 3, but for the
// rounding of these.
constexpr uint16 INVERSE[3] = {bf16_bits(2.109375f), bf16_bits(-1.4296875f), bf16_bits(0.3125f)};
constexpr unsigned SIGN = 0x8000;

#if GELU

// Gates below count as this: their activation is less than bf16 has.
constexpr uint16 LEAST = bf16_bits(-16.0f);
// The exponent of two is x (FIRST + THIRD x^2).
constexpr float FIRST = 2.302208198f, THIRD = 0.044715f * FIRST;

// What x, from LEAST to 0, is multiplied with.
template <unsigned L>
Pair<L> slope(const aie::vector<bfloat16, L> &x) {
    const Pair<L> square = split(aie::mul(x, x)), third = constants<L>(halves_of(THIRD));
    constexpr Halves FIRST_HALVES = halves_of(FIRST);
    const auto first = aie::mac(wide_constant<L>(FIRST_HALVES.hi), constant<L>(FIRST_HALVES.lo), constant<L>(ONE_BITS));
    return split(aie::mac(aie::mac(aie::mac(first, square.hi, third.lo), square.lo, third.hi), square.hi, third.hi));
}

#else

// Gates below count as this, where bf16 ends: their activation is nothing.
constexpr uint16 LEAST = bf16_bits(-87.0f);

template <unsigned L>
Pair<L> slope(const aie::vector<bfloat16, L> &) {
    return constants<L>(halves_of(LOG2E));
}

#endif

// exp(-y) of a gate with the size of x <= 0. With the slope in two bf16 the exponent is off by less than 2^-16 of its size.
template <unsigned L>
aie::vector<bfloat16, L> exp_of(const aie::vector<bfloat16, L> &x) {
    const Pair<L> scale = slope(x);
    return exp2(aie::mac(aie::mac(wide_constant<L>(bf16_bits(EXP2_AT)), x, scale.hi), x, scale.lo));
}

// 1/d for d in [1, 2]: a parabola, and from what it lacks, r, two more members of 1 + r + r^2 + ...
template <unsigned L>
Pair<L> reciprocal(const Pair<L> &d) {
    const auto line = aie::mac(wide_constant<L>(INVERSE[1]), d.hi, constant<L>(INVERSE[2]));
    const auto curve = aie::mac(wide_constant<L>(INVERSE[0]), d.hi, line.template to_vector<bfloat16>());
    const aie::vector<bfloat16, L> near = curve.template to_vector<bfloat16>();
    const auto rest = aie::msc(aie::msc(wide_constant<L>(ONE_BITS), d.hi, near), d.lo, near);
    const aie::vector<bfloat16, L> lacks = rest.template to_vector<bfloat16>();
    const aie::vector<bfloat16, L> more = aie::mac(rest, lacks, lacks).template to_vector<bfloat16>();
    return split(aie::mac(aie::accum<accfloat, L>(near), near, more));
}

// L values. What it takes is in memory anyway: a vector by reference would be put there if this is not inlined.
template <unsigned L>
void silu_times(const bfloat16 *gates, const bfloat16 *up, bfloat16 *out) {
    const aie::vector<bfloat16, L> gate = aie::max(aie::load_v<L>(gates), constant<L>(LEAST));
    const aie::vector<uint16, L> sign = aie::broadcast<uint16, L>(SIGN);
    const aie::vector<bfloat16, L> down =
        aie::bit_or(gate.template cast_to<uint16>(), sign).template cast_to<bfloat16>();
    // Where the slope grows with x, x is bounded, so that no exponent is none.
    const aie::vector<bfloat16, L> e = exp_of<L>(GELU ? aie::max(down, constant<L>(LEAST)) : down);
    const aie::mask<L> negative = aie::lt(gate.template cast_to<int16>(), aie::zeros<int16, L>());
    const Pair<L> inverse = reciprocal(split(aie::mac(wide_constant<L>(ONE_BITS), e, constant<L>(ONE_BITS))));
    const auto top = aie::mul(gate, aie::select(constant<L>(ONE_BITS), e, negative));
    const auto silu = product(split(top), inverse).template to_vector<bfloat16>();
    aie::store_v(out, aie::mul(aie::load_v<L>(up), silu).template to_vector<bfloat16>());
}

}  // namespace
