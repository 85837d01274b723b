// The team's threads and its C interface (team.h): created once, asleep between submissions.
#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <initializer_list>
#include <new>

#include "isa.h"

struct Team {
    TeamState state;
    alignas(64) Progress submitted;
    alignas(64) Progress finished;  // submissions that the caller's helpers are through with, counted for each
    uint32_t submissions = 0;
    const Call *calls = nullptr;
    int64_t count = 0;
    Dims dims = {};
    Lap *laps = nullptr;
    int64_t laps_each = 0;
    bool stopping = false;
    int64_t idle_spin_ns = 0;
    int threads = 0;
    bool crowded = false;  // fewer CPUs than threads
    cpu_set_t cpus = {};   // the team's, as long as nobody takes some away
    int caller_cpu = -1;   // where the helpers do not run
    int started = 1;  // workers with a thread, the caller's included
    pid_t process = 0;
    Worker *workers = nullptr;
    pthread_t *handles = nullptr;
};

namespace {

// Enough to bridge the host's work between two kernels resp. two tokens, and no more: a spinning thread
// takes its core from others.
constexpr int64_t barrier_spin_ns = 100'000, idle_spin_ns = 100'000;

// How many CPUs the process may run on; `set` says which, or nothing where the system does not.
int available_cpus(cpu_set_t &set) {
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    CPU_ZERO(&set);
    const long count = sysconf(_SC_NPROCESSORS_ONLN);
    return count > 0 ? static_cast<int>(count) : 1;
}

void run_calls(Team *team, Worker *worker) {
    worker->lap = team->laps == nullptr ? nullptr : team->laps + worker->thread * team->laps_each;
    worker->laps_end = team->laps == nullptr ? nullptr : worker->lap + team->laps_each;
    Chunks::keep_up(*worker);
    for (int64_t i = 0; i < team->count; i++) team->calls[i].entry(team->calls[i].slots, &team->dims, worker);
    worker->barrier();
}

struct Start {
    Team *team;
    Worker *worker;
    uint32_t submission;
};

void *work(void *argument) {
    Start start = *static_cast<Start *>(argument);
    delete static_cast<Start *>(argument);
    for (;;) {
        start.team->submitted.wait(++start.submission, start.team->idle_spin_ns);
        if (start.team->stopping) return nullptr;
        run_calls(start.team, start.worker);
        start.team->finished.add(1);
    }
}

bool start_threads(Team *team) {
    team->process = getpid();
    for (team->started = 1; team->started < team->threads; team->started++) {
        Worker *worker = &team->workers[team->started];
        Start *start = new (std::nothrow) Start{team, worker, team->submissions};
        if (start == nullptr) return false;
        if (pthread_create(&team->handles[team->started], nullptr, work, start) != 0) {
            delete start;
            return false;
        }
    }
    return true;
}

// On a small machine the scheduler does not search for an idle CPU: it wakes a thread where it ran last or where the
// waker runs, and two threads that sleep in turns may share one CPU for long. So the helpers leave the caller's alone.
void keep_apart(Team *team) {
    const int here = sched_getcpu();
    if (here == team->caller_cpu || here < 0 || here >= CPU_SETSIZE || team->crowded) return;
    team->caller_cpu = here;
    cpu_set_t others = team->cpus;
    CPU_CLR(static_cast<size_t>(here), &others);
    for (int i = 1; i < team->started; i++) pthread_setaffinity_np(team->handles[i], sizeof others, &others);
}

void stop_threads(Team *team) {
    team->stopping = true;
    team->submitted.add(1);
    for (int i = 1; i < team->started; i++) pthread_join(team->handles[i], nullptr);
    team->started = 1;
}

// A forked child has the memory of the team but not its threads.
void restart_after_fork(Team *team) {
    for (Progress *progress : {&team->state.done, &team->submitted, &team->finished}) progress->sleepers.store(0);
    team->finished.value.store(team->submissions * static_cast<uint32_t>(team->threads - 1));
    for (int i = 0; i < team->threads; i++) {
        team->workers[i].loop = team->workers[0].loop;
        team->workers[i].ahead = team->workers[0].ahead;
        team->workers[i].shared = team->workers[0].shared;
    }
    if (!start_threads(team)) abort();
    team->caller_cpu = -1;
}

}  // namespace

extern "C" void team_destroy(Team *team) {
    if (team == nullptr) return;
    if (team->process == getpid()) stop_threads(team);
    for (int i = 0; team->workers != nullptr && i < team->threads; i++)
        for (Scratch *area : {&team->workers[i].own, &team->workers[i].results}) area->release();
    for (Scratch &area : team->state.shared) area.release();
    free(team->workers);
    free(team->handles);
    team->~Team();
    free(team);
}

extern "C" Team *team_create(int threads) {
    void *memory = aligned_alloc(alignof(Team), sizeof(Team));
    if (memory == nullptr) return nullptr;
    Team *team = new (memory) Team();
    const int cpus = available_cpus(team->cpus);
    team->threads = threads > 0 ? threads : cpus;
    // With fewer CPUs than threads, the awaited thread may need this very CPU.
    team->crowded = team->threads > cpus;
    team->state.spin_ns = team->crowded ? 0 : barrier_spin_ns;
    team->idle_spin_ns = team->crowded ? 0 : idle_spin_ns;
    team->workers = static_cast<Worker *>(aligned_alloc(64, sizeof(Worker) * static_cast<size_t>(team->threads)));
    team->state.workers = team->workers;
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
    if (count <= 0) return;
    if (team->process != getpid()) restart_after_fork(team);
    keep_apart(team);
    team->calls = calls;
    team->count = count;
    team->dims = *dims;
    team->submissions++;
    team->submitted.add(1);
    run_calls(team, &team->workers[0]);
    // All is done, but workers that came too late for their part may still be walking through the calls.
    team->finished.wait(team->submissions * static_cast<uint32_t>(team->threads - 1), team->state.spin_ns);
}

extern "C" void team_laps(Team *team, Lap *laps, int64_t each) {
    team->laps = laps;
    team->laps_each = each;
}

extern "C" int team_threads(Team *team) { return team->threads; }

extern "C" const char *isa_name() {
#if defined(__x86_64__)
    switch (chosen_isa()) {
    case Isa::amx: return "amx";
    case Isa::avx512bf16: return "avx512bf16";
    case Isa::avx2: return "avx2";
    case Isa::portable: break;
    case Isa::none: return nullptr;
    }
#endif
#if defined(__aarch64__)
    return "neon";
#else
    return "portable";
#endif
}
