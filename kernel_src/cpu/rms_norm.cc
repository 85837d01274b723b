// rms_norm: out = bf16(bf16(x / sqrt(mean(x^2) + eps)) * weight), x and out bf16 [rows][cols], weight bf16 [cols].
// The mean of squares is f32. The normalised value is rounded before it is scaled, as in transformers.
#include "vec.h"

namespace ISA {

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

static void norm_row(const bf16 *x, const bf16 *weight, bf16 *out, int64_t cols, float eps) {
    const float scale = 1.0f / sqrtf(mean_of_squares(x, cols) + eps);
    for (int64_t i = 0; i < cols; i += lanes) {
        const f32v normal = to_float(to_bf16(load_bf16(x + i, cols - i) * scale));
        store_bf16(out + i, normal * load_bf16(weight + i, cols - i), cols - i);
    }
}

static void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t cols, float eps,
                     Worker &worker) {
    Chunks chunks(worker, rows, 64, 8);
    for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t r = begin; r < end; r++) norm_row(x + r * cols, weight, out + r * cols, cols, eps);
}

}  // namespace ISA

KERNEL void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t cols,
                     float eps, Worker &worker) {
    ISA::rms_norm(x, weight, out, rows, cols, eps, worker);
}
