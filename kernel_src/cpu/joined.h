// The weights of Q, K and V, which are multiplied as one matrix.
#pragma once

#include <cstdint>

#include "kernel.h"

// Matrices that are multiplied as one: their panels are counted on from the first one's.
struct Joined {
    static constexpr int most = 3;
    struct Result {
        bf16 *out;
        int64_t out_cols;
        const bf16 *bias;
    };
    Result results[most];
    int64_t begins[most];  // the first panel of each
    int64_t jumps[most];   // how much further each lies than if it came behind the first one, in elements

    int of(int64_t panel) const { return (panel >= begins[1]) + (panel >= begins[2]); }
};
