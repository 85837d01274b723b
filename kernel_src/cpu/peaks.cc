// The peaks of this machine, for comparison: reading memory, and multiplying in registers.
// Belongs into the host library, next to team.cc.
//
//   double measure_read_bandwidth(Team *, const Range *ranges, int64_t count)   bytes per second of one pass over all
//   double measure_bf16_peak(Team *, int64_t iterations)                        flop per second, vdpbf16ps
//   double measure_f32_peak(Team *, int64_t iterations)                         flop per second, FMA
//
// All threads of the team take part. Pass more data than the caches hold, and some 10^6 iterations per thread;
// take the best of several calls. Without vdpbf16ps, bf16 is widened, and its peak is that of f32.
#ifndef ISA
#define KERNEL_FILE "peaks.cc"
#include "each_isa.h"

static void read_all(const char *data, int64_t bytes, Worker &worker) { ISA_CALL(read_all, data, bytes, worker) }
static double bf16_products(int64_t iterations) { ISA_CALL(bf16_products, iterations) }
static double f32_products(int64_t iterations) { ISA_CALL(f32_products, iterations) }

constexpr int64_t shares = 256;  // of a measurement's iterations, so that the team finishes together

struct Range {
    const char *data;
    int64_t bytes;
};

template <class T>
static const T *argument(void *const *slots) {
    return static_cast<const T *>(slots[0]);
}

static void entry_read(void *const *slots, const Dims *, Worker *worker) {
    const Range *range = argument<Range>(slots);
    for (int64_t i = 0; i < *static_cast<int64_t *>(slots[1]); i++) read_all(range[i].data, range[i].bytes, *worker);
}

template <double products(int64_t iterations)>
static void entry_products(void *const *slots, const Dims *, Worker *worker) {
    Chunks chunks(*worker, shares, 1);
    for (int64_t share, end; chunks.next(share, end);) products(*argument<int64_t>(slots));
}

// Seconds that the team takes.
static double timed(Team *team, decltype(Call::entry) entry, void *const *slots) {
    const Call call = {entry, slots};
    const Dims dims = {1, 0};
    const int64_t start = now_ns();
    team_run(team, &call, 1, &dims);
    return 1e-9 * static_cast<double>(now_ns() - start);
}

template <double products(int64_t iterations)>
static double measure_peak(Team *team, int64_t iterations) {
    int64_t amount = iterations * team_threads(team) / shares + 1;
    void *slots[] = {&amount};
    return products(1) * static_cast<double>(amount * shares) / timed(team, entry_products<products>, slots);
}

extern "C" double measure_read_bandwidth(Team *team, Range *ranges, int64_t count) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) bytes += ranges[i].bytes;
    void *slots[] = {ranges, &count};
    return static_cast<double>(bytes) / timed(team, entry_read, slots);
}

extern "C" double measure_bf16_peak(Team *team, int64_t iterations) {
    return measure_peak<bf16_products>(team, iterations);
}

extern "C" double measure_f32_peak(Team *team, int64_t iterations) {
    return measure_peak<f32_products>(team, iterations);
}
#else
#include "vec.h"

namespace ISA {

// Keeps the compiler from dropping work whose result nobody reads.
INLINE void keep(f32v v) { asm volatile("" : : "m"(v)); }

// So many streams, prefetched into L2. What is small is shared as well.
template <int64_t streams, int64_t ahead>
static void read_streams(const char *data, int64_t bytes, Worker &worker) {
    constexpr int64_t longest = 65536;
    const int64_t share = bytes / (4 * streams) / 64 * 64, length = share < 64 ? 64 : share < longest ? share : longest;
    const int64_t whole = bytes / (streams * length);
    f32v sum[streams] = {};
    Chunks chunks(worker, whole, 1);
    for (int64_t chunk, end; chunks.next(chunk, end);) {
        const char *base = data + chunk * streams * length;
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
static void read_all(const char *data, int64_t bytes, Worker &worker) {
    return reads_ahead ? read_streams<8, 1024>(data, bytes, worker) : read_streams<4, 2048>(data, bytes, worker);
}

// Accumulators enough to hide the latency of a product in any of these machines, each of them
// initialised in a way that keeps the compiler from seeing that they are equal.
constexpr int accumulators = ISA_LANES == 16 ? 24 : 12;
static volatile float one = 1.0f;

static double f32_products(int64_t iterations) {
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

static double bf16_products(int64_t iterations) {
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
#endif
