// RMS norm of a row: out = x / sqrt(mean(x^2) + eps) * (weight + OFFSET), rounded where LlamaRMSNorm rounds: the result, and
// without ONCE what the weight is multiplied with.
#pragma once

#include "tile.h"

#ifndef OFFSET
#define OFFSET 0
#endif
#ifndef ONCE
#define ONCE 0
#endif

namespace {

// One Newton step on the core's estimate, whose accuracy is not published.
float inverse_root(float x) {
    const float estimate = aie::invsqrt(x);
    return estimate * (1.5f - 0.5f * x * estimate * estimate);
}

template <unsigned Cols>
float inverse_rms(const bfloat16 *x, float eps) {
    constexpr unsigned L = lanes_for(Cols, 32);
    static_assert(Cols % L == 0);
    aie::accum<accfloat, L> squares = aie::zeros<accfloat, L>();
    for (unsigned i = 0; i < Cols; i += L) {
        const aie::vector<bfloat16, L> v = aie::load_v<L>(x + i);
        squares = aie::mac(squares, v, v);
    }
    return inverse_root(aie::reduce_add(squares.template to_vector<float>()) * (1.0f / Cols) + eps);
}

// What is normed, times its weight.
template <unsigned L>
aie::accum<accfloat, L> weighted(const aie::accum<accfloat, L> &normed, const aie::vector<bfloat16, L> &weight) {
    if constexpr (OFFSET) {
        const Pair<L> whole = split(aie::add(wide_constant<L>(bf16_bits(OFFSET)), weight));
        if constexpr (ONCE) return product(split(normed), whole);
        return product(normed.template to_vector<bfloat16>(), whole);
    }
    if constexpr (ONCE) return product(weight, split(normed));
    return aie::mul(normed.template to_vector<bfloat16>(), weight);
}

template <unsigned Cols>
void norm_row(const bfloat16 *x, const bfloat16 *weight, bfloat16 *out, float eps) {
    constexpr unsigned L = lanes_for(Cols, 32);
    const Pair<L> scale = split<L>(inverse_rms<Cols>(x, eps));
    for (unsigned i = 0; i < Cols; i += L) {
        const auto result = weighted<L>(product(aie::load_v<L>(x + i), scale), aie::load_v<L>(weight + i));
        aie::store_v(out + i, result.template to_vector<bfloat16>());
    }
}

// Rows that follow one another, in place.
template <unsigned Rows, unsigned Cols>
void norm_rows(bfloat16 *x, const bfloat16 *weight, float eps) {
    for (unsigned row = 0; row < Rows; ++row, x += Cols) norm_row<Cols>(x, weight, x, eps);
}

// x += y, rounded.
template <unsigned Cols>
void add_row(bfloat16 *x, const bfloat16 *y) {
    constexpr unsigned L = lanes_for(Cols, 32);
    for (unsigned i = 0; i < Cols; i += L) {
        const aie::accum<accfloat, L> wide(aie::load_v<L>(y + i));
        aie::store_v(x + i, aie::add(wide, aie::load_v<L>(x + i)).template to_vector<bfloat16>());
    }
}

}  // namespace
