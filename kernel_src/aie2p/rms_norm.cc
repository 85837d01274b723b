// RMS norm (rms_norm.h) of ROWS rows. x, out [ROWS][COLS], weight [COLS].
#include "rms_norm.h"

extern "C" void AIE_FN(rms_norm)(const bfloat16 *x, const bfloat16 *weight, bfloat16 *out, float eps) {
    use_nearest_even();
    for (unsigned row = 0; row < ROWS; ++row, x += COLS, out += COLS) norm_row<COLS>(x, weight, out, eps);
}
