// The norm of a row of bf16, in f32. Included inside each instruction set.
namespace ISA {
namespace {

// weight bf16 [cols], to which `offset` is added. With `once`, only the result is rounded; without, the normalised value is
// rounded before it is scaled too, as in transformers.
struct Norm {
    const bf16 *weight;
    int64_t cols;
    float eps, offset;
    bool once;

    static float mean_of_squares(const bf16 *x, int64_t cols) {
        f32v sum[4] = {};
        int64_t i = 0;
        for (; i + 4 * lanes <= cols; i += 4 * lanes)
            for (int64_t j = 0; j < 4; j++) {
                const f32v v = load_bf16(x + i + j * lanes);
                sum[j] += v * v;
            }
        for (; i < cols; i += lanes) {
            const f32v v = load_bf16(x + i, cols - i);
            sum[0] += v * v;
        }
        return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3])) / static_cast<float>(cols);
    }

    // The values from i on of a row whose values are multiplied by `scale`.
    INLINE_MEMBER f32v at(const bf16 *x, int64_t i, float scale) const {
        const f32v normal = load_bf16(x + i, cols - i) * scale;
        return (once ? normal : to_float(to_bf16(normal))) * (load_bf16(weight + i, cols - i) + offset);
    }

    float scale(const bf16 *x) const { return 1.0f / sqrtf(mean_of_squares(x, cols) + eps); }

    void row(const bf16 *x, bf16 *out) const {
        const float by = scale(x);
        for (int64_t i = 0; i < cols; i += lanes) store_bf16(out + i, at(x, i, by), cols - i);
    }

    // out = residual + the rounded norm.
    void row_added(const bf16 *x, const bf16 *residual, bf16 *out) const {
        const float by = scale(x);
        for (int64_t i = 0; i < cols; i += lanes) {
            const f32v normed = to_float(to_bf16(at(x, i, by)));
            store_bf16(out + i, load_bf16(residual + i, cols - i) + normed, cols - i);
        }
    }
};

}  // namespace
}  // namespace ISA
