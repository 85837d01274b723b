// scale: out = x * scale, f32 [rows][cols].
#include "kernel.h"

KERNEL void scale(const float *x, float *out, int64_t rows, int64_t cols, float scale, Worker &worker) {
    Chunks chunks(worker, rows * cols, 16384);
    for (int64_t begin, end; chunks.next(begin, end);)
        for (int64_t i = begin; i < end; i++) out[i] = x[i] * scale;
}
