// int8_rows_decode_attention_kv: attention_kv.cc over a cache in 8 bits, kv i8 [>= pos + 1][kv_heads], each as Int8Head has it.
// int8_rows_append_kv: one position's K and V, bf16 [kv_heads * head_dim], into row pos of it, in numbers.
#include "vec.h"
#include "tile.h"
#include "fixed_point.h"
#include "pairs.h"
#include "kv_format.h"
#include "streams.h"
#if ISA_AMX
#include "amx.h"
#include "attention_tiles.h"
#endif
#include "attention_core.h"
#include "kv_pack.h"
#include "append_kv_panels.h"
#include "kv_cache.h"
#include "int8_kv_rows.h"
#include "decode_attention.h"

KERNEL void int8_rows_decode_attention_kv(const bf16 *q, const int8_t *kv, bf16 *out, int64_t pos, int64_t heads,
                                          int64_t kv_heads, int64_t head_dim, float scalar, int64_t sees,
                                          Worker &worker) {
    const ISA::AttentionShape shape = {heads, kv_heads, head_dim, scalar, sees};
    ISA::decode_attention(shape, q, ISA::Int8KvRows(shape, kv), out, pos, worker);
}

KERNEL void int8_rows_append_kv(const bf16 *k, const bf16 *v, int8_t *kv, int64_t pos, int64_t kv_heads,
                                int64_t head_dim, Worker &worker) {
    const ISA::Int8Head head = {head_dim};
    int8_t *const numbers = worker.scratch<int8_t>(head_dim + ISA::lanes);
    Chunks chunks(worker, kv_heads, kv_heads);
    for (int64_t which, end; chunks.next(which, end);)
        for (; which < end; which++) {
            int8_t *const row = kv + (pos * kv_heads + which) * head.bytes();
            memcpy(row, ISA::Int8Kv::stored(k + which * head_dim, head_dim, numbers, row + head.k_scale(), 0), head_dim);
            memcpy(row + head.v(), ISA::Int8Kv::stored(v + which * head_dim, head_dim, numbers, row + head.v_scale(), 0),
                   head_dim);
        }
}
