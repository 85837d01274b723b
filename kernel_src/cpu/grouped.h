// Weights in groups: whole numbers of a few bits, 32 or 16 inputs of one output sharing a scale. Included inside each
// instruction set.
//
// A [N][K] matrix (out, in) is cut into panels of 16 outputs, N padded to a multiple of 16 and K to whole groups with
// zeros. A panel is
//   header   f32 [factors][16]                    what a row's scales are multiples of, where they are whole numbers
//   blocks   scales of as many groups as a line of 64 bytes holds, or whole lines of one group, then those groups'
//            numbers; the last block may have fewer groups
// A *pair* is inputs 2i, 2i + 1 of 16 outputs, as one line of panels.h holds it.
//   int4   scale u8 [16], minimum u8 [16] per group: w = d s q - e m, header d and e
//          numbers [4][16 outputs][4 bytes]: nibble t of 16-bit half j of an output = input 8 line + 2 t + j
//   int4_f32  scale f32 [16], minimum f32 [16] per group: w = s q - m; numbers as int4
//   int6   scale u8 [16] per group: w = d s (q - 32), header d
//          nibbles as int4, then [2][16][4 bytes]: two bits 2 (line % 2 * 4 + t) up of half j, above the nibble
//   int8   scale f16 [16] per group: w = s q
//          numbers i8 [8][4][2 pairs][4 outputs][2]: line i is pairs 2 i and 2 i + 1, quarter j of it outputs 4 j and on
//   int8_f32  scale f32 [16], minimum f32 [16] per group: w = s q - m; numbers as int8
//   int8_f32_16  groups of 16: scale f32 [16] per group: w = s q; numbers as int8, four lines
// A group's sum of products is f32, in the order of pairs, and only then scaled: matrices and vectors do the same.
namespace ISA {
namespace {

constexpr int64_t group_inputs = LAYOUT_GROUP, short_group_inputs = LAYOUT_SHORT_GROUP, line_bytes = 64;
static_assert(group_inputs == 32, "four lines of nibbles, or sixteen pairs, are a group");
static_assert(short_group_inputs == 16, "four lines of bytes, or eight pairs, are a short group");

template <class Format>
INLINE int64_t group_count(int64_t cols) {
    return (cols + Format::inputs - 1) / Format::inputs;
}

// Where things are in a panel.
template <class Format>
struct GroupedPanel {
    static constexpr int64_t header = Format::factors * panel_rows * 4;
    static constexpr int64_t block_groups = Format::scale_bytes < line_bytes ? line_bytes / Format::scale_bytes : 1;
    static constexpr int64_t block_scales = block_groups * Format::scale_bytes;
    static constexpr int64_t block = block_scales + block_groups * Format::number_bytes;
    static_assert(block_scales % line_bytes == 0, "lines stay aligned");

    static int64_t size(int64_t cols) {
        const int64_t groups = group_count<Format>(cols), rest = groups % block_groups;
        return header + groups / block_groups * block + (rest ? block_scales + rest * Format::number_bytes : 0);
    }
    INLINE const uint8_t *scales(const uint8_t *panel, int64_t group) {
        return panel + header + group / block_groups * block + group % block_groups * Format::scale_bytes;
    }
    INLINE const uint8_t *numbers(const uint8_t *panel, int64_t group) {
        return panel + header + group / block_groups * block + block_scales +
               group % block_groups * Format::number_bytes;
    }
};

#if ISA_LANES == 16

static_assert(panel_rows == lanes, "a group's scales are one register");

INLINE f32v load_u8(const uint8_t *p) {
    return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE f32v load_f16(const uint8_t *p) { return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

// bf16 of 0, 1 .. 31 less `zero`, for vpermw and vpermi2w.
template <int zero, int period>
INLINE __m512i table(int first) {
    alignas(64) uint16_t values[32];
#pragma GCC unroll 32
    for (int i = 0; i < 32; i++) {
        const float value = static_cast<float>((first + i) % period - zero);
        uint32_t bits;
        __builtin_memcpy(&bits, &value, 4);
        values[i] = static_cast<uint16_t>(bits >> 16);
    }
    return _mm512_load_si512(values);
}

// Byte `byte` of the bf16 of `first`, `first` + 1 .. `first` + 63, for vpermi2b.
template <int byte>
INLINE __m512i byte_table(int first) {
    alignas(64) uint8_t values[64];
#pragma GCC unroll 64
    for (int i = 0; i < 64; i++) {
        const float value = static_cast<float>(first + i);
        uint32_t bits;
        __builtin_memcpy(&bits, &value, 4);
        values[i] = static_cast<uint8_t>(bits >> (16 + 8 * byte));
    }
    return _mm512_load_si512(values);
}

INLINE __m512i shifted(__m512i v, int by) { return by ? _mm512_srli_epi16(v, by) : v; }

#endif

// How the numbers of a group of `inputs` lie.

struct Nibbles {
    static constexpr int64_t inputs = group_inputs, number_bytes = 256;

#if ISA_LANES == 16
    __m512i values;

    // Constructors do not get the target pragma.
    INLINE Nibbles make() { return {table<0, 16>(0)}; }

    INLINE __m512i line(const uint8_t *numbers, int i) { return _mm512_loadu_si512(numbers + i * line_bytes); }

    INLINE_MEMBER __m512bh pair(const uint8_t *numbers, int i) const {
        return (__m512bh)_mm512_permutexvar_epi16(shifted(line(numbers, i / 4), i % 4 * 4), values);
    }
#endif

    // Number of input k and output r.
    INLINE int number(const uint8_t *numbers, int64_t k, int64_t r) {
        const uint8_t byte = numbers[k / 8 * line_bytes + r * 4 + k % 2 * 2 + k % 8 / 4];
        return k % 4 < 2 ? byte & 15 : byte >> 4;
    }
};

struct SixBits {
    static constexpr int64_t inputs = group_inputs, number_bytes = 384;

#if ISA_LANES == 16
    __m512i low, high, nibble;

    INLINE SixBits make() { return {table<32, 64>(0), table<32, 64>(32), _mm512_set1_epi16(15)}; }

    INLINE_MEMBER __m512bh pair(const uint8_t *numbers, int i) const {
        const __m512i four = shifted(Nibbles::line(numbers, i / 4), i % 4 * 4);
        const __m512i two = Nibbles::line(numbers, 4 + i / 8);
        const int at = i % 8 * 2;  // to bits 4 and 5
        const __m512i above = at < 4 ? _mm512_slli_epi16(two, 4 - at) : shifted(two, at - 4);
        // nibble ? four : above; vpermi2w takes the low six bits
        const __m512i index = _mm512_ternarylogic_epi32(nibble, four, above, 0xca);
        return (__m512bh)_mm512_permutex2var_epi16(low, index, high);
    }
#endif

    INLINE int number(const uint8_t *numbers, int64_t k, int64_t r) {
        uint16_t two;
        __builtin_memcpy(&two, numbers + (4 + k / 16) * line_bytes + r * 4 + k % 2 * 2, 2);
        return (Nibbles::number(numbers, k, r) | (two >> (k % 16 / 2 * 2) & 3) << 4) - 32;
    }
};

template <int64_t group>
struct Bytes {
    static constexpr int64_t inputs = group, number_bytes = panel_rows * group;

#if ISA_LANES == 16
    __m512i low[2], high[2];  // bytes of magnitudes 0 .. 127

    INLINE Bytes make() {
        return {{byte_table<0>(0), byte_table<0>(64)}, {byte_table<1>(0), byte_table<1>(64)}};
    }

    // Both pairs of a line have what is before the last step in common.
    INLINE_MEMBER __m512bh pair(const uint8_t *numbers, int i) const {
        const __m512i line = _mm512_loadu_si512(numbers + i / 2 * line_bytes), sign = _mm512_set1_epi8(-128);
        const __m512i magnitude = _mm512_abs_epi8(line);
        const __m512i lower = _mm512_permutex2var_epi8(low[0], magnitude, low[1]);
        const __m512i unsigned_upper = _mm512_permutex2var_epi8(high[0], magnitude, high[1]);
        // upper | line & sign; -128 has a magnitude of 8 bits, of which the table sees 0
        const __m512i upper = _mm512_mask_blend_epi8(_mm512_cmpeq_epi8_mask(line, sign),
                                                     _mm512_ternarylogic_epi32(unsigned_upper, line, sign, 0xf8),
                                                     _mm512_set1_epi8(static_cast<char>(0xc3)));
        return (__m512bh)(i % 2 ? _mm512_unpackhi_epi8(lower, upper) : _mm512_unpacklo_epi8(lower, upper));
    }
#endif

    INLINE int number(const uint8_t *numbers, int64_t k, int64_t r) {
        return static_cast<int8_t>(numbers[k / 4 * line_bytes + r / 4 * 16 + k / 2 % 2 * 8 + r % 4 * 2 + k % 2]);
    }
};

INLINE float f16_to_float(uint16_t half) {
    const uint32_t magnitude = half & 0x7fff, bits = (magnitude << 13) + (magnitude < 0x7c00 ? 0x38000000u : 0x70000000u);
    float value;
    __builtin_memcpy(&value, &bits, 4);
    if (magnitude < 0x400) value = static_cast<float>(magnitude) * 5.9604644775390625e-08f;  // subnormal: 2^-24 each
    return half & 0x8000 ? -value : value;
}

template <class T>
INLINE T element(const uint8_t *line, int64_t r) {
    T value;
    __builtin_memcpy(&value, line + r * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
}

// How the `values` scales of a group lie: its scale, then its minimum if it has one. `at`: value i of all outputs of a
// panel, or of output r; `own`: the group's.

// u8, multiples of the header's factors.
template <int64_t values>
struct Levels {
    static constexpr int64_t factors = values, scale_bytes = values * panel_rows;
    static constexpr bool has_minimum = values == 2;

#if ISA_LANES == 16
    INLINE f32v at(const uint8_t *panel, const uint8_t *own, int64_t i) {
        return load_u8(own + i * panel_rows) * load<f32v>(panel + i * line_bytes);
    }
#endif
    INLINE float at(const uint8_t *panel, const uint8_t *own, int64_t i, int64_t r) {
        return own[i * panel_rows + r] * element<float>(panel + i * line_bytes, r);
    }
};

template <int64_t values>
struct Halves {
    static constexpr int64_t factors = 0, scale_bytes = 2 * values * panel_rows;
    static constexpr bool has_minimum = values == 2;

#if ISA_LANES == 16
    INLINE f32v at(const uint8_t *, const uint8_t *own, int64_t i) { return load_f16(own + i * 2 * panel_rows); }
#endif
    INLINE float at(const uint8_t *, const uint8_t *own, int64_t i, int64_t r) {
        return f16_to_float(element<uint16_t>(own + i * 2 * panel_rows, r));
    }
};

template <int64_t values>
struct Singles {
    static constexpr int64_t factors = 0, scale_bytes = values * line_bytes;
    static constexpr bool has_minimum = values == 2;

#if ISA_LANES == 16
    INLINE f32v at(const uint8_t *, const uint8_t *own, int64_t i) { return load<f32v>(own + i * line_bytes); }
#endif
    INLINE float at(const uint8_t *, const uint8_t *own, int64_t i, int64_t r) {
        return element<float>(own + i * line_bytes, r);
    }
};

struct Int4 : Nibbles, Levels<2> {};
struct Int4F32 : Nibbles, Singles<2> {};
struct Int6 : SixBits, Levels<1> {};
struct Int8 : Bytes<group_inputs>, Halves<1> {};
struct Int8F32 : Bytes<group_inputs>, Singles<2> {};
struct Int8F32By16 : Bytes<short_group_inputs>, Singles<1> {};

// Scale and minimum of one group: of a panel.
#if ISA_LANES == 16

template <class Format>
struct Scales {
    f32v scale, minimum;

    INLINE Scales at(const uint8_t *panel, int64_t group) {
        const uint8_t *own = GroupedPanel<Format>::scales(panel, group);
        return {Format::at(panel, own, 0), Format::has_minimum ? Format::at(panel, own, 1) : f32v{}};
    }
};

#endif

// Of output r.
struct RowScales {
    float scale, minimum;

    template <class Format>
    INLINE RowScales at(const uint8_t *panel, int64_t group, int64_t r) {
        const uint8_t *own = GroupedPanel<Format>::scales(panel, group);
        return {Format::at(panel, own, 0, r), Format::has_minimum ? Format::at(panel, own, 1, r) : 0};
    }
};

// The first `count` inputs of output r of a group, rounded to bf16.
template <class Format>
INLINE void widen_row(const uint8_t *panel, int64_t group, int64_t r, bf16 *out, int64_t count) {
    const auto scales = RowScales::at<Format>(panel, group, r);
    const uint8_t *numbers = GroupedPanel<Format>::numbers(panel, group);
    float wide[Format::inputs];
    for (int64_t k = 0; k < Format::inputs; k++)
        wide[k] = scales.scale * static_cast<float>(Format::number(numbers, k, r)) - scales.minimum;
    for (int64_t k = 0; k < count; k += lanes) store_bf16(out + k, load<f32v>(wide + k), count - k);
}

// total + a group's share: its sum of products, scaled, less its minimum times its sum of x. One rounding each where
// the machine multiplies and adds at once, in every product alike.
template <class Format>
INLINE f32v scaled(f32v sum, f32v scale, f32v minimum, f32v sum_of_x, f32v total) {
#if ISA_LANES == 16
    total = (f32v)_mm512_fmadd_ps((__m512)scale, (__m512)sum, (__m512)total);
    if (Format::has_minimum) total = (f32v)_mm512_fnmadd_ps((__m512)minimum, (__m512)sum_of_x, (__m512)total);
#elif ISA_LANES == 8
    total = (f32v)_mm256_fmadd_ps((__m256)scale, (__m256)sum, (__m256)total);
    if (Format::has_minimum) total = (f32v)_mm256_fnmadd_ps((__m256)minimum, (__m256)sum_of_x, (__m256)total);
#else
    total += scale * sum;
    if (Format::has_minimum) total -= minimum * sum_of_x;
#endif
    return total;
}

// The sum of a group of x, which minima are multiplied with. x: as many values as are left of the row.
template <class Format>
INLINE float sum_of_group(const bf16 *x, int64_t left) {
    f32v sum = {};
    for (int64_t i = 0; i < Format::inputs; i += lanes)
        if (i < left) sum += load_bf16(x + i, left - i);
    return sum_of(sum);
}

}  // namespace
}  // namespace ISA
