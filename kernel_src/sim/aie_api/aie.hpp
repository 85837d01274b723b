// Host stand-in for the part of AMD's AIE API that kernel_src/aie2p uses: same names, same signatures, same rounding.
//
// Arithmetic is that of AIE2P: products of bf16 are exact in f32, accumulators are f32, and a bf16 value appears only
// where an accumulator is converted, in the rounding mode of the tile (`floor` until a kernel sets another).
// What AIE2P lacks is missing here too: f32 x f32 products, vectors above 1024 bits, scalar bf16 arithmetic.
// Everything in `aie::sim` and below `detail` is the stand-in's own; tests/npu/test_aie_api.py compares the rest with the
// declarations of the real headers.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

using int8 = std::int8_t;
using uint8 = std::uint8_t;
using int16 = std::int16_t;
using uint16 = std::uint16_t;
using int32 = std::int32_t;
using uint32 = std::uint32_t;

// Only in vectors, two to a byte.
struct uint4 {};

// Storage only, as on the core: values go through accumulators.
struct bfloat16 {
    std::uint16_t bits;
};

// Only in memory and in block vectors: a byte of eight values that share an exponent, or of their exponent.
struct bfp16ebs8 {
    std::uint8_t byte;
};

inline bool operator<(bfloat16 a, bfloat16 b) {
    const auto wide = [](bfloat16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); };
    return wide(a) < wide(b);
}

struct accfloat {};
struct acc32 {};
struct acc64 {};
struct accauto {};

namespace aie {

enum class rounding_mode : unsigned { floor, conv_even };

namespace sim {

struct Counters {
    std::uint64_t macs;
};
inline thread_local Counters counters{};
inline thread_local rounding_mode mode = rounding_mode::floor;

inline float widen(bfloat16 value) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

// f32 -> bf16. `floor` drops the low half of the sign-magnitude pattern, `conv_even` rounds to nearest, ties to even.
// A NaN keeps its upper half, so that the pattern of never-written memory survives a kernel.
inline bfloat16 narrow(float value, rounding_mode rounding) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t half = rounding == rounding_mode::conv_even ? 0x7fffu + ((bits >> 16) & 1u) : 0u;
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return {static_cast<std::uint16_t>((finite ? bits + half : bits) >> 16)};
}

inline float round_integer(float value) {
    return mode == rounding_mode::conv_even ? __builtin_nearbyintf(value) : __builtin_floorf(value);
}

// A whole number without its last bits.
inline std::int64_t shift_down(std::int64_t value, int shift, rounding_mode rounding) {
    const std::int64_t half = shift > 0 && rounding == rounding_mode::conv_even
                                  ? (std::int64_t{1} << (shift - 1)) - 1 + ((value >> shift) & 1)
                                  : 0;
    return (value + half) >> shift;
}

template <typename T>
struct lanes;
template <>
struct lanes<bfloat16> {
    static constexpr unsigned bits = 16;
};
template <>
struct lanes<float> {
    static constexpr unsigned bits = 32;
};
template <typename T>
    requires std::is_integral_v<T>
struct lanes<T> {
    static constexpr unsigned bits = 8 * sizeof(T);
};
template <>
struct lanes<uint4> {
    static constexpr unsigned bits = 4;
};

// What a vector unpacks to: twice as wide.
template <typename T>
struct wider;
template <>
struct wider<uint4> {
    using type = uint8;
};
template <>
struct wider<uint8> {
    using type = uint16;
};
template <>
struct wider<int8> {
    using type = int16;
};
template <>
struct wider<uint16> {
    using type = uint32;
};

template <typename T>
using stored_t = std::conditional_t<std::is_same_v<T, uint4>, uint8, T>;

// Number i of what a vector holds.
template <typename T>
unsigned number(const stored_t<T> *data, unsigned i) {
    if constexpr (std::is_same_v<T, uint4>) return data[i / 2] >> i % 2 * 4 & 15;
    else return static_cast<unsigned>(data[i]);
}

// What a core would not survive.
struct Fault {
    const char *what;
};

// What is too large for its type becomes the largest or wraps, as a mode of the core says; no kernel says which.
template <typename T, typename Lane>
void fill(T *to, unsigned lanes, const Lane &lane) {
    bool fits = true;
    for (unsigned i = 0; i < lanes; ++i) {
        const std::int64_t value = lane(i);
        to[i] = static_cast<T>(value);
        fits &= static_cast<std::int64_t>(to[i]) == value;
    }
    if (!fits) throw Fault{"a whole number is too large"};
}

// The core ignores the low bits of a vector's address: of 4 bits for 128-bit vectors, 5 for 256, 6 for wider ones.
inline void require_aligned(const void *pointer, unsigned bytes) {
    if (reinterpret_cast<std::uintptr_t>(pointer) % (bytes < 64 ? bytes : 64) != 0)
        throw Fault{"unaligned vector access"};
}

// Block floating point: eight values along K share the exponent of the largest and keep 8-bit signed mantissas. What is
// not finite stays.
inline void share_exponent(float (&row)[8]) {
    float largest = 0.0f;
    for (float value : row) largest = __builtin_fmaxf(largest, __builtin_fabsf(value));
    if (largest == 0.0f || !__builtin_isfinite(largest)) return;
    float quantum = __builtin_ldexpf(1.0f, __builtin_ilogbf(largest) - 6);
    if (__builtin_nearbyintf(largest / quantum) > 127.0f) quantum *= 2.0f;
    for (float &value : row) value = round_integer(value / quantum) * quantum;
}

// Of a block in memory: its exponent, biased by 127, then mantissas, whose 1 is 2^-6.
inline void widen_block(const bfp16ebs8 *block, float (&row)[8]) {
    for (unsigned i = 0; i < 8; ++i)
        row[i] = __builtin_ldexpf(static_cast<float>(static_cast<std::int8_t>(block[1 + i].byte)), block[0].byte - 133);
}

}  // namespace sim

class tile {
public:
    static tile current() { return {}; }
    void set_rounding(rounding_mode mode) { sim::mode = mode; }
    rounding_mode get_rounding() const { return sim::mode; }
};

template <unsigned Elems>
class mask {
public:
    bool empty() const {
        for (bool each : data)
            if (each) return false;
        return true;
    }

    bool data[Elems];
};

template <typename T, unsigned Elems>
class alignas(Elems * sim::lanes<T>::bits < 512 ? Elems * sim::lanes<T>::bits / 8 : 64) vector {
public:
    static_assert(Elems * sim::lanes<T>::bits == 128 || Elems * sim::lanes<T>::bits == 256 ||
                      Elems * sim::lanes<T>::bits == 512 || Elems * sim::lanes<T>::bits == 1024,
                  "AIE2P vectors have 128, 256, 512 or 1024 bits");
    using value_type = T;
    static constexpr unsigned size() { return Elems; }

    T get(unsigned idx) const { return data[idx]; }

    auto unpack() const {
        using Wider = typename sim::wider<T>::type;
        vector<Wider, Elems> out;
        for (unsigned i = 0; i < Elems; ++i) out.data[i] = static_cast<Wider>(sim::number<T>(data, i));
        return out;
    }

    template <unsigned ElemsOut>
    vector<T, ElemsOut> extract(unsigned idx) const {
        vector<T, ElemsOut> out;
        std::memcpy(out.data, data + idx * ElemsOut, sizeof out.data);
        return out;
    }

    template <unsigned ElemsIn>
    vector &insert(unsigned idx, const vector<T, ElemsIn> &v) {
        std::memcpy(data + idx * ElemsIn, v.data, sizeof v.data);
        return *this;
    }

    template <typename DstT>
    auto cast_to() const {
        vector<DstT, Elems * sim::lanes<T>::bits / sim::lanes<DstT>::bits> out;
        std::memcpy(out.data, data, sizeof data);
        return out;
    }

    sim::stored_t<T> data[Elems * sim::lanes<T>::bits / (8 * sizeof(sim::stored_t<T>))];
};

// Values of blocks of eight. That each block has 8 bits of mantissas and one exponent has been seen to.
template <typename T, unsigned Elems>
class block_vector {
public:
    static_assert(std::is_same_v<T, bfp16ebs8> && Elems == 64, "the stand-in has block vectors of 64 values");
    using value_type = T;
    static constexpr unsigned size() { return Elems; }

    float data[Elems];
};

// Block vectors one behind the other, from a whole line on.
template <typename T, unsigned Elems>
class block_vector_input_buffer_stream {
public:
    block_vector_input_buffer_stream(const T *ptr) {
        sim::require_aligned(ptr, 64);
        at = ptr;
    }

    block_vector<T, Elems> pop() {
        block_vector<T, Elems> out;
        for (unsigned i = 0; i < Elems; i += 8, at += 9) {
            float row[8];
            sim::widen_block(at, row);
            std::memcpy(out.data + i, row, sizeof row);
        }
        return out;
    }

private:
    const T *at;
};

template <typename Tag, unsigned Elems>
class alignas(64) accum {
public:
    static_assert((!std::is_same_v<Tag, acc64> && (Elems == 16 || Elems == 32 || Elems == 64)) ||
                      (std::is_same_v<Tag, acc64> && (Elems == 8 || Elems == 32)),
                  "the stand-in has accumulators of 32 bits of 16, 32 and 64 lanes, of 64 bits those of 8 and 32");
    using value_type = Tag;
    using sum_type = std::conditional_t<std::is_same_v<Tag, accfloat>, float,
                                        std::conditional_t<std::is_same_v<Tag, acc32>, int32, std::int64_t>>;
    static constexpr unsigned size() { return Elems; }

    accum() = default;

    template <typename T>
    explicit accum(const vector<T, Elems> &v, int shift = 0) {
        from_vector(v, shift);
    }

    template <typename T>
    void from_vector(const vector<T, Elems> &v, int shift = 0) {
        if constexpr (std::is_same_v<Tag, acc32>)
            sim::fill(data, Elems, [&](unsigned i) { return static_cast<std::int64_t>(v.data[i]) << shift; });
        else if constexpr (std::is_same_v<T, bfloat16>)
            for (unsigned i = 0; i < Elems; ++i) data[i] = sim::widen(v.data[i]);
        else
            std::memcpy(data, v.data, sizeof data);
    }

    template <typename T>
    auto to_vector(int shift = 0) const {
        std::conditional_t<std::is_same_v<T, bfp16ebs8>, block_vector<T, Elems>, vector<T, Elems>> out;
        if constexpr (std::is_same_v<T, bfp16ebs8>) {
            for (unsigned i = 0; i < Elems; i += 8) {
                float row[8];
                std::memcpy(row, data + i, sizeof row);
                sim::share_exponent(row);
                std::memcpy(out.data + i, row, sizeof row);
            }
        } else if constexpr (std::is_same_v<T, bfloat16>) {
            const rounding_mode rounding = sim::mode;
            for (unsigned i = 0; i < Elems; ++i) out.data[i] = sim::narrow(data[i], rounding);
        } else if constexpr (std::is_same_v<Tag, acc32>) {
            const rounding_mode rounding = sim::mode;
            sim::fill(out.data, Elems, [&](unsigned i) { return sim::shift_down(data[i], shift, rounding); });
        } else if constexpr (std::is_same_v<T, int32>) {
            static_assert(std::is_same_v<Tag, acc64>);
            const rounding_mode rounding = sim::mode;
            sim::fill(out.data, Elems, [&](unsigned i) { return sim::shift_down(data[i], shift, rounding); });
        } else {
            static_assert(std::is_same_v<T, float>);
            std::memcpy(out.data, data, sizeof data);
        }
        return out;
    }

    template <unsigned ElemsOut>
    accum<Tag, ElemsOut> extract(unsigned idx) const {
        accum<Tag, ElemsOut> out;
        std::memcpy(out.data, data + idx * ElemsOut, sizeof out.data);
        return out;
    }

    template <unsigned ElemsIn>
    accum &insert(unsigned idx, const accum<Tag, ElemsIn> &acc) {
        std::memcpy(data + idx * ElemsIn, acc.data, sizeof acc.data);
        return *this;
    }

    sum_type data[Elems];
};

template <unsigned Elems, typename T>
vector<T, Elems> load_v(const T *ptr) {
    sim::require_aligned(ptr, Elems * sizeof(T));
    vector<T, Elems> out;
    std::memcpy(out.data, ptr, sizeof out.data);
    return out;
}

template <typename T, unsigned Elems>
T *store_v(T *ptr, const vector<T, Elems> &v) {
    sim::require_aligned(ptr, Elems * sizeof(T));
    std::memcpy(ptr, v.data, sizeof v.data);
    return ptr + Elems;
}

template <typename T, unsigned Elems>
vector<T, Elems> broadcast(T a) {
    vector<T, Elems> out;
    for (T &lane : out.data) lane = a;
    return out;
}

namespace detail {

template <typename T, unsigned Elems>
struct zero {
    using type = vector<T, Elems>;
};
template <unsigned Elems>
struct zero<accfloat, Elems> {
    using type = accum<accfloat, Elems>;
};
template <unsigned Elems>
struct zero<acc32, Elems> {
    using type = accum<acc32, Elems>;
};

template <typename T, unsigned Elems, typename Op>
vector<T, Elems> lanewise(const vector<T, Elems> &v1, const vector<T, Elems> &v2, Op op) {
    vector<T, Elems> out;
    for (unsigned i = 0; i < Elems; ++i) out.data[i] = op(v1.data[i], v2.data[i]);
    return out;
}

}  // namespace detail

template <typename T, unsigned Elems>
typename detail::zero<T, Elems>::type zeros() {
    typename detail::zero<T, Elems>::type out;
    std::memset(out.data, 0, sizeof out.data);
    return out;
}

// bf16 is added in accumulators.
template <typename T, unsigned Elems>
    requires(!std::is_same_v<T, bfloat16>)
vector<T, Elems> add(const vector<T, Elems> &v1, const vector<T, Elems> &v2) {
    return detail::lanewise(v1, v2, [](T a, T b) { return static_cast<T>(a + b); });
}

template <typename T, unsigned Elems>
accum<accfloat, Elems> add(const accum<accfloat, Elems> &acc, const vector<T, Elems> &v) {
    const accum<accfloat, Elems> wide(v);
    accum<accfloat, Elems> out;
    for (unsigned i = 0; i < Elems; ++i) out.data[i] = acc.data[i] + wide.data[i];
    return out;
}

template <typename T, unsigned Elems>
    requires(!std::is_same_v<T, bfloat16>)
vector<T, Elems> sub(const vector<T, Elems> &v1, const vector<T, Elems> &v2) {
    return detail::lanewise(v1, v2, [](T a, T b) { return static_cast<T>(a - b); });
}

template <typename T, unsigned Elems>
accum<accfloat, Elems> sub(const accum<accfloat, Elems> &acc, const vector<T, Elems> &v) {
    const accum<accfloat, Elems> wide(v);
    accum<accfloat, Elems> out;
    for (unsigned i = 0; i < Elems; ++i) out.data[i] = acc.data[i] - wide.data[i];
    return out;
}

// The core's maximum of f32 is emulated.
template <typename T, unsigned Elems>
    requires(!std::is_same_v<T, float>)
vector<T, Elems> max(const vector<T, Elems> &v1, const vector<T, Elems> &v2) {
    return detail::lanewise(v1, v2, [](T a, T b) { return a < b ? b : a; });
}

template <typename T, unsigned Elems>
    requires(!std::is_same_v<T, float>)
vector<T, Elems> min(const vector<T, Elems> &v1, const vector<T, Elems> &v2) {
    return detail::lanewise(v1, v2, [](T a, T b) { return b < a ? b : a; });
}

// Sum of the lanes, by halves: the order in which the core adds them.
template <typename T, unsigned Elems>
T reduce_add(const vector<T, Elems> &v) {
    static_assert(!std::is_same_v<T, bfloat16>);
    T lanes[Elems];
    std::memcpy(lanes, v.data, sizeof lanes);
    for (unsigned width = Elems / 2; width > 0; width /= 2)
        for (unsigned i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

template <typename T, unsigned Elems>
    requires std::is_integral_v<T>
T reduce_max(const vector<T, Elems> &v) {
    T largest = v.data[0];
    for (T each : v.data) largest = largest < each ? each : largest;
    return largest;
}

template <typename T, unsigned Elems>
vector<T, Elems / 2> filter_even(const vector<T, Elems> &v) {
    vector<T, Elems / 2> out;
    for (unsigned i = 0; i < Elems / 2; ++i) out.data[i] = v.data[2 * i];
    return out;
}

template <typename T, unsigned Elems>
vector<T, Elems / 2> filter_odd(const vector<T, Elems> &v) {
    vector<T, Elems / 2> out;
    for (unsigned i = 0; i < Elems / 2; ++i) out.data[i] = v.data[2 * i + 1];
    return out;
}

// Lanes `n` further on. What comes in behind them is not said to be anything.
template <typename T, unsigned Elems>
vector<T, Elems> shuffle_down(const vector<T, Elems> &v, unsigned n) {
    vector<T, Elems> out;
    for (unsigned i = 0; i < Elems; ++i) out.data[i] = i + n < Elems ? v.data[i + n] : static_cast<T>(0x5a5a5a5a);
    return out;
}

template <unsigned Elems>
accum<accfloat, Elems> mac(const accum<accfloat, Elems> &acc, const vector<bfloat16, Elems> &v1,
                           const vector<bfloat16, Elems> &v2) {
    accum<accfloat, Elems> out;
    for (unsigned i = 0; i < Elems; ++i) out.data[i] = acc.data[i] + sim::widen(v1.data[i]) * sim::widen(v2.data[i]);
    sim::counters.macs += Elems;
    return out;
}

template <unsigned Elems>
accum<accfloat, Elems> msc(const accum<accfloat, Elems> &acc, const vector<bfloat16, Elems> &v1,
                           const vector<bfloat16, Elems> &v2) {
    accum<accfloat, Elems> out;
    for (unsigned i = 0; i < Elems; ++i) out.data[i] = acc.data[i] - sim::widen(v1.data[i]) * sim::widen(v2.data[i]);
    sim::counters.macs += Elems;
    return out;
}

template <unsigned Elems>
accum<accfloat, Elems> mul(const vector<bfloat16, Elems> &v1, const vector<bfloat16, Elems> &v2) {
    return mac(zeros<accfloat, Elems>(), v1, v2);
}

template <unsigned Elems>
accum<acc32, Elems> mac(const accum<acc32, Elems> &acc, const vector<uint16, Elems> &v1, const vector<uint16, Elems> &v2) {
    accum<acc32, Elems> out;
    sim::fill(out.data, Elems, [&](unsigned i) { return acc.data[i] + std::int64_t{v1.data[i]} * v2.data[i]; });
    sim::counters.macs += Elems;
    return out;
}

template <typename AccumTag, unsigned Elems>
accum<AccumTag, Elems> mul(const vector<uint16, Elems> &v1, const vector<uint16, Elems> &v2) {
    return mac(zeros<AccumTag, Elems>(), v1, v2);
}

// Even lanes of both, one behind the other, and odd lanes.
template <typename T, unsigned Elems>
std::pair<vector<T, Elems>, vector<T, Elems>> interleave_unzip(const vector<T, Elems> &v1, const vector<T, Elems> &v2,
                                                               unsigned chunk_size) {
    if (chunk_size != 1) throw sim::Fault{"the stand-in takes vectors apart by lanes"};
    vector<T, Elems> even, odd;
    for (unsigned i = 0; i < Elems; ++i) {
        const vector<T, Elems> &from = i < Elems / 2 ? v1 : v2;
        even.data[i] = from.data[2 * i % Elems];
        odd.data[i] = from.data[2 * i % Elems + 1];
    }
    return {even, odd};
}

template <typename T, unsigned Elems>
mask<Elems> lt(const vector<T, Elems> &v1, const vector<T, Elems> &v2) {
    static_assert(std::is_same_v<T, int32> || std::is_same_v<T, int16>, "what the stand-in compares");
    mask<Elems> out;
    for (unsigned i = 0; i < Elems; ++i) out.data[i] = v1.data[i] < v2.data[i];
    return out;
}

// Lanes of `v2` where the mask is set, of `v1` elsewhere.
template <typename T, unsigned Elems>
vector<T, Elems> select(const vector<T, Elems> &v1, const vector<T, Elems> &v2, const mask<Elems> &m) {
    vector<T, Elems> out;
    for (unsigned i = 0; i < Elems; ++i) out.data[i] = m.data[i] ? v2.data[i] : v1.data[i];
    return out;
}

template <typename T, unsigned Elems>
vector<T, Elems> transpose(const vector<T, Elems> &v, unsigned Row, unsigned Col) {
    vector<T, Elems> out;
    for (unsigned r = 0; r < Row; ++r)
        for (unsigned c = 0; c < Col; ++c) out.data[c * Row + r] = v.data[r * Col + c];
    return out;
}

template <typename T, unsigned Elems>
vector<T, Elems> upshift(const vector<T, Elems> &v, unsigned shift) {
    vector<T, Elems> out;
    sim::fill(out.data, Elems, [&](unsigned i) { return static_cast<std::int64_t>(v.data[i]) << shift; });
    return out;
}

template <typename T, unsigned Elems>
vector<T, Elems> bit_and(const vector<T, Elems> &v1, const vector<T, Elems> &v2) {
    return detail::lanewise(v1, v2, [](T a, T b) { return static_cast<T>(a & b); });
}

template <typename T, unsigned Elems>
vector<T, Elems> bit_or(const vector<T, Elems> &v1, const vector<T, Elems> &v2) {
    return detail::lanewise(v1, v2, [](T a, T b) { return static_cast<T>(a | b); });
}

template <typename TR, unsigned Elems>
vector<TR, Elems> to_fixed(const vector<float, Elems> &v, int shift = 0) {
    static_assert(std::is_same_v<TR, int32> || std::is_same_v<TR, int16>);
    constexpr float most = std::is_same_v<TR, int16> ? 0x7fffp0f : 0x7fffff80p0f, least = -0x1p0f * (1u << (8 * sizeof(TR) - 1));
    vector<TR, Elems> out;
    for (unsigned i = 0; i < Elems; ++i) {
        const float whole = sim::round_integer(__builtin_ldexpf(v.data[i], shift));
        out.data[i] = static_cast<TR>(whole < least ? least : whole > most ? most : whole == whole ? whole : 0.0f);
    }
    return out;
}

template <typename TR, typename T, unsigned Elems>
vector<TR, Elems> to_float(const vector<T, Elems> &v, int shift = 0) {
    static_assert(std::is_same_v<TR, float> && (std::is_same_v<T, int32> || std::is_same_v<T, uint16>));
    vector<float, Elems> out;
    for (unsigned i = 0; i < Elems; ++i)
        out.data[i] = __builtin_ldexpf(static_cast<float>(v.data[i]), -shift);
    return out;
}

inline float inv(float a) { return 1.0f / a; }
inline float invsqrt(float a) { return 1.0f / __builtin_sqrtf(a); }

namespace detail {

template <typename Vec>
struct transposed {
    const Vec &of;
};

}  // namespace detail

template <typename Vec>
detail::transposed<Vec> op_transpose(const Vec &v) {
    return {v};
}

template <unsigned M_Elems, unsigned K_Elems, unsigned N_Elems, typename TypeA, typename TypeB = TypeA,
          typename AccumTag = accauto>
struct mmul {
    static_assert(std::is_same_v<TypeA, TypeB> &&
                  (std::is_same_v<TypeA, bfloat16> || std::is_same_v<TypeA, bfp16ebs8>));
    static_assert((M_Elems == 8 || M_Elems == 4) && K_Elems == 8 && (N_Elems == 4 || N_Elems == 8));
    static constexpr unsigned M = M_Elems;
    static constexpr unsigned K = K_Elems;
    static constexpr unsigned N = N_Elems;
    static constexpr unsigned size_A = M * K;
    static constexpr unsigned size_B = K * N;
    static constexpr unsigned size_C = M * N;
    using accum_type = accum<accfloat, size_C>;

    mmul() { acc = zeros<accfloat, size_C>(); }
    mmul(const accum_type &acc) { this->acc = acc; }

    accum_type to_accum() const { return acc; }

    template <typename T>
    vector<T, size_C> to_vector(int shift = 0) const {
        return acc.template to_vector<T>(shift);
    }

    mmul &mul(const vector<TypeA, size_A> &a, const vector<TypeB, size_B> &b)
        requires std::is_same_v<TypeA, bfloat16>
    {
        acc = zeros<accfloat, size_C>();
        return mac(a, b);
    }

    mmul &mac(const vector<TypeA, size_A> &a, const vector<TypeB, size_B> &b)
        requires std::is_same_v<TypeA, bfloat16>
    {
        float wide_a[M][K], wide_b[K][N];
        for (unsigned i = 0; i < size_A; ++i) wide_a[i / K][i % K] = sim::widen(a.data[i]);
        for (unsigned i = 0; i < size_B; ++i) wide_b[i / N][i % N] = sim::widen(b.data[i]);
        for (unsigned m = 0; m < M; ++m)
            for (unsigned k = 0; k < K; ++k)
                for (unsigned n = 0; n < N; ++n) acc.data[m * N + n] += wide_a[m][k] * wide_b[k][n];
        sim::counters.macs += M * K * N;
        return *this;
    }

    mmul &mac(const block_vector<TypeA, size_A> &a, const detail::transposed<block_vector<TypeB, size_B>> &b)
        requires std::is_same_v<TypeA, bfp16ebs8>
    {
        for (unsigned m = 0; m < M; ++m)
            for (unsigned k = 0; k < K; ++k)
                for (unsigned n = 0; n < N; ++n) acc.data[m * N + n] += a.data[m * K + k] * b.of.data[n * K + k];
        sim::counters.macs += M * K * N;
        return *this;
    }

private:
    accum_type acc;
};

// Of whole numbers, one of them of 16 bits: sums are exact.
template <typename TypeB>
    requires(std::is_same_v<TypeB, int8> || std::is_same_v<TypeB, uint8>)
struct mmul<4, 8, 8, int16, TypeB, accauto> {
    using accum_type = accum<acc64, 32>;

    accum_type to_accum() const { return acc; }

    mmul &mac(const vector<int16, 32> &a, const vector<TypeB, 64> &b) {
        for (unsigned m = 0; m < 4; ++m)
            for (unsigned k = 0; k < 8; ++k)
                for (unsigned n = 0; n < 8; ++n) acc.data[m * 8 + n] += a.data[m * 8 + k] * b.data[k * 8 + n];
        sim::counters.macs += 4 * 8 * 8;
        return *this;
    }

private:
    accum_type acc{};
};

}  // namespace aie
