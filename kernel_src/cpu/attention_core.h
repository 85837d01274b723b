// Attention of a tile of query rows over blocks of the KV cache, with an online softmax. Included inside
// each instruction set.
//
// The rows of a tile share one KV head: they are `group` query heads at consecutive positions, ordered
// by position, then head. A block of K and V is brought into panels (panels.h), once for all rows:
// K with positions as outputs, V with positions as columns. Both products are then tile().
namespace ISA {
namespace {

constexpr int64_t block_positions = 128;

// Scores are kept in units of log2, so that exp2 suffices.
struct AttentionShape {
    int64_t heads, kv_heads, head_dim;
    int64_t kv_step;  // elements from one KV head to the next: head_dim, or twice that if V lies between
    int64_t group() const { return heads / kv_heads; }
    int64_t dim_panels() const { return panel_count(head_dim); }
    int64_t padded_dim() const { return dim_panels() * panel_rows; }
    float scale() const { return 1.44269504f / sqrtf(static_cast<float>(head_dim)); }
};

// A row's state: sum of exp2(score - top), and the same weighted with V, not yet divided.
struct AttentionRow {
    float top, sum;
};

// Scratch of one worker, cut out of one allocation.
struct AttentionScratch {
    bf16 *q;            // [rows][head_dim]
    bf16 *k_panels;     // [block_positions] x [head_dim]
    bf16 *v_panels;     // [head_dim] x [block_positions]
    float *scores;      // [tile_rows][block_positions]
    bf16 *weights;      // [tile_rows][block_positions]
    float *out;         // [rows][padded_dim]
    AttentionRow *row;  // [rows]

    static AttentionScratch make(const AttentionShape &shape, int64_t rows, Worker &worker) {
        const int64_t dim = shape.padded_dim();
        const int64_t sizes[] = {rows * dim * 2, block_positions * dim * 2, block_positions * dim * 2,
                                 tile_rows * block_positions * 4, tile_rows * block_positions * 2,
                                 rows * dim * 4, rows * static_cast<int64_t>(sizeof(AttentionRow))};
        int64_t starts[7], total = 0;
        for (int i = 0; i < 7; i++) {
            starts[i] = total;
            total += (sizes[i] + 63) / 64 * 64;
        }
        char *base = worker.scratch<char>(total);
        return {reinterpret_cast<bf16 *>(base + starts[0]), reinterpret_cast<bf16 *>(base + starts[1]),
                reinterpret_cast<bf16 *>(base + starts[2]), reinterpret_cast<float *>(base + starts[3]),
                reinterpret_cast<bf16 *>(base + starts[4]), reinterpret_cast<float *>(base + starts[5]),
                reinterpret_cast<AttentionRow *>(base + starts[6])};
    }
};

class AttentionTile {
public:
    AttentionTile(const AttentionShape &shape, int64_t max_rows, Worker &worker)
        : shape_(shape), scratch_(AttentionScratch::make(shape, max_rows, worker)) {}

    // Starts a tile of the query rows at positions first .. first + positions - 1; q and k, v point to
    // the first position's first head of the group, resp. position 0 of the KV head.
    void start(const bf16 *q, const bf16 *k, const bf16 *v, int64_t first, int64_t positions) {
        k_ = k;
        v_ = v;
        first_ = first;
        rows_ = positions * shape_.group();
        const int64_t width = shape_.group() * shape_.head_dim;
        for (int64_t p = 0; p < positions; p++)
            memcpy(scratch_.q + p * width, q + p * shape_.heads * shape_.head_dim, width * sizeof(bf16));
        memset(scratch_.out, 0, rows_ * shape_.padded_dim() * sizeof(float));
        for (int64_t r = 0; r < rows_; r++) scratch_.row[r] = {-INFINITY, 0.0f};
    }

    // Attends positions begin .. end - 1, of which later ones are masked for earlier rows.
    void attend(int64_t begin, int64_t end) {
        for (; begin < end; begin += block_positions) {
            const int64_t count = end - begin < block_positions ? end - begin : block_positions;
            pack_k(begin, count);
            pack_v(begin, count);
            for (int64_t row = 0; row < rows_; row += tile_rows) attend_rows(row, begin, count);
        }
    }

    int64_t rows() const { return rows_; }
    const AttentionRow &state(int64_t r) const { return scratch_.row[r]; }
    const float *sums(int64_t r) const { return scratch_.out + r * shape_.padded_dim(); }

private:
    int64_t stride() const { return shape_.kv_heads * shape_.kv_step; }

    // k_panels[position / 16][d / 2][position % 16][2]; positions up to the panel's end are zero.
    void pack_k(int64_t begin, int64_t count) {
        const int64_t pairs = shape_.head_dim / 2;
        for (int64_t i = 0; i < panel_count(count) * panel_rows; i++) {
            bf16 *to = scratch_.k_panels + i / panel_rows * pairs * line_elements + i % panel_rows * 2;
            const bf16 *from = k_ + (begin + i) * stride();
            for (int64_t pair = 0; pair < pairs; pair++) {
                if (i < count)
                    memcpy(to + pair * line_elements, from + 2 * pair, 2 * sizeof(bf16));
                else
                    memset(to + pair * line_elements, 0, 2 * sizeof(bf16));
            }
        }
    }

    // v_panels[d / 16][position / 2][d % 16][2]; an odd last position's partner is zero.
    void pack_v(int64_t begin, int64_t count) {
        const int64_t pairs = pair_count(count), dim = shape_.head_dim;
        for (int64_t pair = 0; pair < pairs; pair++) {
            const bf16 *even = v_ + (begin + 2 * pair) * stride();
            const bf16 *odd = 2 * pair + 1 < count ? even + stride() : nullptr;
            for (int64_t d = 0; d < shape_.padded_dim(); d++) {
                bf16 *to = scratch_.v_panels + (d / panel_rows * block_positions / 2 + pair) * line_elements +
                           d % panel_rows * 2;
                to[0] = d < dim ? even[d] : 0;
                to[1] = d < dim && odd != nullptr ? odd[d] : 0;
            }
        }
    }

    // Positions of the block that row r sees.
    int64_t visible(int64_t r, int64_t begin, int64_t count) const {
        const int64_t seen = first_ + r / shape_.group() + 1 - begin;
        return seen < 0 ? 0 : seen < count ? seen : count;
    }

    void attend_rows(int64_t row, int64_t begin, int64_t count) {
        const int64_t rows = rows_ - row < tile_rows ? rows_ - row : tile_rows;
        const int64_t most = visible(row + rows - 1, begin, count);
        if (most == 0) return;
        score(row, rows, most);
        for (int64_t r = 0; r < rows; r++)
            weigh(row + r, visible(row + r, begin, count), scratch_.scores + r * block_positions,
                  scratch_.weights + r * block_positions);
        add_values(row, rows, most);
    }

    // scores = q @ k^T.
    void score(int64_t row, int64_t rows, int64_t positions) {
        const int64_t size = panel_size(shape_.head_dim);
        TileArgs args;
        args.x = scratch_.q + row * shape_.head_dim;
        args.x_stride = shape_.head_dim;
        args.pairs = shape_.head_dim / 2;
        args.out_stride = block_positions;
        args.accumulate = false;
        for (int64_t panel = 0; panel < panel_count(positions); panel += tile_panels) {
            for (int64_t p = 0; p < tile_panels; p++) args.panels[p] = scratch_.k_panels + (panel + p) * size;
            args.out = scratch_.scores + panel * panel_rows;
            tile_of_rows<tile_panels>(rows, args);
        }
    }

    // Scores of `count` positions to bf16 weights of the whole block, 0 for the others; the row's state
    // and sums move to the new maximum.
    void weigh(int64_t r, int64_t count, float *scores, bf16 *weights) {
        AttentionRow &state = scratch_.row[r];
        for (int64_t i = count; i % lanes != 0; i++) scores[i] = -INFINITY;
        f32v tops = splat(state.top);
        const f32v scale = splat(shape_.scale());
        for (int64_t i = 0; i < count; i += lanes) tops = max(tops, load<f32v>(scores + i) * scale);
        const float top = max_of(tops);
        if (top > state.top) rescale(r, top);
        f32v sum = {};
        for (int64_t i = 0; i < count; i += lanes) {
            const f32v weight = exp2(load<f32v>(scores + i) * scale - top);
            sum += weight;
            store_bf16(weights + i, weight);
        }
        state.sum += sum_of(sum);
        for (int64_t i = (count + lanes - 1) / lanes * lanes; i < block_positions; i += lanes)
            store_bf16(weights + i, f32v{});
    }

    void rescale(int64_t r, float top) {
        AttentionRow &state = scratch_.row[r];
        if (state.sum != 0.0f) {
            const float factor = exp2f(state.top - top);
            float *out = scratch_.out + r * shape_.padded_dim();
            for (int64_t d = 0; d < shape_.padded_dim(); d += lanes) store(out + d, load<f32v>(out + d) * factor);
            state.sum *= factor;
        }
        state.top = top;
    }

    // out += weights @ v.
    void add_values(int64_t row, int64_t rows, int64_t positions) {
        const int64_t size = panel_size(block_positions), panels = shape_.dim_panels();
        TileArgs args;
        args.x = scratch_.weights;
        args.x_stride = block_positions;
        args.pairs = pair_count(positions);
        args.out_stride = shape_.padded_dim();
        args.accumulate = true;
        for (int64_t panel = 0; panel < panels;) {
            args.out = scratch_.out + row * shape_.padded_dim() + panel * panel_rows;
            for (int64_t p = 0; p < tile_panels && panel + p < panels; p++)
                args.panels[p] = scratch_.v_panels + (panel + p) * size;
            if (panel + tile_panels <= panels) {
                tile_of_rows<tile_panels>(rows, args);
                panel += tile_panels;
            } else {
                tile_of_rows<1>(rows, args);
                panel++;
            }
        }
    }

    AttentionShape shape_;
    AttentionScratch scratch_;
    const bf16 *k_ = nullptr, *v_ = nullptr;
    int64_t first_ = 0, rows_ = 0;
};

}  // namespace
}  // namespace ISA
