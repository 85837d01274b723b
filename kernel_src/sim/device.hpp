// What lowered AIR programs run on: buffers in three memories, the n-dimensional DMA, counters, and refusals.
//
// Memory is filled with ones when a buffer comes to life. A word of ones is no number a kernel produces, so a DMA that
// reads one reads a byte that was never written; buffers are fenced, so a tile function that leaves its arguments is
// caught at the call. SIM_CHECKS=0 leaves both out; addresses are always checked.
#pragma once

#include <aie_api/aie.hpp>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#ifndef SIM_CHECKS
#define SIM_CHECKS 1
#endif

namespace sim {

constexpr std::int64_t FENCE = 64;
constexpr std::uint32_t NEVER_WRITTEN = 0xffffffffu;

struct Refused {
    std::string what;
};

// Where the program is, for the one line of a refusal.
inline thread_local const char *where = "";

// A buffer: `slot` is the DDR argument it is, or -1.
struct Buffer {
    std::uint8_t *data;
    std::int64_t bytes;
    int slot;
};

// One side of a DMA after folding: bytes, outermost first; the innermost dimension is one contiguous run.
struct Pattern {
    int rank;
    std::int64_t size[8];
    std::int64_t stride[8];
};

// Counts of one launch; `traffic` holds bytes read and written per slot.
struct Launch {
    std::int64_t *calls, *macs, *traffic;
};

// A region of L1 (of one tile) or L2: buffers keep fixed, fenced places.
class Memory {
public:
    explicit Memory(std::int64_t bytes) : storage_(static_cast<std::size_t>(bytes) + 2 * FENCE) {}

    [[gnu::noinline]] Buffer claim(std::int64_t offset, std::int64_t bytes) {
        auto *aligned = reinterpret_cast<std::uint8_t *>((reinterpret_cast<std::uintptr_t>(storage_.data()) + 63) & ~std::uintptr_t{63});
#if SIM_CHECKS
        std::memset(aligned + offset, 0xff, static_cast<std::size_t>(bytes + FENCE));
#endif
        return {aligned + offset, bytes, -1};
    }

private:
    std::vector<std::uint8_t> storage_;
};

[[noreturn]] inline void refuse(const std::string &what) { throw Refused{what}; }

inline void report(const char *what, char *error, std::int64_t bytes) {
    const std::string line = std::string(where) + ": " + what;
    std::strncpy(error, line.c_str(), static_cast<std::size_t>(bytes) - 1);
}

inline std::int64_t span(const Pattern &p) {
    std::int64_t last = 0;
    for (int i = 0; i < p.rank; ++i) last += (p.size[i] - 1) * p.stride[i];
    return last;
}

// `start` and strides are bytes; a run is `run` bytes.
inline void check_address(const char *side, const Buffer &b, std::int64_t start, const Pattern &p, std::int64_t run) {
    const std::int64_t end = start + span(p) + run;
    if (start < 0 || end > b.bytes)
        refuse(std::string(side) + " bytes " + std::to_string(start) + " .. " + std::to_string(end) +
                          " are outside the buffer of " + std::to_string(b.bytes));
    if (start % 4 != 0) refuse(std::string(side) + " offset " + std::to_string(start) + " is not a multiple of 4 bytes");
}

inline void check_written(const std::uint8_t *from, std::int64_t run) {
    for (std::int64_t i = 0; i + 4 <= run; i += 4) {
        std::uint32_t word;
        std::memcpy(&word, from + i, 4);
        if (word == NEVER_WRITTEN) refuse("reads bytes that were never written");
    }
}

// Address of each run of a pattern in stream order.
class Walk {
public:
    Walk(const Pattern &p, std::int64_t start) : p_(p), at_(start) {}

    std::int64_t next() {
        const std::int64_t here = at_;
        for (int i = p_.rank - 1; i >= 0; --i) {
            at_ += p_.stride[i];
            if (++index_[i] < p_.size[i]) break;
            at_ -= p_.size[i] * p_.stride[i];
            index_[i] = 0;
        }
        return here;
    }

private:
    const Pattern &p_;
    std::int64_t at_;
    std::int64_t index_[8] = {};
};

// `count`: whether the DDR side is counted (a broadcast is one stream).
[[gnu::noinline]] inline void dma(Launch &launch, const Buffer &dst, std::int64_t dst_start, const Pattern &to,
                const Buffer &src, std::int64_t src_start, const Pattern &from, std::int64_t runs, std::int64_t run, bool count) {
    check_address("destination", dst, dst_start, to, run);
    check_address("source", src, src_start, from, run);
    Walk write(to, dst_start), read(from, src_start);
    for (std::int64_t i = 0; i < runs; ++i) {
        const std::uint8_t *source = src.data + read.next();
#if SIM_CHECKS
        if (src.slot < 0) check_written(source, run);
#endif
        std::memcpy(dst.data + write.next(), source, static_cast<std::size_t>(run));
    }
    if (!count) return;
    if (src.slot >= 0) launch.traffic[2 * src.slot] += runs * run;
    if (dst.slot >= 0) launch.traffic[2 * dst.slot + 1] += runs * run;
}

// After a tile function: counts it and looks at the fences of its buffers.
[[gnu::noinline]] inline void called(Launch &launch, std::initializer_list<Buffer> buffers) {
    ++*launch.calls;
    *launch.macs += static_cast<std::int64_t>(aie::sim::counters.macs);
    aie::sim::counters.macs = 0;
#if SIM_CHECKS
    for (const Buffer &b : buffers)
        for (std::int64_t i = 0; i < FENCE; ++i)
            if (b.data[b.bytes + i] != 0xff) refuse("wrote past the end of a buffer of " + std::to_string(b.bytes) + " bytes");
#else
    (void)buffers;
#endif
}

// A core starts in the default rounding mode.
inline void start_core() { aie::tile::current().set_rounding(aie::rounding_mode::floor); }

// i-th of n, forwards or backwards: what concurrent steps compute must not depend on their order.
inline std::int64_t step(std::int64_t i, std::int64_t n, bool reverse) { return reverse ? n - 1 - i : i; }

}  // namespace sim
