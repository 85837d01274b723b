// Attention of a token (flash_attention.h): the queries are the MEMBERS heads of a group, all at one position, of which
// the last block may have fewer than it has rows. rows bf16 [HEADS][HD], behind them the position, i32; out bf16
// [MEMBERS][HD].
#define SAME_ROW
#include "flash_attention.h"

static_assert(MEMBERS <= QR && QR < MEMBERS + EDGE);

extern "C" void AIE_FN(ta_init)(const bfloat16 *rows, int32 group, bfloat16 *q, float *acc, float *stats) {
    rows += group * MEMBERS * HD;
    for (unsigned query = 0; query < QR; query += EDGE)
        for (unsigned d = 0; d < HD; d += EDGE, q += BLOCK) {
            aie::vector<bfloat16, BLOCK> block = aie::zeros<bfloat16, BLOCK>();
            unrolled<EDGE>([&](auto r) {
                if (query + r < MEMBERS) block.insert(r, aie::load_v<EDGE>(rows + (query + r) * HD + d));
            });
            aie::store_v(q, aie::transpose(block, EDGE, EDGE));
        }
    begin(acc, stats);
}

// Of keys behind the token's nothing is known.
extern "C" void AIE_FN(ta_step)(const bfloat16 *rows, int32 k_row, const bfloat16 *q, const bfloat16 *kv, float *acc,
                                float *stats, float *work) {
    attend(*reinterpret_cast<const int32 *>(rows + HEADS * HD), k_row, q, kv, acc, stats, work);
}

extern "C" void AIE_FN(ta_out)(float *acc, const float *stats, bfloat16 *q, bfloat16 *out) {
    finish(acc, stats, q);
    for (unsigned query = 0; query < QR; query += EDGE)
        for (unsigned d = 0; d < HD; d += EDGE, q += BLOCK) {
            const aie::vector<bfloat16, BLOCK> block = aie::load_v<BLOCK>(q);
            unrolled<EDGE>([&](auto r) {
                if (query + r < MEMBERS)
                    aie::store_v(out + (query + r) * HD + d, block.template extract<EDGE>(r));
            });
        }
}
