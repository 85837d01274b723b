// Q, K and V of one vector as one product: its chunks go on from one matrix to the next, and so do its streams. Included inside each
// instruction set.
namespace ISA {
namespace {

// Multiplies x with each weight by a Product: with all as one where the machine reads few long streams fastest. `size`: elements of
// a panel.
template <class Product, class Weight>
INLINE void joined_gemv(const Weight *const *weights, const bf16 *x, int64_t size, int64_t cols, const Joined::Result *results, Worker &worker) {
    Joined joined = {};
    int64_t panels = 0;
    for (int i = 0; i < Joined::most; i++) {
        const auto &[out, out_cols, bias] = joined.results[i] = results[i];
        if (!reads_ahead) Product(weights + i, out_cols, cols, {out, out_cols, bias}).run(x, worker);
        joined.begins[i] = panels;
        joined.jumps[i] = weights[i] - weights[0] - panels * size;
        panels += panel_count(out_cols);
    }
    const int64_t all = panels * panel_rows;
    if (reads_ahead) Product(weights, all, cols, {results[0].out, all, nullptr, &joined}).run(x, worker);
}

}  // namespace
}  // namespace ISA
