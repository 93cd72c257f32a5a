#include "threads.h"

#include <stdexcept>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ft {
namespace {

constexpr std::int64_t kMostTasks = 1 << 30;
bool any_left(std::uint64_t next) { return (next & 0xffffffffu) < next >> 32; }

}  // namespace

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin_to(int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // only a hint: a container may forbid it
#else
  (void)cpu;
#endif
}

void sleep_precisely() {
#if defined(__linux__)
  prctl(PR_SET_TIMERSLACK, 1000ul, 0ul, 0ul, 0ul);  // nanoseconds, rather than 50 microseconds
#endif
}

FlushDenormals::FlushDenormals() {
#if defined(__x86_64__)
  saved_ = _mm_getcsr();
  _mm_setcsr(static_cast<unsigned>(saved_) | 0x8040u);  // flush to zero, denormals are zero
#elif defined(__aarch64__)
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" : : "r"(saved_ | (1ull << 24)));
#else
  saved_ = 0;
#endif
}

FlushDenormals::~FlushDenormals() {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(saved_));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(saved_));
#endif
}

ThreadPool::ThreadPool(int threads, const std::vector<int>& cpus, int spins) : spins_(spins) {
  try {
    for (int thread = 1; thread < threads; ++thread) {
      const int cpu = cpus.empty() ? -1 : cpus[static_cast<std::size_t>(thread)];
      workers_.emplace_back([this, thread, cpu] {
        if (cpu >= 0) pin_to(cpu);
        work(thread);
      });
    }
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::drain(int thread) {
  std::int64_t done = 0;
  for (std::uint64_t next; any_left(next = next_.fetch_add(1, std::memory_order_acq_rel)); ++done) {
    call_(body_, static_cast<std::int64_t>(next & 0xffffffffu), thread);
  }
  if (done > 0) left_.fetch_sub(done, std::memory_order_release);
}

void ThreadPool::work(int thread) {
  FlushDenormals flush;
  for (unsigned seen = 0; !stopping_.load();) {
    for (int spin = 0; spin < spins_ && calls_.load(std::memory_order_acquire) == seen; ++spin) {
      if (stopping_.load(std::memory_order_relaxed)) return;
      pause();
    }
    if (calls_.load() == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      parked_.fetch_add(1);
      // Woken too late for a job, it looks for the next one before it sleeps again.
      if (calls_.load() == seen && !stopping_.load()) wake_.wait(lock);
      parked_.fetch_sub(1);
    }
    seen = calls_.load();
    if (any_left(next_.load(std::memory_order_acquire))) drain(thread);
  }
}

void ThreadPool::rouse() {
  if (parked_.load() > 0) announce();
}

void ThreadPool::announce() {
  calls_.fetch_add(1);
  if (parked_.load() == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  wake_.notify_all();
}

void ThreadPool::run_erased(std::int64_t tasks, Call call, const void* body) {
  if (tasks > kMostTasks) throw std::length_error("too many tasks");
  if (tasks <= 1 || workers_.empty()) {
    for (std::int64_t task = 0; task < tasks; ++task) call(body, task, 0);
    return;
  }
  call_ = call;
  body_ = body;
  left_.store(tasks, std::memory_order_relaxed);
  next_.store(static_cast<std::uint64_t>(tasks) << 32);
  announce();
  drain(0);
  wait_until([&] { return left_.load(std::memory_order_acquire) == 0; });
}

}  // namespace ft
