// add: out = a + b, bf16 [rows][cols], f32 inside.
#include "vec.h"

namespace ISA {

static void add(const bf16 *a, const bf16 *b, bf16 *out, int64_t count, Worker &worker) {
    Chunks chunks(worker, count, 16384);
    for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t i = begin; i < end; i += lanes)
            store_bf16(out + i, load_bf16(a + i, end - i) + load_bf16(b + i, end - i), end - i);
}

}  // namespace ISA

KERNEL void add(const bf16 *a, const bf16 *b, bf16 *out, int64_t rows, int64_t cols,
                Worker &worker) {
    ISA::add(a, b, out, rows * cols, worker);
}
