// The peaks of this machine, for comparison: reading memory, and multiplying in registers.
// Belongs into the host library, next to team.cc.
//
//   double measure_read_bandwidth(Team *, const Range *ranges, int64_t count)   bytes per second of one pass over all
//   double measure_bf16_peak(Team *, int64_t iterations)                        flop per second, vdpbf16ps
//   double measure_f32_peak(Team *, int64_t iterations)                         flop per second, FMA
//
// All threads of the team take part. Pass more data than the caches hold, and some 10^6 iterations per thread;
// take the best of several calls. Without vdpbf16ps, bf16 is widened, and its peak is that of f32.
#include "isa.h"
#include "kernel.h"

// What peak_loops.cc defines in the object of an instruction set. Weak, because a library need not have each set's object.
// A loop of products returns how many flop it did.
#define LOOPS(isa)                                                                              \
    namespace isa {                                                                             \
    __attribute__((weak)) void read_all(const char *data, int64_t bytes, Worker &worker); \
    __attribute__((weak)) double bf16_products(int64_t iterations);                       \
    __attribute__((weak)) double f32_products(int64_t iterations);                        \
    }
LOOPS(portable)
#if defined(__x86_64__)
LOOPS(avx2)
LOOPS(avx512bf16)
#endif

static const Isa isa = chosen_isa();

#if defined(__x86_64__)
#define OF_THIS_MACHINE(loop, ...) \
    return isa == Isa::portable ? portable::loop(__VA_ARGS__) : isa == Isa::avx2 ? avx2::loop(__VA_ARGS__) : avx512bf16::loop(__VA_ARGS__)
#else
#define OF_THIS_MACHINE(loop, ...) return portable::loop(__VA_ARGS__)
#endif

static void read_all(const char *data, int64_t bytes, Worker &worker) { OF_THIS_MACHINE(read_all, data, bytes, worker); }
static double bf16_products(int64_t iterations) { OF_THIS_MACHINE(bf16_products, iterations); }
static double f32_products(int64_t iterations) { OF_THIS_MACHINE(f32_products, iterations); }

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
    const Dims dims = {1, 0, nullptr};
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
