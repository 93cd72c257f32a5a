// Host functions for CUDA streams whose driver has no memory operations: engine/device/driver.py launches them.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#define FT_API extern "C" __attribute__((visibility("default")))

namespace {

struct Cell {
  std::uint64_t address;
  std::uint64_t value;

  std::atomic<std::uint64_t>& word() const { return *reinterpret_cast<std::atomic<std::uint64_t>*>(address); }
};

constexpr int kSpins = 1 << 14;

}  // namespace

FT_API void ft_host_store(void* argument) {
  const Cell& cell = *static_cast<const Cell*>(argument);
  cell.word().store(cell.value, std::memory_order_release);
}

// Whoever sets the word also sets it when it fails, so that this ends.
FT_API void ft_host_wait(void* argument) {
  const Cell& cell = *static_cast<const Cell*>(argument);
  for (int spins = 0; cell.word().load(std::memory_order_acquire) != cell.value; ++spins) {
    if (spins > kSpins) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}
