// rope: rotary position embedding. Rotates the pairs (d, d + head_dim/2) of every head of row r by the angles of table
// row pos + r; may work in place.
// x, out bf16 [rows][heads][head_dim]; table f32 [max_position][head_dim]: cosines, then sines.
#include "vec.h"

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
                 int64_t head_dim, Worker &worker) {
    Chunks chunks(worker, rows, 64, 4);
    for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t i = begin * heads; i < end * heads; i++)
            rotate_head(x + i * head_dim, table + i / heads * head_dim, out + i * head_dim, head_dim / 2);
}

}  // namespace ISA

KERNEL void rope(const bf16 *x, const float *table, bf16 *out, int64_t rows, int64_t pos,
                 int64_t heads, int64_t head_dim, Worker &worker) {
    ISA::rope(x, table + pos * head_dim, out, rows, heads, head_dim, worker);
}
