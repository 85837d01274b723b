// Vectors of ISA_LANES floats and their conversion from and to bf16. Who includes this is compiled for each instruction set
// (one_isa.h).
namespace ISA {
namespace {

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))  // what several callers share, and takes so long that a call does not matter

constexpr int64_t lanes = ISA_LANES;

typedef float f32v __attribute__((vector_size(lanes * 4)));
typedef uint32_t u32v __attribute__((vector_size(lanes * 4)));
typedef int32_t i32v __attribute__((vector_size(lanes * 4)));
typedef uint16_t u16v __attribute__((vector_size(lanes * 2)));

template <class V, class T>
INLINE V load(const T *p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class T>
INLINE void store(T *p, V v) {
    __builtin_memcpy(p, &v, sizeof v);
}

INLINE f32v splat(float x) { return x - f32v{}; }

INLINE f32v select(i32v mask, f32v yes, f32v no) {
    return (f32v)((mask & (i32v)yes) | (~mask & (i32v)no));
}

INLINE float float_of_bits(uint32_t bits) {
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}

INLINE float to_float(bf16 x) { return float_of_bits(static_cast<uint32_t>(x) << 16); }

// f16 -> f32, exact.
INLINE float f16_to_float(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff;
    float value = float_of_bits((magnitude << 13) + (magnitude < 0x7c00 ? 0x38000000u : 0x70000000u));
    if (magnitude < 0x400) value = static_cast<float>(magnitude) * 5.9604644775390625e-08f;  // subnormal: 2^-24 each
    return half & 0x8000 ? -value : value;
}

INLINE u32v widen(u16v x) {
#if ISA_LANES == 16
    return (u32v)_mm512_cvtepu16_epi32((__m256i)x);
#elif ISA_LANES == 8
    return (u32v)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, u32v);
#endif
}

INLINE f32v to_float(u16v x) { return (f32v)(widen(x) << 16); }

// To nearest even; NaN stays NaN; subnormals become zero, as vcvtneps2bf16 has it.
INLINE u16v to_bf16(f32v x) {
#if ISA_LANES == 16
    return (u16v)_mm512_cvtneps_pbh((__m512)x);
#else
    const u32v bits = (u32v)x;
    const u32v sign = bits & 0x80000000u, magnitude = bits & 0x7fffffffu;
    u32v rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    const u32v nan = (u32v)(magnitude > 0x7f800000u), tiny = (u32v)(magnitude < 0x00800000u);
    rounded = (nan & (bits >> 16 | 0x40u)) | (~nan & rounded);
    rounded = (tiny & (sign >> 16)) | (~tiny & rounded);
    return __builtin_convertvector(rounded, u16v);
#endif
}

INLINE f32v load_bf16(const bf16 *p) { return to_float(load<u16v>(p)); }
INLINE void store_bf16(bf16 *p, f32v v) { store(p, to_bf16(v)); }

// The same for the last `count` < lanes elements of a row: nothing past them is touched.
INLINE f32v load_bf16(const bf16 *p, int64_t count) {
    if (count >= lanes) return load_bf16(p);
    bf16 padded[lanes] = {};
    for (int64_t i = 0; i < count; i++) padded[i] = p[i];
    return load_bf16(padded);
}

INLINE void store_bf16(bf16 *p, f32v v, int64_t count) {
    if (count >= lanes) return store_bf16(p, v);
    bf16 padded[lanes];
    store_bf16(padded, v);
    for (int64_t i = 0; i < count; i++) p[i] = padded[i];
}

INLINE f32v load_f32(const float *p, int64_t count) {
    if (count >= lanes) return load<f32v>(p);
    float padded[lanes] = {};
    for (int64_t i = 0; i < count; i++) padded[i] = p[i];
    return load<f32v>(padded);
}

// The nearest whole numbers, halves to even. No addition of a magic number, which a compiler may contract with the
// multiplication before it.
INLINE i32v nearest(f32v v) {
#if ISA_LANES == 16
    return (i32v)_mm512_cvtps_epi32((__m512)v);
#elif ISA_LANES == 8
    return (i32v)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
    return (i32v)_mm_cvtps_epi32((__m128)v);
#else
    i32v whole;
    for (int64_t i = 0; i < lanes; i++) whole[i] = static_cast<int32_t>(lrintf(v[i]));
    return whole;
#endif
}

INLINE f32v max(f32v a, f32v b) {
#if ISA_LANES == 16
    return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#elif ISA_LANES == 8
    return (f32v)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}

// As bits: of floats that are not negative, NaN is the largest.
INLINE u32v max(u32v a, u32v b) {
#if ISA_LANES == 16
    return (u32v)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif ISA_LANES == 8
    return (u32v)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
    const u32v more = (u32v)(a > b);
    return (more & a) | (~more & b);
#endif
}

INLINE uint32_t max_of(u32v v) {
#if ISA_LANES == 16
    return _mm512_reduce_max_epu32((__m512i)v);
#else
    uint32_t most = 0;
    for (int64_t i = 0; i < lanes; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

struct Plus {
    INLINE f32v join(f32v a, f32v b) { return a + b; }
    INLINE i32v join(i32v a, i32v b) { return a + b; }
};

struct Max {
    INLINE f32v join(f32v a, f32v b) { return max(a, b); }
    INLINE i32v join(i32v a, i32v b) { return (i32v)max((u32v)a, (u32v)b); }  // of numbers that are not negative
};

// Joins the lanes of a vector, half by half.
template <class Operation>
INLINE float fold(f32v v) {
#if ISA_LANES == 16
    v = Operation::join(v, (f32v)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e));
    v = Operation::join(v, (f32v)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1));
    v = Operation::join(v, (f32v)_mm512_permute_ps((__m512)v, 0x4e));
    v = Operation::join(v, (f32v)_mm512_permute_ps((__m512)v, 0xb1));
#else
    for (int64_t half = lanes / 2; half > 0; half /= 2) {
        f32v other = v;
        for (int64_t i = 0; i < half; i++) other[i] = v[i + half];
        v = Operation::join(v, other);
    }
#endif
    return v[0];
}

// What transposing 32-bit words takes: of each 128 bits of a and b, the first or last two words in turn, and the first or last
// pairs; of a and then b, every other 128 bits.
#if ISA_LANES == 16
INLINE i32v low_words(i32v a, i32v b) { return (i32v)_mm512_unpacklo_epi32((__m512i)a, (__m512i)b); }
INLINE i32v high_words(i32v a, i32v b) { return (i32v)_mm512_unpackhi_epi32((__m512i)a, (__m512i)b); }
INLINE i32v low_pairs(i32v a, i32v b) { return (i32v)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b); }
INLINE i32v high_pairs(i32v a, i32v b) { return (i32v)_mm512_unpackhi_epi64((__m512i)a, (__m512i)b); }
INLINE i32v even_parts(i32v a, i32v b) { return (i32v)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x88); }
INLINE i32v odd_parts(i32v a, i32v b) { return (i32v)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xdd); }
#elif ISA_LANES == 8
INLINE i32v low_words(i32v a, i32v b) { return (i32v)_mm256_unpacklo_epi32((__m256i)a, (__m256i)b); }
INLINE i32v high_words(i32v a, i32v b) { return (i32v)_mm256_unpackhi_epi32((__m256i)a, (__m256i)b); }
INLINE i32v low_pairs(i32v a, i32v b) { return (i32v)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b); }
INLINE i32v high_pairs(i32v a, i32v b) { return (i32v)_mm256_unpackhi_epi64((__m256i)a, (__m256i)b); }
INLINE i32v even_parts(i32v a, i32v b) { return (i32v)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x20); }
INLINE i32v odd_parts(i32v a, i32v b) { return (i32v)_mm256_permute2x128_si256((__m256i)a, (__m256i)b, 0x31); }
#else
static_assert(lanes == 4, "128 bits, of which there are no parts");
INLINE i32v low_words(i32v a, i32v b) { return i32v{a[0], b[0], a[1], b[1]}; }
INLINE i32v high_words(i32v a, i32v b) { return i32v{a[2], b[2], a[3], b[3]}; }
INLINE i32v low_pairs(i32v a, i32v b) { return i32v{a[0], a[1], b[0], b[1]}; }
INLINE i32v high_pairs(i32v a, i32v b) { return i32v{a[2], a[3], b[2], b[3]}; }
INLINE i32v even_parts(i32v a, i32v) { return a; }
INLINE i32v odd_parts(i32v, i32v b) { return b; }
#endif

template <class Operation>
INLINE i32v join_words(i32v a, i32v b) {
    return Operation::join(low_words(a, b), high_words(a, b));
}

// Lane i is what all lanes of v[i] are joined to: v has a vector for each lane.
template <class Operation>
INLINE i32v fold_each(const i32v *v) {
    i32v joined[lanes / 4];
#pragma GCC unroll 4
    for (int64_t i = 0; i < lanes / 4; i++) {
        const i32v first = join_words<Operation>(v[4 * i], v[4 * i + 1]), last = join_words<Operation>(v[4 * i + 2], v[4 * i + 3]);
        joined[i] = Operation::join(low_pairs(first, last), high_pairs(first, last));
    }
#pragma GCC unroll 2
    for (int64_t count = lanes / 8; count > 0; count /= 2)
#pragma GCC unroll 2
        for (int64_t i = 0; i < count; i++) {
            const i32v a = joined[2 * i], b = joined[2 * i + 1];
            joined[i] = Operation::join(even_parts(a, b), odd_parts(a, b));
        }
    return joined[0];
}

INLINE float sum_of(f32v v) { return fold<Plus>(v); }
INLINE float max_of(f32v v) { return fold<Max>(v); }

// 2^x to about 5 ulp of f32; 0 below the normal range, infinity above it.
INLINE f32v exp2(f32v x) {
#if ISA_LANES == 16
    const f32v whole = (f32v)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const f32v clamped = max(splat(-127.0f), select(x > 128.0f, splat(128.0f), x));
    const f32v shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const f32v whole = (clamped + shift) - shift;
#endif
    const f32v part = x - whole;
    f32v p = splat(1.32764716e-03f);
    p = p * part + 9.67554156e-03f;
    p = p * part + 5.55071328e-02f;
    p = p * part + 2.40221197e-01f;
    p = p * part + 6.93146967e-01f;
    p = p * part + 1.0f;
#if ISA_LANES == 16
    return (f32v)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    const i32v exponent = (__builtin_convertvector(whole, i32v) + 127) << 23;
    const f32v result = select(x > 127.5f, splat(INFINITY), p * (f32v)exponent);
    return select(x < -126.0f, f32v{}, result);
#endif
}

// x * sigmoid(y), by the number of the activation in ACTIVATIONS of stages/weights/scalars.py: 0 is SiLU with y = x,
// 1 the tanh approximation of GELU with y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
INLINE f32v activate(f32v x, int64_t activation) {
    const f32v y = activation == 0 ? x : x * (0.0713548163f * x * x + 1.59576912f);
    return x / (1.0f + exp2(y * -1.44269504f));
}

// activation(gate) * up, and by number 2 gpt-oss's: g sigmoid(1.702 g) (u + 1), g cut off above at 7 and u on both sides.
INLINE f32v gated(f32v gate, f32v up, int64_t activation) {
    if (activation != 2) return activate(gate, activation) * up;
    const f32v most = splat(7.0f), g = select(gate > most, most, gate);
    const f32v u = select(up > most, most, select(up < -most, -most, up));
    return g / (1.0f + exp2(g * (1.702f * -1.44269504f))) * (u + 1.0f);
}

}  // namespace
}  // namespace ISA
