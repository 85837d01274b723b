// unpack: weight tiny8 [cols / 32][rows][36 bytes] -> out bf16 [rows][cols].
#include <cstring>

#include "kernel.h"

KERNEL void unpack(const int8_t *weight, bf16 *out, int64_t rows, int64_t cols, Worker &worker) {
    Chunks chunks(worker, cols / 32 * rows, 16);
    for (int64_t block, end; chunks.next(block, end);)
        for (; block < end; block++) {
            const int8_t *values = weight + block * 36;
            float scale;
            memcpy(&scale, values + 32, sizeof scale);
            for (int64_t i = 0; i < 32; i++) {
                const float value = values[i] * scale;
                uint32_t bits;
                memcpy(&bits, &value, sizeof bits);
                out[block % rows * cols + block / rows * 32 + i] = static_cast<bf16>(bits >> 16);
            }
        }
}
