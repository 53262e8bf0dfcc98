// A small pool made for one decode step after another: loops of a few microseconds, dozens per step, then a pause.
//
// * Iterations are claimed one by one from a counter, and a loop waits only for workers that have claimed one. A worker
//   that the system has taken off its core (the client process needs it too) therefore never holds a step up.
// * Idle workers spin for a bounded time, because the next loop is usually microseconds away, then sleep in a condition
//   variable. An idle engine burns nothing.
// * Threads start with the first loop. A child of fork() starts its own: the parent's do not exist there.
//
// How a loop opens and closes (`state` odd: open):
//
//     caller  write loop, next = 0   state += 1            claim …   state += 1   wait until active == 0
//     worker                         active += 1, state odd? claim …              active -= 1
//
// Both sides write one variable and then read the other's, sequentially consistent: either the worker sees the loop
// closed and touches nothing, or the caller sees it active and waits. So the loop's fields are never read while written.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <atomic>

namespace allm {
namespace {

constexpr int CACHE_LINE = 64;

std::atomic<uint32_t> fork_count{0};  // how often this process is a child of a process that had loaded this library

__attribute__((constructor)) void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

struct Scratch {
    uint8_t* memory;
    size_t bytes;

    bool reserve(size_t wanted) {
        if (wanted <= bytes) return true;
        free(memory);
        bytes = (wanted + 4095) / 4096 * 4096;
        memory = static_cast<uint8_t*>(aligned_alloc(CACHE_LINE, bytes));
        if (!memory) bytes = 0;
        return memory != nullptr;
    }
};

}  // namespace

struct Crew;

struct Worker {
    Crew* crew;
    pthread_t thread;
    Scratch scratch;
};

// The threads of one pool in one process, and the loop they run.
struct Crew {
    uint32_t born_at_fork;
    int32_t num_threads;  // the caller included: worker 0 is the caller
    int32_t spin_us;
    int32_t num_started;
    Worker* workers;
    Loop loop;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    alignas(CACHE_LINE) std::atomic<uint32_t> state;
    std::atomic<bool> stop;
    alignas(CACHE_LINE) std::atomic<int64_t> next;
    alignas(CACHE_LINE) std::atomic<int32_t> active;
    alignas(CACHE_LINE) std::atomic<int32_t> sleepers;
    alignas(CACHE_LINE) std::atomic<bool> busy;
};

namespace {

void claim(Crew* crew, Scratch& scratch) {
    const Loop& loop = crew->loop;
    for (;;) {
        int64_t index = crew->next.fetch_add(1, std::memory_order_relaxed);
        if (index >= loop.count) return;
        loop.run(loop.context, index, scratch.memory);
    }
}

void wait_for_change(Crew* crew, uint32_t seen) {
    int64_t deadline = 0;
    for (int spins = 1; crew->state.load(std::memory_order_acquire) == seen; spins++) {
        if (crew->stop.load(std::memory_order_relaxed)) return;
        pause();
        if (spins % 64) continue;
        int64_t now = now_us();
        if (!deadline) deadline = now + crew->spin_us;
        if (now < deadline) continue;
        pthread_mutex_lock(&crew->mutex);
        crew->sleepers.fetch_add(1);
        while (crew->state.load() == seen && !crew->stop.load()) pthread_cond_wait(&crew->wake, &crew->mutex);
        crew->sleepers.fetch_sub(1);
        pthread_mutex_unlock(&crew->mutex);
        return;
    }
}

void* work(void* argument) {
    Worker* worker = static_cast<Worker*>(argument);
    Crew* crew = worker->crew;
    for (uint32_t seen = 0; !crew->stop.load(std::memory_order_relaxed);) {
        wait_for_change(crew, seen);
        seen = crew->state.load();
        if (seen % 2 == 0) continue;
        crew->active.fetch_add(1);
        seen = crew->state.load();
        if (seen % 2) claim(crew, worker->scratch);
        crew->active.fetch_sub(1);
    }
    return nullptr;
}

void start_threads(Crew* crew) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);  // signals belong to the host application's threads
    for (int32_t i = 1; i < crew->num_threads; i++) {
        if (pthread_create(&crew->workers[i].thread, nullptr, work, &crew->workers[i])) break;  // fewer will do
        crew->num_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Crew* make_crew(int32_t num_threads, int32_t spin_us) {
    Crew* crew = static_cast<Crew*>(aligned_alloc(CACHE_LINE, sizeof(Crew)));
    Worker* workers = static_cast<Worker*>(calloc(num_threads, sizeof(Worker)));
    if (!crew || !workers) {
        free(crew);
        free(workers);
        return nullptr;
    }
    memset(static_cast<void*>(crew), 0, sizeof(Crew));
    crew->born_at_fork = fork_count.load();
    crew->num_threads = num_threads;
    crew->spin_us = spin_us;
    crew->workers = workers;
    for (int32_t i = 0; i < num_threads; i++) workers[i].crew = crew;
    pthread_mutex_init(&crew->mutex, nullptr);
    pthread_cond_init(&crew->wake, nullptr);
    return crew;
}

void end_crew(Crew* crew) {
    if (!crew) return;
    if (crew->born_at_fork == fork_count.load()) {  // else its threads live in the parent only
        pthread_mutex_lock(&crew->mutex);
        crew->stop.store(true);
        pthread_cond_broadcast(&crew->wake);
        pthread_mutex_unlock(&crew->mutex);
        for (int32_t i = 1; i <= crew->num_started; i++) pthread_join(crew->workers[i].thread, nullptr);
        pthread_cond_destroy(&crew->wake);
        pthread_mutex_destroy(&crew->mutex);
    }
    for (int32_t i = 0; i < crew->num_threads; i++) free(crew->workers[i].scratch.memory);
    free(crew->workers);
    free(crew);
}

int32_t run_alone(const Loop& loop) {
    Scratch scratch{nullptr, 0};
    if (loop.scratch_bytes && !scratch.reserve(loop.scratch_bytes)) return ALLM_NO_MEMORY;
    for (int64_t i = 0; i < loop.count; i++) loop.run(loop.context, i, scratch.memory);
    free(scratch.memory);
    return ALLM_OK;
}

void run_together(Crew* crew, const Loop& loop) {
    crew->loop = loop;
    crew->next.store(0, std::memory_order_relaxed);
    crew->state.fetch_add(1);
    if (crew->sleepers.load() > 0) {
        pthread_mutex_lock(&crew->mutex);
        pthread_cond_broadcast(&crew->wake);
        pthread_mutex_unlock(&crew->mutex);
    }
    claim(crew, crew->workers[0].scratch);
    crew->state.fetch_add(1);
    for (int spins = 1; crew->active.load() != 0; spins++) {
        pause();
        if (spins % 4096 == 0) sched_yield();  // the worker may need this very core
    }
}

}  // namespace
}  // namespace allm

struct allm_pool {
    int32_t num_threads, spin_us;
    std::atomic<allm::Crew*> crew;
};

namespace allm {
namespace {

// The crew of this process; a new one after fork(), where the old one's threads are gone and its locks are in any state.
Crew* crew_of(allm_pool* pool) {
    Crew* crew = pool->crew.load();
    if (crew && crew->born_at_fork == fork_count.load()) return crew;
    Crew* fresh = make_crew(pool->num_threads, pool->spin_us);
    if (!fresh) return nullptr;
    if (!pool->crew.compare_exchange_strong(crew, fresh)) {
        end_crew(fresh);
        return pool->crew.load();
    }
    return fresh;  // the stale one leaks: a few kilobytes per fork
}

bool reserve_scratch(Crew* crew, size_t bytes) {
    for (int32_t i = 0; i < crew->num_threads; i++)
        if (!crew->workers[i].scratch.reserve(bytes)) return false;
    return true;
}

}  // namespace

int32_t num_threads(const allm_pool* pool) { return pool ? pool->num_threads : 1; }

int32_t run_loop(allm_pool* pool, const Loop& loop) {
    Crew* crew = pool ? crew_of(pool) : nullptr;
    if (!crew || crew->busy.exchange(true)) return run_alone(loop);
    int32_t status = ALLM_OK;
    if (loop.scratch_bytes && !reserve_scratch(crew, loop.scratch_bytes)) {
        status = ALLM_NO_MEMORY;
    } else if (loop.count <= 1 || crew->num_threads == 1) {
        for (int64_t i = 0; i < loop.count; i++) loop.run(loop.context, i, crew->workers[0].scratch.memory);
    } else {
        if (!crew->num_started) start_threads(crew);
        run_together(crew, loop);
    }
    crew->busy.store(false);
    return status;
}

}  // namespace allm

allm_pool* allm_pool_create(int32_t num_threads, int32_t spin_us) {
    if (num_threads < 1 || spin_us < 0) return nullptr;
    allm_pool* pool = static_cast<allm_pool*>(calloc(1, sizeof(allm_pool)));
    if (!pool) return nullptr;
    pool->num_threads = num_threads;
    pool->spin_us = spin_us;
    return pool;
}

void allm_pool_destroy(allm_pool* pool) {
    if (!pool) return;
    allm::end_crew(pool->crew.load());
    free(pool);
}

int32_t allm_pool_num_threads(const allm_pool* pool) { return allm::num_threads(pool); }
