// short_conv: rows of B, C and x -> out = C * the convolution of B * x over positions, each channel by itself.
// bcx bf16 [rows][3][cols], weight bf16 [taps][cols], history bf16 [taps - 1 + 128 * blocks][cols], out bf16 [rows][cols].
// B * x of position p goes to row taps - 1 + 128 * blocks[p / 128] + p % 128 of history; its first taps - 1 rows belong to
// the positions before 0 and are 0. Products are exact in f32, and sums go from the oldest position on, so all instruction
// sets have the same bits.
#include "vec.h"
#include "panels.h"

namespace ISA {
namespace {

struct ShortConv {
    const bf16 *bcx, *weight;
    bf16 *history, *out;
    int64_t pos, cols, taps;
    const int32_t *blocks;

    bf16 *kept(int64_t position) const {
        const int64_t row = position < 0 ? position
                                         : blocks[position / kv_block_positions] * kv_block_positions + position % kv_block_positions;
        return history + (taps - 1 + row) * cols;
    }

    // The channels from c on, at most a vector of them, of row r.
    INLINE_MEMBER void row(int64_t r, int64_t c, int64_t count) const {
        const bf16 *gate = bcx + r * 3 * cols + c, *after = gate + cols, *x = after + cols;
        const int64_t oldest = pos + r - (taps - 1);
        store_bf16(kept(pos + r) + c, load_bf16(gate, count) * load_bf16(x, count), count);
        f32v sum = load_bf16(kept(oldest) + c, count) * load_bf16(weight + c, count);
        for (int64_t t = 1; t < taps; t++)
            sum += load_bf16(kept(oldest + t) + c, count) * load_bf16(weight + t * cols + c, count);
        store_bf16(out + r * cols + c, load_bf16(after, count) * to_float(to_bf16(sum)), count);
    }
};

static void short_conv(const ShortConv &conv, int64_t rows, Worker &worker) {
    // A row needs those before it, so that workers share the channels alone.
    Chunks chunks(worker, conv.cols, 256, lanes);
    for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = begin; c < end; c += lanes) conv.row(r, c, end - c);
}

}  // namespace
}  // namespace ISA

KERNEL void short_conv(const bf16 *bcx, const bf16 *weight, bf16 *history, bf16 *out, int64_t rows, int64_t pos,
                       int64_t cols, int64_t taps, const int32_t *blocks, Worker &worker) {
    ISA::short_conv({bcx, weight, history, out, pos, cols, taps, blocks}, rows, worker);
}
