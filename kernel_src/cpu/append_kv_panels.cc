// append_kv_panels: rows of K and V into a KV cache in panels, which attention streams without rearranging it.
// k, v bf16 [rows][kv_heads * head_dim], of positions pos, pos + 1 .. The cache is in blocks of 128 positions:
// k_panels bf16 [position / 128][kv_heads][position % 128 / 16][head_dim / 2][position % 16][2]
// v_panels bf16 [position / 128][kv_heads][head_dim / 16][position % 128 / 2][16][2], head_dim padded to 16
#include <cstring>

#include "kernel.h"
#include "panels.h"

static void append_k(const bf16 *k, bf16 *block, int64_t offset, int64_t head_dim) {
    bf16 *to = block + offset / panel_rows * panel_size(head_dim) + offset % panel_rows * 2;
    for (int64_t pair = 0; pair < head_dim / 2; pair++)
        memcpy(to + pair * line_elements, k + 2 * pair, 2 * sizeof(bf16));
}

// The position's partner is 0 until it comes: it is multiplied with 0, and must not be NaN.
static void append_v(const bf16 *v, bf16 *block, int64_t offset, int64_t head_dim) {
    bf16 *line = block + offset / 2 * line_elements;
    for (int64_t d = 0; d < head_dim; d++) {
        bf16 *pair = line + d / panel_rows * panel_size(kv_block_positions) + d % panel_rows * 2;
        pair[offset % 2] = v[d];
        if (offset % 2 == 0) pair[1] = 0;
    }
}

KERNEL void append_kv_panels(const bf16 *k, const bf16 *v, bf16 *k_panels, bf16 *v_panels, int64_t rows,
                             int64_t pos, int64_t kv_heads, int64_t head_dim, Worker &worker) {
    const int64_t padded = panel_count(head_dim) * panel_rows;
    // By panels of positions: no two workers write the same line.
    const int64_t first = pos / panel_rows, panels = panel_count(pos + rows) - first;
    Chunks chunks(worker, panels * kv_heads, 4);
    for (int64_t task, end; chunks.next(task, end);)
        for (; task < end; task++) {
            const int64_t head = task % kv_heads, begin = (first + task / kv_heads) * panel_rows;
            const int64_t last = begin + panel_rows < pos + rows ? begin + panel_rows : pos + rows;
            for (int64_t p = begin > pos ? begin : pos; p < last; p++) {
                const int64_t row = ((p - pos) * kv_heads + head) * head_dim, offset = p % kv_block_positions;
                const int64_t block = (p / kv_block_positions * kv_heads + head) * kv_block_positions;
                append_k(k + row, k_panels + block * head_dim, offset, head_dim);
                append_v(v + row, v_panels + block * padded, offset, head_dim);
            }
        }
}
