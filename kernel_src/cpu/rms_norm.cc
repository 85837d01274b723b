// The norm of rows (norm.h): bf16(bf16(x / sqrt(mean(x^2) + eps)) * (weight + offset)), and with `once` without the inner
// rounding.
//   rms_norm  out = the norm of x
//   norm_add  out = residual + the norm of x
// x, residual and out bf16 [rows][cols], weight bf16 [cols]. The mean of squares is f32.
#include "vec.h"
#include "norm.h"

namespace ISA {

static void rms_norm(const bf16 *x, const bf16 *residual, bf16 *out, int64_t rows, const Norm &norm, Worker &worker) {
    Chunks chunks(worker, rows, 64, 8);
    for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t r = begin; r < end; r++) {
            const int64_t first = r * norm.cols;
            if (residual == nullptr) norm.row(x + first, out + first);
            else norm.row_added(x + first, residual + first, out + first);
        }
}

}  // namespace ISA

KERNEL void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int64_t rows, int64_t cols,
                     float eps, float offset, int64_t once, Worker &worker) {
    ISA::rms_norm(x, nullptr, out, rows, {weight, cols, eps, offset, once != 0}, worker);
}

KERNEL void norm_add(const bf16 *x, const bf16 *residual, const bf16 *weight, bf16 *out, int64_t rows, int64_t cols,
                     float eps, float offset, int64_t once, Worker &worker) {
    ISA::rms_norm(x, residual, out, rows, {weight, cols, eps, offset, once != 0}, worker);
}
