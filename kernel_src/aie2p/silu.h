// SwiGLU's activation: out = gate / (1 + exp(-gate)) * up, bf16 in and out, f32 inside, one rounding.
//
// The core's exponential has bf16 precision, which would leave two roundings in the result. Here e = 2^-|y|,
// y = gate * log2(e), is 2^-n (exponent bits) times a polynomial, and 1/(1+e) on (1, 2] is two Newton steps.
// The result is the rounding of the exact value for all but one gate in several hundred.
#pragma once

#include "tile.h"

namespace {

// log2(e) in three bf16: |gate| may be 100, where two would leave 2^-10.
constexpr float LOG2E[3] = {1.4453125f, -0.00262451171875f, 7.063150405883789e-06f};
// 2^f on [-1/2, 1/2], least maximum relative error (2^-18.5).
constexpr float EXP2[5] = {0.999999285f, 0.693121791f, 0.240247443f, 0.0559178628f, 0.00957010221f};

// |gate| * -log2(e), at least -127, whose power is 0.
template <unsigned L>
aie::vector<float, L> exponent(const aie::vector<bfloat16, L> &gate, const aie::mask<L> &negative) {
    aie::accum<accfloat, L> y = aie::zeros<accfloat, L>();
    for (unsigned part = 3; part-- > 0;) {
        const aie::accum<accfloat, L> factor(aie::broadcast<float, L>(LOG2E[part]));
        y = aie::mac(y, gate, factor.template to_vector<bfloat16>());
    }
    const aie::vector<float, L> signed_y = y.template to_vector<float>();
    const aie::vector<float, L> down = aie::sub(aie::zeros<float, L>(), signed_y);
    return aie::max(aie::select(down, signed_y, negative), aie::broadcast<float, L>(-127.0f));
}

template <unsigned L>
aie::vector<float, L> exp2_f32(const aie::vector<float, L> &y) {
    const aie::vector<float, L> whole = aie::to_float<float>(aie::to_fixed<int32>(y));
    const Pair<L> f = split(aie::sub(y, whole));
    aie::vector<float, L> p = aie::broadcast<float, L>(EXP2[4]);
    for (unsigned degree = 4; degree-- > 0;)
        p = aie::add(product(split(p), f), aie::broadcast<float, L>(EXP2[degree])).template to_vector<float>();
    const aie::vector<bfloat16, L> power = aie::accum<accfloat, L>(power_of_two(whole)).template to_vector<bfloat16>();
    return exact_product(p, power).template to_vector<float>();
}

// 1/d for d in [1, 2]: a line within 1/17, then two Newton steps.
template <unsigned L>
aie::vector<float, L> reciprocal(const aie::vector<float, L> &d) {
    const Pair<L> divisor = split(d);
    const auto line = aie::add(product(divisor, split<L>(-8.0f / 17.0f)), aie::broadcast<float, L>(24.0f / 17.0f));
    aie::vector<float, L> r = line.template to_vector<float>();
    for (unsigned step = 0; step < 2; ++step) {
        const Pair<L> estimate = split(r);
        const auto inverse = product(divisor, estimate).template to_vector<float>();
        r = product(estimate, split(aie::sub(aie::broadcast<float, L>(2.0f), inverse))).template to_vector<float>();
    }
    return r;
}

// L values. What it takes is in memory anyway: a vector by reference would be put there if this is not inlined.
template <unsigned L>
void silu_times(const bfloat16 *gates, const bfloat16 *up, bfloat16 *out) {
    const aie::vector<bfloat16, L> gate = aie::load_v<L>(gates);
    const aie::vector<float, L> wide = aie::accum<accfloat, L>(gate).template to_vector<float>();
    const aie::mask<L> negative = aie::lt(wide.template cast_to<int32>(), aie::zeros<int32, L>());
    const aie::vector<float, L> one = aie::broadcast<float, L>(1.0f);
    const aie::vector<float, L> e = exp2_f32(exponent(gate, negative));
    const Pair<L> top = split(aie::select(one, e, negative));
    const auto sigmoid = product(top, split(reciprocal(aie::add(one, e)))).template to_vector<float>();
    const auto silu = product(gate, split(sigmoid)).template to_vector<float>();
    aie::store_v(out, product(aie::load_v<L>(up), split(silu)).template to_vector<bfloat16>());
}

}  // namespace
