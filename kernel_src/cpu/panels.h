// The panel layout of weights: one copy serves gemm, gemv and embed.
//
// A [N][K] matrix (out, in) is cut into panels of 16 output rows; N is padded to a multiple of 16 and
// K to an even number with zeros. Element order: [N/16][K/2][16 rows][2]. One 64-byte line holds 16
// outputs x (k, k+1), the operand of one vdpbf16ps (and a row of an AMX tile).
#pragma once

#include <cstdint>

#if !defined(LAYOUT_PANEL_ROWS) || !defined(LAYOUT_KV_BLOCK_POSITIONS)
#error "The constants of the layout come from stages/weights/constants.py: compile with the flags of its macros()."
#endif

constexpr int64_t panel_rows = LAYOUT_PANEL_ROWS;
constexpr int64_t line_elements = 2 * panel_rows, line_bytes = 64;
static_assert(panel_rows == 16, "16 outputs x 2 inputs in bf16 are one line of 64 bytes");

// Positions in a block of a KV cache in panels.
constexpr int64_t kv_block_positions = LAYOUT_KV_BLOCK_POSITIONS;

inline int64_t panel_count(int64_t rows) { return (rows + panel_rows - 1) / panel_rows; }
inline int64_t pair_count(int64_t cols) { return (cols + 1) / 2; }

// Elements in one panel of a matrix with `cols` columns.
inline int64_t panel_size(int64_t cols) { return pair_count(cols) * line_elements; }
