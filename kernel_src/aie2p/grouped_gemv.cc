// PANELS panels of LANES outputs of matrices in groups (grouped.h), one behind the other, times a vector, or those of TOKENS
// tokens, chunk by chunk. Of several, x, acc, out and residuals have a row each.
// x [STEPS * GROUPS * GROUP], of which COLS are given; NORM: as their RMS norm; in fixed point from then on. acc f32
// [PANELS][LANES], behind it of each group of x its sum f32 and its power of two i32, and what sums begin with; out
// [OUTS]: LANES for each step, the sums of the one panel as bf16, f32 if KEEP, BIAS: with a bias before they are
// rounded, ADD: with a residual after that; or SwiGLU's
// activation of those of two, gate and up.
#include "grouped_sums.h"
#if NORM
#include "rms_norm.h"
#endif

#ifndef PANELS
#define PANELS 1
#else
#include "grouped_silu.h"
#endif

#ifndef ROW_STEP
#define ROW_STEP 0
#endif

#ifndef TOKENS
#define TOKENS 1
#endif

namespace {

constexpr unsigned padded(unsigned count, unsigned unit) { return (count + unit - 1) / unit * unit; }

constexpr unsigned INPUTS = STEPS * GROUPS * GROUP, SUMS = padded(PANELS * LANES + 2 * (INPUTS / GROUP) + 1, 16);
#if NORM
constexpr unsigned ADDED = TOKENS * INPUTS + padded(COLS, WIDE);
#else
constexpr unsigned ADDED = TOKENS * INPUTS;
#endif
#if ADD
constexpr unsigned RESIDUAL = padded(ADD, WIDE);
#else
constexpr unsigned RESIDUAL = 0;
#endif

using Known = Inputs<PANELS, INPUTS / GROUP>;

// Also inputs behind COLS, which numbers of 0 are multiplied with.
void begin(bfloat16 *x, float *acc) {
    use_nearest_even();
    Known::fix_all(x, COLS, INPUTS, acc);
}

#if KEEP
using Out = float;
#else
using Out = bfloat16;
#endif

// What is made of a step's sums; `added` is what is added to its rows, for BIAS or ADD.
void make_outputs(float *acc, [[maybe_unused]] const bfloat16 *added, Out *out) {
#if KEEP
    aie::store_v(out, aie::load_v<LANES>(acc));
#elif PANELS == 2
    activate(acc, out);
#elif BIAS
    const aie::accum<accfloat, LANES> sum(aie::load_v<LANES>(acc));
    aie::store_v(out, aie::add(sum, aie::load_v<LANES>(added)).template to_vector<bfloat16>());
#else
    round_sums(acc, out);
#if ADD
    const aie::accum<accfloat, LANES> sum(aie::load_v<LANES>(out));
    aie::store_v(out, aie::add(sum, aie::load_v<LANES>(added)).template to_vector<bfloat16>());
#endif
#endif
}

// The chunk that a core takes as its `index`th begins, adds to or ends the sums of a panel, of which the last ends a step.
void take(const uint8 *chunk, const int16 *x, unsigned index, const bfloat16 *added, float *acc, Out *out) {
    use_nearest_even();
    const unsigned step = index / (PANELS * STEPS), panel = index / STEPS % PANELS, at = index % STEPS;
    Known::add<TOKENS>(chunk, x, at, acc, acc + panel * LANES, INPUTS, SUMS, SUMS);
    if (at < STEPS - 1 || panel < PANELS - 1) return;
    for (unsigned token = 0; token < TOKENS; ++token, acc += SUMS, added += RESIDUAL, out += OUTS)
        make_outputs(acc, added + step * ROW_STEP, out + step * LANES);
}

}  // namespace

#if NORM

// x [TOKENS][INPUTS], behind it the norm's weight.
extern "C" void AIE_FN(grouped_gemv_begin)(bfloat16 *__restrict x, float *__restrict acc, float eps) {
    use_nearest_even();
    const bfloat16 *weight = x + TOKENS * INPUTS;
    for (unsigned token = 0; token < TOKENS; ++token, x += INPUTS, acc += SUMS) {
        norm_row<COLS>(x, weight, x, eps);
        begin(x, acc);
    }
}

#else

extern "C" void AIE_FN(grouped_gemv_begin)(bfloat16 *__restrict x, float *__restrict acc) {
    for (unsigned token = 0; token < TOKENS; ++token, x += INPUTS, acc += SUMS) begin(x, acc);
}

#endif

#if ADD || BIAS

// Behind x, and the norm's weight, lies what is added, from ADDED on: `row` is the first of a core's first step, and ROW_STEP from one step to the next.
extern "C" void AIE_FN(grouped_gemv_step)(const uint8 *__restrict chunk, const bfloat16 *__restrict x, int32 index,
                                          int32 row, float *__restrict acc, Out *__restrict out) {
    take(chunk, reinterpret_cast<const int16 *>(x), index, x + ADDED + row, acc, out);
}

#else

extern "C" void AIE_FN(grouped_gemv_step)(const uint8 *__restrict chunk, const bfloat16 *__restrict x, int32 index,
                                          float *__restrict acc, Out *__restrict out) {
    take(chunk, reinterpret_cast<const int16 *>(x), index, x, acc, out);
}

#endif
