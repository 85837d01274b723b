// Q, K and V of one vector as one product: its chunks go on from one matrix to the next, and so do its streams. Included inside each
// instruction set.
namespace ISA {
namespace {

// The results of three matrices, each of which is a row of its own.
struct StoreEach {
    static constexpr int64_t weights = 1;
    bf16 *out;         // the first one's
    int64_t out_cols;  // of all, each padded to whole panels
    StoreBf16 results[Joined::most + 1];
    Joined joined;

    INLINE_MEMBER void row(const float *sums, int64_t, int64_t column, int64_t) const {
        int64_t of = 0, first = 0;
        for (int i = 0; i < Joined::most; i++)
            if (column >= joined.begins[i] * panel_rows) of = i + 1, first = joined.begins[i];
        const int64_t panel = column / panel_rows - first;
        results[of].row(sums, 0, panel * panel_rows, panel_outputs(panel, results[of].out_cols));
    }
};

INLINE const Joined *joined_by(const StoreEach &epilogue) { return &epilogue.joined; }

// `size`: elements of a panel.
template <class Weight>
INLINE StoreEach store_each(const Weight *const *weights, int64_t size, const StoreBf16 *results) {
    StoreEach each = {results[0].out, 0, {}, {}};
    int64_t panels = 0;
    for (int i = 0; i <= Joined::most; i++) {
        each.results[i] = results[i];
        if (i > 0) each.joined.begins[i - 1] = panels, each.joined.jumps[i - 1] = weights[i] - weights[0] - panels * size;
        panels += panel_count(results[i].out_cols);
    }
    each.out_cols = panels * panel_rows;
    return each;
}

// Multiplies x with each weight by a Product, or where the machine reads few long streams fastest, with all by one Whole. `size`:
// elements of a panel.
template <class Product, class Whole, class Weight>
INLINE void joined_gemv(const Weight *const *weights, const bf16 *x, int64_t size, int64_t cols, const StoreBf16 *results, Worker &worker) {
    if (reads_ahead) {
        const StoreEach each = store_each(weights, size, results);
        return Whole(weights, each.out_cols, cols, each).run(x, worker);
    }
    for (int i = 0; i <= Joined::most; i++) Product(weights + i, results[i].out_cols, cols, results[i]).run(x, worker);
}

}  // namespace
}  // namespace ISA
