// PANELS panels of LANES outputs of matrices in groups (grouped.h), one behind the other, times a vector, chunk by chunk.
// x [STEPS * GROUPS * GROUP], of which COLS are given; NORM: as their RMS norm. acc f32 [PANELS][LANES], out [OUTS]: LANES
// for each step, the sums of the one panel as bf16, f32 if KEEP, ADD: with a residual; or SwiGLU's activation of those of
// two, gate and up.
#include "grouped.h"
#if NORM
#include "rms_norm.h"
#endif

#ifndef PANELS
#define PANELS 1
#else
#include "silu.h"
#endif

#ifndef ROW_STEP
#define ROW_STEP 0
#endif

namespace {

using Sums = aie::vector<float, LANES>;

// The inputs that the lanes of a vector of numbers are multiplied with.
Lifted spread(const bfloat16 *x) {
    Lifted out;
    unrolled<TURN>([&](auto i) { out.insert(i, aie::broadcast<bfloat16, LANES>(x[i])); });
    return out;
}

// The sum over the inputs that share a vector.
template <unsigned Lanes>
Sums fold(const aie::vector<float, Lanes> &sums) {
    if constexpr (Lanes == LANES) return sums;
    else return aie::add(sums.template extract<LANES>(0), sums.template extract<LANES>(1));
}

// A group's numbers, ABOVE on top, times its inputs. Two sums, because one has to wait for itself.
Sums products(const uint8 *numbers, const bfloat16 *x) {
    aie::accum<accfloat, WIDE> even = aie::zeros<accfloat, WIDE>(), odd = even;
    for (unsigned index = 0; index < GROUP / TURN / 2; ++index, x += 2 * TURN) {
        const Two two = numbers_at(numbers, index);
        even = add_products(even, two.even, spread(x));
        odd = add_products(odd, two.odd, spread(x + TURN));
    }
    return fold(aie::add(even, odd.to_vector<float>()).to_vector<float>());
}

#if FACTORS

// ABOVE times the sum of a group's inputs.
float on_top(const bfloat16 *x) {
    const float above = ABOVE;
    const auto factor = aie::accum<accfloat, WIDE>(aie::broadcast<float, WIDE>(above)).template to_vector<bfloat16>();
    return aie::reduce_add(aie::mul(aie::load_v<WIDE>(x), factor).template to_vector<float>());
}

void add_chunk(const uint8 *chunk, const bfloat16 *x, float *acc) {
    aie::accum<accfloat, LANES> scaled = aie::zeros<accfloat, LANES>(), least = scaled;
    const uint8 *scales = chunk + SCALES_AT, *numbers = chunk + NUMBERS_AT;
    for (unsigned g = 0; g < GROUPS; ++g, scales += SCALE_BYTES, numbers += NUMBER_BYTES, x += GROUP) {
        const float top = on_top(x);
        const Pair<LANES> sum = split(aie::sub(products(numbers, x), aie::broadcast<float, LANES>(top)));
        const aie::vector<bfloat16, LANES> scale = small_numbers(scales);
        scaled = aie::mac(aie::mac(scaled, sum.hi, scale), sum.lo, scale);
        if constexpr (FACTORS == 2) {
            const Pair<LANES> inputs = split<LANES>(top);
            const aie::vector<bfloat16, LANES> minimum = small_numbers(scales + LANES);
            least = aie::mac(aie::mac(least, inputs.hi, minimum), inputs.lo, minimum);
        }
    }
    Sums sum = product(split(scaled), factor(chunk, 0)).template to_vector<float>();
    if constexpr (FACTORS == 2) sum = aie::sub(sum, product(split(least), factor(chunk, 1)).template to_vector<float>());
    aie::store_v(acc, aie::add(aie::load_v<LANES>(acc), sum));
}

#else

void add_chunk(const uint8 *chunk, const bfloat16 *x, float *acc) {
    Sums total = aie::load_v<LANES>(acc);
    const uint8 *scales = chunk + SCALES_AT, *numbers = chunk + NUMBERS_AT;
    for (unsigned g = 0; g < GROUPS; ++g, scales += SCALE_BYTES, numbers += NUMBER_BYTES, x += GROUP) {
        static_assert(ABOVE == 0);
        const Pair<LANES> sum = split(products(numbers, x));
        total = aie::add(total, product(sum, split(halves(scales))).template to_vector<float>());
    }
    aie::store_v(acc, total);
}

#endif

constexpr unsigned INPUTS = STEPS * GROUPS * GROUP;

void clear(float *sums) { aie::store_v(sums, aie::zeros<float, LANES>()); }

// Also inputs behind COLS, which numbers of 0 are multiplied with.
void begin(bfloat16 *x, float *acc) {
    for (unsigned panel = 0; panel < PANELS; ++panel) clear(acc + panel * LANES);
    const bfloat16 zero = aie::zeros<bfloat16, WIDE>().get(0);
    for (unsigned k = COLS; k < INPUTS; ++k) x[k] = zero;
}

#if KEEP
using Out = float;
#else
using Out = bfloat16;

void round_sums(const float *acc, bfloat16 *out) {
    aie::store_v(out, aie::accum<accfloat, LANES>(aie::load_v<LANES>(acc)).template to_vector<bfloat16>());
}
#endif

// What is made of a step's sums; `residual` is that of its rows, for ADD.
void make_outputs(float *acc, [[maybe_unused]] const bfloat16 *residual, Out *out) {
#if KEEP
    aie::store_v(out, aie::load_v<LANES>(acc));
#elif PANELS == 2
    bfloat16 *rounded = reinterpret_cast<bfloat16 *>(acc);
    round_sums(acc, rounded);
    round_sums(acc + LANES, rounded + LANES);
    silu_times<LANES>(rounded, rounded + LANES, out);
#else
    round_sums(acc, out);
#if ADD
    const aie::accum<accfloat, LANES> sum(aie::load_v<LANES>(out));
    aie::store_v(out, aie::add(sum, aie::load_v<LANES>(residual)).template to_vector<bfloat16>());
#endif
#endif
}

// The chunk that a core takes as its `index`th begins, adds to or ends the sums of a panel, of which the last ends a step.
void take(const uint8 *chunk, const bfloat16 *x, unsigned index, const bfloat16 *residual, float *acc, Out *out) {
    use_nearest_even();
    const unsigned step = index / (PANELS * STEPS), panel = index / STEPS % PANELS, at = index % STEPS;
    float *sums = acc + panel * LANES;
    if (at == 0) clear(sums);
    add_chunk(chunk, x + at * (GROUPS * GROUP), sums);
    if (at == STEPS - 1 && panel == PANELS - 1) make_outputs(acc, residual + step * ROW_STEP, out + step * LANES);
}

}  // namespace

#if NORM

// x [INPUTS], behind it the norm's weight.
extern "C" void AIE_FN(grouped_gemv_begin)(bfloat16 *x, float *acc, float eps) {
    use_nearest_even();
    norm_row(x, x + INPUTS, x, eps);
    begin(x, acc);
}

#else

extern "C" void AIE_FN(grouped_gemv_begin)(bfloat16 *x, float *acc) { begin(x, acc); }

#endif

#if ADD

// Behind x [INPUTS] lies the residual: `row` is the first of a core's first step, and ROW_STEP from one step to the next.
extern "C" void AIE_FN(grouped_gemv_step)(const uint8 *chunk, const bfloat16 *x, int32 index, int32 row, float *acc,
                                          Out *out) {
    take(chunk, x, index, x + INPUTS + row, acc, out);
}

#else

extern "C" void AIE_FN(grouped_gemv_step)(const uint8 *chunk, const bfloat16 *x, int32 index, float *acc, Out *out) {
    take(chunk, x, index, x, acc, out);
}

#endif
