// RMS norm (rms_norm.h) of ROWS rows. x, out [ROWS][COLS], weight [COLS]. ADD: of x in place, plus the residual [ROWS][COLS].
#include "rms_norm.h"

#ifdef ADD

extern "C" void AIE_FN(norm_add)(bfloat16 *__restrict x, const bfloat16 *__restrict weight,
                                 const bfloat16 *__restrict residual, float eps) {
    use_nearest_even();
    for (unsigned row = 0; row < ROWS; ++row, x += COLS, residual += COLS) {
        norm_row<COLS>(x, weight, x, eps);
        add_row<COLS>(x, residual);
    }
}

#else

extern "C" void AIE_FN(rms_norm)(const bfloat16 *__restrict x, const bfloat16 *__restrict weight,
                                 bfloat16 *__restrict out, float eps) {
    use_nearest_even();
    for (unsigned row = 0; row < ROWS; ++row, x += COLS, out += COLS) norm_row<COLS>(x, weight, out, eps);
}

#endif
