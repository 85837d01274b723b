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

// The rows of a product that the matrix unit makes.
constexpr unsigned HEIGHT = EDGE / 2;

// A group's numbers times the inputs of Rows rows, whose others are `next` further on: whole, and so exact up to where f32
// ends. `take` is given the sums of each row.
//
// Two blocks of outputs are multiplied at a time: with more accumulators in use, the products of one group could not begin
// before the sums of the one before are scaled.
template <unsigned Rows, typename Take>
void products(const uint8 *numbers, const int16 *x, unsigned next, Take take) {
    static_assert(Rows <= 2 && Rows <= HEIGHT);
    const aie::vector<int16, GROUP> inputs = aie::load_v<GROUP>(x);
    Registers<aie::vector<int16, GROUP>, GROUP / EDGE> rows;
    unrolled<GROUP / EDGE>([&](auto k) {
        // The matrix unit takes four rows; what stands in the others makes sums that nobody reads.
        rows.get(k) = aie::shuffle_down(inputs, k * EDGE);
        if constexpr (Rows == 2) rows.get(k).insert(1, aie::load_v<EDGE>(x + next + k * EDGE));
    });
    Registers<aie::vector<int32, LANES>, Rows> whole;
    unrolled<LANES / EDGE / 2>([&](auto n) {
        Product even, odd;
        unrolled<GROUP / EDGE>([&](auto k) {
            const Two two = numbers_at(numbers, k * (LANES / EDGE / 2) + n);
            even.mac(rows.get(k), two.even);
            odd.mac(rows.get(k), two.odd);
        });
        unrolled<Rows>([&](auto row) {
            whole.get(row).insert(2 * n, even.to_accum().template extract<EDGE>(row).template to_vector<int32>());
            whole.get(row).insert(2 * n + 1, odd.to_accum().template extract<EDGE>(row).template to_vector<int32>());
        });
    });
    unrolled<Rows>([&](auto row) { take(row, aie::to_float<float>(whole.get(row))); });
}

#if FACTORS

// `x`, `groups` and `acc` are those of the first row, and of each other one `next_x`, `next_group` and `next_acc` further on.
template <unsigned Rows>
void add_chunk(const uint8 *chunk, const int16 *x, unsigned next_x, const Group *groups, unsigned next_group, float *acc,
               unsigned next_acc) {
    struct Totals {
        aie::accum<accfloat, LANES> scaled, least;
    };
    Registers<Totals, Rows> totals;
    unrolled<Rows>([&](auto row) {
        totals.get(row) = {aie::zeros<accfloat, LANES>(), aie::zeros<accfloat, LANES>()};
    });
    const uint8 *scales = chunk + SCALES_AT, *numbers = chunk + NUMBERS_AT;
    for (unsigned g = 0; g < GROUPS; ++g, scales += SCALE_BYTES, numbers += NUMBER_BYTES, x += GROUP)
        products<Rows>(numbers, x, next_x, [&](auto row, const Sums &whole) {
            Totals &total = totals.get(row);
            const Group &group = groups[row * next_group + g];
            const Pair<LANES> sum = split(whole);
            const aie::vector<bfloat16, LANES> scale = small_numbers(scales, group.power);
            total.scaled = aie::mac(aie::mac(total.scaled, sum.hi, scale), sum.lo, scale);
            if constexpr (FACTORS == 2) {
                const Pair<LANES> inputs = split<LANES>(group.sum);
                const aie::vector<bfloat16, LANES> minimum = small_numbers(scales + LANES);
                total.least = aie::mac(aie::mac(total.least, inputs.hi, minimum), inputs.lo, minimum);
            }
        });
    unrolled<Rows>([&](auto row) {
        const Totals &total = totals.get(row);
        Sums sum = product(split(total.scaled), factor(chunk, 0)).template to_vector<float>();
        if constexpr (FACTORS == 2)
            sum = aie::sub(sum, product(split(total.least), factor(chunk, 1)).template to_vector<float>());
        float *own = acc + row * next_acc;
        aie::store_v(own, aie::add(aie::load_v<LANES>(own), sum));
    });
}

#else

template <unsigned Rows>
void add_chunk(const uint8 *chunk, const int16 *x, unsigned next_x, const Group *groups, unsigned next_group, float *acc,
               unsigned next_acc) {
    Registers<Sums, Rows> totals;
    unrolled<Rows>([&](auto row) { totals.get(row) = aie::load_v<LANES>(acc + row * next_acc); });
    const uint8 *scales = chunk + SCALES_AT, *numbers = chunk + NUMBERS_AT;
    for (unsigned g = 0; g < GROUPS; ++g, scales += SCALE_BYTES, numbers += NUMBER_BYTES, x += GROUP)
        products<Rows>(numbers, x, next_x, [&](auto row, const Sums &whole) {
            const Pair<LANES> scale = split(halves(scales, groups[row * next_group + g].power));
            totals.get(row) = aie::add(totals.get(row), product(split(whole), scale).template to_vector<float>());
        });
    unrolled<Rows>([&](auto row) { aie::store_v(acc + row * next_acc, totals.get(row)); });
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

    // The chunk that inputs take as their `at`th, onto `sums` of their panel. Of Rows rows, each has what is known of its
    // inputs `next_acc` behind the one before; `x` and `sums` alike.
    template <unsigned Rows = 1>
    static void add(const uint8 *chunk, const int16 *x, unsigned at, float *acc, float *sums, unsigned next_x = 0,
                    unsigned next_acc = 0, unsigned next_sums = 0) {
        if (at == 0)
            for (unsigned row = 0; row < Rows; ++row)
                aie::store_v(sums + row * next_sums, aie::broadcast<float, LANES>(beginning(acc + row * next_acc)));
        add_chunk<Rows>(chunk, x + at * (GROUPS * GROUP), next_x, groups(acc) + at * GROUPS, next_acc / 2, sums, next_sums);
    }
};

inline void round_sums(const float *acc, bfloat16 *out) {
    aie::store_v(out, aie::accum<accfloat, LANES>(aie::load_v<LANES>(acc)).template to_vector<bfloat16>());
}

}  // namespace
