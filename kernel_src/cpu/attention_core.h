// Attention of query rows over blocks of the KV cache, with an online softmax. Included inside each
// instruction set.
//
// A block of one KV head's K and V is brought into panels (panels.h), once for all query rows that share
// the head: K with positions as outputs, V with positions as columns. Both products are then tile().
// What happens to a row depends on its positions alone, not on the rows it is computed with.
namespace ISA {
namespace {

constexpr int64_t block_positions = 128;

struct AttentionShape {
    int64_t heads, kv_heads, head_dim;
    int64_t kv_step;  // elements from one KV head to the next: head_dim, or twice that if V lies between
    int64_t group() const { return heads / kv_heads; }
    int64_t dim_panels() const { return panel_count(head_dim); }
    int64_t padded_dim() const { return dim_panels() * panel_rows; }
    int64_t kv_stride() const { return kv_heads * kv_step; }
    // Scores are kept in units of log2, so that exp2 suffices.
    float scale() const { return 1.44269504f / sqrtf(static_cast<float>(head_dim)); }
};

// One KV head in the cache, from position 0 on.
struct KvHead {
    const bf16 *k, *v;
};

// The result for a row: the sum of exp2(score - top); that of the same weighted with V is kept apart.
struct AttentionRow {
    float top, sum;
};

// While a row is in the making, its sum is kept by lanes. The top follows the largest score only when that
// is exceeded by more than this, in powers of two: nothing overflows, and the sums are seldom rescaled.
constexpr float top_slack = 8.0f;

// Scratch of one worker, cut out of one allocation.
struct AttentionScratch {
    bf16 *q;         // [rows][head_dim]
    bf16 *k_panels;  // [block_positions] x [head_dim]
    bf16 *v_panels;  // [head_dim] x [block_positions]
    float *scores;   // [tile_rows][block_positions]
    bf16 *weights;   // [tile_rows][block_positions]
    float *out;      // [rows][padded_dim]
    float *sums;     // [rows][lanes]
    float *tops;     // [rows]

    static AttentionScratch make(const AttentionShape &shape, int64_t rows, Worker &worker) {
        const int64_t dim = shape.padded_dim(), block = block_positions;
        const int64_t sizes[] = {rows * dim * 2,      block * dim * 2, block * dim * 2,  tile_rows * block * 4,
                                 tile_rows * block * 2, rows * dim * 4,  rows * lanes * 4, rows * 4};
        int64_t starts[8], total = 0;
        for (int i = 0; i < 8; i++) {
            starts[i] = total;
            total += (sizes[i] + 63) / 64 * 64;
        }
        char *base = worker.scratch<char>(total);
        return {reinterpret_cast<bf16 *>(base + starts[0]),  reinterpret_cast<bf16 *>(base + starts[1]),
                reinterpret_cast<bf16 *>(base + starts[2]),  reinterpret_cast<float *>(base + starts[3]),
                reinterpret_cast<bf16 *>(base + starts[4]),  reinterpret_cast<float *>(base + starts[5]),
                reinterpret_cast<float *>(base + starts[6]), reinterpret_cast<float *>(base + starts[7])};
    }
};

// Lines of rows that will be needed, brought into L2 one by one in the order of memory, which is what it
// delivers fastest, in between other work.
class Lines {
public:
    Lines(const bf16 *first, int64_t rows, int64_t stride, int64_t width)
        : row_(first), rows_(rows), stride_(stride), width_(width) {}

    void fetch() {
        if (rows_ <= 0) return;
        __builtin_prefetch(row_ + column_, 0, 2);
        column_ += 32;
        if (column_ >= width_) {
            column_ = 0;
            row_ += stride_;
            rows_--;
        }
    }

    void fetch(int64_t count) {
        while (count-- > 0) fetch();
    }

    int64_t left() const { return rows_ * ((width_ + 31) / 32); }

private:
    const bf16 *row_;
    int64_t rows_, stride_, width_, column_ = 0;
};

#if ISA_LANES == 16

// 16 x 16 words: brings together 2, then 4 rows within each quarter, then the quarters.
INLINE void transpose(__m512i *rows) {
    __m512i pairs[16], fours[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i even0 = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0x88);
        const __m512i odd0 = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0xdd);
        const __m512i even8 = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0x88);
        const __m512i odd8 = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0xdd);
        rows[i] = _mm512_shuffle_i32x4(even0, even8, 0x88);
        rows[i + 4] = _mm512_shuffle_i32x4(odd0, odd8, 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(even0, even8, 0xdd);
        rows[i + 12] = _mm512_shuffle_i32x4(odd0, odd8, 0xdd);
    }
}

INLINE __m512i load_row(const bf16 *row, __mmask16 mask, Lines &ahead) {
    ahead.fetch();
    return _mm512_maskz_loadu_epi32(mask, row);
}

// panel[pair][16][2] = `count` <= 16 rows of `pairs` pairs each, `stride` elements apart; other rows 0.
INLINE void pack_k_panel(const bf16 *rows, int64_t stride, int64_t count, int64_t pairs, bf16 *panel, Lines &ahead) {
    for (int64_t first = 0; first < pairs; first += 16, rows += 32, panel += 16 * line_elements) {
        const int64_t left = pairs - first < 16 ? pairs - first : 16;
        const __mmask16 mask = static_cast<__mmask16>((1u << left) - 1);
        __m512i square[16];
        if (count == 16) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < 16; i++) square[i] = load_row(rows + i * stride, mask, ahead);
        } else {
#pragma GCC unroll 16
            for (int64_t i = 0; i < 16; i++)
                square[i] = i < count ? load_row(rows + i * stride, mask, ahead) : _mm512_setzero_si512();
        }
        transpose(square);
        if (left == 16) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < 16; i++) _mm512_storeu_si512(panel + i * line_elements, square[i]);
        } else {
#pragma GCC unroll 16
            for (int64_t i = 0; i < 16; i++)
                if (i < left) _mm512_storeu_si512(panel + i * line_elements, square[i]);
        }
    }
}

// Two rows' 32 or fewer elements to two lines of 16 x 2, `step` elements apart.
INLINE void interleave(__m512i even, __m512i odd, bool both, bf16 *lines, int64_t step) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38,
                                         6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(lines, _mm512_permutex2var_epi16(even, low, odd));
    if (both) _mm512_storeu_si512(lines + step, _mm512_permutex2var_epi16(even, high, odd));
}

INLINE __m512i load_row(const bf16 *row, __mmask32 mask, Lines &ahead) {
    ahead.fetch();
    return _mm512_maskz_loadu_epi16(mask, row);
}

// lines[d / 16][row / 2][16][2] = `count` rows of V, panels `step` elements apart; an odd last row's partner 0.
INLINE void pack_v_panel(const bf16 *rows, int64_t stride, int64_t count, int64_t dim, bf16 *lines, int64_t step,
                         Lines &ahead) {
    for (int64_t d = 0; d < dim; d += 32, lines += 2 * step) {
        const __mmask32 mask = dim - d < 32 ? (1u << (dim - d)) - 1 : ~0u;
        const bool both = dim - d > 16;
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

INLINE void pack_k_panel(const bf16 *rows, int64_t stride, int64_t count, int64_t pairs, bf16 *panel, Lines &ahead) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t pair = 0; pair < pairs; pair++) {
            const bf16 *from = rows + i * stride + 2 * pair;
            if (pair % 16 == 0) ahead.fetch();
            memcpy(panel + pair * line_elements + 2 * i, from, 2 * sizeof(bf16));
        }
}

INLINE void pack_v_panel(const bf16 *rows, int64_t stride, int64_t count, int64_t dim, bf16 *lines, int64_t step,
                         Lines &ahead) {
    for (int64_t i = 0; i < count; i += 2, rows += 2 * stride, lines += line_elements)
        for (int64_t d = 0; d < dim; d += lanes) {
            if (d % 32 == 0) ahead.fetch(2);
            const u32v low = (u32v)load_bf16(rows + d, dim - d) >> 16;
            const u32v high = i + 1 < count ? (u32v)load_bf16(rows + stride + d, dim - d) : u32v{};
            store(lines + d / panel_rows * step + d % panel_rows * 2, low | high);
        }
}

#endif

class AttentionTile {
public:
    AttentionTile(const AttentionShape &shape, int64_t max_rows, Worker &worker)
        : shape_(shape), scratch_(AttentionScratch::make(shape, max_rows, worker)) {}

    // Takes in `heads` query heads of each of `positions` positions, `stride` apart, as the tile's rows.
    void start(const bf16 *q, int64_t positions, int64_t heads, int64_t stride) {
        const int64_t rows = positions * heads, width = heads * shape_.head_dim;
        for (int64_t p = 0; p < positions; p++)
            memcpy(scratch_.q + p * width, q + p * stride, width * sizeof(bf16));
        memset(scratch_.out, 0, rows * shape_.padded_dim() * sizeof(float));
        memset(scratch_.sums, 0, rows * lanes * sizeof(float));
        for (int64_t r = 0; r < rows; r++) scratch_.tops[r] = -INFINITY;
    }

    // The tile's rows from `row` on, which are at positions first, first + 1 .. with a group of heads each,
    // attend positions begin .. begin + count - 1 of a block, as far as they are not later than their own.
    // Meanwhile, lines of K and V are fetched.
    void attend(KvHead kv, int64_t row, int64_t rows, int64_t first, int64_t begin, int64_t count, Lines k_ahead,
                Lines v_ahead) {
        Lines none(nullptr, 0, 0, 0);
        const bool few = rows <= tile_rows;  // packing is most of the work
        for (int64_t i = 0; i < count; i += panel_rows)
            pack_panel(kv, begin + i, count - i < panel_rows ? count - i : panel_rows, i, few ? k_ahead : none,
                       few ? v_ahead : none);
        const int64_t tiles = (rows + tile_rows - 1) / tile_rows, share = k_ahead.left() / tiles + 1;
        for (int64_t done = 0; done < rows; done += tile_rows) {
            attend_rows(row + done, rows - done < tile_rows ? rows - done : tile_rows, first, done, begin, count);
            k_ahead.fetch(share);
            v_ahead.fetch(share);
        }
    }

    AttentionRow state(int64_t r) const {
        return {scratch_.tops[r], sum_of(load<f32v>(scratch_.sums + r * lanes))};
    }
    const float *sums(int64_t r) const { return scratch_.out + r * shape_.padded_dim(); }

private:
    // 16 positions of K and V, which are at `offset` within their block. K [offset / 16][d / 2][16][2];
    // V [d / 16][offset / 2][16][2], an odd last position's partner 0.
    void pack_panel(KvHead kv, int64_t begin, int64_t count, int64_t offset, Lines &k_ahead,
                    Lines &v_ahead) {
        const int64_t stride = shape_.kv_stride(), dim = shape_.head_dim;
        pack_k_panel(kv.k + begin * stride, stride, count, dim / 2, scratch_.k_panels + offset * dim,
                     k_ahead);
        pack_v_panel(kv.v + begin * stride, stride, count, dim, scratch_.v_panels + offset / 2 * line_elements,
                     panel_size(block_positions), v_ahead);
    }

    // `rows` <= tile_rows rows, the first of which is the tile's row `row` and the head's row `offset`.
    void attend_rows(int64_t row, int64_t rows, int64_t first, int64_t offset, int64_t begin, int64_t count) {
        int64_t visible[tile_rows], most = 0;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t seen = first + (offset + r) / shape_.group() + 1 - begin;
            visible[r] = seen < 0 ? 0 : seen < count ? seen : count;
            if (visible[r] > most) most = visible[r];
        }
        if (most == 0) return;
        score(row, rows, most);
        for (int64_t r = 0; r < rows; r++)
            weigh(row + r, visible[r], most, scratch_.scores + r * block_positions,
                  scratch_.weights + r * block_positions);
        add_values(row, rows, most);
    }

    // scores = q @ k^T.
    void score(int64_t row, int64_t rows, int64_t positions) {
        const int64_t size = panel_size(shape_.head_dim);
        TileArgs args;
        args.x = scratch_.q + row * shape_.head_dim;
        args.x_stride = shape_.head_dim;
        args.pairs = shape_.head_dim / 2;
        args.out_stride = block_positions;
        args.accumulate = false;
        for (int64_t panel = 0; panel < panel_count(positions); panel += tile_panels) {
            for (int64_t p = 0; p < tile_panels; p++) args.panels[p] = scratch_.k_panels + (panel + p) * size;
            args.out = scratch_.scores + panel * panel_rows;
            tile_of_rows<tile_panels>(rows, args);
        }
    }

    // Scores of the first `count` positions to bf16 weights, 0 for the others up to `most`.
    void weigh(int64_t r, int64_t count, int64_t most, float *scores, bf16 *weights) {
        for (int64_t i = count; i % lanes != 0; i++) scores[i] = -INFINITY;
        if (count > 0) raise_top(r, count, scores);
        const float top = scratch_.tops[r], scale = shape_.scale();
        f32v sum = load<f32v>(scratch_.sums + r * lanes);
        int64_t i = 0;
        for (; i < count; i += lanes) {
            const f32v weight = exp2(load<f32v>(scores + i) * scale - top);
            sum += weight;
            store_bf16(weights + i, weight);
        }
        store(scratch_.sums + r * lanes, sum);
        for (; i < most; i += lanes) store_bf16(weights + i, f32v{});
    }

    void raise_top(int64_t r, int64_t count, const float *scores) {
        f32v tops = load<f32v>(scores);
        for (int64_t i = lanes; i < count; i += lanes) tops = max(tops, load<f32v>(scores + i));
        const float top = max_of(tops) * shape_.scale(), before = scratch_.tops[r];
        if (!(top > before + top_slack)) return;
        scratch_.tops[r] = top;
        if (before == -INFINITY) return;
        const float factor = exp2f(before - top);
        float *out = scratch_.out + r * shape_.padded_dim(), *sum = scratch_.sums + r * lanes;
        for (int64_t d = 0; d < shape_.padded_dim(); d += lanes) store(out + d, load<f32v>(out + d) * factor);
        store(sum, load<f32v>(sum) * factor);
    }

    // out += weights @ v.
    void add_values(int64_t row, int64_t rows, int64_t positions) {
        const int64_t size = panel_size(block_positions), panels = shape_.dim_panels();
        TileArgs args;
        args.x = scratch_.weights;
        args.x_stride = block_positions;
        args.pairs = pair_count(positions);
        args.out_stride = shape_.padded_dim();
        args.accumulate = true;
        for (int64_t panel = 0; panel < panels;) {
            args.out = scratch_.out + row * shape_.padded_dim() + panel * panel_rows;
            for (int64_t p = 0; p < tile_panels && panel + p < panels; p++)
                args.panels[p] = scratch_.v_panels + (panel + p) * size;
            if (panel + tile_panels <= panels) {
                tile_of_rows<tile_panels>(rows, args);
                panel += tile_panels;
            } else {
                tile_of_rows<1>(rows, args);
                panel++;
            }
        }
    }

    AttentionShape shape_;
    AttentionScratch scratch_;
};

}  // namespace
}  // namespace ISA
