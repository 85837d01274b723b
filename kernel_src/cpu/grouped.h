// Weights in groups: whole numbers of a few bits, 32 or 16 inputs of one output sharing a scale. Included inside each
// instruction set.
//
// A [N][K] matrix (out, in) is cut into panels of 16 outputs, N padded to a multiple of 16 and K to whole groups with
// zeros. A panel is
//   header   f32 [factors][16]                    what a row's scales are multiples of, where they are whole numbers
//   blocks   scales of as many groups as a line of 64 bytes holds, a line of their minima, then those groups' numbers; the
//            last block may have fewer groups
// A *quad* is four inputs of 16 outputs, a byte each, [16 outputs][4], in the order 0, 2, 1, 3: a line's even bytes are
// a pair of inputs for each output, and so are its odd ones.
//   int4   scale u8 [16] per group, and a quad of minima u8 for four groups: w = d s q - e m, header d and e
//          numbers: four lines, quad 2 i in the low nibbles of line i, quad 2 i + 1 in the high ones
//   int4_f32  scale f32 [16], minimum f32 [16] per group: w = s q - m; numbers as int4
//   int6   scale u8 [16] per group: w = d s (q - 32), header d
//          numbers: the low four bits as int4, then two lines: two bits of quads 4 i .. 4 i + 3, upwards
//   int8   scale f16 [16] per group: w = s (q - 128)
//          numbers: eight lines, a quad each
//   int8_f32  scale f32 [16], minimum f32 [16] per group: w = s (q - 128) - m; numbers as int8
//   int8_f32_16  groups of 16: scale f32 [16] per group: w = s (q - 128); numbers as int8, four lines
//   mxfp4  scale u8 [16] per group: w = 2^(s - 128) t[q], t whole numbers, twice E2M1; numbers as int4
// x is fixed point (fixed_point.h), so that a group's sum of products is a whole number, exact in any order. Where it stays
// one with its scale (int4), it is scaled exactly, by the numbers or the sum; elsewhere in f32. Groups are summed in f32, in
// their order: matrices and vectors do the same.
namespace ISA {
namespace {

constexpr int64_t group_inputs = LAYOUT_GROUP, short_group_inputs = LAYOUT_SHORT_GROUP;
constexpr int64_t quad = LAYOUT_QUAD, sum_vectors = panel_rows / lanes;
static_assert(quad == 4, "four inputs of an output are one lane of vpdpbusd");
static_assert(group_inputs == 32, "four lines of nibbles, or eight quads, are a group");
static_assert(short_group_inputs == 16, "four quads are a short group");
static_assert(fixed_inputs % group_inputs == 0 && fixed_inputs % short_group_inputs == 0, "blocks of x are whole groups");

template <class Format>
INLINE int64_t group_count(int64_t cols) {
    return (cols + Format::inputs - 1) / Format::inputs;
}

// Where number i of a quad is: the order 0, 2, 1, 3.
constexpr int64_t quad_place(int64_t i) { return i % 2 * 2 + i / 2 % 2; }

// Where things are in a panel.
template <class Format>
struct GroupedPanel {
    static constexpr int64_t header = Format::factors * panel_rows * 4;
    static constexpr int64_t block_groups = line_bytes / Format::scale_bytes;
    static constexpr int64_t block_scales = (Format::has_minimum ? 2 : 1) * line_bytes;
    static constexpr int64_t block = block_scales + block_groups * Format::number_bytes;

    static int64_t size(int64_t cols) {
        const int64_t groups = group_count<Format>(cols), rest = groups % block_groups;
        return header + groups / block_groups * block + (rest ? block_scales + rest * Format::number_bytes : 0);
    }
    // Of the block that begins with a group.
    static constexpr int64_t offset(int64_t group) { return header + group / block_groups * block; }
    INLINE const uint8_t *scales(const uint8_t *panel, int64_t group) {
        return panel + offset(group) + group % block_groups * Format::scale_bytes;
    }
    // The line of minima that has a group's.
    INLINE const uint8_t *minima(const uint8_t *panel, int64_t group) { return panel + offset(group) + line_bytes; }
    INLINE const uint8_t *numbers(const uint8_t *panel, int64_t group) {
        return panel + offset(group) + block_scales +
               group % block_groups * Format::number_bytes;
    }
};

// How the numbers of a group of `inputs` lie. `quad_at`: of the outputs whose bytes begin `at` bytes into a line. Numbers
// are stored `zero` above their value, whose magnitude is `most` at most. Of panels times a vector, two are taken at a time
// where it has at most `narrow_inputs`, else `wide_streams`. At most `direct_rows` rows are multiplied with numbers as they lie by
// AVX2: with more, it takes less to widen them once.

struct Nibbles {
    static constexpr int64_t inputs = group_inputs, number_bytes = 256;
    static constexpr int64_t narrow_inputs = 4096;
    static constexpr int wide_streams = 4, direct_rows = 8;
    static constexpr int zero = 0, most = 15;

    INLINE quadv quad_at(const uint8_t *numbers, int i, int64_t at) {
        const quadv line = load<quadv>(numbers + i / 2 * line_bytes + at);
        return (i % 2 ? line >> 4 : line) & 0x0f0f;
    }
};

// The value of a number is in a table.
struct TwiceE2M1 : Nibbles {
    static constexpr int zero = 12, most = 12;

    // Of each byte, a number, its value and `zero`.
    INLINE quadv looked_up(quadv numbers) {
        alignas(16) static constexpr uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if ISA_LANES == 16
        const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)table));
        return (quadv)_mm512_shuffle_epi8(values, (__m512i)numbers);
#elif ISA_LANES == 8
        const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)table));
        return (quadv)_mm256_shuffle_epi8(values, (__m256i)numbers);
#else
        uint8_t bytes[sizeof numbers];
        store(bytes, numbers);
        for (uint8_t &byte : bytes) byte = table[byte];
        return load<quadv>(bytes);
#endif
    }

    INLINE quadv quad_at(const uint8_t *numbers, int i, int64_t at) {
        return looked_up(Nibbles::quad_at(numbers, i, at));
    }
};

struct SixBits {
    static constexpr int64_t inputs = group_inputs, number_bytes = 384;
    static constexpr int64_t narrow_inputs = 4096;
    static constexpr int wide_streams = 8, direct_rows = 4;
    static constexpr int zero = 32, most = 32;

    INLINE quadv quad_at(const uint8_t *numbers, int i, int64_t at) {
        const quadv line = load<quadv>(numbers + (4 + i / 4) * line_bytes + at);
        const int first = i % 4 * 2;  // to bits 4 and 5
        const quadv two = first < 4 ? line << (4 - first) : line >> (first - 4);
        return Nibbles::quad_at(numbers, i, at) | (two & 0x3030);
    }
};

template <int64_t group>
struct Bytes {
    static constexpr int64_t inputs = group, number_bytes = panel_rows * group;
    static constexpr int64_t narrow_inputs = 1024;
    static constexpr int wide_streams = 4, direct_rows = 8;
    static constexpr int zero = 128, most = 128;

    INLINE quadv quad_at(const uint8_t *numbers, int i, int64_t at) {
        return load<quadv>(numbers + i * line_bytes + at);
    }
};

// Of quad i, the pair of inputs in its even bytes, or in its odd ones, as 16 bits. Nibbles take fewer instructions than by way of bytes.
template <class Format>
INLINE quadv pairs_at(const uint8_t *numbers, int i, int half, int64_t at) {
    if constexpr (std::is_base_of_v<Nibbles, Format> && Format::zero == 0) {
        const int shift = i % 2 * 4 + half * 8;
        const quadv above = load<quadv>(numbers + i / 2 * line_bytes + at) >> shift;
        return shift == 12 ? above : above & 0xf;
    } else {
        const quadv four = Format::quad_at(numbers, i, at);
        return half == 0 ? four & 0xff : four >> 8;
    }
}

INLINE i32v load_u8(const uint8_t *p) {
#if ISA_LANES == 16
    return (i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif ISA_LANES == 8
    return (i32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    i32v v;
    for (int64_t i = 0; i < lanes; i++) v[i] = p[i];
    return v;
#endif
}

// Like f16_to_float, of a vector.
INLINE f32v load_f16(const uint8_t *p) {
#if ISA_LANES == 16
    return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif ISA_LANES == 8
    return (f32v)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    const u32v half = widen(load<u16v>(p)), magnitude = half & 0x7fff, shifted = magnitude << 13;
    const f32v normal = (f32v)(shifted + 0x38000000), tiny = whole_to_float((i32v)magnitude) * 0x1p-24f;
    const f32v finite = select((i32v)magnitude < 0x400, tiny, normal);
    const f32v value = select((i32v)magnitude < 0x7c00, finite, (f32v)(shifted | 0x7f800000));
    return (f32v)((u32v)value | (half & 0x8000) << 16);
#endif
}

// How the scale of a group lies, and its minimum if it has one. `at`: those of all outputs of a panel from output `first`
// on, `own`: the group's. `minimum_at`: of the group `index` of a block, in the block's line. In units of `factor` of the
// panel.

// u8, multiples of the header's factors.
template <int64_t values>
struct Levels {
    static constexpr int64_t factors = values, scale_bytes = panel_rows;
    static constexpr bool has_minimum = values == 2;

    INLINE i32v whole_at(const uint8_t *own, int64_t first) { return load_u8(own + first); }
    INLINE f32v at(const uint8_t *own, int64_t first) { return whole_to_float(whole_at(own, first)); }
    INLINE f32v minimum_at(const uint8_t *line, int64_t index, int64_t first) {
        const i32v four = load<i32v>(line + first * quad);
        return whole_to_float(four >> static_cast<int>(8 * quad_place(index)) & 0xff);
    }
};

struct Halves {
    static constexpr int64_t factors = 0, scale_bytes = 2 * panel_rows;
    static constexpr bool has_minimum = false;

    INLINE f32v at(const uint8_t *own, int64_t first) { return load_f16(own + first * 2); }
};

// u8, exponents of two; 255 is NaN.
struct Exponents {
    static constexpr int64_t factors = 0, scale_bytes = panel_rows;
    static constexpr bool has_minimum = false;

    INLINE f32v at(const uint8_t *own, int64_t first) {
        const i32v exponents = load_u8(own + first);
#if ISA_LANES == 16
        const __mmask16 none = _mm512_cmpeq_epi32_mask((__m512i)exponents, _mm512_set1_epi32(255));
        const __m512 powers = _mm512_scalef_ps(_mm512_set1_ps(1.0f), (__m512)whole_to_float(exponents - 128));
        return (f32v)_mm512_mask_mov_ps(powers, none, _mm512_set1_ps(NAN));
#else
        const i32v normal = (exponents - 1) << 23, tiny = (exponents + 1) * 0x00200000, below = exponents < 2;
        return select(exponents == 255, splat(NAN), (f32v)((below & tiny) | (~below & normal)));
#endif
    }
};

template <int64_t values>
struct Singles {
    static constexpr int64_t factors = 0, scale_bytes = line_bytes;
    static constexpr bool has_minimum = values == 2;

    INLINE f32v at(const uint8_t *own, int64_t first) { return load<f32v>(own + first * 4); }
    INLINE f32v minimum_at(const uint8_t *line, int64_t, int64_t first) { return load<f32v>(line + first * 4); }
};

struct Int4 : Nibbles, Levels<2> {};
struct Int4F32 : Nibbles, Singles<2> {};
struct Mxfp4 : TwiceE2M1, Exponents {};
struct Int6 : SixBits, Levels<1> {};
struct Int8 : Bytes<group_inputs>, Halves {};
struct Int8F32 : Bytes<group_inputs>, Singles<2> {};
struct Int8F32By16 : Bytes<short_group_inputs>, Singles<1> {};

// A panel's factor of value i, from output `first` on.
template <class Format>
INLINE f32v factor(const uint8_t *panel, int64_t i, int64_t first) {
    return Format::factors != 0 ? load<f32v>(panel + i * line_bytes + first * 4) : splat(1.0f);
}

// Whether a group's sum is a whole number of 32 bits with its scale, too.
template <class Format>
constexpr bool scaled_whole = Format::factors != 0 && most_fixed * Format::most * 255 * Format::inputs <= INT32_MAX;

// sums f32 [lanes] += a block's total, in its unit.
INLINE void add_block(float *sums, f32v total, float unit) {
    store(sums, multiply_add(splat(unit), total, load<f32v>(sums)));
}

// sums f32 [16] of a panel: of scaled products and of minima times x, both in units of the panel's factors.
template <class Format>
INLINE void finish_sums(const uint8_t *panel, float *products, const float *minima) {
    if (Format::factors == 0 && !Format::has_minimum) return;
#pragma GCC unroll 4
    for (int64_t first = 0; first < panel_rows; first += lanes) {
        f32v sum = load<f32v>(products + first) * factor<Format>(panel, 0, first);
        if (Format::has_minimum)
            sum = multiply_add(-factor<Format>(panel, 1, first), load<f32v>(minima + first), sum);
        store(products + first, sum);
    }
}

// The first `count` inputs of output r of a group, rounded to bf16.
template <class Format>
INLINE void widen_row(const uint8_t *panel, int64_t group, int64_t r, bf16 *out, int64_t count) {
    const int64_t first = r / lanes * lanes, lane = r % lanes;
    using Panel = GroupedPanel<Format>;
    const uint8_t *numbers = Panel::numbers(panel, group);
    const f32v scale = Format::at(Panel::scales(panel, group), first) * factor<Format>(panel, 0, first);
    f32v minimum = {};
    if constexpr (Format::has_minimum)
        minimum = Format::minimum_at(Panel::minima(panel, group), group % Panel::block_groups, first) *
                  factor<Format>(panel, 1, first);
    float wide[Format::inputs];
    for (int64_t k = 0; k < Format::inputs; k++) {
        uint8_t bytes[lanes * quad];
        store(bytes, Format::quad_at(numbers, k / quad, first * quad));
        wide[k] = scale[lane] * static_cast<float>(bytes[lane * quad + quad_place(k)] - Format::zero) - minimum[lane];
    }
    for (int64_t k = 0; k < count; k += lanes) store_bf16(out + k, load<f32v>(wide + k), count - k);
}

}  // namespace
}  // namespace ISA
