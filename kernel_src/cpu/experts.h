// Experts of which each row takes some: feed-forward networks whose weights are stacked, each expert's panels whole. Included
// inside each instruction set.
//
// A row's results are summed in f32 in the order of the experts' ids, each times its share and with its bias, and rounded
// once: the same bits in a prompt and as a token.
namespace ISA {
namespace {

// Of `count` experts, each row takes `top`.
struct Experts {
    int64_t count, top;

    // An id that is none is that of the last expert: nothing outside of the weights is read.
    INLINE_MEMBER int64_t id(const int32_t *chosen, int64_t i) const {
        const int64_t id = static_cast<uint32_t>(chosen[i]);
        return id < count ? id : count - 1;
    }
};

// The bias of an expert's `width` outputs; null where there are none.
INLINE const bf16 *bias_of(const bf16 *biases, int64_t id, int64_t width) {
    return biases == nullptr ? nullptr : biases + id * width;
}

INLINE f32v with_bias(f32v sum, const bf16 *bias, int64_t column, int64_t count) {
    return bias == nullptr ? sum : sum + load_bf16(bias + column, count);
}

// out = activation(gate) * up of rounded products with their biases. Included in epilogue.h's sense.
template <int64_t group_columns>
struct GatedExpert {
    static constexpr int64_t weights = 2;
    bf16 *out;
    int64_t out_cols;
    int64_t activation;
    const bf16 *gate_bias, *up_bias;

    INLINE_MEMBER void row(const float *sums, int64_t r, int64_t column, int64_t count) const {
        bf16 *o = out + r * out_cols + column;
        for (int64_t i = 0; i < count; i += lanes) {
            const f32v gate = with_bias(load<f32v>(sums + i), gate_bias, column + i, count - i);
            const f32v up = with_bias(load<f32v>(sums + group_columns + i), up_bias, column + i, count - i);
            store_bf16(o + i, gated(to_float(to_bf16(gate)), to_float(to_bf16(up)), activation), count - i);
        }
    }
};

// total f32 [count, in whole vectors] += share * (sums + bias).
INLINE void add_share(float *total, const float *sums, float share, const bf16 *bias, int64_t column, int64_t count) {
    for (int64_t i = 0; i < count; i += lanes) {
        const f32v sum = with_bias(load<f32v>(sums + i), bias, column + i, count - i);
        store(total + i, multiply_add(splat(share), sum, load<f32v>(total + i)));
    }
}

// Arguments of both kernels; `Weight` as in panels.
template <class Weight>
struct GateAndUp {
    const bf16 *x;
    const int32_t *chosen;
    const Weight *gate, *up;
    const bf16 *gate_bias, *up_bias;
    bf16 *out;
    int64_t cols, out_cols;
    Experts experts;
    int64_t activation;

    template <int64_t group_columns>
    INLINE_MEMBER GatedExpert<group_columns> epilogue(int64_t id, int64_t row) const {
        return {out + row * out_cols, out_cols, activation, bias_of(gate_bias, id, out_cols), bias_of(up_bias, id, out_cols)};
    }
};

template <class Weight>
struct SharedDown {
    const bf16 *x;
    const int32_t *chosen;
    const float *shares;
    const Weight *weight;
    const bf16 *bias, *residual;
    bf16 *out;
    int64_t cols, out_cols;
    Experts experts;

    // Stores a row's totals of some columns.
    INLINE_MEMBER void store_row(const float *totals, int64_t r, int64_t column, int64_t count) const {
        if (residual == nullptr) StoreBf16{out, out_cols}.row(totals, r, column, count);
        else AddResidual{residual, out, out_cols}.row(totals, r, column, count);
    }
};

}  // namespace
}  // namespace ISA
