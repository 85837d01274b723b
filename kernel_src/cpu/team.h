// A team of threads that run the same program on different parts of the data.
//
// Worker is what a kernel sees of it. Everything a kernel needs is inline here, because the kernels
// live in other shared objects than team.cc and must not depend on its symbols.
#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>

// Rows of one sequence at consecutive positions.
struct Run {
    int64_t first;          // of the call's rows
    int64_t rows;
    int64_t pos;            // absolute position of the first of them
    const int32_t *blocks;  // of its KV cache: where that of positions 128 i .. 128 i + 127 lies
};

struct Dims {
    int64_t seq;  // rows in this call, of all runs
    int64_t count;
    const Run *runs;

    const Run *begin() const { return runs; }
    const Run *end() const { return runs + count; }
};

inline int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// A counter that threads wait on: they spin for a while, because the wait is usually shorter than a
// system call, and then sleep, because their core may be what the awaited thread needs. It wraps around.
struct Progress {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    void add(uint32_t count) {
        value.fetch_add(count);
        if (sleepers.load() != 0)
            syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    bool reached(uint32_t goal) const { return reached(value.load(std::memory_order_acquire), goal); }

    // Returns when the counter has reached `goal`.
    void wait(uint32_t goal, int64_t spin_ns) {
        if (reached(goal) || spin(goal, spin_ns)) return;
        sleepers.fetch_add(1);
        for (uint32_t now = value.load(); !reached(now, goal); now = value.load())
            syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
        sleepers.fetch_sub(1);
    }

private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }

    static bool reached(uint32_t now, uint32_t goal) { return static_cast<int32_t>(now - goal) >= 0; }

    bool spin(uint32_t goal, int64_t spin_ns) {
        for (int64_t deadline = 0;;) {
            for (int i = 0; i < 64; i++) {
                if (reached(goal)) return true;
                pause();
            }
            const int64_t now = now_ns();
            if (deadline == 0) deadline = now + spin_ns;
            if (now >= deadline) return false;
        }
    }
};

// Memory that grows and is never initialised.
struct Scratch {
    char *end = nullptr;
    size_t size = 0;

    // The memory ends where a page begins that cannot be touched: a kernel that needs more than it asked for ends the process,
    // and damages nothing.
    void *at_least(size_t bytes) {
        const size_t lines = (bytes + 63) / 64 * 64;
        if (lines > size) grow(lines + lines / 4);
        return end - lines;
    }

    void grow(size_t bytes) {
        const size_t page = page_bytes();
        release();
        size = (bytes + page - 1) / page * page;
        void *first = mmap(nullptr, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (first == MAP_FAILED) abort();
        end = static_cast<char *>(first) + size;
        if (mprotect(end, page, PROT_NONE) != 0) abort();
    }

    void release() {
        if (end != nullptr) munmap(end - size, size + page_bytes());
    }

    static size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
};

// What the workers of a team share. Lines that different threads write are kept apart.
struct TeamState {
    int64_t spin_ns = 0;
    struct Worker *workers = nullptr;
    alignas(64) Progress done;  // indices of loops (Chunks) whose work is done
    alignas(64) std::atomic<uint32_t> scratch_lock{0};
    Scratch shared[2];
};

// When a worker was in a launch, in nanoseconds of CLOCK_MONOTONIC. `waited`: of that, at barriers inside it.
struct Lap {
    int64_t begin, end, waited;
};

struct alignas(64) Worker {
    int thread = 0;
    int threads = 1;
    TeamState *state = nullptr;
    uint32_t loop = 0;    // loops entered so far; all workers enter the same ones in the same order
    uint32_t ahead = 0;   // what TeamState::done will be when the work of these loops is done
    uint32_t shared = 0;  // uses of shared scratch so far
    Lap *lap = nullptr;   // of the next launch; where laps end if none is noted
    Lap *laps_end = nullptr;
    Scratch own, results;
    // How far its share of a loop is handed out: number of the loop (24 bits), next index (40 bits). Others take from it, too.
    alignas(64) std::atomic<uint64_t> handed_out{0};

    // Returns when the work of all loops before it is done, by whomever. It does not wait for workers that have
    // no part in that: one whose core is taken away follows later, finds nothing left to do, and holds nobody up.
    void barrier() {
        if (threads == 1 || state->done.reached(ahead)) return;
        const int64_t since = lap != laps_end ? now_ns() : 0;
        state->done.wait(ahead, state->spin_ns);
        if (lap != laps_end) lap->waited += now_ns() - since;
    }

    // Asks for the first lines of this worker's share of weights that it reads next, if they are among these, which lie `before` bytes
    // behind the first of `all`. While workers wait for each other, memory is idle, and what begins a stream takes as long to come as
    // much that follows it.
    void ask(const void *weights, int64_t bytes, int64_t before, int64_t all) const {
        constexpr int64_t lines = 16;
        const int64_t begin = all / 64 * thread / threads * 64 - before;
        if (begin < 0 || begin >= bytes) return;
        const char *own = static_cast<const char *>(weights) + begin;
        for (int64_t line = 0; line < lines; line++) __builtin_prefetch(own + line * 64, 0, 2);
    }

    // One of the launches that a program consists of.
    template <class Kernel>
    void launch(Kernel &&kernel) {
        if (lap == laps_end) return kernel();
        *lap = {now_ns(), 0, 0};
        kernel();
        lap++->end = now_ns();
    }

    // Memory of this worker alone, valid until the next call.
    template <class T>
    T *scratch(int64_t count) {
        return static_cast<T *>(own.at_least(static_cast<size_t>(count) * sizeof(T)));
    }

    // Memory of this worker alone for what every worker computes for itself, valid until the program ends.
    char *own_results(int64_t bytes) { return static_cast<char *>(results.at_least(static_cast<size_t>(bytes))); }

    // Memory that the team shares, the same for all workers that ask for the same size at the same
    // place of the program, to be touched inside loops only. The user must pass a barrier between writing and
    // finishing: then no work is left of the use before the last one, and two areas are enough.
    template <class T>
    T *shared_scratch(int64_t count) {
        Scratch &area = state->shared[shared++ % 2];
        while (state->scratch_lock.exchange(1, std::memory_order_acquire) != 0) {
        }
        void *data = area.at_least(static_cast<size_t>(count) * sizeof(T));
        state->scratch_lock.store(0, std::memory_order_release);
        return static_cast<T *>(data);
    }
};

// Hands the indices 0 .. count-1 to the workers in chunks. Each worker has a share of neighbouring indices, which it takes in order,
// and when nothing is left of it, takes from the others' shares. So a worker seldom touches a line that another one writes, which
// takes most of a microsecond where they have no cache in common, and reads the same weights for each token. Everything that a
// kernel writes for others, and everything that it reads of theirs, belongs to an index that was handed out.
//
// A worker leaves a loop only when all of it is handed out. So counters need no reset: whoever first takes from a share restarts
// its counter, and a latecomer that finds a later loop's number knows that nothing is left of its own loop. What a worker was given
// counts as done when its Chunks go out of scope, which must be before the next barrier.
class Chunks {
public:
    // Chunks of `most`, and towards the end of a share halves of that and so on, while they are larger than `least`, so that the
    // workers finish together. By halves, because kernels have code for so many at a time.
    Chunks(Worker &worker, int64_t count, int64_t most, int64_t least)
        : workers_(worker.threads == 1 ? &worker : worker.state->workers),
          loop_(first_index(++worker.loop)),
          count_(count),
          most_(most < 1 ? 1 : most),
          least_(least < 1 ? 1 : least),
          threads_(worker.threads),
          owner_(worker.thread),
          done_(worker.threads == 1 ? nullptr : &worker.state->done) {
        worker.ahead += static_cast<uint32_t>(count);
    }
    ~Chunks() {
        if (done_ != nullptr && given_ != 0) done_->add(given_);
    }
    Chunks(Worker &worker, int64_t count, int64_t chunk) : Chunks(worker, count, chunk, chunk) {}
    Chunks(const Chunks &) = delete;

    // No chunk reaches across these indices, which ascend.
    void cut_at(int64_t first, int64_t second) { cuts_[0] = first, cuts_[1] = second; }

    // The next chunk is [begin, end); false when nothing is left.
    bool next(int64_t &begin, int64_t &end) {
        for (; visited_ < threads_; visited_++, owner_ = owner_ + 1 < threads_ ? owner_ + 1 : 0)
            if (take(begin, end)) return true;
        return false;
    }

    // Called where a submission begins. Shares that have no indices leave their counters behind, and one that is 2^23 loops old
    // would look like a later loop's.
    static void keep_up(Worker &worker) {
        const uint64_t now = first_index(worker.loop);
        uint64_t seen = worker.handed_out.load(std::memory_order_relaxed);
        if (static_cast<int64_t>(seen - now) < 0) worker.handed_out.compare_exchange_strong(seen, now, std::memory_order_relaxed);
    }

private:
    static constexpr int index_bits = 40;

    static uint64_t first_index(uint32_t loop) { return static_cast<uint64_t>(loop) << index_bits; }

    // Where the share of a worker begins. Shares are whole chunks of `least`, and where these do not come out even, the first
    // workers have more.
    int64_t share_begin(int64_t worker) const {
        const int64_t chunks = (count_ + least_ - 1) / least_, begin = (chunks * worker + threads_ - 1) / threads_ * least_;
        return begin < count_ ? begin : count_;
    }

    // The next chunk of the share of worker `owner_`.
    bool take(int64_t &begin, int64_t &end) {
        std::atomic<uint64_t> &next = workers_[owner_].handed_out;
        const int64_t first = share_begin(owner_), last = share_begin(owner_ + 1);
        uint64_t seen = next.load(std::memory_order_relaxed);
        for (;;) {
            const int64_t ahead = static_cast<int64_t>(seen - loop_) >> index_bits;
            begin = ahead < 0 ? first : static_cast<int64_t>(seen - loop_);
            if (ahead > 0 || begin >= last) return false;
            end = begin + chunk(last - begin);
            for (const int64_t cut : cuts_)
                if (begin < cut && cut < end) end = cut;
            if (next.compare_exchange_weak(seen, loop_ | static_cast<uint64_t>(end), std::memory_order_relaxed)) {
                given_ += static_cast<uint32_t>(end - begin);
                return true;
            }
        }
    }

    // Of what is left of a share; at most half of it, where others may take the rest.
    int64_t chunk(int64_t left) const {
        const int64_t parts = threads_ == 1 ? 1 : 2;
        int64_t some = most_;
        while (some > least_ && some * parts > left) some /= 2;
        return some < left ? some : left;
    }

    Worker *workers_;
    uint64_t loop_;
    int64_t count_, most_, least_, threads_, owner_, visited_ = 0, cuts_[2] = {0, 0};
    Progress *done_;
    uint32_t given_ = 0;
};

// A program. It begins with a barrier, behind which is what the programs before it made.
struct Call {
    void (*entry)(void *const *slots, const Dims *dims, Worker *worker);
    void *const *slots;
};

struct Team;

extern "C" {
Team *team_create(int threads);  // 0: as many as there are CPUs to run on; null when it cannot be made
void team_run(Team *team, const Call *calls, int64_t count, const Dims *dims);  // caller is worker 0
// From the next submission on, every worker notes the launches of each, worker i from laps[i * each] on and at most so
// many; null: none.
void team_laps(Team *team, Lap *laps, int64_t each);
void team_destroy(Team *team);
int team_threads(Team *team);
// "amx" | "avx512bf16" | "avx2" | "portable" | "neon"; null if the library has no code that this machine can run.
const char *isa_name();
}
