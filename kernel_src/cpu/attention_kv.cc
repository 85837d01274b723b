// decode_attention_kv: attention of the one query row at position pos over the positions up to pos that it sees of a KV cache in rows that keep
// K and V of a head together (append_kv.cc): kv bf16 [>= pos + 1][kv_heads][2][head_dim]; else as decode_attention.h has it.
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
#include "decode_attention.h"

KERNEL void decode_attention_kv(const bf16 *q, const bf16 *kv, bf16 *out, int64_t pos, int64_t heads,
                                int64_t kv_heads, int64_t head_dim, float scalar, int64_t sees,
                                Worker &worker) {
    const ISA::AttentionShape shape = {heads, kv_heads, head_dim, scalar, sees};
    ISA::decode_attention(shape, q, ISA::KvRows(shape, kv), out, pos, worker);
}
