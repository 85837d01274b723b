// embed_rows: out[r] = row tokens[r] of a row-major matrix, times scale, for targets whose LM head keeps rows whole;
// zeros for a token outside of the vocabulary.
// tokens i32 [rows], table bf16 [vocab][cols], out bf16 [rows][cols].
#include <cstring>

#include "kernel.h"
#include "scale_row.h"

KERNEL void embed_rows(const int32_t *tokens, const bf16 *table, bf16 *out, int64_t rows, int64_t cols,
                       int64_t vocab, float scale, Worker &worker) {
    Chunks chunks(worker, rows, 8);
    for (int64_t row, end; chunks.next(row, end);)
        for (; row < end; row++) {
            if (tokens[row] >= 0 && tokens[row] < vocab)
                memcpy(out + row * cols, table + tokens[row] * cols, cols * sizeof(bf16));
            else
                memset(out + row * cols, 0, cols * sizeof(bf16));
            scale_row(out + row * cols, cols, scale);
        }
}
