// Rotary embedding, half-split pairs (d, d + HEAD_DIM/2), by a table f32 [HEAD_DIM] = [cos.., sin..] of a position.
#pragma once

#include "tile.h"

namespace {

constexpr unsigned PAIRS = HEAD_DIM / 2;
constexpr unsigned L = lanes_for(PAIRS, 32);
static_assert(PAIRS % L == 0);

// Lanes d .. d+L of `heads` heads of one row. `step`: from one head of `out` to the next.
void rotate(const bfloat16 *x, const Pair<L> &cos, const Pair<L> &sin, bfloat16 *out, unsigned heads, unsigned step) {
    for (unsigned head = 0; head < heads; ++head, x += HEAD_DIM, out += step) {
        const aie::vector<bfloat16, L> first = aie::load_v<L>(x), second = aie::load_v<L>(x + PAIRS);
        const auto low = aie::msc(aie::msc(product(first, cos), second, sin.hi), second, sin.lo);
        const auto high = aie::mac(aie::mac(product(second, cos), first, sin.hi), first, sin.lo);
        aie::store_v(out, low.template to_vector<bfloat16>());
        aie::store_v(out + PAIRS, high.template to_vector<bfloat16>());
    }
}

// A row [Heads][HEAD_DIM] into heads that lie Step apart.
template <unsigned Heads, unsigned Step>
void rotate_heads(const bfloat16 *x, const float *table, bfloat16 *out) {
    for (unsigned d = 0; d < PAIRS; d += L)
        rotate(x + d, split(aie::load_v<L>(table + d)), split(aie::load_v<L>(table + PAIRS + d)), out + d, Heads, Step);
}

}  // namespace
