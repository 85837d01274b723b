// silu_and_mul: out = activation(gate) * up, bf16 [rows][cols], f32 inside; activation 0 is x * sigmoid(x).
#include "vec.h"

namespace ISA {

static void silu_and_mul(const bf16 *gate, const bf16 *up, bf16 *out, int64_t count, int64_t activation,
                         Worker &worker) {
    Chunks chunks(worker, count, 8192);
    for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t i = begin; i < end; i += lanes)
            store_bf16(out + i, gated(load_bf16(gate + i, end - i), load_bf16(up + i, end - i), activation), end - i);
}

}  // namespace ISA

KERNEL void silu_and_mul(const bf16 *gate, const bf16 *up, bf16 *out, int64_t rows, int64_t cols,
                         int64_t activation, Worker &worker) {
    ISA::silu_and_mul(gate, up, out, rows * cols, activation, worker);
}
