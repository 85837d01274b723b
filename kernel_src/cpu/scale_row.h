// row bf16 [count] *= scale, rounded to nearest even.
#pragma once

#include <cmath>
#include <cstring>

#include "kernel.h"

static inline void scale_row(bf16 *row, int64_t count, float scale) {
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = static_cast<uint32_t>(row[i]) << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        value *= scale;
        memcpy(&bits, &value, sizeof bits);
        if (value != value) bits |= 0x400000u;
        else if (fabsf(value) < 1.17549435e-38f) bits &= 0x80000000u;
        else bits += 0x7fffu + (bits >> 16 & 1);
        row[i] = static_cast<bf16>(bits >> 16);
    }
}
