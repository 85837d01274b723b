// embed: out[r] = row tokens[r] of a matrix in the panel layout (panels.h), which is the tied LM head, times scale;
// zeros for a token outside of the vocabulary.
// tokens i32 [rows], table bf16 panels of [vocab][cols], out bf16 [rows][cols].
// One row is a column of 4-byte pairs in its panel, 64 bytes apart; the copy is spread over the team.
#include <cstring>

#include "kernel.h"
#include "panels.h"
#include "scale_row.h"

static void copy_pairs(const bf16 *panel, bf16 *out, int64_t cols, int64_t begin, int64_t end) {
    const int64_t whole = end < cols / 2 ? end : cols / 2;
    for (int64_t pair = begin; pair < whole; pair++)
        memcpy(out + 2 * pair, panel + pair * line_elements, 2 * sizeof(bf16));
    if (whole < end) out[cols - 1] = panel[whole * line_elements];
}

KERNEL void embed(const int32_t *tokens, const bf16 *table_panels, bf16 *out, int64_t rows,
                  int64_t cols, int64_t vocab, float scale, Worker &worker) {
    const int64_t pairs = pair_count(cols);
    Chunks chunks(worker, rows * pairs, 512);
    for (int64_t begin, end; chunks.next(begin, end);) {
        while (begin < end) {
            const int64_t row = begin / pairs, first = begin % pairs;
            const int64_t last = first + (end - begin) < pairs ? first + (end - begin) : pairs;
            const int64_t token = tokens[row];
            if (token >= 0 && token < vocab) {
                const bf16 *panel = table_panels + token / panel_rows * panel_size(cols);
                copy_pairs(panel + token % panel_rows * 2, out + row * cols, cols, first, last);
                scale_row(out + row * cols + 2 * first, (2 * last < cols ? 2 * last : cols) - 2 * first, scale);
            } else {
                for (int64_t i = 2 * first; i < 2 * last && i < cols; i++) out[row * cols + i] = 0;
            }
            begin += last - first;
        }
    }
}
