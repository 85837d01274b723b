// A core's share of down's product of TOKENS tokens, in groups (grouped.h), and the sum of all shares: out = residual + down(x).
// Chunks come of panels of down, DOWN_STEPS each. arriving bf16 [TOKENS][UNIT], of x or of the residual; own
// [TOKENS][INPUTS], the core's share of x, INNER elements; residual [TOKENS][OUTS]; acc as in feed_forward.cc, a row of SUMS for
// each token; sums f32 [TOKENS][OUTS].
#include "grouped_sums.h"
#include "joined_sums.h"

namespace {

constexpr unsigned INPUTS = DOWN_STEPS * GROUPS * GROUP, SUMS = (2 * LANES + 2 * INPUTS / GROUP + 1 + 15) / 16 * 16;

using Known = Inputs<2, INPUTS / GROUP>;

}  // namespace

// Touches nothing: the buffers stay where they are.
extern "C" void AIE_FN(shared_down_keep)(bfloat16 *, float *) {}

// Units of x come first, share after share, then those of the residual.
extern "C" void AIE_FN(shared_down_take)(const bfloat16 *__restrict arriving, int32 index, int32 column,
                                         bfloat16 *__restrict own, bfloat16 *__restrict residual) {
    constexpr int32 of_share = INNER / UNIT, of_x = COLUMNS * of_share;
    const int32 unit = index - (index < of_x ? column * of_share : of_x);
    if (index < of_x && (unit < 0 || unit >= of_share)) return;
    bfloat16 *to = (index < of_x ? own : residual) + unit * UNIT;
    const unsigned next = index < of_x ? INPUTS : OUTS;
    for (unsigned token = 0; token < TOKENS; ++token, arriving += UNIT, to += next)
        for (unsigned i = 0; i < UNIT; i += GROUP) aie::store_v(to + i, aie::load_v<GROUP>(arriving + i));
}

extern "C" void AIE_FN(shared_down_step)(const uint8 *__restrict chunk, int32 index, float *__restrict acc,
                                         bfloat16 *__restrict own, float *__restrict sums) {
    use_nearest_even();
    if (index == 0)
        for (unsigned token = 0; token < TOKENS; ++token)
            Known::fix_all(own + token * INPUTS, INNER, INPUTS, acc + token * SUMS);
    const int16 *fixed = reinterpret_cast<const int16 *>(own);
    Known::add<TOKENS>(chunk, fixed, index % DOWN_STEPS, acc, sums + index / DOWN_STEPS * LANES, INPUTS, SUMS, OUTS);
}
