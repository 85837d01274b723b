// The loops of peaks.cc, which has them declared.
#include "vec.h"

namespace ISA {

// Keeps the compiler from dropping work whose result nobody reads.
INLINE void keep(f32v v) { asm volatile("" : : "m"(v)); }

// So many streams, prefetched into L2. What is small is shared as well. Workers read neighbouring blocks: eight streams of shares that
// are far apart are read at 0.87 of the rate on a Zen 4.
template <int64_t streams, int64_t ahead>
static void read_streams(const char *data, int64_t bytes, Worker &worker) {
    constexpr int64_t longest = 65536;
    const int64_t share = bytes / (4 * streams) / 64 * 64, length = share < 64 ? 64 : share < longest ? share : longest;
    const int64_t whole = bytes / (streams * length), share_blocks = (whole + worker.threads - 1) / worker.threads;
    f32v sum[streams] = {};
    Chunks chunks(worker, share_blocks * worker.threads, 1);
    for (int64_t chunk, end; chunks.next(chunk, end);) {
        const int64_t block = chunk % share_blocks * worker.threads + chunk / share_blocks;
        if (block >= whole) continue;
        const char *base = data + block * streams * length;
        for (int64_t i = 0; i < length; i += 64) {
#pragma GCC unroll 8
            for (int64_t s = 0; s < streams; s++) {
                __builtin_prefetch(base + s * length + i + ahead, 0, 2);
                for (int64_t v = 0; v < 16; v += lanes)
                    sum[s] += load<f32v>(base + s * length + i + 4 * v);
            }
        }
    }
    if (worker.thread == 0)
        for (int64_t i = whole * streams * length; i + 64 <= bytes; i += 64) sum[0] += load<f32v>(data + i);
    for (int64_t s = 0; s < streams; s++) keep(sum[s]);
}

// Of plain patterns, with one distance for all streams, the one that reads fastest: on Zen, and on Granite Rapids, where
// streams at different distances (streams.h) read up to 1.09 times as fast.
void read_all(const char *data, int64_t bytes, Worker &worker) {
    return reads_ahead ? read_streams<8, 1024>(data, bytes, worker) : read_streams<4, 2048>(data, bytes, worker);
}

// Accumulators enough to hide the latency of a product in any of these machines, each of them
// initialised in a way that keeps the compiler from seeing that they are equal.
constexpr int accumulators = ISA_LANES == 16 ? 24 : 12;
static volatile float one = 1.0f;

double f32_products(int64_t iterations) {
    f32v sum[accumulators], factor = splat(one);
#pragma GCC unroll 24
    for (int i = 0; i < accumulators; i++) sum[i] = splat(one);
    for (int64_t n = 0; n < iterations; n++) {
#pragma GCC unroll 24
        for (int i = 0; i < accumulators; i++) sum[i] = sum[i] * factor + factor;
    }
#pragma GCC unroll 24
    for (int i = 0; i < accumulators; i++) keep(sum[i]);
    return 2.0 * lanes * accumulators * static_cast<double>(iterations);
}

double bf16_products(int64_t iterations) {
#if ISA_LANES == 16
    __m512 sum[accumulators];
    const __m512bh factor = (__m512bh)_mm512_set1_epi16(0x3f80);
#pragma GCC unroll 24
    for (int i = 0; i < accumulators; i++) sum[i] = _mm512_set1_ps(one);
    for (int64_t n = 0; n < iterations; n++) {
#pragma GCC unroll 24
        for (int i = 0; i < accumulators; i++) sum[i] = _mm512_dpbf16_ps(sum[i], factor, factor);
    }
#pragma GCC unroll 24
    for (int i = 0; i < accumulators; i++) keep((f32v)sum[i]);
    return 64.0 * accumulators * static_cast<double>(iterations);
#else
    return f32_products(iterations);
#endif
}

}  // namespace ISA
