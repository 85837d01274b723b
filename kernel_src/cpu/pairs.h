// Products of whole numbers of 16 bits, in pairs: sums are exact, in any order and with any instruction. Included inside
// each instruction set.
namespace ISA {
namespace {

typedef uint16_t quadv __attribute__((vector_size(lanes * 4)));  // a pair of 16 bits for each of `lanes` outputs

// a * b + c: one rounding where the machine multiplies and adds at once, in every product alike.
INLINE f32v multiply_add(f32v a, f32v b, f32v c) {
#if ISA_LANES == 16
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif ISA_LANES == 8
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The next i32 sums: products of i16, a pair of inputs for each output, with a pair of x.
INLINE i32v multiply_pairs(quadv pairs, i32v x, i32v sum) {
#if ISA_LANES == 16
    return (i32v)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, (__m512i)x);
#elif ISA_LANES == 8
    return sum + (i32v)_mm256_madd_epi16((__m256i)pairs, (__m256i)x);
#elif defined(__SSE2__)
    return sum + (i32v)_mm_madd_epi16((__m128i)pairs, (__m128i)x);
#else
    typedef int16_t pairv __attribute__((vector_size(lanes * 4)));
    const pairv a = (pairv)pairs, b = (pairv)x;
    for (int64_t i = 0; i < lanes; i++) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sum;
#endif
}

// Keeps a compiler from moving sums away from their products, to where they no longer fit registers.
template <class V>
INLINE void settle(V &sum) {
#if ISA_LANES == 8
    asm("" : "+x"(sum));
#else
    (void)sum;
#endif
}

// Keeps an address in one register: else the compiler makes one of each sum of an address and a distance in a loop, and as
// there are more than registers, reads them from memory before what lies there.
template <class T>
INLINE void settle_address(const T *&address) {
    asm("" : "+r"(address));
}

#if ISA_LANES == 8

// The next i32 sums: a quad of i8 for each output, times four of x, -127 to 127. vpmaddubsw takes one operand without a sign, so
// magnitudes are multiplied with what has the signs of both; the sum of two products has 16 bits.
INLINE i32v multiply_quads(__m256i numbers, __m256i x, i32v sum) {
    const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(numbers), _mm256_sign_epi8(x, numbers));
    return sum + (i32v)_mm256_madd_epi16(products, _mm256_set1_epi16(1));
}

#endif

// Two of x for every output.
INLINE i32v splat_pair(const int16_t *x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return pair - i32v{};
}

INLINE f32v whole_to_float(i32v v) { return __builtin_convertvector(v, f32v); }

}  // namespace
}  // namespace ISA
