// The host side of device.hpp.
#include "device.hpp"

#include <aie_api/aie.hpp>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#ifndef SIM_CHECKS
#define SIM_CHECKS 1
#endif

namespace sim {

thread_local const char *where = "";

namespace {

constexpr bool CHECKS = SIM_CHECKS;
constexpr std::int64_t FENCE = SIM_FENCE_BYTES;
constexpr std::uint32_t NEVER_WRITTEN = 0xffffffffu;

struct Refused {
    std::string what;
};

[[noreturn]] void refuse(const std::string &what) { throw Refused{what}; }

std::int64_t span(const Pattern &p) {
    std::int64_t last = 0;
    for (int i = 0; i < p.rank; ++i) last += (p.size[i] - 1) * p.stride[i];
    return last;
}

void check_address(const char *side, const Buffer &b, std::int64_t start, const Pattern &p, std::int64_t run) {
    const std::int64_t end = start + span(p) + run;
    if (start < 0 || end > b.bytes)
        refuse(std::string(side) + " bytes " + std::to_string(start) + " .. " + std::to_string(end) +
               " are outside the buffer of " + std::to_string(b.bytes));
    if (start % 4 != 0)
        refuse(std::string(side) + " offset " + std::to_string(start) + " is not a multiple of 4 bytes");
}

// Of packed numbers a word says nothing, a line of words does.
void check_written(const std::uint8_t *from, std::int64_t run, bool packed) {
    const std::int64_t enough = packed ? 16 : 1;
    std::int64_t words = 0;
    for (std::int64_t i = 0; i + 4 <= run; i += 4) {
        std::uint32_t word;
        std::memcpy(&word, from + i, 4);
        words = word == NEVER_WRITTEN ? words + 1 : 0;
        if (words == enough) refuse("reads bytes that were never written");
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

int report(const char *what, char *error, std::int64_t bytes) {
    const std::string line = std::string(where) + ": " + what;
    std::strncpy(error, line.c_str(), static_cast<std::size_t>(bytes) - 1);
    return 1;
}

}  // namespace

struct Memory::State {
    std::uint8_t *storage;
    std::vector<Buffer> living;
};

Memory::Memory(std::int64_t bytes)
    : state_(new State{new (std::align_val_t{64}) std::uint8_t[static_cast<std::size_t>(bytes)], {}}) {}

Memory::~Memory() {
    ::operator delete[](state_->storage, std::align_val_t{64});
    delete state_;
}

Buffer Memory::claim(std::int64_t offset, std::int64_t bytes, bool packed) {
    const Buffer buffer = {state_->storage + offset, bytes, -1, packed};
    if (!CHECKS) return buffer;
    std::memset(buffer.data - FENCE, 0xff, static_cast<std::size_t>(bytes + 2 * FENCE));
    for (const Buffer &other : state_->living)
        if (other.data == buffer.data) return buffer;
    state_->living.push_back(buffer);
    return buffer;
}

void Memory::clear() { state_->living.clear(); }

void Memory::check_fences(std::initializer_list<Buffer> given) const {
    std::uint8_t intact[FENCE];
    std::memset(intact, 0xff, sizeof intact);
    for (const Buffer &b : state_->living) {
        const bool before = std::memcmp(b.data - FENCE, intact, sizeof intact) != 0;
        if (!before && std::memcmp(b.data + b.bytes, intact, sizeof intact) == 0) continue;
        std::string which = ", which it was not given";
        int number = 0;
        for (const Buffer &argument : given)
            if (++number; argument.data == b.data) which = ", number " + std::to_string(number) + " that it was given";
        refuse(std::string("wrote ") + (before ? "before the start" : "past the end") + " of a buffer of " +
               std::to_string(b.bytes) + " bytes" + which);
    }
}

void dma(Launch &launch, const Buffer &dst, std::int64_t dst_start, const Pattern &to, const Buffer &src,
         std::int64_t src_start, const Pattern &from, std::int64_t runs, std::int64_t run, bool count) {
    check_address("destination", dst, dst_start, to, run);
    check_address("source", src, src_start, from, run);
    Walk write(to, dst_start), read(from, src_start);
    for (std::int64_t i = 0; i < runs; ++i) {
        const std::uint8_t *source = src.data + read.next();
        if (CHECKS) check_written(source, run, src.packed);
        std::memcpy(dst.data + write.next(), source, static_cast<std::size_t>(run));
    }
    if (!count) return;
    if (src.slot >= 0) launch.traffic[2 * src.slot] += runs * run;
    if (dst.slot >= 0) launch.traffic[2 * dst.slot + 1] += runs * run;
}

struct Channel::State {
    using Items = std::vector<std::vector<std::uint8_t>>;
    std::int64_t size_x, size_y, wide_x, wide_y;
    struct Reader {
        std::size_t taken = 0;   // items of which all bytes are taken
        std::int64_t bytes = 0;  // bytes that are taken of the next
    };
    std::vector<Items> items;
    std::vector<Reader> readers;

    // What a reader's entry was given.
    const Items &items_for(std::int64_t x, std::int64_t y) const {
        const std::int64_t from_x = size_x == wide_x ? x : 0, from_y = size_y == wide_y ? y : 0;
        return items[static_cast<std::size_t>(from_x * size_y + from_y)];
    }
};

Channel::Channel(std::int64_t size_x, std::int64_t size_y, std::int64_t wide_x, std::int64_t wide_y)
    : state_(new State{size_x, size_y, wide_x, wide_y, {}, {}}) {
    clear();
}

Channel::~Channel() { delete state_; }

void Channel::clear() {
    state_->items.assign(static_cast<std::size_t>(state_->size_x * state_->size_y), {});
    state_->readers.assign(static_cast<std::size_t>(state_->wide_x * state_->wide_y), {});
}

void Channel::put(Launch &launch, std::int64_t x, std::int64_t y, const Buffer &src, std::int64_t start,
                  const Pattern &from, std::int64_t runs, std::int64_t run) {
    if (x < 0 || y < 0 || x >= state_->size_x || y >= state_->size_y)
        refuse("puts into a channel entry that is not there");
    check_address("source", src, start, from, run);
    std::vector<std::uint8_t> item;
    Walk read(from, start);
    for (std::int64_t i = 0; i < runs; ++i) {
        const std::uint8_t *source = src.data + read.next();
        if (CHECKS) check_written(source, run, src.packed);
        item.insert(item.end(), source, source + run);
    }
    state_->items[static_cast<std::size_t>(x * state_->size_y + y)].push_back(std::move(item));
    if (src.slot >= 0) launch.traffic[2 * src.slot] += runs * run;
}

void Channel::get(std::int64_t x, std::int64_t y, const Buffer &dst, std::int64_t start, const Pattern &to,
                  std::int64_t runs, std::int64_t run) {
    if (x < 0 || y < 0 || x >= state_->wide_x || y >= state_->wide_y)
        refuse("takes from a channel entry that is not there");
    check_address("destination", dst, start, to, run);
    const auto &items = state_->items_for(x, y);
    State::Reader &reader = state_->readers[static_cast<std::size_t>(x * state_->wide_y + y)];
    if (reader.taken == items.size())
        refuse("takes from a channel into which nothing more is put: the array would wait forever");
    const auto &item = items[reader.taken];
    // A channel is a stream of words: several transfers may take an item, one after the other.
    const std::int64_t left = static_cast<std::int64_t>(item.size()) - reader.bytes, size = runs * run;
    if (size > left)
        refuse("takes " + std::to_string(size) + " bytes of a channel item that has " + std::to_string(left));
    Walk write(to, start);
    for (std::int64_t i = 0; i < runs; ++i)
        std::memcpy(dst.data + write.next(), item.data() + reader.bytes + i * run, static_cast<std::size_t>(run));
    reader.bytes += size;
    if (size == left) reader = {reader.taken + 1, 0};
}

void Channel::finish() {
    for (std::int64_t x = 0; x < state_->wide_x; ++x)
        for (std::int64_t y = 0; y < state_->wide_y; ++y)
            if (state_->readers[static_cast<std::size_t>(x * state_->wide_y + y)].taken != state_->items_for(x, y).size())
                refuse("leaves items in a channel: the array would wait forever");
    clear();
}

void called(Launch &launch, const Memory &memory, std::initializer_list<Buffer> given) {
    ++*launch.calls;
    *launch.macs += static_cast<std::int64_t>(aie::sim::counters.macs);
    aie::sim::counters.macs = 0;
    if (CHECKS) memory.check_fences(given);
}

void start_core(Memory &memory) {
    memory.clear();
    aie::tile::current().set_rounding(aie::rounding_mode::floor);
}

int guarded(void (*program)(void **, std::int64_t *, bool), void **slots, std::int64_t *counters, bool reverse,
            char *error, std::int64_t error_bytes) {
    try {
        program(slots, counters, reverse);
        return 0;
    } catch (const Refused &refused) {
        return report(refused.what.c_str(), error, error_bytes);
    } catch (const aie::sim::Fault &fault) {
        return report(fault.what, error, error_bytes);
    }
}

}  // namespace sim
