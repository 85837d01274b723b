// Rotary embedding, half-split pairs (d, d + HEAD_DIM/2), of ROWS rows.
// x, out [ROWS][HEADS * HEAD_DIM]; table f32 [ROWS][HEAD_DIM] = [cos.., sin..] of the row's position.
#include "tile.h"

namespace {

constexpr unsigned PAIRS = HEAD_DIM / 2;
constexpr unsigned L = lanes_for(PAIRS, 32);
static_assert(PAIRS % L == 0);

// Lanes d .. d+L of every head of one row.
void rotate(const bfloat16 *x, const Pair<L> &cos, const Pair<L> &sin, bfloat16 *out) {
    for (unsigned head = 0; head < HEADS; ++head, x += HEAD_DIM, out += HEAD_DIM) {
        const aie::vector<bfloat16, L> first = aie::load_v<L>(x), second = aie::load_v<L>(x + PAIRS);
        const auto low = aie::msc(aie::msc(product(first, cos), second, sin.hi), second, sin.lo);
        const auto high = aie::mac(aie::mac(product(second, cos), first, sin.hi), first, sin.lo);
        aie::store_v(out, low.template to_vector<bfloat16>());
        aie::store_v(out + PAIRS, high.template to_vector<bfloat16>());
    }
}

}  // namespace

extern "C" void AIE_FN(rope)(const bfloat16 *x, const float *table, bfloat16 *out) {
    use_nearest_even();
    for (unsigned row = 0; row < ROWS; ++row) {
        for (unsigned d = 0; d < PAIRS; d += L)
            rotate(x + d, split(aie::load_v<L>(table + d)), split(aie::load_v<L>(table + PAIRS + d)), out + d);
        x += HEADS * HEAD_DIM, table += HEAD_DIM, out += HEADS * HEAD_DIM;
    }
}
