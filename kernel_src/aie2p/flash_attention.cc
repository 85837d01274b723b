// Causal attention of a prompt's rows (flash_attention.h).
#include "flash_attention.h"

static_assert(LAYOUT_HEAD_POSITION == EDGE, "a block's row");

extern "C" void AIE_FN(fa_init)(bfloat16 *q, float *acc, float *stats) {
    use_nearest_even();
    for (unsigned query = 0; query < QUERY_BLOCKS; ++query, q += Q_BLOCKS * BLOCK)
        for (unsigned i = 0; i < DIM_BLOCKS * BLOCK; i += BLOCK)
            aie::store_v(q + i, prepared(aie::load_v<BLOCK>(q + i)));
    begin(acc, stats);
}

extern "C" void AIE_FN(fa_step)(int32 k_row, const bfloat16 *q, const bfloat16 *kv, float *acc, float *stats,
                                float *work) {
    attend(*reinterpret_cast<const int32 *>(q + DIM_BLOCKS * BLOCK), k_row, q, kv, acc, stats, work);
}

extern "C" void AIE_FN(fa_out)(float *acc, const float *stats, bfloat16 *q) { finish(acc, stats, q); }
