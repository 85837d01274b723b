// unpack_bfp16: rows `first` to `first + out_cols` of weights in 8x8 blocks of bf16, in block floating point.
// weight bf16 [rows/8][cols/8][8 inputs][8 outputs], out i8 [blocks/2][cols/8][2][8 outputs][9 bytes] (block_float.h),
// whose blocks `to`, `to + apart`, ... are written.
#include "vec.h"
#include "block_float.h"

namespace ISA {

static void unpack(const bf16 *weight, int8_t *out, int64_t out_cols, int64_t cols, int64_t to, int64_t apart,
                   Worker &worker) {
    const int64_t columns = cols / block_inputs;
    alignas(64) float values[block_inputs * block_inputs + lanes];
    uint8_t rows[block_bytes + lanes * row_bytes];
    Chunks chunks(worker, out_cols / block_inputs * columns, 64);
    for (int64_t at, end; chunks.next(at, end);)
        for (; at < end; at++) {
            const bf16 *block = weight + at * block_inputs * block_inputs;
            for (int64_t i = 0; i < block_inputs * block_inputs; i++) values[i] = to_float(block[i]);
            for (int64_t output = 0; output < block_inputs; output += lanes)
                to_block_float(values + output, block_inputs, rows + output * row_bytes);
            memcpy(block_float_at(out, cols, to + at / columns * apart, at % columns), rows, block_bytes);
        }
}

}  // namespace ISA

KERNEL void unpack_bfp16(const bf16 *weight, int8_t *out, int64_t out_cols, int64_t cols, int64_t first, int64_t,
                         int64_t to, int64_t apart, Worker &worker) {
    ISA::unpack(weight + first * cols, out, out_cols, cols, to, apart, worker);
}
