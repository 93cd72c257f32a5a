#include "threads.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ft {
namespace {

constexpr std::uint64_t kOpen = 1ull << 16;
constexpr std::uint64_t kCount = kOpen - 1;
constexpr int kGenerationShift = 17;

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

bool ThreadPool::joinable(std::uint64_t state, std::uint64_t seen) const {
  return stopping_.load(std::memory_order_relaxed) || ((state & kOpen) && (state >> kGenerationShift) != seen);
}

void ThreadPool::drain(int thread) {
  for (std::int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) call_(body_, task, thread);
}

void ThreadPool::work(int thread) {
  FlushDenormals flush;
  std::uint64_t seen = 0;
  for (;;) {
    std::uint64_t state = state_.load(std::memory_order_acquire);
    for (int spin = 0; spin < spins_ && !joinable(state, seen); ++spin) {
      pause();
      state = state_.load(std::memory_order_acquire);
    }
    if (!joinable(state, seen)) {
      std::unique_lock<std::mutex> lock(mutex_);
      parked_.fetch_add(1);
      wake_.wait(lock, [&] { return joinable(state = state_.load(), seen); });
      parked_.fetch_sub(1);
    }
    if (stopping_.load()) return;
    if (!state_.compare_exchange_strong(state, state + 1, std::memory_order_acq_rel)) continue;
    seen = state >> kGenerationShift;
    drain(thread);
    state_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::run_erased(std::int64_t tasks, Call call, const void* body) {
  if (tasks <= 1 || workers_.empty()) {
    for (std::int64_t task = 0; task < tasks; ++task) call(body, task, 0);
    return;
  }
  tasks_ = tasks;
  call_ = call;
  body_ = body;
  next_.store(0, std::memory_order_relaxed);
  const std::uint64_t generation = (state_.load(std::memory_order_relaxed) >> kGenerationShift) + 1;
  state_.store(generation << kGenerationShift | kOpen);
  if (parked_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  drain(0);
  state_.fetch_and(~kOpen);
  for (int spin = 0; state_.load(std::memory_order_acquire) & kCount; ++spin) {
    if (spin < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace ft
