// What becomes of the f32 sums of a projection (see gemm_core.h). Included inside each instruction set.
// Each rounds where the unfused kernels round, so that fusing changes no bit.
namespace ISA {
namespace {

// f32 sums of a group of columns, rounded to bf16 as if they had been stored.
INLINE f32v rounded(const float *sums) { return to_float(to_bf16(load<f32v>(sums))); }

// Asks for the lines of `count` elements, to be read or, if `written`, written.
template <int written, class T>
INLINE void expect_lines(const T *first, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(first + i, written, 3);
    __builtin_prefetch(first + count - 1, written, 3);
}

// The outputs that a panel has.
INLINE int64_t panel_outputs(int64_t panel, int64_t out_cols) {
    const int64_t left = out_cols - panel * panel_rows;
    return left < panel_rows ? left : panel_rows;
}

// With the bias, if there is one, added before the sums are rounded.
struct StoreBf16 {
    static constexpr int64_t weights = 1;
    bf16 *out;
    int64_t out_cols;
    const bf16 *bias = nullptr;
    const Joined *joined = nullptr;  // the matrices, if several are multiplied as one

    // Where `count` outputs from `column` on belong. Of joined matrices they are those of a panel, and become those of its matrix.
    INLINE_MEMBER Joined::Result result(int64_t &column, int64_t &count) const {
        if (joined == nullptr) return {out, out_cols, bias};
        const int64_t panel = column / panel_rows, of = joined->of(panel), own = panel - joined->begins[of];
        column = own * panel_rows;
        count = panel_outputs(own, joined->results[of].out_cols);
        return joined->results[of];
    }

    INLINE_MEMBER void row(const float *sums, int64_t r, int64_t column, int64_t count) const {
        const Joined::Result to = result(column, count);
        bf16 *o = to.out + r * to.out_cols + column;
        for (int64_t i = 0; i < count; i += lanes) {
            const f32v sum = load<f32v>(sums + i);
            store_bf16(o + i, to.bias == nullptr ? sum : sum + load_bf16(to.bias + column + i, count - i), count - i);
        }
    }
};

INLINE const Joined *joined_by(const StoreBf16 &epilogue) { return epilogue.joined; }

// Multiplies with each of Q's, K's and V's weights: with all as one if `as_one`, and where the machine reads few long streams fastest.
// `size`: elements of a panel. multiply(weights, outputs, epilogue) is one product.
template <class Weight, class Multiply>
INLINE void each_of_qkv(const Weight *const *weights, int64_t size, const Joined::Result *results, bool as_one, const Multiply &multiply) {
    Joined joined = {};
    int64_t panels = 0;
    as_one = as_one && reads_ahead;
    for (int i = 0; i < Joined::most; i++) {
        const auto &[out, out_cols, bias] = joined.results[i] = results[i];
        if (!as_one) multiply(weights + i, out_cols, StoreBf16{out, out_cols, bias});
        joined.begins[i] = panels;
        joined.jumps[i] = weights[i] - weights[0] - panels * size;
        panels += panel_count(out_cols);
    }
    const int64_t all = panels * panel_rows;
    if (as_one) multiply(weights, all, StoreBf16{results[0].out, all, nullptr, &joined});
}

struct StoreF32 {
    static constexpr int64_t weights = 1;
    float *out;
    int64_t out_cols;

    void row(const float *sums, int64_t r, int64_t column, int64_t count) const {
        float *o = out + r * out_cols + column;
        for (int64_t i = 0; i < count; i++) o[i] = sums[i];
    }
};

struct AddResidual {
    static constexpr int64_t weights = 1;
    const bf16 *residual;
    bf16 *out;
    int64_t out_cols;

    INLINE_MEMBER void row(const float *sums, int64_t r, int64_t column, int64_t count) const {
        const int64_t first = r * out_cols + column;
        for (int64_t i = 0; i < count; i += lanes)
            store_bf16(out + first + i, rounded(sums + i) + load_bf16(residual + first + i, count - i),
                       count - i);
    }
};

template <int64_t group_columns>
struct SiluAndMul {
    static constexpr int64_t weights = 2;
    bf16 *out;
    int64_t out_cols;
    int64_t activation;

    INLINE_MEMBER void row(const float *sums, int64_t r, int64_t column, int64_t count) const {
        bf16 *o = out + r * out_cols + column;
        for (int64_t i = 0; i < count; i += lanes)
            store_bf16(o + i, gated(rounded(sums + i), rounded(sums + group_columns + i), activation), count - i);
    }
};

// Asks for the lines of a row that an epilogue is going to touch: else the end of the row waits for them.
template <class Epilogue>
INLINE void expect_row(const Epilogue &epilogue, int64_t r, int64_t column, int64_t count) {
    expect_lines<1>(epilogue.out + r * epilogue.out_cols + column, count);
}

INLINE void expect_row(const StoreBf16 &epilogue, int64_t r, int64_t column, int64_t count) {
    const Joined::Result to = epilogue.result(column, count);
    expect_lines<1>(to.out + r * to.out_cols + column, count);
}

INLINE void expect_row(const AddResidual &epilogue, int64_t r, int64_t column, int64_t count) {
    expect_row<AddResidual>(epilogue, r, column, count);
    expect_lines<0>(epilogue.residual + r * epilogue.out_cols + column, count);
}

// One panel of row r: sums as its epilogue takes them, of outputs from panel * panel_rows on.
template <class Epilogue>
NOINLINE void finish_panel(const Epilogue &epilogue, int64_t panel, int64_t out_cols, const float *sums, int64_t r = 0) {
    epilogue.row(sums, r, panel * panel_rows, panel_outputs(panel, out_cols));
}

// `count` panels of a row, `panel` and others `apart`: their sums of each weight lie together.
template <int count, class Epilogue>
INLINE void finish_panels(const Epilogue &epilogue, int64_t panel, int64_t apart, int64_t out_cols,
                          const float (*sums)[count * panel_rows]) {
    for (int64_t p = 0; p < count; p++) {
        float row[Epilogue::weights * panel_rows];
        for (int64_t w = 0; w < Epilogue::weights; w++)
            memcpy(row + w * panel_rows, sums[w] + p * panel_rows, panel_rows * sizeof(float));
        finish_panel(epilogue, panel + p * apart, out_cols, row);
    }
}

}  // namespace
}  // namespace ISA
