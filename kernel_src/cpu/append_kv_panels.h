// Rows of K and V into a KV cache in panels, which attention streams without rearranging it. Included inside each
// instruction set.
// k, v bf16 [rows][kv_heads * head_dim], of positions pos, pos + 1 .. The cache is in blocks of 128 positions, those of
// positions 128 i .. at blocks[i]:
// k_panels [block][kv_heads][position % 128 / 16][head_dim / 2][position % 16][2]
// v_panels [block][kv_heads][head_dim / 16][position % 128 / 2][16][2], head_dim padded to 16
// In bf16; or in i8, and in front of each [block][kv_heads] the positions' scales, f32 [128]. A row of a head is
// rounded to multiples of its scale, the largest magnitude / 127, halves to even.
namespace ISA {
namespace {

// Asks for the lines that a position is written to: one by one, each write would wait for memory.
template <class Number>
void fetch(const Number *k, const Number *v, int64_t head_dim) {
    for (int64_t pair = 0; pair < head_dim / 2; pair++) __builtin_prefetch(k + pair * line_elements, 1);
    for (int64_t d = 0; d < head_dim; d += panel_rows) __builtin_prefetch(v + d * kv_block_positions, 1);
}

template <class Number>
void append_k(const Number *k, Number *to, int64_t head_dim) {
    for (int64_t pair = 0; pair < head_dim / 2; pair++)
        memcpy(to + pair * line_elements, k + 2 * pair, 2 * sizeof(Number));
}

// The position's partner is 0 until it comes: it is multiplied with 0, and must not be NaN.
template <class Number>
void append_v(const Number *v, Number *line, int64_t offset, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d++) {
        Number *pair = line + d / panel_rows * panel_size(kv_block_positions) + d % panel_rows * 2;
        pair[offset % 2] = v[d];
        if (offset % 2 == 0) pair[1] = 0;
    }
}

template <class Format>
void append(const bf16 *k, const bf16 *v, typename Format::Number *k_cache, typename Format::Number *v_cache,
                   int64_t rows, int64_t pos, int64_t kv_heads, int64_t head_dim, const int32_t *blocks, Worker &worker) {
    const int64_t padded = panel_count(head_dim) * panel_rows, stride = kv_heads * head_dim;
    typename Format::Number *const own = worker.scratch<typename Format::Number>(padded);
    // By panels of positions: no two workers write the same line.
    const int64_t first = pos / panel_rows, panels = panel_count(pos + rows) - first;
    Chunks chunks(worker, panels * kv_heads, 1);
    for (int64_t task, end; chunks.next(task, end);)
        for (; task < end; task++) {
            const int64_t head = task % kv_heads, begin = (first + task / kv_heads) * panel_rows;
            const int64_t last = begin + panel_rows < pos + rows ? begin + panel_rows : pos + rows;
            for (int64_t p = begin > pos ? begin : pos; p < last; p++) {
                const int64_t row = (p - pos) * stride + head * head_dim, offset = p % kv_block_positions;
                const int64_t index = (blocks[p / kv_block_positions] * kv_heads + head) * kv_block_positions;
                auto *k_block = k_cache + index * (head_dim + Format::row_elements);
                auto *v_block = v_cache + index * (padded + Format::row_elements);
                auto *to_k = k_block + Format::header + offset / panel_rows * panel_size(head_dim);
                auto *to_v = v_block + Format::header + offset / 2 * line_elements;
                if constexpr (std::is_same_v<typename Format::Number, bf16>) {  // which is not rounded row by row
                    if (last - p == panel_rows) {
                        pack_k(k + row, stride, panel_rows, head_dim / 2, to_k, head_dim);
                        pack_v(v + row, stride, panel_rows, head_dim, to_v, panel_size(kv_block_positions), head_dim);
                        break;
                    }
                }
                fetch(to_k, to_v, head_dim);
                append_k(Format::stored(k + row, head_dim, own, k_block, offset), to_k + offset % panel_rows * 2, head_dim);
                append_v(Format::stored(v + row, head_dim, own, v_block, offset), to_v, offset, head_dim);
            }
        }
}

}  // namespace
}  // namespace ISA
