// One row of BLOCKS blocks of tiny8 -> bf16.
#include <cstring>

#include "tile.h"

extern "C" void AIE_FN(unpack)(const signed char *packed, bfloat16 *out) {
    for (unsigned block = 0; block < BLOCKS; ++block, packed += 36)
        for (unsigned i = 0; i < 32; ++i, ++out) {
            float scale;
            memcpy(&scale, packed + 32, sizeof scale);
            const float value = packed[i] * scale;
            memcpy(static_cast<void *>(out), reinterpret_cast<const char *>(&value) + 2, 2);
        }
}
