// Attention (flash_attention.h) over KV tiles in 8 bits, with products of whole numbers, of which the matrix unit makes
// eight where one of bf16 makes one. Included by flash_attention.h.
//
// Queries are taken four at a time, the rows of such a product: a unit. What is said of one is said of a block
// [4 queries][8 keys] or [4 queries][8 dims] of the lanes of a vector.
//
// q bf16 blocks, as flash_attention.h has them, and in their place from begin() on int16, multiples of a power of two of each
// query's own. With SAME_ROW blocks are units, [QR/4][HD/8][4][8]. kv i8 [HD/8 + 1 + HD/8][KR][8]: of each key 8 numbers of K at a time,
// then its scales of K and V, f32, then 8 numbers of V at a time; so 8 keys are a block in the order of memory, and only
// K's are transposed. acc f32 [QR/4][HD/8][4][8]. stats f32 [QR/4][4][4][8], the same in all lanes of a row but for sums:
// ceiling (behind WHOLE), running sums of every eighth key, and what makes f32 of sums of weights and of scores (floats_of).
// work f32 [QR/4][KR/8][4][8], and behind it what is known of keys (facts_at).
//
// Scores are sums of whole numbers, exact, times K's scale. A key's weight is multiplied with V's scale before the product
// with V. Scales would take most of the bits of a fixed point, so their exponents are added to scores, the mantissas are
// multiplied with, and a tile's weights count from the largest of each query in this tile on: in 15 bits, which are sixteen
// times finer than bf16's 8 of the largest. So results depend on KR, but on no other query. The running sum gets the weights
// without V's scale, as bf16, rounded alike.

namespace {

constexpr unsigned QUERIES = EDGE / 2, UNITS = QR / QUERIES, NUMBERS_AT = DIM_BLOCKS * KR * EDGE;
static_assert(QR % QUERIES == 0 && KEY_BLOCKS % 2 == 0 && HALF == QUERIES * EDGE);
// Units that share each block of K or V.
constexpr unsigned SHARE = UNITS % 2 == 0 ? 2 : 1;

using Whole = aie::mmul<QUERIES, EDGE, EDGE, int16, int8>;
using Lanes = aie::vector<int32, HALF>;

constexpr unsigned bits_of(unsigned count) { return count > 1 ? 1 + bits_of((count + 1) / 2) : 0; }

// Sums of whole numbers lose so many bits, which are less than their last one counts, to have 22 and a sign at most: of
// queries of 15 bits and K, and of weights of 15 bits and V, each times 7 bits.
constexpr int SCORE_SHIFT = bits_of(HD), VALUE_SHIFT = bits_of(KR), WEIGHT_BITS = 14;
// The bits of 1.5 * 2^23, and of an infinite bf16; those of what is no number are more.
constexpr int32 WHOLE_BITS = 0x4b400000, INFINITE_BITS = 0x7f80;

// Exponents of V's scales from here to there are added to scores, others as if they were the next of these.
constexpr int32 LEAST_SCALE = (127 - 64) << 23, MOST_SCALE = (127 + 63) << 23, EXPONENT_BITS = 0x7f800000;

// Powers of two that queries may be multiples of, and those by which a tile is below the ceiling.
constexpr int32 LEAST_POWER = -100, MOST_POWER = 88, LEAST_CHANGE = -100;

// Where a block of a unit of queries lies, and of their results.
#ifdef SAME_ROW
constexpr unsigned place_of(unsigned unit, unsigned d) { return (unit * DIM_BLOCKS + d) * HALF; }
constexpr unsigned result_of(unsigned unit, unsigned d) { return place_of(unit, d); }
#else
static_assert(QR % EDGE == 0);
constexpr unsigned place_of(unsigned unit, unsigned d) { return (unit / 2 * Q_BLOCKS + d) * BLOCK + unit % 2 * HALF; }
constexpr unsigned result_of(unsigned unit, unsigned d) { return (unit / 2 * DIM_BLOCKS + d) * BLOCK + unit % 2 * HALF; }
#endif

struct Stats {
    float *ceiling, *sums;
    int32 *values, *scores;
};

inline Stats stats_of(float *stats, unsigned unit) {
    float *own = stats + unit * 4 * HALF;
    int32 *at = reinterpret_cast<int32 *>(own + 2 * HALF);
    return {own, own + HALF, at, at + HALF};
}

// What is known of two blocks of keys: exponents of V's scales, f32; scales of K and mantissas of V's, each in two bf16; 2
// to less than those exponents, bf16. Where there are several units, it lies there as they take it: for each query.
constexpr bool FOR_EACH = UNITS > 1;
constexpr unsigned KEY_LANES = FOR_EACH ? HALF : EDGE;
enum : unsigned { KEY_HIGH, KEY_LOW, VALUE_HIGH, VALUE_LOW, LESS, PARTS };

constexpr unsigned FACTS_BYTES = (2 * KEY_LANES * (sizeof(float) + PARTS * sizeof(bfloat16)) + 63) / 64 * 64;

inline int8 *facts_at(float *work, unsigned key) {
    return reinterpret_cast<int8 *>(work + UNITS * KEY_BLOCKS * HALF) + key / 2 * FACTS_BYTES;
}

inline float *exponents_of(int8 *facts) { return reinterpret_cast<float *>(facts); }

inline bfloat16 *part_of(int8 *facts, unsigned which) {
    return reinterpret_cast<bfloat16 *>(facts + 2 * KEY_LANES * sizeof(float)) + which * 2 * KEY_LANES;
}

// Of the keys of both blocks, to where it lies.
template <typename T>
void put(T *to, const aie::vector<T, 2 * EDGE> &values) {
    if constexpr (FOR_EACH)
        unrolled<2>([&](auto key) { aie::store_v(to + key * HALF, repeat<HALF>(values.template extract<EDGE>(key))); });
    else aie::store_v(to, values);
}

// Of the keys of one block, the first or the second, for each query of a unit.
template <typename T>
aie::vector<T, HALF> of_one(const T *from, unsigned key) {
    if constexpr (FOR_EACH) return aie::load_v<HALF>(from + key * HALF);
    else return repeat<HALF>(aie::load_v<EDGE>(from + key * EDGE));
}

// The same of both blocks.
inline aie::vector<bfloat16, BLOCK> of_both(int8 *facts, unsigned which) {
    if constexpr (FOR_EACH) return aie::load_v<BLOCK>(part_of(facts, which));
    aie::vector<bfloat16, BLOCK> out;
    unrolled<2>([&](auto key) { out.insert(key, of_one(part_of(facts, which), key)); });
    return out;
}

void put_pair(int8 *facts, unsigned which, const aie::vector<float, 2 * EDGE> &values) {
    const Pair<2 * EDGE> pair = split(values);
    put(part_of(facts, which), pair.hi);
    put(part_of(facts, which + 1), pair.lo);
}

// A position that has a scale which is not finite makes what sees it none.
void take_scales(const int8 *kv, float *work) {
    constexpr unsigned COUNT = 2 * EDGE;
    const auto exponent = aie::broadcast<int32, COUNT>(EXPONENT_BITS);
    const float *scales = reinterpret_cast<const float *>(kv + NUMBERS_AT);
    for (unsigned key = 0; key < KEY_BLOCKS; key += 2, scales += 2 * COUNT) {
        int8 *facts = facts_at(work, key);
        const auto [keys, values] =
            aie::interleave_unzip(aie::load_v<COUNT>(scales), aie::load_v<COUNT>(scales + COUNT), 1);
        const auto bits = values.template cast_to<int32>();
        const auto own = aie::bit_and(bits, exponent), others = aie::bit_and(keys.template cast_to<int32>(), exponent);
        const auto bounded = aie::min(aie::max(own, aie::broadcast<int32, COUNT>(LEAST_SCALE)),
                                      aie::broadcast<int32, COUNT>(MOST_SCALE));
        const auto wide = aie::to_float<float>(aie::filter_odd(bounded.template cast_to<uint16>()), 7);
        const auto whole = aie::sub(wide, aie::broadcast<float, COUNT>(127.0f));
        const auto none = aie::broadcast<int32, COUNT>(0x7fc00000).template cast_to<float>();
        const auto infinite = aie::lt(aie::broadcast<int32, COUNT>(EXPONENT_BITS - 1), aie::max(own, others));
        put(exponents_of(facts), aie::select(whole, none, infinite));
        put_pair(facts, KEY_HIGH, aie::select(keys, aie::zeros<float, COUNT>(), infinite));
        const auto moved = aie::sub(bits, aie::sub(bounded, aie::broadcast<int32, COUNT>(127 << 23)));
        put_pair(facts, VALUE_HIGH, moved.template cast_to<float>());
        const auto less = aie::sub(aie::broadcast<int32, COUNT>(254 << 23), bounded).template cast_to<float>();
        put(part_of(facts, LESS), aie::accum<accfloat, COUNT>(less).template to_vector<bfloat16>());
    }
}

// Whole numbers of 22 bits times 2^n: `at` are the bits of 1.5 * 2^(23 + n), whose last one counts 2^n.
inline Half floats_of(const Lanes &whole, const Lanes &at) {
    return aie::sub(aie::add(whole, at).template cast_to<float>(), at.template cast_to<float>());
}

// work = scores, of which exponents of V's scales are a part.
void scores(const int16 *q, const int8 *kv, float *stats, float *work) {
    for (unsigned key = 0; key < KEY_BLOCKS; key += 2) {
        int8 *facts = facts_at(work, key);
        for (unsigned unit = 0; unit < UNITS; unit += SHARE) {
            Registers<Whole, 2 * SHARE> sums;
            for (unsigned d = 0; d < DIM_BLOCKS; ++d) {
                const int8 *from = kv + (d * KR + key * EDGE) * EDGE;
                const auto first = aie::transpose(aie::load_v<BLOCK>(from), EDGE, EDGE);
                const auto second = aie::transpose(aie::load_v<BLOCK>(from + BLOCK), EDGE, EDGE);
                unrolled<SHARE>([&](auto u) {
                    const auto rows = aie::load_v<HALF>(q + place_of(unit + u, d));
                    sums.get(std::integral_constant<unsigned, 2 * u>()).mac(rows, first);
                    sums.get(std::integral_constant<unsigned, 2 * u + 1>()).mac(rows, second);
                });
            }
            unrolled<2>([&](auto k) {
                const Pair<HALF> scale{of_one(part_of(facts, KEY_HIGH), k), of_one(part_of(facts, KEY_LOW), k)};
                const aie::accum<accfloat, HALF> exponents(of_one(exponents_of(facts), k));
                unrolled<SHARE>([&](auto u) {
                    const Lanes at = aie::load_v<HALF>(stats_of(stats, unit + u).scores);
                    const auto whole = sums.get(std::integral_constant<unsigned, 2 * u + k>())
                                           .to_accum().template to_vector<int32>(SCORE_SHIFT);
                    const Pair<HALF> sum = split(floats_of(whole, at));
                    const auto y = aie::mac(aie::mac(aie::mac(exponents, sum.lo, scale.hi), sum.hi, scale.lo), sum.hi, scale.hi);
                    aie::store_v(work + ((unit + u) * KEY_BLOCKS + key + k) * HALF, y.template to_vector<float>());
                });
            });
        }
    }
}

// Masks the scores of a unit, as flash_attention.h's `mask`; returns more than their maximum, per query, behind WHOLE: so
// much more than that of masked keys, where there are no others, that their weights are 0.
Lanes mask(float *work, int32 first_visible) {
    const Lanes top = masked_top<QUERIES, EDGE>(work, first_visible, MASKED + 256.0f);
    Lanes rows;
    unrolled<QUERIES>([&](auto r) {
        rows.insert(r, aie::broadcast<int32, EDGE>(aie::reduce_max(top.template extract<EDGE>(r)) + 1));
    });
    return rows;
}

inline void multiply(float *values, const aie::vector<bfloat16, HALF> &by) {
    aie::store_v(values, exact_product(aie::load_v<HALF>(values), by).template to_vector<float>());
}

// The ceiling of a unit, raised where a tile's is above it.
Lanes raised(const Lanes &highest, float *acc, const Stats &stats) {
    const Lanes before = aie::load_v<HALF>(stats.ceiling).template cast_to<int32>();
    if (aie::lt(before, highest).empty()) return before;
    const Lanes after = aie::max(before, aie::add(highest, aie::broadcast<int32, HALF>(HEADROOM)));
    aie::store_v(stats.ceiling, after.template cast_to<float>());
    const Lanes change = aie::max(aie::sub(before, after), aie::broadcast<int32, HALF>(-127));
    const auto factor = aie::accum<accfloat, HALF>(power_of_two(change)).template to_vector<bfloat16>();
    multiply(stats.sums, factor);
    for (unsigned d = 0; d < DIM_BLOCKS; ++d) multiply(acc + d * HALF, factor);
    return after;
}

// Softmax step of a unit: its scores become weights times V's scales, int16, at the same places.
void advance(float *work, int8 *facts, float *acc, const Stats &stats, int32 first_visible) {
    const Lanes highest = mask(work, first_visible), ceiling = raised(highest, acc, stats);
    const Lanes change = aie::max(aie::sub(highest, ceiling), aie::broadcast<int32, HALF>(LEAST_CHANGE));
    const auto at = aie::broadcast<int32, HALF>(WHOLE_BITS + ((VALUE_SHIFT - WEIGHT_BITS) << 23));
    aie::store_v(stats.values, aie::add(at, aie::upshift(change, 23)));
    const Half above = aie::sub(aie::broadcast<float, HALF>(WHOLE + EXP2_AT), highest.template cast_to<float>());
    aie::accum<accfloat, BLOCK> sum = aie::zeros<accfloat, BLOCK>();
    for (unsigned key = 0; key < KEY_BLOCKS; key += 2, work += BLOCK, facts += FACTS_BYTES) {
        const auto weights =
            exp2(aie::add(aie::load_v<HALF>(work), above), aie::add(aie::load_v<HALF>(work + HALF), above));
        sum = aie::mac(sum, weights, of_both(facts, LESS));
        const auto scaled = product(weights, Pair<BLOCK>{of_both(facts, VALUE_HIGH), of_both(facts, VALUE_LOW)});
        unrolled<2>([&](auto k) {
            const auto values = scaled.template extract<HALF>(k).template to_vector<float>();
            aie::store_v(reinterpret_cast<int16 *>(work + k * HALF), aie::to_fixed<int16>(values, WEIGHT_BITS));
        });
    }
    const Pair<HALF> sums = split(aie::add(sum.template extract<HALF>(0).template to_vector<float>(),
                                           sum.template extract<HALF>(1).template to_vector<float>()));
    const auto factor = aie::accum<accfloat, HALF>(power_of_two(change)).template to_vector<bfloat16>();
    const aie::accum<accfloat, HALF> before(aie::load_v<HALF>(stats.sums));
    aie::store_v(stats.sums, aie::mac(aie::mac(before, sums.lo, factor), sums.hi, factor).template to_vector<float>());
}

// acc += P V
void accumulate(const float *work, const int8 *kv, float *acc, float *stats) {
    const int8 *values = kv + NUMBERS_AT + KR * EDGE;
    for (unsigned d = 0; d < DIM_BLOCKS; d += 2)
        for (unsigned unit = 0; unit < UNITS; unit += SHARE) {
            Registers<Whole, 2 * SHARE> sums;
            for (unsigned key = 0; key < KEY_BLOCKS; ++key) {
                const int8 *from = values + (d * KR + key * EDGE) * EDGE;
                const auto first = aie::load_v<BLOCK>(from), second = aie::load_v<BLOCK>(from + KR * EDGE);
                unrolled<SHARE>([&](auto u) {
                    const float *weights = work + ((unit + u) * KEY_BLOCKS + key) * HALF;
                    const auto rows = aie::load_v<HALF>(reinterpret_cast<const int16 *>(weights));
                    sums.get(std::integral_constant<unsigned, 2 * u>()).mac(rows, first);
                    sums.get(std::integral_constant<unsigned, 2 * u + 1>()).mac(rows, second);
                });
            }
            unrolled<SHARE>([&](auto u) {
                const Lanes at = aie::load_v<HALF>(stats_of(stats, unit + u).values);
                unrolled<2>([&](auto n) {
                    const auto whole = sums.get(std::integral_constant<unsigned, 2 * u + n>())
                                           .to_accum().template to_vector<int32>(VALUE_SHIFT);
                    float *to = acc + ((unit + u) * DIM_BLOCKS + d + n) * HALF;
                    aie::store_v(to, aie::add(aie::load_v<HALF>(to), floats_of(whole, at)));
                });
            });
        }
}

// The magnitudes of a unit's queries, the largest of each eighth dimension, as bits of bf16.
inline aie::vector<int16, HALF> sizes_of(const bfloat16 *q, unsigned unit) {
    aie::vector<int16, HALF> most = aie::zeros<int16, HALF>();
    for (unsigned d = 0; d < DIM_BLOCKS; ++d) {
        const auto bits = aie::load_v<HALF>(q + place_of(unit, d)).template cast_to<int16>();
        most = aie::max(most, aie::bit_and(bits, aie::broadcast<int16, HALF>(0x7fff)));
    }
    return most;
}

// More than the exponent of what is multiplied with SCALED has then, less that of 2^15.
constexpr int32 LESS_POWER = (__builtin_bit_cast(int32, SCALED) >> 23) - 2 * 127 + 2 - 15;

// Before the first key, with queries in place. Those that are not finite have a sum that is none.
void begin(bfloat16 *q, float *acc, float *stats) {
    for (unsigned unit = 0; unit < UNITS; ++unit, acc += DIM_BLOCKS * HALF) {
        const Stats own = stats_of(stats, unit);
        const aie::vector<int16, HALF> sizes = sizes_of(q, unit);
        Lanes sums = aie::zeros<int32, HALF>(), at = sums;
        aie::vector<uint16, HALF> inverses = aie::zeros<uint16, HALF>();
        unrolled<QUERIES>([&](auto r) {
            aie::vector<int16, HALF> row = aie::zeros<int16, HALF>();
            row.insert(r, sizes.template extract<EDGE>(r));
            const int32 size = aie::reduce_max(row), wanted = (size >> 7) + LESS_POWER;
            const int32 power = wanted < LEAST_POWER ? LEAST_POWER : wanted > MOST_POWER ? MOST_POWER : wanted;
            if (size >= INFINITE_BITS) sums.insert(r, aie::broadcast<int32, EDGE>(0x7fc00000));
            at.insert(r, aie::broadcast<int32, EDGE>(WHOLE_BITS + ((power + SCORE_SHIFT) << 23)));
            inverses.insert(r, aie::broadcast<uint16, EDGE>((127 - power) << 7));
        });
        aie::store_v(own.ceiling, aie::broadcast<float, HALF>(WHOLE + MASKED));
        aie::store_v(own.sums, sums.template cast_to<float>());
        aie::store_v(own.scores, at);
        const Pair<HALF> scale = constants<HALF>(halves_of(SCALED));
        const auto inverse = inverses.template cast_to<bfloat16>();
        const Pair<HALF> by{aie::mul(scale.hi, inverse).template to_vector<bfloat16>(),
                            aie::mul(scale.lo, inverse).template to_vector<bfloat16>()};
        for (unsigned d = 0; d < DIM_BLOCKS; ++d) {
            aie::store_v(acc + d * HALF, aie::zeros<float, HALF>());
            bfloat16 *block = q + place_of(unit, d);
            const auto values = product(aie::load_v<HALF>(block), by).template to_vector<float>();
            aie::store_v(reinterpret_cast<int16 *>(block), aie::to_fixed<int16>(values));
        }
    }
}

void attend(int32 q_row, int32 k_row, const bfloat16 *q, const int8 *kv, float *acc, float *stats, float *work) {
    if (k_row > q_row + APART * (static_cast<int32>(QR) - 1)) return;
    if (SEES && q_row - k_row >= SEES + static_cast<int32>(KR) - 1) return;
    use_nearest_even();
    take_scales(kv, work);
    scores(reinterpret_cast<const int16 *>(q), kv, stats, work);
    for (unsigned unit = 0; unit < UNITS; ++unit)
        advance(work + unit * KEY_BLOCKS * HALF, facts_at(work, 0), acc + unit * DIM_BLOCKS * HALF,
                stats_of(stats, unit), k_row - q_row - APART * static_cast<int32>(unit * QUERIES));
    accumulate(work, kv, acc, stats);
}

// Behind the last key: the results, in blocks as queries have them.
void finish(const float *acc, float *stats, bfloat16 *out) {
    use_nearest_even();
    for (unsigned unit = 0; unit < UNITS; ++unit, acc += DIM_BLOCKS * HALF) {
        const Half sums = aie::load_v<HALF>(stats_of(stats, unit).sums);
        alignas(32) float totals[EDGE];
        unrolled<QUERIES>([&](auto r) {
            totals[r] = totals[r + QUERIES] = aie::reduce_add(sums.template extract<EDGE>(r));
        });
        const auto inverse = reciprocals(totals);
        const auto hi = aie::transpose(repeat<BLOCK>(inverse.hi.template extract<EDGE>(0)), EDGE, EDGE);
        const auto lo = aie::transpose(repeat<BLOCK>(inverse.lo.template extract<EDGE>(0)), EDGE, EDGE);
        const Pair<HALF> by{hi.template extract<HALF>(0), lo.template extract<HALF>(0)};
        for (unsigned d = 0; d < DIM_BLOCKS; ++d) {
            const auto value = product(split(aie::load_v<HALF>(acc + d * HALF)), by);
            aie::store_v(out + result_of(unit, d), value.template to_vector<bfloat16>());
        }
    }
}

}  // namespace
