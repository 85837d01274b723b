// Attention of tokens (flash_attention.h): the queries are the MEMBERS heads of a group, all at one position, of which
// the last block may have fewer than it has rows. rows bf16 [HEADS + 2 * KV_HEADS][HD] = Q, K and V before their rotation
// (rope.h); table f32 [HD], and behind it the position, i32; row bf16 [K | V][HD], the group's part of the token's row of
// the cache; out bf16 [MEMBERS][HD]. NORM: heads of Q and K are normed first (rms_norm.h), in place, with weights bf16 [HD] of
// Q and K. KV_BITS of 8: rows of the cache, a token's too, are i8 [HEAD_BYTES] (int8_rows.h), and queries are in units
// (int8_rows_attention.h).
#define SAME_ROW
#define HEAD_DIM HD
#include "flash_attention.h"
#include "rope.h"
#if NORM
#include "rms_norm.h"
#endif
#if KV_BITS == 8
#include "int8_rows.h"
#endif

// Queries of a block, and elements of a row of the cache.
#if KV_BITS == 8
using Cached = int8;
constexpr unsigned HIGH = QUERIES, KV_ROW = HEAD_BYTES;
#else
using Cached = bfloat16;
constexpr unsigned HIGH = EDGE, KV_ROW = 2 * HD;
#endif
using Queries = aie::vector<bfloat16, HIGH * EDGE>;

static_assert(MEMBERS <= QR && QR < MEMBERS + HIGH);

namespace {

int32 position_of(const float *table) { return *reinterpret_cast<const int32 *>(table + HD); }

#if KV_BITS == 8
[[maybe_unused]] void copy_row(const int8 *from, int8 *to) { copy_words(from, KV_ROW, to); }
#else
void copy(const bfloat16 *from, unsigned count, bfloat16 *to) {
    for (unsigned d = 0; d < count; d += L) aie::store_v(to + d, aie::load_v<L>(from + d));
}

void copy_row(const bfloat16 *from, bfloat16 *to) { copy(from, KV_ROW, to); }
#endif

#if NORM
#define NORMED(...) __VA_ARGS__
#else
#define NORMED(...)
#endif

// A token's K, rotated, and its V: the group's part of its row of the cache.
void take_row(bfloat16 *rows, const float *table, int32 group, Cached *row NORMED(, const bfloat16 *norm, float eps)) {
    bfloat16 *k = rows + (HEADS + group) * HD, *v = k + KV_HEADS * HD;
    NORMED(norm_rows<1, HD>(k, norm, eps);)
#if KV_BITS == 8
    rotate_heads<1, HD>(k, table, k);
    put_key(k, row);
    put_value(v, row + ROW_BYTES);
#else
    rotate_heads<1, HD>(k, table, row);
    copy(v, HD, row + HD);
#endif
}

// A token's queries, rotated, as blocks, before the first key.
void take_queries(bfloat16 *rows, const float *table, int32 group,
                  bfloat16 *q, float *acc, float *stats NORMED(, const bfloat16 *norm, float eps)) {
    rows += group * MEMBERS * HD;
    NORMED(norm_rows<MEMBERS, HD>(rows, norm, eps);)
    rotate_heads<MEMBERS, HD>(rows, table, rows);
    bfloat16 *to = q;
    for (unsigned query = 0; query < QR; query += HIGH)
        for (unsigned d = 0; d < HD; d += EDGE, to += Queries::size()) {
            Queries block = aie::zeros<bfloat16, Queries::size()>();
            unrolled<HIGH>([&](auto r) {
                if (query + r < MEMBERS) block.insert(r, aie::load_v<EDGE>(rows + (query + r) * HD + d));
            });
#if KV_BITS == 8
            aie::store_v(to, block);
        }
    begin(q, acc, stats);
#else
            aie::store_v(to, prepared(block));
        }
    begin(acc, stats);
#endif
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
void insert(const Cached *row, int32 at, Cached *kv) {
    if (at < 0 || at >= static_cast<int32>(KR)) return;
#if KV_BITS == 8
    for (unsigned byte = 0; byte < KV_ROW; byte += EDGE) copy_words(row + byte, EDGE, kv + byte * KR + at * EDGE);
#else
    copy_row(row, kv + at * KV_ROW);
#endif
}

}  // namespace

#ifdef TOKENS

// TOKENS tokens at consecutive positions. table: a row of each, as above; NORM: norms bf16 [2][HD], of Q and of K. fresh: of
// each the group's part of its row of the cache; then their positions, i32.

constexpr unsigned ANGLES = HD + LAYOUT_POSITION / 2;

// Q, K and V of a token: GATHERED, they lie after those of the tokens before, else there are only these.
bfloat16 *rows_of(bfloat16 *rows, [[maybe_unused]] int32 index) {
#ifdef GATHERED
    return rows + index * (HEADS + 2 * KV_HEADS) * HD;
#else
    return rows;
#endif
}

extern "C" void AIE_FN(ta_row)(bfloat16 *__restrict rows NORMED(, const bfloat16 *__restrict norms),
                               const float *__restrict table, int32 group, int32 index,
                               Cached *__restrict fresh NORMED(, float eps)) {
    use_nearest_even();
    table += index * ANGLES;
    take_row(rows_of(rows, index), table, group, fresh + index * KV_ROW NORMED(, norms + HD, eps));
    reinterpret_cast<int32 *>(fresh + TOKENS * KV_ROW)[index] = position_of(table);
}

// Touches nothing: buffers that only a loop uses would be moved into it.
extern "C" void AIE_FN(ta_keep)(bfloat16 * NORMED(, bfloat16 *), float *, bfloat16 *, float *, float *, float *,
                                Cached *, Cached *, bfloat16 *) {}

// Of the token `own`, when it comes.
extern "C" void AIE_FN(ta_queries)(bfloat16 *__restrict rows NORMED(, const bfloat16 *__restrict norms),
                                   const float *__restrict table, int32 group, int32 index, int32 own,
                                   bfloat16 *__restrict q, float *__restrict acc,
                                   float *__restrict stats NORMED(, float eps)) {
    if (index != own) return;
    use_nearest_even();
    take_queries(rows_of(rows, own), table + own * ANGLES, group, q, acc, stats NORMED(, norms, eps));
}

extern "C" void AIE_FN(ta_step)(const Cached *__restrict fresh, int32 own, int32 k_row, Cached *__restrict kv,
                                const bfloat16 *__restrict q, float *__restrict acc, float *__restrict stats,
                                float *__restrict work) {
    const int32 *positions = reinterpret_cast<const int32 *>(fresh + TOKENS * KV_ROW);
    k_row = first_key(positions[0], k_row);
    for (int32 token = 0; token <= own; ++token) insert(fresh + token * KV_ROW, positions[token] - k_row, kv);
    attend(positions[own], k_row, q, kv, acc, stats, work);
}

#else

// Touches nothing: buffers that only a loop uses would be moved into it.
extern "C" void AIE_FN(ta_keep)(bfloat16 *, float *, Cached *, bfloat16 *, float *, float *, float *,
                                bfloat16 * NORMED(, bfloat16 *, bfloat16 *)) {}

extern "C" void AIE_FN(ta_init)(bfloat16 *__restrict rows
                                NORMED(, const bfloat16 *__restrict q_norm, const bfloat16 *__restrict k_norm),
                                const float *__restrict table, int32 group, bfloat16 *__restrict q,
                                float *__restrict acc, float *__restrict stats,
                                Cached *__restrict row NORMED(, float eps)) {
    use_nearest_even();
    take_row(rows, table, group, row NORMED(, k_norm, eps));
    take_queries(rows, table, group, q, acc, stats NORMED(, q_norm, eps));
}

extern "C" void AIE_FN(ta_step)(const float *__restrict table, int32 k_row, const Cached *__restrict row,
                                const bfloat16 *__restrict q, Cached *__restrict kv, float *__restrict acc,
                                float *__restrict stats, float *__restrict work) {
    const int32 position = position_of(table);
    k_row = first_key(position, k_row);
    insert(row, position - k_row, kv);
    attend(position, k_row, q, kv, acc, stats, work);
}

#endif

#ifdef TOKENS
// The token `own` is the `number`th of its core: row [tokens of the core], rows of the cache, out [..][MEMBERS][HD].
extern "C" void AIE_FN(ta_out)(float *__restrict acc, float *__restrict stats, bfloat16 *__restrict q,
                               const Cached *__restrict fresh, int32 own, int32 number, Cached *__restrict row,
                               bfloat16 *__restrict out) {
    copy_row(fresh + own * KV_ROW, row + number * KV_ROW);
    out += number * MEMBERS * HD;
#else
extern "C" void AIE_FN(ta_out)(float *__restrict acc, float *__restrict stats, bfloat16 *__restrict q,
                               bfloat16 *__restrict out) {
#endif
    finish(acc, stats, q);
    for (unsigned query = 0; query < QR; query += HIGH)
        for (unsigned d = 0; d < HD; d += EDGE, q += Queries::size()) {
            const Queries block = aie::load_v<Queries::size()>(q);
            unrolled<HIGH>([&](auto r) {
                if (query + r < MEMBERS)
                    aie::store_v(out + (query + r) * HD + d, block.template extract<EDGE>(r));
            });
        }
}
