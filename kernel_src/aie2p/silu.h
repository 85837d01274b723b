// SwiGLU's activation: out = silu(gate) * up, silu(gate) = gate / (1 + exp(-gate)), bf16 in and out, rounded where
// transformers rounds: silu, and its product.
//
// e = exp(-|gate|) comes from the core's exponential, which has bf16 precision: where the gate is negative, silu has that
// rounding besides its own. 1/(1+e) on (1, 2] is good to 2^-13.
#pragma once

#include "tile.h"

namespace {

// log2(e) in two bf16: y is off by less than 2^-17 of its size.
constexpr float LOG2E[2] = {1.4453125f, -0.00262451171875f};
// 1/d on [1, 2] within 1/99, from d^0 on: what is left of 1 - d p(d) is the Chebyshev polynomial of degree 3.
constexpr float INVERSE[3] = {210.0f / 99.0f, -144.0f / 99.0f, 32.0f / 99.0f};
constexpr unsigned SIGN = 0x8000;
// Gates below count as this, where the core's exponential ends: their activation is nothing.
constexpr float LEAST = -87.0f;

template <unsigned L>
aie::vector<bfloat16, L> constant(float value) {
    return aie::accum<accfloat, L>(aie::broadcast<float, L>(value)).template to_vector<bfloat16>();
}

template <unsigned L>
aie::accum<accfloat, L> wide_constant(float value) {
    return aie::accum<accfloat, L>(aie::broadcast<float, L>(value));
}

// exp(gate), LEAST <= gate <= 0.
template <unsigned L>
aie::vector<bfloat16, L> power(const aie::vector<bfloat16, L> &gate) {
    const auto y = aie::mac(aie::mul(gate, constant<L>(LOG2E[0])), gate, constant<L>(LOG2E[1]));
    return aie::exp2<bfloat16>(y.template to_vector<float>());
}

// 1/d for d in [1, 2]: a parabola, and from what it lacks, r, two more members of 1 + r + r^2 + ...
template <unsigned L>
Pair<L> reciprocal(const Pair<L> &d) {
    const auto line = aie::mac(wide_constant<L>(INVERSE[1]), d.hi, constant<L>(INVERSE[2]));
    const auto curve = aie::mac(wide_constant<L>(INVERSE[0]), d.hi, line.template to_vector<bfloat16>());
    const aie::vector<bfloat16, L> near = curve.template to_vector<bfloat16>();
    const auto rest = aie::msc(aie::msc(wide_constant<L>(1.0f), d.hi, near), d.lo, near);
    const aie::vector<bfloat16, L> lacks = rest.template to_vector<bfloat16>();
    const aie::vector<bfloat16, L> more = aie::mac(rest, lacks, lacks).template to_vector<bfloat16>();
    return split(aie::mac(aie::accum<accfloat, L>(near), near, more));
}

// L values. What it takes is in memory anyway: a vector by reference would be put there if this is not inlined.
template <unsigned L>
void silu_times(const bfloat16 *gates, const bfloat16 *up, bfloat16 *out) {
    const aie::vector<bfloat16, L> least = constant<L>(LEAST), gate = aie::max(aie::load_v<L>(gates), least);
    const aie::vector<uint16, L> sign = aie::broadcast<uint16, L>(SIGN);
    const aie::vector<bfloat16, L> down =
        aie::bit_or(gate.template cast_to<uint16>(), sign).template cast_to<bfloat16>();
    const aie::vector<bfloat16, L> e = power(aie::max(down, least));
    const aie::mask<L> negative = aie::lt(gate.template cast_to<int16>(), aie::zeros<int16, L>());
    const Pair<L> inverse = reciprocal(split(aie::add(wide_constant<L>(1.0f), e)));
    const auto top = aie::mul(gate, aie::select(constant<L>(1.0f), e, negative));
    const auto silu = product(split(top), inverse).template to_vector<bfloat16>();
    aie::store_v(out, aie::mul(aie::load_v<L>(up), silu).template to_vector<bfloat16>());
}

}  // namespace
