// A token's [Q | K | V], x [(HEADS + 2 * KV_HEADS) * HEAD_DIM]: Q rotated (rope.h), and its row of an interleaved cache,
// K rotated: q [HEADS * HEAD_DIM], kv [KV_HEADS][K | V][HEAD_DIM]; table f32 [HEAD_DIM].
#include "rope.h"

extern "C" void AIE_FN(rope_qkv)(const bfloat16 *x, const float *table, bfloat16 *q, bfloat16 *kv) {
    use_nearest_even();
    rotate_heads<HEADS, HEAD_DIM>(x, table, q);
    const bfloat16 *k = x + HEADS * HEAD_DIM, *v = k + KV_HEADS * HEAD_DIM;
    rotate_heads<KV_HEADS, 2 * HEAD_DIM>(k, table, kv);
    for (unsigned head = 0; head < KV_HEADS; ++head, v += HEAD_DIM, kv += 2 * HEAD_DIM)
        for (unsigned d = 0; d < HEAD_DIM; d += L) aie::store_v(kv + HEAD_DIM + d, aie::load_v<L>(v + d));
}
