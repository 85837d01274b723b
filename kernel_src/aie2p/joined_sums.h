// Sums of TOKENS tokens that pass from core to core, in PARTS parts: each core adds its own. x bf16 [TOKENS][COLS], in whose
// place the result comes; sums f32 [TOKENS][OUTS]; part f32 [TOKENS][OUTS / PARTS], of the cores before.
// SANDWICH: x gets the norm of the result added (rms_norm.h, which comes first).
#pragma once

#ifndef TOKENS
#define TOKENS 1
#endif

namespace {

constexpr unsigned PART = OUTS / PARTS, EACH = 16;
static_assert(PART % EACH == 0);

// Part `index` of x, up to where the next token's begins.
void round_part(const float *part, int32 index, bfloat16 *x, unsigned end = OUTS) {
    for (unsigned i = 0; i < PART && index * PART + i < end; i += EACH) {
        const aie::accum<accfloat, EACH> sum(aie::load_v<EACH>(part + i));
        aie::store_v(x + index * PART + i, sum.template to_vector<bfloat16>());
    }
}

}  // namespace

// A part of `PARTS` of what all cores up to this one make of x: of the first, it and the core's own. Of a SANDWICH without x.
extern "C" void AIE_FN(feed_forward_first)([[maybe_unused]] const bfloat16 *__restrict x, int32 index,
                                           const float *__restrict sums, float *__restrict part) {
    use_nearest_even();
    for (unsigned token = 0; token < TOKENS; ++token, x += COLS, sums += OUTS, part += PART)
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

extern "C" void AIE_FN(feed_forward_join)(const float *__restrict sums, int32 index, float *__restrict part) {
    sums += index * PART;
    for (unsigned token = 0; token < TOKENS; ++token, sums += OUTS, part += PART)
        for (unsigned i = 0; i < PART; i += EACH)
            aie::store_v(part + i, aie::add(aie::load_v<EACH>(part + i), aie::load_v<EACH>(sums + i)));
}

#ifdef SANDWICH

// The product is kept as bf16 in place of the core's sums, of which it takes half: of those that are in the parts so far.
extern "C" void AIE_FN(feed_forward_last)(const float *__restrict part, int32 index, bfloat16 *__restrict x,
                                          bfloat16 *__restrict sums, const bfloat16 *__restrict after, float eps) {
    use_nearest_even();
    for (unsigned token = 0; token < TOKENS; ++token, part += PART, x += COLS, sums += 2 * OUTS) {
        round_part(part, index, sums);
        if (index < static_cast<int32>(PARTS) - 1) continue;
        norm_row<COLS>(sums, after, sums, eps);
        add_row<COLS>(x, sums);
    }
}

#else

extern "C" void AIE_FN(feed_forward_last)(const float *__restrict part, int32 index, bfloat16 *__restrict x) {
    use_nearest_even();
    for (unsigned token = 0; token < TOKENS; ++token, part += PART, x += COLS)
        round_part(part, index, x, token == TOKENS - 1 ? OUTS : COLS);
}

#endif
