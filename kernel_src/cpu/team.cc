// The team's threads and its C interface (team.h): created once, asleep between submissions.
#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <new>

#include "isa.h"

struct Team {
    TeamState state;
    alignas(64) Gate submitted;
    const Call *calls = nullptr;
    int64_t count = 0;
    Dims dims = {};
    bool stopping = false;
    int64_t idle_spin_ns = 0;
    int threads = 0;
    int started = 1;  // workers with a thread, the caller's included
    pid_t process = 0;
    Worker *workers = nullptr;
    pthread_t *handles = nullptr;
};

namespace {

// Enough to bridge the host's work between two kernels resp. two tokens, and no more: a spinning thread
// takes its core from others.
constexpr int64_t barrier_spin_ns = 100'000, idle_spin_ns = 100'000;

int available_cpus() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    const long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 0 ? static_cast<int>(count) : 1;
}

// A worker may leave the last barrier when the next submission is already being written: nothing of the
// team's is read after that barrier.
void run_calls(Team *team, Worker *worker) {
    const Call *calls = team->calls;
    for (int64_t left = team->count; left > 0; left--, calls++) {
        calls->entry(calls->slots, &team->dims, worker);
        worker->barrier();
    }
}

struct Start {
    Team *team;
    Worker *worker;
    uint32_t seen;
};

void *work(void *argument) {
    Start start = *static_cast<Start *>(argument);
    delete static_cast<Start *>(argument);
    for (;; start.seen++) {
        start.team->submitted.wait(start.seen, start.team->idle_spin_ns);
        if (start.team->stopping) return nullptr;
        run_calls(start.team, start.worker);
    }
}

bool start_threads(Team *team) {
    team->process = getpid();
    for (team->started = 1; team->started < team->threads; team->started++) {
        Worker *worker = &team->workers[team->started];
        Start *start = new (std::nothrow) Start{team, worker, team->submitted.value.load()};
        if (start == nullptr) return false;
        if (pthread_create(&team->handles[team->started], nullptr, work, start) != 0) {
            delete start;
            return false;
        }
    }
    return true;
}

void stop_threads(Team *team) {
    team->stopping = true;
    team->submitted.open();
    for (int i = 1; i < team->started; i++) pthread_join(team->handles[i], nullptr);
    team->started = 1;
}

// A forked child has the memory of the team but not its threads.
void restart_after_fork(Team *team) {
    team->state.arrived.store(0);
    team->state.phase.sleepers.store(0);
    team->submitted.sleepers.store(0);
    for (int i = 0; i < team->threads; i++) {
        team->workers[i].loop = team->workers[0].loop;
        team->workers[i].shared = team->workers[0].shared;
    }
    if (!start_threads(team)) abort();
}

}  // namespace

extern "C" void team_destroy(Team *team) {
    if (team == nullptr) return;
    if (team->process == getpid()) stop_threads(team);
    for (int i = 0; team->workers != nullptr && i < team->threads; i++) free(team->workers[i].own.data);
    for (Scratch &area : team->state.shared) free(area.data);
    free(team->workers);
    free(team->handles);
    team->~Team();
    free(team);
}

extern "C" Team *team_create(int threads) {
    void *memory = aligned_alloc(alignof(Team), sizeof(Team));
    if (memory == nullptr) return nullptr;
    Team *team = new (memory) Team();
    const int cpus = available_cpus();
    team->threads = threads > 0 ? threads : cpus;
    // With fewer CPUs than threads, the awaited thread may need this very CPU.
    const bool crowded = team->threads > cpus;
    team->state.spin_ns = crowded ? 0 : barrier_spin_ns;
    team->idle_spin_ns = crowded ? 0 : idle_spin_ns;
    team->workers = static_cast<Worker *>(aligned_alloc(64, sizeof(Worker) * static_cast<size_t>(team->threads)));
    team->handles = static_cast<pthread_t *>(calloc(static_cast<size_t>(team->threads), sizeof(pthread_t)));
    if (team->workers != nullptr)
        for (int i = 0; i < team->threads; i++) {
            Worker *worker = new (&team->workers[i]) Worker();
            worker->thread = i;
            worker->threads = team->threads;
            worker->state = &team->state;
        }
    if (team->workers == nullptr || team->handles == nullptr || !start_threads(team)) {
        team->process = getpid();
        team_destroy(team);
        return nullptr;
    }
    return team;
}

extern "C" void team_run(Team *team, const Call *calls, int64_t count, const Dims *dims) {
    if (count <= 0) return;  // no barrier would tell when the workers have read it
    if (team->process != getpid()) restart_after_fork(team);
    team->calls = calls;
    team->count = count;
    team->dims = *dims;
    team->submitted.open();
    run_calls(team, &team->workers[0]);
}

extern "C" int team_threads(Team *team) { return team->threads; }

extern "C" const char *isa_name() {
#if defined(__x86_64__)
    switch (chosen_isa()) {
    case Isa::avx512bf16: return "avx512bf16";
    case Isa::avx2: return "avx2";
    case Isa::portable: return "portable";
    }
#endif
#if defined(__aarch64__)
    return "neon";
#else
    return "portable";
#endif
}
