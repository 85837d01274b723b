// Attention of tokens (flash_attention.h): the queries are the MEMBERS heads of a group, all at one position, of which
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

#if NORM
#define NORMED(...) __VA_ARGS__
#else
#define NORMED(...)
#endif

// A token's K, rotated, and its V: the group's part of its row of the cache.
void take_row(bfloat16 *rows, const float *table, int32 group, bfloat16 *row NORMED(, const bfloat16 *norm, float eps)) {
    bfloat16 *k = rows + (HEADS + group) * HD, *v = k + KV_HEADS * HD;
    NORMED(norm_rows<1, HD>(k, norm, eps);)
    rotate_heads<1, HD>(k, table, row);
    copy(v, HD, row + HD);
}

// A token's queries, rotated, as blocks.
void take_queries(bfloat16 *rows, const float *table, int32 group,
                  bfloat16 *q NORMED(, const bfloat16 *norm, float eps)) {
    rows += group * MEMBERS * HD;
    NORMED(norm_rows<MEMBERS, HD>(rows, norm, eps);)
    rotate_heads<MEMBERS, HD>(rows, table, rows);
    for (unsigned query = 0; query < QR; query += EDGE)
        for (unsigned d = 0; d < HD; d += EDGE, q += BLOCK) {
            aie::vector<bfloat16, BLOCK> block = aie::zeros<bfloat16, BLOCK>();
            unrolled<EDGE>([&](auto r) {
                if (query + r < MEMBERS) block.insert(r, aie::load_v<EDGE>(rows + (query + r) * HD + d));
            });
            aie::store_v(q, prepared(block));
        }
}

// The first key of a tile, which counts from the first of the view, is at this position; `position`: the first token's.
int32 first_key([[maybe_unused]] int32 position, int32 k_row) {
#ifdef SLIDES
    return k_row + first_tile(position);
#else
    return k_row;
#endif
}

// Of keys behind a token's nothing is known, and the token's may not be in the cache yet.
void insert(const bfloat16 *row, int32 at, bfloat16 *kv) {
    if (at >= 0 && at < static_cast<int32>(KR)) copy(row, 2 * HD, kv + at * 2 * HD);
}

}  // namespace

#ifdef TOKENS

// TOKENS tokens at consecutive positions, without NORM. table: a row of each, as above. fresh: of each bf16 [K | V][HD], the group's
// part of its row of the cache; then their positions, i32.

constexpr unsigned ANGLES = HD + LAYOUT_POSITION / 2;

extern "C" void AIE_FN(ta_row)(bfloat16 *rows, const float *table, int32 group, int32 index,
                               bfloat16 *fresh) {
    use_nearest_even();
    table += index * ANGLES;
    take_row(rows, table, group, fresh + index * 2 * HD);
    reinterpret_cast<int32 *>(fresh + TOKENS * 2 * HD)[index] = position_of(table);
}

// Of the token `own`, when it comes.
extern "C" void AIE_FN(ta_queries)(bfloat16 *rows, const float *table, int32 group, int32 index, int32 own, bfloat16 *q,
                                   float *acc, float *stats) {
    if (index != own) return;
    use_nearest_even();
    take_queries(rows, table + own * ANGLES, group, q);
    begin(acc, stats);
}

extern "C" void AIE_FN(ta_step)(const bfloat16 *fresh, int32 own, int32 k_row, bfloat16 *kv, const bfloat16 *q, float *acc,
                                float *stats, float *work) {
    const int32 *positions = reinterpret_cast<const int32 *>(fresh + TOKENS * 2 * HD);
    k_row = first_key(positions[0], k_row);
    for (int32 token = 0; token <= own; ++token) insert(fresh + token * 2 * HD, positions[token] - k_row, kv);
    attend(positions[own], k_row, q, kv, acc, stats, work);
}

#else

extern "C" void AIE_FN(ta_init)(bfloat16 *rows NORMED(, const bfloat16 *q_norm, const bfloat16 *k_norm),
                                const float *table, int32 group, bfloat16 *q, float *acc, float *stats,
                                bfloat16 *row NORMED(, float eps)) {
    use_nearest_even();
    take_row(rows, table, group, row NORMED(, k_norm, eps));
    take_queries(rows, table, group, q NORMED(, q_norm, eps));
    begin(acc, stats);
}

extern "C" void AIE_FN(ta_step)(const float *table, int32 k_row, const bfloat16 *row, const bfloat16 *q, bfloat16 *kv,
                                float *acc, float *stats, float *work) {
    const int32 position = position_of(table);
    k_row = first_key(position, k_row);
    insert(row, position - k_row, kv);
    attend(position, k_row, q, kv, acc, stats, work);
}

#endif

#ifdef TOKENS
// The token `own` is the `number`th of its core: row bf16 [tokens of the core][K | V][HD], out [..][MEMBERS][HD].
extern "C" void AIE_FN(ta_out)(float *acc, const float *stats, bfloat16 *q, const bfloat16 *fresh, int32 own, int32 number,
                               bfloat16 *row, bfloat16 *out) {
    copy(fresh + own * 2 * HD, 2 * HD, row + number * 2 * HD);
    out += number * MEMBERS * HD;
#else
extern "C" void AIE_FN(ta_out)(float *acc, const float *stats, bfloat16 *q, bfloat16 *out) {
#endif
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
