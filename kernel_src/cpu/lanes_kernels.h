// What the host does with weights of one format in the array's order (lanes.h). A file for a format defines BITS and
// FACTORS, NAMED(kernel), the kernel's name with the format's in front, and THIS_FILE, and includes this.
// weight i8 [panels][bytes]; out bf16 [blocks][cols/8][8][8] (unpack, unpack_paired), i8 [blocks/2][cols/8][2][72]
// (..._bfp16), bf16 [rows][cols] (embed_rows), f32 [out_cols] (gemv_rows_f32). Of blocks, `to`, `to + apart`, ... are
// written.
#ifndef ISA
#define KERNEL_FILE THIS_FILE
#include "each_isa.h"

KERNEL void NAMED(unpack)(const int8_t *weight, bf16 *out, int64_t out_cols, int64_t cols, int64_t, int64_t, int64_t to,
                          int64_t apart, int64_t lanes, int64_t chunks, int64_t start, int64_t step, Worker &worker) {
    ISA_CALL(unpack, weight, out, out_cols, cols, to, apart, lanes, chunks, start, step, worker)
}

KERNEL void NAMED(unpack_paired)(const int8_t *weight, bf16 *out, int64_t out_cols, int64_t cols, int64_t, int64_t to,
                                 int64_t apart, int64_t lanes, int64_t chunks, int64_t start, int64_t step,
                                 Worker &worker) {
    ISA_CALL(unpack, weight, out, out_cols, cols, to, apart, lanes, chunks, start, step, worker)
}

KERNEL void NAMED(unpack_bfp16)(const int8_t *weight, int8_t *out, int64_t out_cols, int64_t cols, int64_t, int64_t,
                                int64_t to, int64_t apart, int64_t lanes, int64_t chunks, int64_t start, int64_t step,
                                Worker &worker) {
    ISA_CALL(unpack_bfp16, weight, out, out_cols, cols, to, apart, lanes, chunks, start, step, worker)
}

KERNEL void NAMED(unpack_paired_bfp16)(const int8_t *weight, int8_t *out, int64_t out_cols, int64_t cols, int64_t,
                                       int64_t to, int64_t apart, int64_t lanes, int64_t chunks, int64_t start,
                                       int64_t step, Worker &worker) {
    ISA_CALL(unpack_bfp16, weight, out, out_cols, cols, to, apart, lanes, chunks, start, step, worker)
}

KERNEL void NAMED(embed_rows)(const int32_t *tokens, const int8_t *weight, bf16 *out, int64_t rows, int64_t cols,
                              int64_t vocab, int64_t lanes, int64_t chunks, Worker &worker) {
    ISA_CALL(embed_rows, tokens, weight, out, rows, cols, vocab, lanes, chunks, worker)
}

KERNEL void NAMED(gemv_rows_f32)(const int8_t *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
                                 int64_t lanes, int64_t chunks, Worker &worker) {
    ISA_CALL(gemv_rows_f32, weight, x, out, out_cols, cols, lanes, chunks, worker)
}
#else
#include "vec.h"
#include "block_float.h"
#include "lanes.h"

namespace ISA {

using Stored = Lanes<BITS, FACTORS>;

INLINE const uint8_t *bytes(const int8_t *stored) { return reinterpret_cast<const uint8_t *>(stored); }

static void unpack(const int8_t *weight, bf16 *out, int64_t out_cols, int64_t cols, int64_t to, int64_t apart,
                   int64_t lanes, int64_t chunks, int64_t start, int64_t step, Worker &worker) {
    const Blocks blocks{out, cols};
    unpack_panels(Stored(cols, lanes, chunks), bytes(weight), blocks, out_cols, to, apart, start, step, worker);
}

static void unpack_bfp16(const int8_t *weight, int8_t *out, int64_t out_cols, int64_t cols, int64_t to, int64_t apart,
                         int64_t lanes, int64_t chunks, int64_t start, int64_t step, Worker &worker) {
    const FloatBlocks blocks{out, cols};
    unpack_panels(Stored(cols, lanes, chunks), bytes(weight), blocks, out_cols, to, apart, start, step, worker);
}

static void embed_rows(const int32_t *tokens, const int8_t *weight, bf16 *out, int64_t rows, int64_t cols,
                       int64_t vocab, int64_t lanes, int64_t chunks, Worker &worker) {
    embed_lanes(Stored(cols, lanes, chunks), tokens, bytes(weight), out, rows, cols, vocab, worker);
}

static void gemv_rows_f32(const int8_t *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
                          int64_t lanes, int64_t chunks, Worker &worker) {
    dot_lanes(Stored(cols, lanes, chunks), bytes(weight), x, out, out_cols, cols, worker);
}

}  // namespace ISA
#endif
