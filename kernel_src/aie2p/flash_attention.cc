// Causal attention of a prompt's rows (flash_attention.h).
#include "flash_attention.h"

static_assert(LAYOUT_HEAD_POSITION == EDGE, "a block's row");

#if KV_BITS == 8
using Cached = int8;
#else
using Cached = bfloat16;
#endif

extern "C" void AIE_FN(fa_init)(bfloat16 *__restrict q, float *__restrict acc, float *__restrict stats) {
    use_nearest_even();
#if KV_BITS == 8
    begin(q, acc, stats);
#else
    for (unsigned query = 0; query < QUERY_BLOCKS; ++query, q += Q_BLOCKS * BLOCK)
        for (unsigned i = 0; i < DIM_BLOCKS * BLOCK; i += BLOCK)
            aie::store_v(q + i, prepared(aie::load_v<BLOCK>(q + i)));
    begin(acc, stats);
#endif
}

extern "C" void AIE_FN(fa_step)(int32 k_row, const bfloat16 *__restrict q, const Cached *__restrict kv,
                                float *__restrict acc, float *__restrict stats, float *__restrict work) {
    attend(*reinterpret_cast<const int32 *>(q + DIM_BLOCKS * BLOCK), k_row, q, kv, acc, stats, work);
}

extern "C" void AIE_FN(fa_out)(float *__restrict acc, float *__restrict stats, bfloat16 *__restrict q) {
    finish(acc, stats, q);
}
