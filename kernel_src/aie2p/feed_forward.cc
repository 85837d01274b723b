// A core's share of a feed-forward network in groups (grouped.h) of one row, and the sum of all: out = x + down(silu(gate) *
// up), gate and up of x's RMS norm. Chunks come of a panel of gate and one of up in turn, PAIR_CHUNKS in all, STEPS a panel;
// then of panels of down, DOWN_STEPS each.
// x [INPUTS or OUTS, the larger], of which COLS are given; normed [INPUTS], the norm's weight before; inner [DOWN_INPUTS],
// of which INNER are the core's share of the activation; acc f32 [2][LANES], behind it of each group of inputs its sum f32
// and its power of two i32, and what sums begin with; sums f32 [OUTS].
//
// SANDWICH: of x plus the norm of what the mixer made, and out adds the norm of down's product. x begins as the residual;
// sums as bf16 [2][OUTS], the mixer's product and the weight of its norm; after [COLS] is the weight of down's.
#include "grouped_silu.h"
#include "rms_norm.h"

namespace {

static_assert(LANES == WIDE, "a panel of gate makes a group of inputs of down");

constexpr unsigned CHUNK = GROUPS * GROUP, INPUTS = STEPS * CHUNK, DOWN_INPUTS = DOWN_STEPS * CHUNK;
constexpr unsigned PART = OUTS / PARTS, EACH = 16, ROW = INPUTS > OUTS ? INPUTS : OUTS;
static_assert(PART % EACH == 0);
constexpr unsigned MOST = (INPUTS > DOWN_INPUTS ? INPUTS : DOWN_INPUTS) / GROUP;

using Known = Inputs<2, MOST>;

void begin(bfloat16 *x, bfloat16 *normed, float *acc, float eps) {
    clear(x, COLS, ROW);
    norm_row<COLS>(x, normed, normed, eps);
    Known::fix_all(normed, COLS, INPUTS, acc);
}

// Part `index` of x.
void round_part(const float *part, int32 index, bfloat16 *x) {
    for (unsigned i = 0; i < PART; i += EACH) {
        const aie::accum<accfloat, EACH> sum(aie::load_v<EACH>(part + i));
        aie::store_v(x + index * PART + i, sum.template to_vector<bfloat16>());
    }
}

}  // namespace

#ifdef SANDWICH

extern "C" void AIE_FN(feed_forward_begin)(bfloat16 *x, bfloat16 *normed, float *acc, bfloat16 *, bfloat16 *sums,
                                           bfloat16 *, float eps) {
    use_nearest_even();
    norm_row<COLS>(sums, sums + OUTS, sums, eps);
    add_row<COLS>(x, sums);
    begin(x, normed, acc, eps);
}

#else

extern "C" void AIE_FN(feed_forward_begin)(bfloat16 *x, bfloat16 *normed, float *acc, bfloat16 *, float eps) {
    use_nearest_even();
    begin(x, normed, acc, eps);
}

#endif

extern "C" void AIE_FN(feed_forward_step)(const uint8 *chunk, const bfloat16 *normed, int32 index, float *acc,
                                          bfloat16 *inner, float *sums) {
    use_nearest_even();
    if (index < PAIR_CHUNKS) {
        const unsigned at = index % STEPS, panel = index / STEPS;
        Known::add(chunk, reinterpret_cast<const int16 *>(normed), at, acc, acc + panel % 2 * LANES);
        if (at == STEPS - 1 && panel % 2) activate(acc, inner + panel / 2 * LANES);
    } else {
        const unsigned down = index - PAIR_CHUNKS;
        if (down == 0) Known::fix_all(inner, INNER, DOWN_INPUTS, acc);
        const int16 *fixed = reinterpret_cast<const int16 *>(inner);
        Known::add(chunk, fixed, down % DOWN_STEPS, acc, sums + down / DOWN_STEPS * LANES);
    }
}

// A part of `PARTS` of what all cores up to this one make of x: of the first, it and the core's own. Of a SANDWICH without x.
extern "C" void AIE_FN(feed_forward_first)([[maybe_unused]] const bfloat16 *x, int32 index, const float *sums,
                                           float *part) {
    use_nearest_even();
    for (unsigned i = 0; i < PART; i += EACH) {
        const unsigned at = index * PART + i;
#ifdef SANDWICH
        aie::store_v(part + i, aie::load_v<EACH>(sums + at));
#else
        const aie::accum<accfloat, EACH> sum(aie::load_v<EACH>(sums + at));
        aie::store_v(part + i, aie::add(sum, aie::load_v<EACH>(x + at)).template to_vector<float>());
#endif
    }
}

extern "C" void AIE_FN(feed_forward_join)(const float *sums, int32 index, float *part) {
    for (unsigned i = 0; i < PART; i += EACH)
        aie::store_v(part + i, aie::add(aie::load_v<EACH>(part + i), aie::load_v<EACH>(sums + index * PART + i)));
}

#ifdef SANDWICH

// The product is kept as bf16 in place of the core's sums, of which it takes half: of those that are in the parts so far.
extern "C" void AIE_FN(feed_forward_last)(const float *part, int32 index, bfloat16 *x, bfloat16 *sums,
                                          const bfloat16 *after, float eps) {
    use_nearest_even();
    round_part(part, index, sums);
    if (index < static_cast<int32>(PARTS) - 1) return;
    norm_row<COLS>(sums, after, sums, eps);
    add_row<COLS>(x, sums);
}

#else

extern "C" void AIE_FN(feed_forward_last)(const float *part, int32 index, bfloat16 *x) {
    use_nearest_even();
    round_part(part, index, x);
}

#endif
