// gemv_rows_f32: out = weight @ x, not rounded, for a row-major weight, for targets whose LM head keeps rows whole.
// weight bf16 [out_cols][cols], x bf16 [cols], out f32 [out_cols].
// Bound by memory, which a core reads fastest from several long sequential streams (gemv_core.h): a chunk is cut into
// runs of whole rows, and a step takes one line of each run.
#include "vec.h"
#include "operand.h"

namespace ISA {

constexpr int64_t ahead = 16 * line_elements, stream_bytes = 131072;
constexpr int streams = ISA_LANES == 4 ? 4 : 8;  // their sums stay in registers

// sum + one line of a row times one of x, lane by lane.
#if ISA_LANES == 16
INLINE f32v add_line(f32v sum, const bf16 *row, const Operand *x) {
    // In assembly for the reason that gemv_core.h gives.
    const __m512i part = _mm512_loadu_si512(x);
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(part), "m"(*(const bf16(*)[line_elements])row));
    return sum;
}
#else
INLINE f32v add_line(f32v sum, const bf16 *row, const Operand *x) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < line_elements; i += lanes) sum += load_bf16(row + i) * load<f32v>(x + i);
    return sum;
}
#endif

// out[s * stride] = row s * stride of weight . x, for R rows. x is padded with zeros to whole lines.
template <int R>
static void dot_rows(const bf16 *weight, const Operand *x, float *out, int64_t stride, int64_t cols) {
    const bf16 *row[R];
    for (int s = 0; s < R; s++) row[s] = weight + s * stride * cols;
    f32v sum[R] = {};
    int64_t i = 0;
    for (; i + line_elements <= cols; i += line_elements)
#pragma GCC unroll 8
        for (int s = 0; s < R; s++) {
            __builtin_prefetch(row[s] + i + ahead, 0, 2);
            sum[s] = add_line(sum[s], row[s] + i, x + i);
        }
    for (int s = 0; s < R; s++) {
        if (i < cols) {
            bf16 rest[line_elements] = {};
            memcpy(rest, row[s] + i, (cols - i) * sizeof(bf16));
            sum[s] = add_line(sum[s], rest, x + i);
        }
        out[s * stride] = sum_of(sum[s]);
    }
}

static void gemv_rows_f32(const bf16 *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
                          Worker &worker) {
    const Operand *operands = nullptr;
    const int64_t run = stream_bytes / (2 * cols) + 1;
    Chunks chunks(worker, out_cols, streams * run, streams);
    for (int64_t row, end; chunks.next(row, end);) {
        if (operands == nullptr)
            operands = prepare(x, cols, cols + line_elements, worker.scratch<Operand>(cols + line_elements));
        const int64_t length = (end - row) / streams, whole = row + streams * length;
        for (int64_t r = row; r < row + length; r++)
            dot_rows<streams>(weight + r * cols, operands, out + r, length, cols);
        for (int64_t r = whole; r < end; r++) dot_rows<1>(weight + r * cols, operands, out + r, 0, cols);
    }
}

}  // namespace ISA

KERNEL void gemv_rows_f32(const bf16 *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
                          Worker &worker) {
    ISA::gemv_rows_f32(weight, x, out, out_cols, cols, worker);
}
