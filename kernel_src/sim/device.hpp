// What lowered AIR programs run on: buffers in three memories, the n-dimensional DMA, counters, and refusals.
//
// Memory is filled with ones when a buffer comes to life. A word of ones is no number a kernel produces, so a DMA that
// reads one reads a byte that was never written; as bf16 or f32 it is NaN, which a tile function passes on. Buffers are
// fenced on both sides, so one that leaves its arguments is caught at the call. SIM_CHECKS=0 leaves all of it out;
// addresses are always checked.
//
// What it cannot show: a write that jumps over a fence, and the core's stack, which on the array lies before the first
// buffer and runs into it: a host compiler's frames say nothing about another's. That is checked on the core's objects.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace sim {

// A buffer: `slot` is the DDR argument it is, or -1.
// `packed`: elements are bytes into which numbers are packed, which may well be what memory holds that was never written.
struct Buffer {
    std::uint8_t *data;
    std::int64_t bytes;
    int slot;
    bool packed;
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

// A region of L1 (of one tile) or L2: buffers keep fixed places, SIM_FENCE_BYTES or more from each other and the ends.
class Memory {
public:
    explicit Memory(std::int64_t bytes);
    ~Memory();
    Memory(const Memory &) = delete;
    Buffer claim(std::int64_t offset, std::int64_t bytes, bool packed);
    // No buffer lives any more.
    void clear();
    // Refuses if a fence of a living buffer is broken; names it by its place in `given`, what a tile function was given.
    void check_fences(std::initializer_list<Buffer> given) const;

private:
    struct State;
    State *state_;
};

// FIFOs between a segment and its herd: one per entry of `size`; each delivers every item to all readers of the entry,
// of which `wide` has as many as it is larger. Puts run ahead of the herd here and beside it on the array.
class Channel {
public:
    Channel(std::int64_t size_x, std::int64_t size_y, std::int64_t wide_x, std::int64_t wide_y);
    ~Channel();
    Channel(const Channel &) = delete;
    void put(Launch &launch, std::int64_t x, std::int64_t y, const Buffer &src, std::int64_t start, const Pattern &from,
             std::int64_t runs, std::int64_t run);
    void get(std::int64_t x, std::int64_t y, const Buffer &dst, std::int64_t start, const Pattern &to,
             std::int64_t runs, std::int64_t run);
    // After a launch: whatever is left would keep the array waiting.
    void finish();
    void clear();

private:
    struct State;
    State *state_;
};

// Where the program is, for the one line of a refusal.
extern thread_local const char *where;

// Starts are bytes, `runs` of `run` bytes move. `count`: whether the DDR side is counted (a broadcast is one stream).
void dma(Launch &launch, const Buffer &dst, std::int64_t dst_start, const Pattern &to, const Buffer &src,
         std::int64_t src_start, const Pattern &from, std::int64_t runs, std::int64_t run, bool count);

// After a tile function: counts it and looks at the fences of all buffers of its memory.
void called(Launch &launch, const Memory &memory, std::initializer_list<Buffer> given);

// A core starts without buffers and in the default rounding mode.
void start_core(Memory &memory);

// Runs a program; a refusal becomes one line in `error` and status 1.
int guarded(void (*program)(void **slots, std::int64_t *counters, bool reverse), void **slots, std::int64_t *counters,
            bool reverse, char *error, std::int64_t error_bytes);

// i-th of n, forwards or backwards: what concurrent steps compute must not depend on their order.
inline std::int64_t step(std::int64_t i, std::int64_t n, bool reverse) { return reverse ? n - 1 - i : i; }

}  // namespace sim
