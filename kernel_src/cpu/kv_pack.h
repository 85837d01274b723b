// Rows of K and V in bf16 into panels. Included inside each instruction set.
namespace ISA {
namespace {

#if ISA_LANES == 16

static_assert(panel_rows == lanes, "a square of words, one register for each row of a panel, is what is transposed");

// 16 x 16 words: brings together 2, then 4 rows within each quarter, then the quarters.
INLINE void transpose(i32v *rows) {
    i32v pairs[lanes], fours[lanes];
#pragma GCC unroll 8
    for (int i = 0; i < lanes; i += 2) {
        pairs[i] = low_words(rows[i], rows[i + 1]);
        pairs[i + 1] = high_words(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < lanes; i += 4) {
        fours[i] = low_pairs(pairs[i], pairs[i + 2]);
        fours[i + 1] = high_pairs(pairs[i], pairs[i + 2]);
        fours[i + 2] = low_pairs(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = high_pairs(pairs[i + 1], pairs[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const i32v even0 = even_parts(fours[i], fours[i + 4]), odd0 = odd_parts(fours[i], fours[i + 4]);
        const i32v even8 = even_parts(fours[i + 8], fours[i + 12]), odd8 = odd_parts(fours[i + 8], fours[i + 12]);
        rows[i] = even_parts(even0, even8);
        rows[i + 4] = even_parts(odd0, odd8);
        rows[i + 8] = odd_parts(even0, even8);
        rows[i + 12] = odd_parts(odd0, odd8);
    }
}

INLINE __m512i load_row(const bf16 *row, __mmask16 mask, int64_t ahead) {
    __builtin_prefetch(row + ahead, 0, 2);
    return _mm512_maskz_loadu_epi32(mask, row);
}

// panel[pair][16][2] = `count` <= panel_rows rows of `pairs` pairs each, `stride` elements apart; other rows 0.
// Fetches what lies `ahead` elements behind each row.
INLINE void pack_k(const bf16 *rows, int64_t stride, int64_t count, int64_t pairs, bf16 *panel, int64_t ahead) {
    for (int64_t first = 0; first < pairs; first += lanes, rows += 2 * lanes, panel += lanes * line_elements) {
        const int64_t left = pairs - first < lanes ? pairs - first : lanes;
        const __mmask16 mask = static_cast<__mmask16>((1u << left) - 1);
        i32v square[panel_rows];
        if (count == panel_rows) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < panel_rows; i++) square[i] = (i32v)load_row(rows + i * stride, mask, ahead);
        } else {
#pragma GCC unroll 16
            for (int64_t i = 0; i < panel_rows; i++)
                square[i] = i < count ? (i32v)load_row(rows + i * stride, mask, ahead) : i32v{};
        }
        transpose(square);
#pragma GCC unroll 16
        for (int64_t i = 0; i < lanes; i++)
            if (i < left) store(panel + i * line_elements, square[i]);
    }
}

// Two rows' elements, for as many as two panels, to a line of 16 x 2 each, `step` elements apart.
INLINE void interleave(__m512i even, __m512i odd, bool both, bf16 *lines, int64_t step) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                                         6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(lines, _mm512_permutex2var_epi16(even, low, odd));
    if (both) _mm512_storeu_si512(lines + step, _mm512_permutex2var_epi16(even, high, odd));
}

INLINE __m512i load_row(const bf16 *row, __mmask32 mask, int64_t ahead) {
    __builtin_prefetch(row + ahead, 0, 2);
    return _mm512_maskz_loadu_epi16(mask, row);
}

// lines[d / 16][row / 2][16][2] = `count` rows of V, panels `step` elements apart; an odd last row's partner 0.
INLINE void pack_v(const bf16 *rows, int64_t stride, int64_t count, int64_t dim, bf16 *lines, int64_t step,
                   int64_t ahead) {
    for (int64_t d = 0; d < dim; d += 2 * panel_rows, lines += 2 * step) {
        const __mmask32 mask = dim - d < 2 * panel_rows ? (1u << (dim - d)) - 1 : ~0u;
        const bool both = dim - d > panel_rows;
        int64_t i = 0;
        for (; i + 2 <= count; i += 2) {
            const bf16 *even = rows + i * stride + d;
            interleave(load_row(even, mask, ahead), load_row(even + stride, mask, ahead), both,
                       lines + i / 2 * line_elements, step);
        }
        if (i < count)
            interleave(load_row(rows + i * stride + d, mask, ahead), _mm512_setzero_si512(), both,
                       lines + i / 2 * line_elements, step);
    }
}

#else

INLINE void pack_k(const bf16 *rows, int64_t stride, int64_t count, int64_t pairs, bf16 *panel, int64_t) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t pair = 0; pair < pairs; pair++)
            memcpy(panel + pair * line_elements + 2 * i, rows + i * stride + 2 * pair, 2 * sizeof(bf16));
}

INLINE void pack_v(const bf16 *rows, int64_t stride, int64_t count, int64_t dim, bf16 *lines, int64_t step, int64_t) {
    for (int64_t i = 0; i < count; i += 2, rows += 2 * stride, lines += line_elements)
        for (int64_t d = 0; d < dim; d += lanes) {
            const u32v low = (u32v)load_bf16(rows + d, dim - d) >> 16;
            const u32v high = i + 1 < count ? (u32v)load_bf16(rows + stride + d, dim - d) : u32v{};
            store(lines + d / panel_rows * step + d % panel_rows * 2, low | high);
        }
}

#endif

}  // namespace
}  // namespace ISA
