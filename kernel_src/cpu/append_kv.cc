// append_kv: one position's K and V into row pos of a cache that keeps both of a head together.
// k, v bf16 [kv_heads * head_dim]; kv bf16 [>= pos + 1][kv_heads][2][head_dim]. A few KiB: one chunk.
#include <cstring>

#include "kernel.h"

KERNEL void append_kv(const bf16 *k, const bf16 *v, bf16 *kv, int64_t pos, int64_t kv_heads,
                      int64_t head_dim, Worker &worker) {
    bf16 *row = kv + pos * kv_heads * 2 * head_dim;
    Chunks chunks(worker, kv_heads, kv_heads);
    for (int64_t head, end; chunks.next(head, end);)
        for (; head < end; head++) {
            memcpy(row + 2 * head * head_dim, k + head * head_dim, head_dim * sizeof(bf16));
            memcpy(row + (2 * head + 1) * head_dim, v + head * head_dim, head_dim * sizeof(bf16));
        }
}
