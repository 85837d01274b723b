// SwiGLU's activation of sums of two panels (grouped_sums.h), gate's and up's: acc f32 [2][LANES], out [LANES].
#pragma once

#include "grouped_sums.h"
#include "silu.h"

namespace {

inline void activate(float *acc, bfloat16 *out) {
    bfloat16 *rounded = reinterpret_cast<bfloat16 *>(acc);
    round_sums(acc, rounded);
    round_sums(acc + LANES, rounded + LANES);
    silu_times<LANES>(rounded, rounded + LANES, out);
}

}  // namespace
