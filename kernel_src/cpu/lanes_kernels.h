// What the host does with weights of one format in the array's order (lanes.h). A file for a format defines BITS and
// FACTORS, and NAMED(kernel), the kernel's name after the format's, and includes this.
// weight i8 [panels][bytes]; out bf16 [blocks][cols/8][8][8] (unpack...), i8 [blocks/2][cols/8][2][72] (..._bfp16),
// bf16 [rows][cols] (embed_rows), f32 [out_cols] (gemv_rows_f32). Of blocks, `to`, `to + apart`, ... are written.

// Where and how a matrix lies: `groups` and `panels` are those of a share of its columns, or all.
#define PLACE                                                                                                        \
    int64_t lanes, int64_t chunks, int64_t chunk_groups, int64_t groups, int64_t panels, int64_t start, int64_t step
#define PLACED lanes, chunks, chunk_groups, groups, panels, start, step

#include "vec.h"
#include "block_float.h"
#include "scale_row.h"
#include "lanes.h"

namespace ISA {

using Stored = Lanes<BITS, FACTORS>;

INLINE const uint8_t *bytes(const int8_t *stored) { return reinterpret_cast<const uint8_t *>(stored); }

template <class Result>
static void take(const int8_t *weight, const Result &out, int64_t out_cols, int64_t to, int64_t apart, PLACE,
                 Worker &worker) {
    const Stored stored(lanes, groups, chunks, chunk_groups);
    unpack_panels(stored, bytes(weight), out, out_cols, Taken{start, step, panels, to, apart}, worker);
}

static void unpack(const int8_t *weight, bf16 *out, int64_t out_cols, int64_t cols, int64_t to, int64_t apart, PLACE,
                   Worker &worker) {
    take(weight, Blocks{out, cols}, out_cols, to, apart, PLACED, worker);
}

static void unpack_bfp16(const int8_t *weight, int8_t *out, int64_t out_cols, int64_t cols, int64_t to, int64_t apart,
                         PLACE, Worker &worker) {
    take(weight, FloatBlocks{out, cols}, out_cols, to, apart, PLACED, worker);
}

static void embed_rows(const int32_t *tokens, const int8_t *weight, bf16 *out, int64_t rows, int64_t cols,
                       int64_t vocab, float scale, int64_t lanes, int64_t chunks, Worker &worker) {
    embed_lanes(Stored(cols, lanes, chunks), tokens, bytes(weight), out, rows, cols, vocab, scale, worker);
}

static void gemv_rows_f32(const int8_t *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
                          int64_t lanes, int64_t chunks, Worker &worker) {
    dot_lanes(Stored(cols, lanes, chunks), bytes(weight), x, out, out_cols, cols, worker);
}

}  // namespace ISA

// What takes a matrix out; behind its sizes come scalars of which `start` and `step` say all, each with a comma.
#define UNPACK(kernel, made, Out, ...)                                                                               \
    KERNEL void NAMED(kernel)(const int8_t *weight, Out *out, int64_t out_cols, int64_t cols, __VA_ARGS__ int64_t to, \
                              int64_t apart, PLACE, Worker &worker) {                                                 \
        ISA::made(weight, out, out_cols, cols, to, apart, PLACED, worker);                                             \
    }

UNPACK(unpack, unpack, bf16, int64_t, int64_t, )
UNPACK(unpack_paired, unpack, bf16, int64_t, )
UNPACK(unpack_shared_pairs, unpack, bf16, int64_t, )
UNPACK(unpack_shared, unpack, bf16, )
UNPACK(unpack_bfp16, unpack_bfp16, int8_t, int64_t, int64_t, )
UNPACK(unpack_paired_bfp16, unpack_bfp16, int8_t, int64_t, )
UNPACK(unpack_shared_pairs_bfp16, unpack_bfp16, int8_t, int64_t, )
UNPACK(unpack_shared_bfp16, unpack_bfp16, int8_t, )

KERNEL void NAMED(embed_rows)(const int32_t *tokens, const int8_t *weight, bf16 *out, int64_t rows, int64_t cols,
                              int64_t vocab, float scale, int64_t lanes, int64_t chunks, Worker &worker) {
    ISA::embed_rows(tokens, weight, out, rows, cols, vocab, scale, lanes, chunks, worker);
}

KERNEL void NAMED(gemv_rows_f32)(const int8_t *weight, const bf16 *x, float *out, int64_t out_cols, int64_t cols,
                                 int64_t lanes, int64_t chunks, Worker &worker) {
    ISA::gemv_rows_f32(weight, x, out, out_cols, cols, lanes, chunks, worker);
}
