// Causal attention of a prompt's rows (flash_attention.h).
#include "flash_attention.h"

extern "C" void AIE_FN(fa_init)(bfloat16 *q, float *acc, float *stats) {
    for (unsigned i = 0; i < QR * HD; i += BLOCK)
        aie::store_v(q + i, aie::transpose(aie::load_v<BLOCK>(q + i), EDGE, EDGE));
    begin(acc, stats);
}

extern "C" void AIE_FN(fa_step)(int32 q_row, int32 k_row, const bfloat16 *q, const bfloat16 *kv, float *acc,
                                float *stats, float *work) {
    attend(q_row, k_row, q, kv, acc, stats, work);
}

extern "C" void AIE_FN(fa_out)(float *acc, const float *stats, bfloat16 *q) { finish(acc, stats, q); }
