// A row of COLS values: total = a + b, then its RMS norm (rms_norm.h). rows [3][COLS]: a, b, the norm's weight.
#include "rms_norm.h"

extern "C" void AIE_FN(add_rms_norm)(const bfloat16 *rows, bfloat16 *total, bfloat16 *out, float eps) {
    use_nearest_even();
    for (unsigned i = 0; i < COLS; i += L) {
        const aie::accum<accfloat, L> wide(aie::load_v<L>(rows + i));
        aie::store_v(total + i, aie::add(wide, aie::load_v<L>(rows + COLS + i)).template to_vector<bfloat16>());
    }
    norm_row(total, rows + 2 * COLS, out, eps);
}
