// Panels of LANES outputs of a matrix in groups (grouped.h) times inputs in fixed point, chunk by chunk.
#pragma once

#include "grouped.h"

namespace {

using Sums = aie::vector<float, LANES>;
using Product = aie::mmul<EDGE / 2, EDGE, EDGE, int16, Number>;

// What is known of groups of inputs, behind the sums.
struct Group {
    float sum;
    int32 power;
};

// A group's numbers times its inputs: whole, and so exact up to where f32 ends.
Sums products(const uint8 *numbers, const int16 *x) {
    const aie::vector<int16, GROUP> inputs = aie::load_v<GROUP>(x);
    Registers<Product, LANES / EDGE> sums;
    unrolled<GROUP / EDGE>([&](auto k) {
        // The matrix unit takes four rows; what stands in the others makes sums that nobody reads.
        const aie::vector<int16, GROUP> row = aie::shuffle_down(inputs, k * EDGE);
        unrolled<LANES / EDGE / 2>([&](auto n) {
            const Two two = numbers_at(numbers, k * (LANES / EDGE / 2) + n);
            sums.get(std::integral_constant<unsigned, 2 * n>()).mac(row, two.even);
            sums.get(std::integral_constant<unsigned, 2 * n + 1>()).mac(row, two.odd);
        });
    });
    aie::vector<int32, LANES> whole;
    unrolled<LANES / EDGE>([&](auto n) {
        whole.insert(n, sums.get(n).to_accum().template extract<EDGE>(0).template to_vector<int32>());
    });
    return aie::to_float<float>(whole);
}

#if FACTORS

void add_chunk(const uint8 *chunk, const int16 *x, const Group *groups, float *acc) {
    aie::accum<accfloat, LANES> scaled = aie::zeros<accfloat, LANES>(), least = scaled;
    const uint8 *scales = chunk + SCALES_AT, *numbers = chunk + NUMBERS_AT;
    for (unsigned g = 0; g < GROUPS; ++g, scales += SCALE_BYTES, numbers += NUMBER_BYTES, x += GROUP) {
        const Pair<LANES> sum = split(products(numbers, x));
        const aie::vector<bfloat16, LANES> scale = small_numbers(scales, groups[g].power);
        scaled = aie::mac(aie::mac(scaled, sum.hi, scale), sum.lo, scale);
        if constexpr (FACTORS == 2) {
            const Pair<LANES> inputs = split<LANES>(groups[g].sum);
            const aie::vector<bfloat16, LANES> minimum = small_numbers(scales + LANES);
            least = aie::mac(aie::mac(least, inputs.hi, minimum), inputs.lo, minimum);
        }
    }
    Sums sum = product(split(scaled), factor(chunk, 0)).template to_vector<float>();
    if constexpr (FACTORS == 2) sum = aie::sub(sum, product(split(least), factor(chunk, 1)).template to_vector<float>());
    aie::store_v(acc, aie::add(aie::load_v<LANES>(acc), sum));
}

#else

void add_chunk(const uint8 *chunk, const int16 *x, const Group *groups, float *acc) {
    Sums total = aie::load_v<LANES>(acc);
    const uint8 *scales = chunk + SCALES_AT, *numbers = chunk + NUMBERS_AT;
    for (unsigned g = 0; g < GROUPS; ++g, scales += SCALE_BYTES, numbers += NUMBER_BYTES, x += GROUP) {
        const Pair<LANES> sum = split(products(numbers, x));
        const Pair<LANES> scale = split(halves(scales, groups[g].power));
        total = aie::add(total, product(sum, scale).template to_vector<float>());
    }
    aie::store_v(acc, total);
}

#endif

inline void clear(bfloat16 *x, unsigned from, unsigned to) {
    const bfloat16 zero = aie::zeros<bfloat16, WIDE>().get(0);
    for (unsigned k = from; k < to; ++k) x[k] = zero;
}

// What a core knows of its inputs, behind the sums of Panels panels: of each of at most Most groups, and behind those what
// sums begin with: 0, or what no number of fixed point can be, of inputs that are infinite or none.
template <unsigned Panels, unsigned Most>
struct Inputs {
    static Group *groups(float *acc) { return reinterpret_cast<Group *>(acc + Panels * LANES); }

    static float &beginning(float *acc) { return groups(acc)[Most].sum; }

    // Inputs bf16 [count] as fixed point, in place, zeros behind the first `given`.
    static void fix_all(bfloat16 *x, unsigned given, unsigned count, float *acc) {
        clear(x, given, count);
        Group *group = groups(acc);
        beginning(acc) = 0;
        for (unsigned k = 0; k < count; k += GROUP, ++group) {
            const Fixed fixed = fix(x + k);
            *group = {fixed.sum, fixed.power};
            if (!fixed.finite) beginning(acc) = fixed.sum;
        }
    }

    // The chunk that a row's inputs take as its `at`th, onto `sums` of its panel.
    static void add(const uint8 *chunk, const int16 *x, unsigned at, float *acc, float *sums) {
        if (at == 0) aie::store_v(sums, aie::broadcast<float, LANES>(beginning(acc)));
        add_chunk(chunk, x + at * (GROUPS * GROUP), groups(acc) + at * GROUPS, sums);
    }
};

inline void round_sums(const float *acc, bfloat16 *out) {
    aie::store_v(out, aie::accum<accfloat, LANES>(aie::load_v<LANES>(acc)).template to_vector<bfloat16>());
}

}  // namespace
