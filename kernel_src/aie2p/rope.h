// Rotary embedding, half-split pairs (d, d + HEAD_DIM/2), by a table f32 [HEAD_DIM] = [cos.., sin..] of a position.
#pragma once

#include "tile.h"

namespace {

constexpr unsigned PAIRS = HEAD_DIM / 2;
constexpr unsigned L = lanes_for(PAIRS, 32);
static_assert(PAIRS % L == 0);

// In parts that Step, from one head to the next, keeps aligned.
template <unsigned Step>
void store(bfloat16 *out, const aie::vector<bfloat16, L> &values) {
    constexpr unsigned PART = Step % L == 0 ? L : EDGE;
    static_assert(Step % PART == 0);
    unrolled<L / PART>([&](auto i) { aie::store_v(out + i * PART, values.template extract<PART>(i)); });
}

// Lanes d .. d+L of Heads heads of one row.
template <unsigned Heads, unsigned Step>
void rotate(const bfloat16 *x, const Pair<L> &cos, const Pair<L> &sin, bfloat16 *out) {
    for (unsigned head = 0; head < Heads; ++head, x += HEAD_DIM, out += Step) {
        const aie::vector<bfloat16, L> first = aie::load_v<L>(x), second = aie::load_v<L>(x + PAIRS);
        const auto low = aie::msc(aie::msc(product(first, cos), second, sin.hi), second, sin.lo);
        const auto high = aie::mac(aie::mac(product(second, cos), first, sin.hi), first, sin.lo);
        store<Step>(out, low.template to_vector<bfloat16>());
        store<Step>(out + PAIRS, high.template to_vector<bfloat16>());
    }
}

// A row [Heads][HEAD_DIM] into heads that lie Step apart.
template <unsigned Heads, unsigned Step>
void rotate_heads(const bfloat16 *x, const float *table, bfloat16 *out) {
    for (unsigned d = 0; d < PAIRS; d += L)
        rotate<Heads, Step>(x + d, split(aie::load_v<L>(table + d)), split(aie::load_v<L>(table + PAIRS + d)), out + d);
}

}  // namespace
