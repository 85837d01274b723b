// Attention of a token (flash_attention.h): the queries are the MEMBERS heads of a group, all at one position, of which
// the last block may have fewer than it has rows. rows bf16 [HEADS + 2 * KV_HEADS][HD] = Q, K and V before their rotation
// (rope.h); table f32 [HD], and behind it the position, i32; row bf16 [K | V][HD], the group's part of the token's row of
// the cache; out bf16 [MEMBERS][HD]. NORM: heads of Q and K are normed first (rms_norm.h), in place, with weights bf16 [HD] of
// Q and K.
#define SAME_ROW
#define HEAD_DIM HD
#include "flash_attention.h"
#include "rope.h"
#if NORM
#include "rms_norm.h"
#endif

static_assert(MEMBERS <= QR && QR < MEMBERS + EDGE);

namespace {

int32 position_of(const float *table) { return *reinterpret_cast<const int32 *>(table + HD); }

void copy(const bfloat16 *from, unsigned count, bfloat16 *to) {
    for (unsigned d = 0; d < count; d += L) aie::store_v(to + d, aie::load_v<L>(from + d));
}

}  // namespace

#if NORM
extern "C" void AIE_FN(ta_init)(bfloat16 *rows, const bfloat16 *q_norm, const bfloat16 *k_norm, const float *table,
                                int32 group, bfloat16 *q, float *acc, float *stats, bfloat16 *row, float eps) {
#else
extern "C" void AIE_FN(ta_init)(bfloat16 *rows, const float *table, int32 group, bfloat16 *q, float *acc, float *stats,
                                bfloat16 *row) {
#endif
    use_nearest_even();
    bfloat16 *k = rows + (HEADS + group) * HD, *v = k + KV_HEADS * HD;
#if NORM
    norm_rows<1, HD>(k, k_norm, eps);
    norm_rows<MEMBERS, HD>(rows + group * MEMBERS * HD, q_norm, eps);
#endif
    rotate_heads<1, HD>(k, table, row);
    copy(v, HD, row + HD);
    rows += group * MEMBERS * HD;
    rotate_heads<MEMBERS, HD>(rows, table, rows);
    for (unsigned query = 0; query < QR; query += EDGE)
        for (unsigned d = 0; d < HD; d += EDGE, q += BLOCK) {
            aie::vector<bfloat16, BLOCK> block = aie::zeros<bfloat16, BLOCK>();
            unrolled<EDGE>([&](auto r) {
                if (query + r < MEMBERS) block.insert(r, aie::load_v<EDGE>(rows + (query + r) * HD + d));
            });
            aie::store_v(q, prepared(block));
        }
    begin(acc, stats);
}

// Of keys behind the token's nothing is known, and the token's may not be in the cache yet. k_row counts from the cache's
// first row, with SLIDES from the first row of its view.
extern "C" void AIE_FN(ta_step)(const float *table, int32 k_row, const bfloat16 *row, const bfloat16 *q, bfloat16 *kv,
                                float *acc, float *stats, float *work) {
    const int32 position = position_of(table);
#ifdef SLIDES
    k_row += first_tile(position);
#endif
    const int32 own = position - k_row;
    if (own >= 0 && own < static_cast<int32>(KR)) copy(row, 2 * HD, kv + own * 2 * HD);
    attend(position, k_row, q, kv, acc, stats, work);
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
