// Reads memory as fast as the threads can: the yardstick for everything that is bound by bandwidth.
#include "context.h"

namespace ft {

std::uint64_t read_all(ThreadPool& pool, const void* memory, std::int64_t bytes) {
  // A type of the compiler's own: from plain integers it makes a loop that goes through the stack, a third slower.
  typedef std::uint64_t Pair __attribute__((vector_size(16), aligned(8), may_alias));
  constexpr std::int64_t block = 1 << 20;
  constexpr int pairs = 8;
  std::atomic<std::uint64_t> total{0};
  pool.run(bytes / block, [&](std::int64_t task, int) {
    const char* p = static_cast<const char*>(memory) + task * block;
    Pair sums[pairs] = {};
    for (std::int64_t i = 0; i < block; i += sizeof sums) {
      // A page ahead, so that the hardware's prefetching does not stop at its end.
      __builtin_prefetch(p + i + 4096);
      __builtin_prefetch(p + i + 4160);
      const Pair* words = reinterpret_cast<const Pair*>(p + i);
      for (int pair = 0; pair < pairs; ++pair) sums[pair] ^= words[pair];
    }
    std::uint64_t sum = 0;
    for (const Pair& pair : sums) sum ^= pair[0] ^ pair[1];
    total.fetch_xor(sum, std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace ft
