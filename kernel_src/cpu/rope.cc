// rope: rotary position embedding. Rotates the pairs (d, d + head_dim/2) of every head of row r by the angles of table
// row pos + r; may work in place.
// norm_rope: the same of the norm (norm.h) of every head, with one weight bf16 [head_dim] for all.
// x, out bf16 [rows][heads][head_dim]; table f32 [max_position][head_dim]: cosines, then sines.
#include "vec.h"
#include "norm.h"

namespace ISA {

static void rotate_head(const bf16 *x, const float *table, bf16 *out, int64_t half) {
    for (int64_t d = 0; d < half; d += lanes) {
        const int64_t count = half - d;
        const f32v a = load_bf16(x + d, count), b = load_bf16(x + half + d, count);
        const f32v cosine = load_f32(table + d, count), sine = load_f32(table + half + d, count);
        store_bf16(out + d, a * cosine - b * sine, count);
        store_bf16(out + half + d, b * cosine + a * sine, count);
    }
}

static void rope(const bf16 *x, const float *table, bf16 *out, int64_t rows, int64_t heads,
                 const Norm &norm, Worker &worker) {
    const int64_t head_dim = norm.cols;
    Chunks chunks(worker, rows, 64, 4);
    for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t i = begin * heads; i < end * heads; i++) {
            const bf16 *head = x + i * head_dim;
            bf16 *to = out + i * head_dim;
            if (norm.weight != nullptr) {
                norm.row(head, to);
                head = to;
            }
            rotate_head(head, table + i / heads * head_dim, to, head_dim / 2);
        }
}

}  // namespace ISA

KERNEL void rope(const bf16 *x, const float *table, bf16 *out, int64_t rows, int64_t pos,
                 int64_t heads, int64_t head_dim, Worker &worker) {
    ISA::rope(x, table + pos * head_dim, out, rows, heads, {nullptr, head_dim, 0, 0, false}, worker);
}

KERNEL void norm_rope(const bf16 *x, const float *table, const bf16 *weight, bf16 *out, int64_t rows, int64_t pos,
                      int64_t heads, int64_t head_dim, float eps, float offset, int64_t once, Worker &worker) {
    const ISA::Norm norm = {weight, head_dim, eps, offset, once != 0};
    ISA::rope(x, table + pos * head_dim, out, rows, heads, norm, worker);
}
