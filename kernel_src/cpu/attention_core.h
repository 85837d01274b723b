// Attention of query rows over blocks of the KV cache, with an online softmax. Included inside each
// instruction set.
//
// A block is 128 positions (kv_block_positions) of one KV head in panels (panels.h), K with positions as outputs and V
// with positions as columns, so that both products are tile():
//   K [position / 16][d / 2][position % 16][2]
//   V [d / 16][position / 2][d % 16][2], d padded to a multiple of 16
// each behind the positions' scales, where the cache's format has some (kv_format.h).
// Positions are attended in ranges, each with a softmax of its own, which are joined in their order. What happens to a row
// depends on its positions alone: it is the same bits with any other rows, in a prompt and as a token.
namespace ISA {
namespace {

static_assert(kv_block_positions == 128, "K and V of a block, 32 KiB for a head of 64, stay in the first-level cache");
static_assert(kv_block_positions % (tile_panels * panel_rows) == 0, "scores are made for whole groups of panels");

// Rows that attend a block together.
#if ISA_AMX
constexpr int64_t attended_rows = tile_lines;
#else
constexpr int64_t attended_rows = tile_rows;
#endif

// As long as to make joining cheap, as short as to occupy a team with the ranges of one row.
constexpr int64_t range_positions = 2 * kv_block_positions;

// The result for a row: the sum of exp2(score - top); that of the same weighted with V is kept apart.
struct AttentionRow {
    float top, sum;
};

constexpr AttentionRow no_positions = {-INFINITY, 0.0f};

constexpr float log2_e = 1.44269504f;

struct AttentionShape {
    int64_t heads, kv_heads, head_dim;
    float scalar;  // scores are divided by its root
    int64_t sees;  // a row attends to so many positions, its own the last
    const bf16 *sinks = nullptr;  // of each head, a score without a value; null where there are none
    int64_t group() const { return heads / kv_heads; }
    int64_t dim_panels() const { return panel_count(head_dim); }
    int64_t padded_dim() const { return dim_panels() * panel_rows; }
    // Scores are kept in units of log2, so that exp2 suffices.
    float scale() const { return log2_e / sqrtf(scalar); }
    // What a row of a head begins with.
    AttentionRow begin(int64_t head) const {
        return sinks == nullptr ? no_positions : AttentionRow{to_float(sinks[head]) * log2_e, 1.0f};
    }
    // The first position that a row at `pos` attends to.
    int64_t first_seen(int64_t pos) const { return pos >= sees ? pos - sees + 1 : 0; }
};

template <class Format>
struct KvBlock {
    const typename Format::Number *k, *v;
};

// Adds the result of a range, weighted sums f32 [dim], to that of the ranges before it, `total` f32 [dim]; dim is a
// multiple of lanes. No sum of two products, which a compiler may contract in two ways.
INLINE void join(AttentionRow &row, float *total, AttentionRow range, const float *sums, int64_t dim) {
    if (range.top > row.top) {
        const float share = exp2f(row.top - range.top);
        row = {range.top, row.sum * share + range.sum};
        for (int64_t d = 0; d < dim; d += lanes) store(total + d, load<f32v>(total + d) * share + load<f32v>(sums + d));
    } else {
        const float share = exp2f(range.top - row.top);
        row.sum += range.sum * share;
        for (int64_t d = 0; d < dim; d += lanes) store(total + d, load<f32v>(sums + d) * share + load<f32v>(total + d));
    }
}

// out bf16 [head_dim] = total / the row's sum.
INLINE void store_head(AttentionRow row, const float *total, int64_t head_dim, bf16 *out) {
    const float scale = 1.0f / row.sum;
    for (int64_t d = 0; d < head_dim; d += lanes) store_bf16(out + d, load<f32v>(total + d) * scale, head_dim - d);
}

// While a row is in the making, its sum is kept by lanes. The top follows the largest score only when that
// is exceeded by more than this, in powers of two: nothing overflows, and the sums are seldom rescaled.
constexpr float top_slack = 8.0f;

// Scratch of one worker, cut out of one allocation.
template <class X>
struct AttentionScratch {
    static_assert(sizeof(X) == 2, "queries and weights are 16 bits");
    bf16 *k, *v;         // one block
    X *q;                // [rows][head_dim], and room for a whole vector
    float *q_units;      // [rows]
    float *scores;       // [attended_rows][kv_block_positions]
    X *weights;          // [attended_rows][kv_block_positions]
    float *units;        // [attended_rows], of the weights
    float *out;          // [rows][padded_dim], of the range at hand
    float *sums;         // [rows][lanes], of the range at hand
    float *tops;         // [rows], of the range at hand
    float *totals;       // [rows][padded_dim], of the ranges before it
    AttentionRow *rows;  // [rows], of the ranges before it

    static AttentionScratch make(const AttentionShape &shape, int64_t rows, Worker &worker) {
        const int64_t dim = shape.padded_dim(), block = kv_block_positions;
        const int64_t sizes[] = {block * dim * 2,       block * dim * 2,       rows * dim * 2, rows * 4,
                                 attended_rows * block * 4, attended_rows * block * 2, attended_rows * 4,          rows * dim * 4,
                                 rows * lanes * 4,      rows * 4,              rows * dim * 4,         rows * 8};
        char *starts[12];
        int64_t total = 0;
        for (int64_t size : sizes) total += (size + 63) / 64 * 64;
        char *next = worker.scratch<char>(total);
        for (int i = 0; i < 12; i++) {
            starts[i] = next;
            next += (sizes[i] + 63) / 64 * 64;
        }
        return {reinterpret_cast<bf16 *>(starts[0]),   reinterpret_cast<bf16 *>(starts[1]),
                reinterpret_cast<X *>(starts[2]),      reinterpret_cast<float *>(starts[3]),
                reinterpret_cast<float *>(starts[4]),  reinterpret_cast<X *>(starts[5]),
                reinterpret_cast<float *>(starts[6]),  reinterpret_cast<float *>(starts[7]),
                reinterpret_cast<float *>(starts[8]),  reinterpret_cast<float *>(starts[9]),
                reinterpret_cast<float *>(starts[10]), reinterpret_cast<AttentionRow *>(starts[11])};
    }
};

template <class Format>
class AttentionTile {
public:
    using Block = KvBlock<Format>;

    AttentionTile(const AttentionShape &shape, int64_t max_rows, Worker &worker)
        : shape_(shape), scratch_(Scratch::make(shape, max_rows, worker)) {}

    // Takes in `heads` query heads, the first of which is head `first`, of each of `positions` positions, `stride` apart, as
    // the tile's rows.
    void start(const bf16 *q, int64_t positions, int64_t first, int64_t heads, int64_t stride) {
        const int64_t rows = positions * heads, dim = shape_.head_dim;
        for (int64_t r = 0; r < rows; r++)
            scratch_.q_units[r] =
                Format::take_query(q + r / heads * stride + r % heads * dim, dim, scratch_.q + r * dim);
        memset(scratch_.totals, 0, rows * shape_.padded_dim() * sizeof(float));
        for (int64_t r = 0; r < rows; r++) scratch_.rows[r] = shape_.begin(first + r % heads);
        start_range(rows);
    }

    // Joins what the tile's rows first .. last - 1 found in a range, and starts the next one for all `rows`.
    void finish_range(int64_t first, int64_t last, int64_t rows) {
        for (int64_t r = first; r < last; r++)
            join(scratch_.rows[r], scratch_.totals + r * shape_.padded_dim(), state(r), sums(r), shape_.padded_dim());
        start_range(rows);
    }

    // out bf16 [head_dim] = the result of a row over all ranges.
    void store_row(int64_t r, bf16 *out) const {
        store_head(scratch_.rows[r], scratch_.totals + r * shape_.padded_dim(), shape_.head_dim, out);
    }

    // The tile's rows from `row` on, which are at positions first, first + 1 .. with a group of heads each,
    // attend the first `count` positions of a block that starts at position `begin`, as far as they
    // see them. Meanwhile, block `next` is fetched into the cache, unless it is this one.
    void attend(Block block, Block next, int64_t row, int64_t rows, int64_t first, int64_t begin, int64_t count) {
        for (int64_t at = 0; at < Format::header && next.k != block.k; at += 64) {
            __builtin_prefetch(next.k + at, 0, 2);
            __builtin_prefetch(next.v + at, 0, 2);
        }
        for (int64_t done = 0; done < rows; done += attended_rows) {
            attend_rows(block, next, row + done, rows - done < attended_rows ? rows - done : attended_rows, first, done, begin,
                        count);
            next = block;
        }
    }

    // What a row found in the range at hand: `sums` f32 [padded_dim].
    AttentionRow state(int64_t r) const {
        return {scratch_.tops[r], sum_of(load<f32v>(scratch_.sums + r * lanes))};
    }
    const float *sums(int64_t r) const { return scratch_.out + r * shape_.padded_dim(); }
    // Room for a block that is not in panels yet.
    bf16 *k_scratch() const { return scratch_.k; }
    bf16 *v_scratch() const { return scratch_.v; }

private:
    using X = typename Format::X;
    using Number = typename Format::Number;
    using Scratch = AttentionScratch<X>;

    void start_range(int64_t rows) {
        memset(scratch_.out, 0, rows * shape_.padded_dim() * sizeof(float));
        memset(scratch_.sums, 0, rows * lanes * sizeof(float));
        for (int64_t r = 0; r < rows; r++) scratch_.tops[r] = -INFINITY;
    }

    // Rows at positions before the block, the first ones, are left out, and the last ones that do not see so far back.
    // `rows` <= attended_rows rows, the first of which is the tile's row `row` and its head's row `offset`.
    NOINLINE void attend_rows(Block block, Block next, int64_t row, int64_t rows, int64_t first, int64_t offset,
                     int64_t begin, int64_t count) {
        const int64_t early = (begin - first) * shape_.group() - offset;  // rows at positions before the block
        if (early >= rows) return;
        if (early > 0) row += early, offset += early, rows -= early;
        // The first position whose rows see no position of the block.
        const int64_t late = (begin + count + shape_.sees - 1 - first) * shape_.group() - offset;
        if (late <= 0) return;
        if (late < rows) rows = late;
        int64_t hidden[attended_rows], visible[attended_rows], most = 0;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t position = first + (offset + r) / shape_.group(), seen = position + 1 - begin;
            hidden[r] = shape_.first_seen(position) - begin;
            visible[r] = seen < count ? seen : count;
            if (visible[r] > most) most = visible[r];
        }
#if ISA_AMX
        if (Format::in_tiles) tiles_.take(rows);
#endif
        score(block.k, next.k - block.k, row, rows, most);
        for (int64_t r = 0; r < rows; r++)
            scratch_.units[r] = weigh(row + r, hidden[r], visible[r], most, Format::scales(block.v),
                                      scratch_.scores + r * kv_block_positions,
                                      scratch_.weights + r * kv_block_positions);
        add_values(block.v, next.v - block.v, row, rows, most);
    }

    // Calls multiply(the first, Panels) for all of `panels`, none of them in vain.
    template <class Multiply>
    static void each_tile(int64_t panels, const Multiply &multiply) {
        for (int64_t panel = 0; panel < panels;)
            panel += with_panels<Panels<tile_panels>>(panels - panel, [&](auto some) { multiply(panel, some); });
    }

    template <int P>
    NOINLINE static void multiply(int64_t rows, const typename Format::Args &args) {
#if ISA_AMX
        if constexpr (Format::in_tiles) return tiles_of_rows<P>(rows, args);
#endif
        tile_of_rows<P>(rows, args);
    }

    // scores = q @ k^T.
    void score(const Number *k, int64_t ahead, int64_t row, int64_t rows, int64_t positions) {
        const int64_t size = panel_size(shape_.head_dim);
        typename Format::Args args;
        args.x = scratch_.q + row * shape_.head_dim;
        args.x_stride = shape_.head_dim;
        args.pairs = shape_.head_dim / 2;
        args.out_stride = kv_block_positions;
        args.accumulate = false;
        args.ahead = ahead;
        each_tile(panel_count(positions), [&](int64_t panel, auto some) {
            for (int64_t p = 0; p < some.value; p++) args.panels[p] = k + Format::header + (panel + p) * size;
            Format::in_units(args, scratch_.q_units + row, Format::scales(k), panel * panel_rows);
            args.out = scratch_.scores + panel * panel_rows;
            multiply<some.value>(rows, args);
        });
    }

    // Scores of the first `count` positions, which have `scales`, to weights, 0 for those before `hidden` and for the others
    // up to `most`; returns the weights' unit.
    float weigh(int64_t r, int64_t hidden, int64_t count, int64_t most, const float *scales, float *scores, X *weights) {
        for (int64_t i = count; i % lanes != 0; i++) scores[i] = -INFINITY;
        for (int64_t i = 0; i < hidden; i++) scores[i] = -INFINITY;
        raise_top(r, count, scores);
        const float top = scratch_.tops[r], scale = shape_.scale();
        f32v sum = load<f32v>(scratch_.sums + r * lanes);
        typename Format::Weights taken(weights, scales, scores, count);
        int64_t i = 0;
        for (; i < count; i += lanes) {
            const f32v weight = exp2(load<f32v>(scores + i) * scale - top);
            sum += weight;
            taken.put(i, weight);
        }
        store(scratch_.sums + r * lanes, sum);
        if (i < most) memset(weights + i, 0, (most - i + 1) / 2 * 2 * sizeof(X));
        return taken.finish();
    }

    void raise_top(int64_t r, int64_t count, const float *scores) {
        f32v tops = load<f32v>(scores);
        for (int64_t i = lanes; i < count; i += lanes) tops = max(tops, load<f32v>(scores + i));
        const float top = max_of(tops) * shape_.scale(), before = scratch_.tops[r];
        if (!(top > before + top_slack)) return;
        scratch_.tops[r] = top;
        if (before == -INFINITY) return;
        const float factor = exp2f(before - top);
        float *out = scratch_.out + r * shape_.padded_dim(), *sum = scratch_.sums + r * lanes;
        for (int64_t d = 0; d < shape_.padded_dim(); d += lanes) store(out + d, load<f32v>(out + d) * factor);
        store(sum, load<f32v>(sum) * factor);
    }

    // out += weights @ v.
    void add_values(const Number *v, int64_t ahead, int64_t row, int64_t rows, int64_t positions) {
        const int64_t size = panel_size(kv_block_positions);
        typename Format::Args args;
        args.x = scratch_.weights;
        args.x_stride = kv_block_positions;
        args.pairs = pair_count(positions);
        args.out_stride = shape_.padded_dim();
        args.accumulate = true;
        args.ahead = ahead;
        Format::in_units(args, scratch_.units, nullptr, 0);
        each_tile(shape_.dim_panels(), [&](int64_t panel, auto some) {
            for (int64_t p = 0; p < some.value; p++) args.panels[p] = v + Format::header + (panel + p) * size;
            args.out = scratch_.out + row * shape_.padded_dim() + panel * panel_rows;
            multiply<some.value>(rows, args);
        });
    }

    AttentionShape shape_;
    Scratch scratch_;
#if ISA_AMX
    RowTiles tiles_;
#endif
};

}  // namespace
}  // namespace ISA
