// Reads memory as fast as the threads can: the yardstick for everything that is bound by bandwidth.
#include <cstring>

#include "context.h"

namespace ft {

std::uint64_t read_all(Context& context, const void* memory, std::int64_t bytes) {
  constexpr std::int64_t block = 1 << 20;
  constexpr int lanes = 16;
  std::atomic<std::uint64_t> total{0};
  context.pool.run(bytes / block, [&](std::int64_t task, int) {
    const char* p = static_cast<const char*>(memory) + task * block;
    std::uint64_t sums[lanes] = {};
    for (std::int64_t i = 0; i < block; i += sizeof sums) {
      // A page ahead, so that the hardware's prefetching does not stop at its end.
      __builtin_prefetch(p + i + 4096);
      __builtin_prefetch(p + i + 4160);
      std::uint64_t words[lanes];
      std::memcpy(words, p + i, sizeof words);
      for (int lane = 0; lane < lanes; ++lane) sums[lane] ^= words[lane];
    }
    std::uint64_t sum = 0;
    for (std::uint64_t lane : sums) sum ^= lane;
    total.fetch_xor(sum, std::memory_order_relaxed);
  });
  return total.load();
}

}  // namespace ft
