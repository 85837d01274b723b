// What every tile function shares: symbol names per variant, and f32 arithmetic built from bf16 products.
//
// AIE2P multiplies bf16 x bf16 exactly into f32 accumulators and has no f32 x f32 product. An f32 value is therefore
// carried as the sum of two bf16 (relative error 2^-18) or three (exact) where a product needs it. What the first leaves
// is taken by a product with 1: sums of f32 are rounded to the place of the larger one before they are made. The maximum
// of f32 is emulated by tens of operations, and so are the scalar unit's products, quotients and comparisons of f32
// (mlir-aie's notes on its kernels, measured): loops do without them.
//
// The buffers that a tile function is given are different ones, and its signature says so (`__restrict`): else a loop could
// not load before what the pass before has stored. Loops run a constant number of times, so the compiler needs no hint.
#pragma once

#include <aie_api/aie.hpp>
#include <type_traits>
#include <utility>

#ifndef LAYOUT_BLOCK
#error "The constants of the layout come from stages/weights/constants.py: compile with the flags of its macros()."
#endif

// Matrices lie in square blocks of EDGE rows, each contiguous. A vector holds one in bf16, or half of one in f32.
constexpr unsigned EDGE = LAYOUT_BLOCK, BLOCK = EDGE * EDGE, HALF = BLOCK / 2;

// A function's symbol ends in its variant, so that two shapes of one kernel can live in one module.
#define AIE_JOIN(name, variant) name##_##variant
#define AIE_EXPAND(name, variant) AIE_JOIN(name, variant)
#define AIE_FN(name) AIE_EXPAND(name, VARIANT)

// Widest of 64, 32 or 16 lanes that divides a length.
constexpr unsigned lanes_for(unsigned length, unsigned widest) {
    return length % widest == 0 || widest == 16 ? widest : lanes_for(length, widest / 2);
}

// What shares a loaded operand: 4, 2 or 1 of `number`, all of them in registers.
constexpr unsigned sharing(unsigned number) {
    return number % 4 == 0 ? 4 : number % 2 == 0 ? 2 : 1;
}

// body(0), ..., body(Count - 1), each with its index as a constant. Registers cannot be indexed: vectors that a loop's
// counter chooses lie on the stack unless the compiler unrolls that loop, and a product of blocks is too long for that.
template <unsigned Count, typename Body>
inline void unrolled(const Body &body) {
    [&]<unsigned... Index>(std::integer_sequence<unsigned, Index...>) {
        (body(std::integral_constant<unsigned, Index>()), ...);
    }(std::make_integer_sequence<unsigned, Count>());
}

// Variables that a constant chooses: no array, for the same reason.
template <typename T, unsigned Count>
struct Registers : Registers<T, Count - 1> {
    T last;

    template <unsigned Index>
    T &get(std::integral_constant<unsigned, Index>) {
        return static_cast<Registers<T, Index + 1> *>(this)->last;
    }
};
template <typename T>
struct Registers<T, 0> {};

inline void use_nearest_even() {
    aie::tile::current().set_rounding(aie::rounding_mode::conv_even);
}

// The bits of the nearest bf16, of what is finite.
consteval uint16 bf16_bits(float value) {
    const uint32 bits = __builtin_bit_cast(uint32, value);
    return static_cast<uint16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// One value in all lanes, of the bits of a bf16.
template <unsigned L>
inline aie::vector<bfloat16, L> constant(uint16 bits) {
    return aie::broadcast<uint16, L>(bits).template cast_to<bfloat16>();
}

template <unsigned L>
inline aie::accum<accfloat, L> wide_constant(uint16 bits) {
    return aie::accum<accfloat, L>(constant<L>(bits));
}

// hi + lo, each bf16.
template <unsigned L>
struct Pair {
    aie::vector<bfloat16, L> hi, lo;
};

constexpr uint16 ONE_BITS = bf16_bits(1.0f);

// value - part, exact if there is room for the difference.
template <unsigned L>
inline aie::accum<accfloat, L> without(const aie::accum<accfloat, L> &value, const aie::vector<bfloat16, L> &part) {
    return aie::msc(value, part, constant<L>(ONE_BITS));
}

template <unsigned L>
inline Pair<L> split(const aie::accum<accfloat, L> &value) {
    Pair<L> out;
    out.hi = value.template to_vector<bfloat16>();
    out.lo = without(value, out.hi).template to_vector<bfloat16>();
    return out;
}

template <unsigned L>
inline Pair<L> split(const aie::vector<float, L> &value) {
    return split(aie::accum<accfloat, L>(value));
}

template <unsigned L>
inline Pair<L> split(float value) {
    return split(aie::broadcast<float, L>(value));
}

// A constant in two bf16.
struct Halves {
    uint16 hi, lo;
};

consteval Halves halves_of(float value) {
    const uint16 hi = bf16_bits(value);
    return {hi, bf16_bits(value - __builtin_bit_cast(float, static_cast<uint32>(hi) << 16))};
}

template <unsigned L>
inline Pair<L> constants(const Halves &bits) {
    return {constant<L>(bits.hi), constant<L>(bits.lo)};
}

// bf16 x f32, relative error 2^-17.
template <unsigned L>
inline aie::accum<accfloat, L> product(const aie::vector<bfloat16, L> &a, const Pair<L> &b) {
    return aie::mac(aie::mul(a, b.hi), a, b.lo);
}

// f32 x f32, relative error 2^-16: the product of the two low parts is left out.
template <unsigned L>
inline aie::accum<accfloat, L> product(const Pair<L> &a, const Pair<L> &b) {
    return aie::mac(product(a.hi, b), a.lo, b.hi);
}

// f32 x bf16 with all 24 bits of `a`: exact when `b` is a power of two.
template <unsigned L>
inline aie::accum<accfloat, L> exact_product(const aie::vector<float, L> &a, const aie::vector<bfloat16, L> &b) {
    const aie::accum<accfloat, L> wide(a);
    const aie::vector<bfloat16, L> hi = wide.template to_vector<bfloat16>();
    const aie::accum<accfloat, L> rest = without(wide, hi);
    const aie::vector<bfloat16, L> mid = rest.template to_vector<bfloat16>();
    const aie::vector<bfloat16, L> lo = without(rest, mid).template to_vector<bfloat16>();
    return aie::mac(aie::mac(aie::mul(lo, b), mid, b), hi, b);
}

// 2^n, n from -127 to 127, from the exponent's bits (-127 gives 0).
template <unsigned L>
inline aie::vector<float, L> power_of_two(const aie::vector<int32, L> &n) {
    return aie::upshift(aie::add(n, aie::broadcast<int32, L>(127)), 23).template cast_to<float>();
}

// One row of a block over and over.
template <unsigned L, typename T>
inline aie::vector<T, L> repeat(const aie::vector<T, EDGE> &v) {
    aie::vector<T, L> out;
    unrolled<L / EDGE>([&](auto i) { out.insert(i, v); });
    return out;
}

// A block of f32 [EDGE][EDGE].
inline aie::accum<accfloat, BLOCK> load_block(const float *from) {
    aie::accum<accfloat, BLOCK> out;
    unrolled<2>([&](auto h) { out.insert(h, aie::accum<accfloat, HALF>(aie::load_v<HALF>(from + h * HALF))); });
    return out;
}

inline void store_block(float *to, const aie::accum<accfloat, BLOCK> &value) {
    unrolled<2>([&](auto h) {
        aie::store_v(to + h * HALF, value.template extract<HALF>(h).template to_vector<float>());
    });
}

// The sum of the rows of half a block.
inline aie::vector<float, EDGE> sum_of_rows(const aie::vector<float, HALF> &v) {
    static_assert(EDGE == 8, "half a block is four rows");
    const aie::vector<float, 2 * EDGE> two = aie::add(v.extract<2 * EDGE>(0), v.extract<2 * EDGE>(1));
    return aie::add(two.extract<EDGE>(0), two.extract<EDGE>(1));
}
