// Attention of QR query rows over a stream of KR-row KV tiles, online softmax in the log2 domain, head size HD. The rows
// are at positions that follow one another, or with SAME_ROW all at one.
//
// q bf16 blocks [QR/8][HD/8][8][8], prepared, where rows are at positions of their own [QR/8][HD/8 + 1][8][8]: each row of
// the last block begins with its position, i32. kv bf16 [KR][2*HD], a row = K then V of one position; acc f32 blocks
// [QR/8][HD/8][8 queries][8 dims]; stats f32 [2][QR] = ceiling (behind WHOLE), running sum; work f32 [QR][KR], scratch.
//
// Scores are divided by the root of HD, or they are multiplied by the f32 with the bits SCALE. With SEES a row attends to
// that many positions, its own included.
//
// Scores are computed transposed, in blocks [8 keys][8 queries], so that a query's maximum and sum run along vectors
// and not across lanes; the blocks of q are transposed for this. They are scaled, too, by log2(e) besides, and rounded
// once more, so that their products with K are exponents of two.
//
// Weights are rounded to bf16 (exp2.h), which is what the product with V takes; the sum is taken over those same rounded
// weights, so their error does not scale the result. They are exponents below a ceiling that is a whole number: where it
// must rise, what was accumulated is corrected by a power of two, exact, however often. It rises to HEADROOM above the
// scores, so that few steps have to (2 in 1000 for the model that ships over 2048 positions, 36 in 100 without).
//
// All of that is said of KV caches in bf16. With KV_BITS of 8, int8_rows_attention.h has the same functions.
#pragma once

#include "exp2.h"

namespace {

constexpr unsigned KEY_BLOCKS = KR / EDGE, DIM_BLOCKS = HD / EDGE;
static_assert(KR % EDGE == 0 && HD % EDGE == 0);
static_assert(EDGE == 8, "the matrix unit multiplies blocks of 8 x 8 bf16, and DISTANCE is half of one");
// Score of a masked key; also the ceiling before the first key. Far below any score, within the range of an int32.
constexpr float MASKED = -1048576.0f;
// From here on a float is a whole number which its bits count, so that whole numbers can be added and compared as such.
constexpr float WHOLE = 0x1.8p23f;
// A weight that is 2^94 times smaller than another is none.
constexpr int32 HEADROOM = 32;

using Half = aie::vector<float, HALF>;

constexpr float root(float x) {
    float r = x;
    for (unsigned i = 0; i < 32; ++i) r = 0.5f * (r + x / r);
    return r;
}

#ifdef SCALE
constexpr float SCALED = LOG2E * __builtin_bit_cast(float, SCALE);
#else
constexpr float SCALED = LOG2E / root(HD);
#endif

#ifndef SEES
#define SEES 0
#endif

#ifdef SAME_ROW
constexpr int32 APART = 0;
// Of q in a row of blocks.
constexpr unsigned Q_BLOCKS = DIM_BLOCKS;
#else
constexpr int32 APART = 1;
constexpr unsigned Q_BLOCKS = DIM_BLOCKS + 1;
#endif

// Query minus key inside half a score block: lane = key * EDGE + query; with KV_BITS of 8 lane = query * EDGE + key.
#if KV_BITS == 8 && defined(SAME_ROW)
alignas(64) const int32 DISTANCE[HALF] = {0, -1, -2, -3, -4, -5, -6, -7, 0, -1, -2, -3, -4, -5, -6, -7,
                                          0, -1, -2, -3, -4, -5, -6, -7, 0, -1, -2, -3, -4, -5, -6, -7};
#elif KV_BITS == 8
alignas(64) const int32 DISTANCE[HALF] = {0, -1, -2, -3, -4, -5, -6, -7, 1, 0, -1, -2, -3, -4, -5, -6,
                                          2, 1,  0,  -1, -2, -3, -4, -5, 3, 2, 1,  0,  -1, -2, -3, -4};
#elif defined(SAME_ROW)
alignas(64) const int32 DISTANCE[HALF] = {0,  0,  0,  0,  0,  0,  0,  0,  -1, -1, -1, -1, -1, -1, -1, -1,
                                          -2, -2, -2, -2, -2, -2, -2, -2, -3, -3, -3, -3, -3, -3, -3, -3};
#else
alignas(64) const int32 DISTANCE[HALF] = {0,  1,  2,  3,  4, 5, 6, 7, -1, 0,  1,  2,  3, 4, 5, 6,
                                          -2, -1, 0,  1,  2, 3, 4, 5, -3, -2, -1, 0,  1, 2, 3, 4};
#endif

// 1/x in two bf16; one Newton step on the core's estimate, whose accuracy is not published.
Pair<2 * EDGE> reciprocals(const float *x) {
    alignas(32) float estimates[EDGE];
    for (unsigned i = 0; i < EDGE; ++i) estimates[i] = aie::inv(x[i]);
    const auto near = split(repeat<2 * EDGE>(aie::load_v<EDGE>(estimates)));
    const auto of = split(repeat<2 * EDGE>(aie::load_v<EDGE>(x)));
    const auto one = wide_constant<2 * EDGE>(ONE_BITS);
    const auto lacks = aie::msc(aie::msc(aie::msc(one, of.hi, near.hi), of.hi, near.lo), of.lo, near.hi);
    const auto more = lacks.template to_vector<bfloat16>();
    return split(aie::mac(product(constant<2 * EDGE>(ONE_BITS), near), more, near.hi));
}

// Masks `work`, scores in half blocks of so many queries and keys. Returns the maximum of each lane over all, behind WHOLE, at
// least `least` + WHOLE. Key j of this tile is visible to query i of this block iff i - j >= first_visible, and with SEES less than
// that plus SEES.
template <unsigned QUERIES_OF_BLOCK, unsigned KEYS_OF_BLOCK>
aie::vector<int32, HALF> masked_top(float *work, int32 first_visible, float least) {
    const Half masked = aie::broadcast<float, HALF>(MASKED), whole = aie::broadcast<float, HALF>(WHOLE);
    aie::vector<int32, HALF> top = aie::broadcast<float, HALF>(WHOLE + least).template cast_to<int32>();
    for (unsigned key = 0; key < KR; key += KEYS_OF_BLOCK, work += HALF) {
        Half y = aie::load_v<HALF>(work);
        const int32 bound = first_visible + static_cast<int32>(key);
        if (bound > 1 - static_cast<int32>(KEYS_OF_BLOCK)) {
            y = aie::select(y, masked, aie::lt(aie::load_v<HALF>(DISTANCE), aie::broadcast<int32, HALF>(bound)));
            aie::store_v(work, y);
        }
        if (SEES && bound + SEES <= APART * static_cast<int32>(QUERIES_OF_BLOCK - 1)) {
            const auto last = aie::broadcast<int32, HALF>(bound + SEES - 1);
            y = aie::select(y, masked, aie::lt(last, aie::load_v<HALF>(DISTANCE)));
            aie::store_v(work, y);
        }
        top = aie::max(top, aie::add(y, whole).template cast_to<int32>());
    }
    return top;
}

#ifdef SLIDES
static_assert(SEES > 0 && (KR & (KR - 1)) == 0, "a mask rounds down to a tile");

// The first position of the first tile of which a query at this position sees something: with SLIDES, keys begin there.
int32 first_tile(int32 position) {
    const int32 first = position + 1 - SEES;
    return first > 0 ? first & -static_cast<int32>(KR) : 0;
}
#endif

}  // namespace

#if KV_BITS == 8
#include "int8_rows_attention.h"
#else

namespace {

constexpr unsigned QUERY_BLOCKS = QR / EDGE;
static_assert(QR % EDGE == 0);
// Keys of half a score block.
constexpr unsigned KEYS = EDGE / 2;
// Query blocks that share each gathered block of K or V.
constexpr unsigned GROUP = sharing(QUERY_BLOCKS);
// Blocks of V held at a time: two are a third of the vector registers, and a product needs as many again.
constexpr unsigned HELD = KEY_BLOCKS % 2 == 0 ? 2 : 1;

using Block = aie::mmul<EDGE, EDGE, EDGE, bfloat16, bfloat16>;
using PerQuery = aie::vector<float, EDGE>;
// The bits of whole numbers behind WHOLE, or whole numbers.
using Counts = aie::vector<int32, EDGE>;

// A block whose rows lie 2*HD apart.
aie::vector<bfloat16, BLOCK> gather(const bfloat16 *rows) {
    aie::vector<bfloat16, BLOCK> out;
    unrolled<EDGE>([&](auto r) { out.insert(r, aie::load_v<EDGE>(rows + r * 2 * HD)); });
    return out;
}

// Over the keys of half a block, per query.
Counts maximum_of_keys(const aie::vector<int32, HALF> &v) {
    const auto two = aie::max(v.template extract<2 * EDGE>(0), v.template extract<2 * EDGE>(1));
    return aie::max(two.template extract<EDGE>(0), two.template extract<EDGE>(1));
}

// work[query block][key block] = K Q^T, f32 blocks [8 keys][8 queries].
void scores(const bfloat16 *q, const bfloat16 *kv, float *work) {
    for (unsigned first = 0; first < QUERY_BLOCKS; first += GROUP)
        for (unsigned key = 0; key < KEY_BLOCKS; ++key) {
            Registers<Block, GROUP> sum;
            for (unsigned d = 0; d < DIM_BLOCKS; ++d) {
                const aie::vector<bfloat16, BLOCK> k = gather(kv + key * EDGE * 2 * HD + d * EDGE);
                unrolled<GROUP>([&](auto g) {
                    sum.get(g).mac(k, aie::load_v<BLOCK>(q + ((first + g) * Q_BLOCKS + d) * BLOCK));
                });
            }
            unrolled<GROUP>([&](auto g) {
                store_block(work + ((first + g) * KEY_BLOCKS + key) * BLOCK, sum.get(g).to_accum());
            });
        }
}

// A block of q, as `scores` takes it.
aie::vector<bfloat16, BLOCK> prepared(const aie::vector<bfloat16, BLOCK> &q) {
    const auto scaled = product(q, constants<BLOCK>(halves_of(SCALED)));
    return aie::transpose(scaled.template to_vector<bfloat16>(), EDGE, EDGE);
}

// Masks the scores of one query block; returns their maximum, per query, behind WHOLE: rounded, so less than 1 off.
Counts mask(float *work, int32 first_visible) {
    return maximum_of_keys(masked_top<EDGE, KEYS>(work, first_visible, MASKED));
}

// Replaces the scores of one query block by bf16 weights 2^(y - ceiling), blocks [8 queries][8 keys] at the scores'
// places. Returns the sums of the rounded weights, per query.
PerQuery weights(float *work, const Counts &ceiling) {
    const PerQuery at = aie::broadcast<float, EDGE>(WHOLE + EXP2_AT);
    const Half above = repeat<HALF>(aie::sub(at, ceiling.template cast_to<float>()));
    const aie::vector<bfloat16, BLOCK> one = constant<BLOCK>(ONE_BITS);
    aie::accum<accfloat, BLOCK> sum = aie::zeros<accfloat, BLOCK>();
    for (unsigned key = 0; key < KEY_BLOCKS; ++key, work += BLOCK) {
        const auto block =
            exp2(aie::add(aie::load_v<HALF>(work), above), aie::add(aie::load_v<HALF>(work + HALF), above));
        sum = aie::mac(sum, block, one);
        aie::store_v(reinterpret_cast<bfloat16 *>(work), aie::transpose(block, EDGE, EDGE));
    }
    return sum_of_rows(aie::add(sum.template extract<HALF>(0).template to_vector<float>(),
                                sum.template extract<HALF>(1).template to_vector<float>()));
}

// Multiplies what was accumulated for one query block by 2^change, per query.
void rescale(float *acc, float *sum, const Counts &change) {
    // A row of a block is less than an accumulator has: the factor is applied to copies.
    const auto factor = aie::accum<accfloat, HALF>(power_of_two(repeat<HALF>(change))).template to_vector<bfloat16>();
    const auto kept = exact_product(repeat<HALF>(aie::load_v<EDGE>(sum)), factor).template to_vector<float>();
    aie::store_v(sum, kept.template extract<EDGE>(0));
    const auto per_row = aie::transpose(repeat<BLOCK>(factor.template extract<EDGE>(0)), EDGE, EDGE);
    for (unsigned d = 0; d < DIM_BLOCKS; ++d)
        unrolled<2>([&](auto h) {
            const aie::vector<bfloat16, HALF> by = per_row.template extract<HALF>(h);
            aie::store_v(acc, exact_product(aie::load_v<HALF>(acc), by).template to_vector<float>());
            acc += HALF;
        });
}

// The ceiling of one query block, raised where a score is above it. Before the first key nothing is accumulated.
Counts raised(const Counts &highest, float *ceiling, float *acc, float *sum, bool first) {
    const Counts before = aie::load_v<EDGE>(ceiling).template cast_to<int32>();
    if (aie::lt(before, highest).empty()) return before;
    const Counts after = aie::max(before, aie::add(highest, aie::broadcast<int32, EDGE>(HEADROOM)));
    aie::store_v(ceiling, after.template cast_to<float>());
    if (!first) rescale(acc, sum, aie::max(aie::sub(before, after), aie::broadcast<int32, EDGE>(-127)));
    return after;
}

// Softmax step of one query block.
void advance(float *work, float *acc, float *ceiling, float *sum, int32 first_visible, bool first) {
    const Counts top = raised(mask(work, first_visible), ceiling, acc, sum, first);
    aie::store_v(sum, aie::add(aie::load_v<EDGE>(sum), weights(work, top)));
}

// acc += P V for HELD blocks of keys: `work` their weights, `v` their rows, from one block of dimensions on, as `acc`.
void add_values(const float *work, const bfloat16 *v, float *acc) {
    Registers<aie::vector<bfloat16, BLOCK>, HELD> held;
    unrolled<HELD>([&](auto key) { held.get(key) = gather(v + key * EDGE * 2 * HD); });
    for (unsigned query = 0; query < QUERY_BLOCKS; ++query, work += KEY_BLOCKS * BLOCK, acc += DIM_BLOCKS * BLOCK) {
        Block sum(load_block(acc));
        unrolled<HELD>([&](auto key) {
            sum.mac(aie::load_v<BLOCK>(reinterpret_cast<const bfloat16 *>(work + key * BLOCK)), held.get(key));
        });
        store_block(acc, sum.to_accum());
    }
}

// acc += P V
void accumulate(const float *work, const bfloat16 *kv, float *acc) {
    for (unsigned d = 0; d < DIM_BLOCKS; ++d)
        for (unsigned key = 0; key < KEY_BLOCKS; key += HELD)
            add_values(work + key * BLOCK, kv + key * EDGE * 2 * HD + HD + d * EDGE, acc + d * BLOCK);
}

// Before the first key.
void begin(float *acc, float *stats) {
    for (unsigned i = 0; i < QR * HD; i += HALF) aie::store_v(acc + i, aie::zeros<float, HALF>());
    for (unsigned i = 0; i < QR; i += EDGE) {
        aie::store_v(stats + i, aie::broadcast<float, EDGE>(WHOLE + MASKED));
        aie::store_v(stats + QR + i, aie::zeros<float, EDGE>());
    }
}

// q_row, k_row: absolute positions of the first query and the first key. Query i sees key j iff k_row + j is no more than
// the query's position, and with SEES more than that less SEES. What a query without a key in its first tiles makes of them
// is nothing once it sees one: the ceiling rises from MASKED.
void attend(int32 q_row, int32 k_row, const bfloat16 *q, const bfloat16 *kv, float *acc, float *stats, float *work) {
    if (k_row > q_row + APART * (static_cast<int32>(QR) - 1)) return;
    if (SEES && q_row - k_row >= SEES + static_cast<int32>(KR) - 1) return;
    use_nearest_even();
    scores(q, kv, work);
    for (unsigned query = 0; query < QUERY_BLOCKS; ++query)
        advance(work + query * KEY_BLOCKS * BLOCK, acc + query * DIM_BLOCKS * BLOCK, stats + query * EDGE,
                stats + QR + query * EDGE, k_row - q_row - APART * static_cast<int32>(query * EDGE), k_row == 0);
    accumulate(work, kv, acc);
}

// Behind the last key: the results, blocks [QR/8][HD/8][8][8] from the beginning of q on.
void finish(float *acc, const float *stats, bfloat16 *q) {
    use_nearest_even();
    for (unsigned query = 0; query < QUERY_BLOCKS; ++query, acc += DIM_BLOCKS * BLOCK, q += DIM_BLOCKS * BLOCK) {
        const auto inverse = reciprocals(stats + QR + query * EDGE);
        const auto hi = aie::transpose(repeat<BLOCK>(inverse.hi.template extract<EDGE>(0)), EDGE, EDGE);
        const auto lo = aie::transpose(repeat<BLOCK>(inverse.lo.template extract<EDGE>(0)), EDGE, EDGE);
        for (unsigned d = 0; d < DIM_BLOCKS; ++d)
            unrolled<2>([&](auto h) {
                const unsigned at = d * BLOCK + h * HALF;
                const Pair<HALF> by{hi.template extract<HALF>(h), lo.template extract<HALF>(h)};
                const auto value = product(split(aie::load_v<HALF>(acc + at)), by);
                aie::store_v(q + at, value.template to_vector<bfloat16>());
            });
    }
}

}  // namespace

#endif
