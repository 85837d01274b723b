// RMS norm of a row of COLS values: out = bf16(x / sqrt(mean(x^2) + eps)) * weight, rounded where LlamaRMSNorm rounds.
#pragma once

#include "tile.h"

namespace {

constexpr unsigned L = lanes_for(COLS, 32);
static_assert(COLS % L == 0);

// One Newton step on the core's estimate, whose accuracy is not published.
float inverse_root(float x) {
    const float estimate = aie::invsqrt(x);
    return estimate * (1.5f - 0.5f * x * estimate * estimate);
}

float inverse_rms(const bfloat16 *x, float eps) {
    aie::accum<accfloat, L> squares = aie::zeros<accfloat, L>();
    for (unsigned i = 0; i < COLS; i += L) {
        const aie::vector<bfloat16, L> v = aie::load_v<L>(x + i);
        squares = aie::mac(squares, v, v);
    }
    return inverse_root(aie::reduce_add(squares.template to_vector<float>()) * (1.0f / COLS) + eps);
}

void norm_row(const bfloat16 *x, const bfloat16 *weight, bfloat16 *out, float eps) {
    const Pair<L> scale = split<L>(inverse_rms(x, eps));
    for (unsigned i = 0; i < COLS; i += L) {
        const auto normed = product(aie::load_v<L>(x + i), scale).template to_vector<bfloat16>();
        aie::store_v(out + i, aie::mul(normed, aie::load_v<L>(weight + i)).template to_vector<bfloat16>());
    }
}

}  // namespace
