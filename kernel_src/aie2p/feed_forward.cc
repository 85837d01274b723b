// A core's share of a feed-forward network in groups (grouped.h) of one row, and the sum of all: out = x + down(silu(gate) *
// up), gate and up of x's RMS norm. Chunks come of a panel of gate and one of up in turn, PAIR_CHUNKS in all, STEPS a panel;
// then of panels of down, DOWN_STEPS each.
// x [INPUTS or OUTS, the larger], of which COLS are given; normed [INPUTS], the norm's weight before; inner [DOWN_INPUTS],
// of which INNER are the core's share of the activation; acc f32 [2][LANES], behind it of each group of inputs its sum f32
// and its power of two i32, and what sums begin with; sums f32 [OUTS].
//
// SANDWICH: of x plus the norm of what the mixer made, and out adds the norm of down's product. x begins as the residual;
// sums as bf16 [2][OUTS], the mixer's product and the weight of its norm; after [COLS] is the weight of down's.
//
// TOKENS: x has COLS of each, and padding at the end; inner, acc, sums and parts have a row for each. A token's normed row lies
// where its sums come later, and the norm's weight in the second half of the last token's.
#include "grouped_silu.h"
#include "rms_norm.h"
#include "joined_sums.h"

namespace {

static_assert(LANES == WIDE, "a panel of gate makes a group of inputs of down");

constexpr unsigned CHUNK = GROUPS * GROUP, INPUTS = STEPS * CHUNK, DOWN_INPUTS = DOWN_STEPS * CHUNK;
constexpr unsigned ROW = INPUTS > OUTS ? INPUTS : OUTS;
constexpr unsigned DOWN_ROW = (DOWN_INPUTS + WIDE - 1) / WIDE * WIDE;
constexpr unsigned MOST = (INPUTS > DOWN_INPUTS ? INPUTS : DOWN_INPUTS) / GROUP;

using Known = Inputs<2, MOST>;

constexpr unsigned SUMS = (2 * LANES + 2 * MOST + 1 + 15) / 16 * 16;

void begin(const bfloat16 *x, const bfloat16 *weight, bfloat16 *normed, float *acc, float eps) {
    norm_row<COLS>(x, weight, normed, eps);
    Known::fix_all(normed, COLS, INPUTS, acc);
}

// The chunk that a core takes as its `index`th; `next_normed`: from one token's normed row to the next.
void take(const uint8 *chunk, const int16 *normed, unsigned next_normed, int32 index, float *acc, bfloat16 *inner,
          float *sums) {
    if (index < PAIR_CHUNKS) {
        const unsigned at = index % STEPS, panel = index / STEPS;
        Known::add<TOKENS>(chunk, normed, at, acc, acc + panel % 2 * LANES, next_normed, SUMS, SUMS);
        if (at == STEPS - 1 && panel % 2)
            for (unsigned token = 0; token < TOKENS; ++token)
                activate(acc + token * SUMS, inner + token * DOWN_ROW + panel / 2 * LANES);
    } else {
        const unsigned down = index - PAIR_CHUNKS;
        if (down == 0)
            for (unsigned token = 0; token < TOKENS; ++token)
                Known::fix_all(inner + token * DOWN_ROW, INNER, DOWN_INPUTS, acc + token * SUMS);
        const int16 *fixed = reinterpret_cast<const int16 *>(inner);
        float *own = sums + down / DOWN_STEPS * LANES;
        Known::add<TOKENS>(chunk, fixed, down % DOWN_STEPS, acc, own, DOWN_ROW, SUMS, OUTS);
    }
}

}  // namespace

#if TOKENS > 1

extern "C" void AIE_FN(feed_forward_begin)(bfloat16 *__restrict x, float *__restrict acc, bfloat16 *,
                                           bfloat16 *__restrict sums,
#ifdef SANDWICH
                                           bfloat16 *,
#endif
                                           float eps) {
    use_nearest_even();
    const bfloat16 *weight = sums + (2 * TOKENS - 1) * OUTS;
#ifdef SANDWICH
    for (unsigned token = 0; token < TOKENS; ++token) {
        bfloat16 *mixed = sums + token * 2 * OUTS;
        norm_row<COLS>(mixed, sums + OUTS, mixed, eps);
        add_row<COLS>(x + token * COLS, mixed);
    }
#endif
    clear(x + (TOKENS - 1) * COLS, COLS, ROW);
    for (unsigned token = 0; token < TOKENS; ++token)
        begin(x + token * COLS, weight, sums + token * 2 * OUTS, acc + token * SUMS, eps);
}

extern "C" void AIE_FN(feed_forward_step)(const uint8 *__restrict chunk, int32 index, float *__restrict acc,
                                          bfloat16 *__restrict inner, float *__restrict sums) {
    use_nearest_even();
    take(chunk, reinterpret_cast<const int16 *>(sums), 2 * OUTS, index, acc, inner, sums);
}

#else

#ifdef SANDWICH

extern "C" void AIE_FN(feed_forward_begin)(bfloat16 *__restrict x, bfloat16 *__restrict normed, float *__restrict acc,
                                           bfloat16 *, bfloat16 *__restrict sums, bfloat16 *, float eps) {
    use_nearest_even();
    norm_row<COLS>(sums, sums + OUTS, sums, eps);
    add_row<COLS>(x, sums);
    clear(x, COLS, ROW);
    begin(x, normed, normed, acc, eps);
}

#else

extern "C" void AIE_FN(feed_forward_begin)(bfloat16 *__restrict x, bfloat16 *__restrict normed, float *__restrict acc,
                                           bfloat16 *, float eps) {
    use_nearest_even();
    clear(x, COLS, ROW);
    begin(x, normed, normed, acc, eps);
}

#endif

extern "C" void AIE_FN(feed_forward_step)(const uint8 *__restrict chunk, const bfloat16 *__restrict normed, int32 index,
                                          float *__restrict acc, bfloat16 *__restrict inner, float *__restrict sums) {
    use_nearest_even();
    take(chunk, reinterpret_cast<const int16 *>(normed), 0, index, acc, inner, sums);
}

#endif
