// A persistent pool of threads that share numbered tasks. Which thread runs a task never changes its result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace ft {

// Flushes denormals to zero for the calling thread while alive. Workers hold one for life and every call from outside
// holds one, so that arithmetic does not depend on the thread.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  std::uint64_t saved_;
};

// Binds the calling thread to a processor where the system lets it.
void pin_to(int cpu);
// Sleeps of the calling thread end when they should.
void sleep_precisely();
void pause();

// For what other threads are about to do.
template <class Condition>
void wait_until(const Condition& condition) {
  for (int spin = 0; !condition(); ++spin) {
    if (spin < 4000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

class ThreadPool {
 public:
  // About 100 microseconds: longer than the Python code between two operations, short enough not to be felt when idle.
  static constexpr int kSpins = 4000;

  // The caller of run() counts as one of the threads. Worker i is pinned to cpus[i] if there are any; idle ones look
  // for work `spins` times before they sleep.
  explicit ThreadPool(int threads, const std::vector<int>& cpus = {}, int spins = kSpins);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Workers that sleep look for work again, for a while.
  void rouse();

  // Idle workers leave their cores to others from now on.
  void sleep_at_once() { spins_.store(0); }

  // Calls body(task, thread) once for every task in [0, tasks), and returns when all are done. Tasks begin in their
  // order, so that one may wait for another before it. Bodies must not throw.
  template <class Body>
  void run(std::int64_t tasks, const Body& body) {
    run_erased(
        tasks,
        [](const void* erased, std::int64_t task, int thread) { (*static_cast<const Body*>(erased))(task, thread); },
        &body);
  }

 private:
  using Call = void (*)(const void*, std::int64_t, int);

  void run_erased(std::int64_t tasks, Call call, const void* body);
  void work(int thread);
  void drain(int thread);
  void announce();
  void stop();

  std::atomic<int> spins_;
  // tasks << 32 | the next one, in a cache line of their own. A thread that gets a number below `tasks` has a task of
  // the job that runs now, which cannot end without it; a job never waits for a worker that has not woken up yet.
  alignas(64) std::atomic<std::uint64_t> next_{0};
  alignas(64) std::atomic<std::int64_t> left_{0};
  // Jobs and calls of rouse so far. Idle workers look here, not where others take tasks.
  alignas(64) std::atomic<unsigned> calls_{0};
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<bool> stopping_{false};
  Call call_ = nullptr;
  const void* body_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace ft
