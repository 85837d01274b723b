// decode_attention: attention of the one query row at position pos over positions 0 .. pos.
// q, out bf16 [heads * head_dim]; k, v bf16 [>= pos + 1][kv_heads * head_dim], or together
// kv bf16 [>= pos + 1][kv_heads][2][head_dim].
// Positions are split into ranges that the team attends independently; the partial results are then
// joined head by head, in order: the result does not depend on the number of threads.
#ifndef ISA
#define KERNEL_FILE "decode_attention.cc"
#include "each_isa.h"

extern "C" void decode_attention(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, int64_t pos,
                                 int64_t heads, int64_t kv_heads, int64_t head_dim, Worker &worker) {
    ISA_CALL(decode_attention, q, k, v, out, pos, heads, kv_heads, head_dim, head_dim, worker)
}

extern "C" void decode_attention_kv(const bf16 *q, const bf16 *kv, bf16 *out, int64_t pos, int64_t heads,
                                    int64_t kv_heads, int64_t head_dim, Worker &worker) {
    ISA_CALL(decode_attention, q, kv, kv + head_dim, out, pos, heads, kv_heads, head_dim, 2 * head_dim, worker)
}
#else
#include "vec.h"
#include "tile.h"
#include "attention_core.h"

namespace ISA {

constexpr int64_t range_positions = 2 * block_positions;

// Results of all ranges: [range][head] states and [range][head][padded_dim] sums.
struct Partials {
    AttentionRow *states;
    float *sums;
};

static void keep(const AttentionTile &tile, const AttentionShape &shape, int64_t first, Partials partials) {
    for (int64_t r = 0; r < tile.rows(); r++) {
        partials.states[first + r] = tile.state(r);
        memcpy(partials.sums + (first + r) * shape.padded_dim(), tile.sums(r),
               shape.padded_dim() * sizeof(float));
    }
}

static void join(const AttentionShape &shape, Partials partials, int64_t ranges, int64_t head, bf16 *out) {
    float top = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < ranges; i++) top = fmaxf(top, partials.states[i * shape.heads + head].top);
    for (int64_t i = 0; i < ranges; i++) {
        AttentionRow &state = partials.states[i * shape.heads + head];
        state.top = exp2f(state.top - top);  // from here on, the range's share
        sum += state.sum * state.top;
    }
    for (int64_t d = 0; d < shape.head_dim; d += lanes) {
        f32v total = {};
        for (int64_t i = 0; i < ranges; i++) {
            const int64_t row = i * shape.heads + head;
            total += load<f32v>(partials.sums + row * shape.padded_dim() + d) * partials.states[row].top;
        }
        store_bf16(out + head * shape.head_dim + d, total / sum, shape.head_dim - d);
    }
}

static void decode_attention(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, int64_t pos,
                             int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t kv_step,
                             Worker &worker) {
    const AttentionShape shape = {heads, kv_heads, head_dim, kv_step};
    const int64_t ranges = (pos + range_positions) / range_positions, rows = ranges * heads;
    float *shared = worker.shared_scratch<float>(rows * (shape.padded_dim() + 2));
    const Partials partials = {reinterpret_cast<AttentionRow *>(shared + rows * shape.padded_dim()), shared};
    AttentionTile tile(shape, shape.group(), worker);
    Chunks chunks(worker, ranges * kv_heads, 1);
    for (int64_t task, end; chunks.next(task, end);) {
        const int64_t first = task / kv_heads * range_positions, kv_head = task % kv_heads;
        const int64_t last = first + range_positions < pos + 1 ? first + range_positions : pos + 1;
        tile.start(q + kv_head * shape.group() * head_dim, k + kv_head * kv_step, v + kv_head * kv_step,
                   pos, 1);
        tile.attend(first, last);
        keep(tile, shape, task / kv_heads * heads + kv_head * shape.group(), partials);
    }
    worker.barrier();
    Chunks joins(worker, heads, 4);
    for (int64_t head, end; joins.next(head, end);)
        for (; head < end; head++) join(shape, partials, ranges, head, out);
}

}  // namespace ISA
#endif
