// Attention over a KV cache in panels of one format (kv_format.h), and what appends to it. A file for a format defines FORMAT,
// the format's struct, and NAMED(kernel), the kernel's name after the format's, and includes this.
//   flash_attention_panels   of rows pos .. pos + seq - 1, q and out bf16 [seq][heads * head_dim] (flash_attention.h)
//   decode_attention_panels  of the row at position pos, q and out bf16 [heads * head_dim] (decode_attention.h)
//   both also as _sinks, with sinks bf16 [heads]: scores without values
//   append_kv_panels         k and v bf16 [rows][kv_heads * head_dim], from position pos on (append_kv_panels.h)
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
#include "kv_cache.h"
#include "append_kv_panels.h"
#include "flash_attention.h"
#include "decode_attention.h"

using Number = ISA::FORMAT::Number;

KERNEL void NAMED(flash_attention_panels)(const bf16 *q, const Number *k_panels, const Number *v_panels, bf16 *out,
                                          int64_t seq, int64_t pos, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                          float scalar, int64_t sees, const int32_t *blocks, Worker &worker) {
    const ISA::AttentionShape shape = {heads, kv_heads, head_dim, scalar, sees};
    ISA::flash_attention<ISA::FORMAT>(q, k_panels, v_panels, out, seq, pos, shape, blocks, worker);
}

KERNEL void NAMED(decode_attention_panels)(const bf16 *q, const Number *k_panels, const Number *v_panels, bf16 *out,
                                           int64_t pos, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                           float scalar, int64_t sees, const int32_t *blocks, Worker &worker) {
    const ISA::AttentionShape shape = {heads, kv_heads, head_dim, scalar, sees};
    ISA::decode_attention(shape, q, ISA::KvPanels<ISA::FORMAT>(shape, k_panels, v_panels, blocks), out, pos, worker);
}

KERNEL void NAMED(flash_attention_panels_sinks)(const bf16 *q, const Number *k_panels, const Number *v_panels,
                                                const bf16 *sinks, bf16 *out, int64_t seq, int64_t pos, int64_t heads,
                                                int64_t kv_heads, int64_t head_dim, float scalar, int64_t sees,
                                                const int32_t *blocks, Worker &worker) {
    const ISA::AttentionShape shape = {heads, kv_heads, head_dim, scalar, sees, sinks};
    ISA::flash_attention<ISA::FORMAT>(q, k_panels, v_panels, out, seq, pos, shape, blocks, worker);
}

KERNEL void NAMED(decode_attention_panels_sinks)(const bf16 *q, const Number *k_panels, const Number *v_panels,
                                                 const bf16 *sinks, bf16 *out, int64_t pos, int64_t heads,
                                                 int64_t kv_heads, int64_t head_dim, float scalar, int64_t sees,
                                                 const int32_t *blocks, Worker &worker) {
    const ISA::AttentionShape shape = {heads, kv_heads, head_dim, scalar, sees, sinks};
    ISA::decode_attention(shape, q, ISA::KvPanels<ISA::FORMAT>(shape, k_panels, v_panels, blocks), out, pos, worker);
}

KERNEL void NAMED(append_kv_panels)(const bf16 *k, const bf16 *v, Number *k_panels, Number *v_panels, int64_t rows,
                                    int64_t pos, int64_t kv_heads, int64_t head_dim, const int32_t *blocks, Worker &worker) {
    ISA::append<ISA::FORMAT>(k, v, k_panels, v_panels, rows, pos, kv_heads, head_dim, blocks, worker);
}
