// Computes routed experts from the host's pool, for this process and for a device that asks through a mailbox.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "context.h"

namespace ft {

constexpr int kMostParts = 4;

enum class ExpertFormat : std::int32_t { bf16, int8, mxfp4 };

// The pool and the mailbox; mirrored in engine/native/library.py, the mailbox explained in engine/experts/executor.py.
struct ExecutorSpec {
  std::int32_t threads;    // that compute, the coordinator being one of them
  std::int32_t cpu_count;  // 0, or as many as threads
  const std::int32_t* cpus;
  std::int32_t exact;  // 0: int8 and mxfp4 with one digit of the activations, else three
  ExpertFormat format;
  const char* pool;  // [layers * experts] blobs, `stride` bytes apart
  std::int64_t stride, layers, experts, hidden, inner, parts;
  std::int64_t bounds[kMostParts + 1];
  std::int64_t rows, ranks;  // at most so many rows in a request; ranks in each
  char* mailbox;
  std::int64_t ready, done, error, served, arrived, x, plan, weights, y;  // offsets in the mailbox
  std::int64_t* times;  // [layers][3]: ns from request to answer, ns from request to arrival or 0, parts computed
};

// Activations of (row, rank) pairs in tiles of `size` pairs: what the kernels take as `a`. Floats where there are no
// digits, else Integers.
class Activations {
 public:
  Activations(const Dots& dots, std::int64_t depth, int digits);
  // Room for so many pairs; what was put before is lost when it grows.
  void reserve(std::int64_t pairs);
  // `count` values, a multiple of kBlock, of row `row` of the tile that begins at pair `first`.
  void put(std::int64_t first, int size, int row, std::int64_t column, const float* values, std::int64_t count);
  const float* floats(std::int64_t first, int size, std::int64_t column) const;
  Integers integers(std::int64_t first, int size, std::int64_t column) const;

 private:
  const Dots& dots_;
  const std::int64_t depth_;
  const int digits_;
  std::int64_t pairs_ = 0;
  std::vector<float> values_;  // or the scales
  std::vector<std::int32_t> quads_, sums_;
};

class Executor {
 public:
  Executor(const Kernels& kernels, const Dots& dots, const ExecutorSpec& spec);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // y[row] = sum over ranks, in order, of weights * the parts [first, parts) of the expert; plan is
  // [rows][ranks][2]: expert or -1, first part. Throws Invalid.
  void run(std::int64_t layer, std::int64_t rows, const float* x, const std::int32_t* plan, const float* weights,
           float* y);

  // The error of a request from the mailbox, once; empty without one.
  std::string take_error();
  // Nanoseconds since the coordinator last looked at the mailbox.
  std::int64_t silence() const;

 private:
  // The pairs of one expert with the same first part: entries_ [entry, ...) in tiles.
  struct Group {
    std::int64_t expert, first_part, entry;
    Tiling tiling;
  };
  // Units [begin, end) of a group's part.
  struct Task {
    std::int64_t group, part, begin, end;
  };
  // Where a pair is: in row `row` of the tile of `size` pairs that begins at entry `first`; size 0: nowhere.
  struct Place {
    std::int64_t first;
    int size, row;
  };

  void compute(std::int64_t layer, std::int64_t rows, const float* x, const std::int32_t* plan, const float* weights,
               float* y);
  void group_pairs(std::int64_t rows, const std::int32_t* plan);
  void reserve(std::int64_t rows);
  void gather(std::int64_t rows, const float* x);
  void gate_up(std::int64_t layer, const float* x);
  void down(std::int64_t layer);
  void combine(std::int64_t rows, const float* weights, float* y);
  std::int64_t task_units(std::int64_t total) const;
  void add_tasks(std::int64_t group, std::int64_t part, std::int64_t units, std::int64_t most);
  void product(const Activations& tiles, const float* row, std::int64_t first, int size, std::int64_t column,
               const char* panel, std::int64_t depth, float* c) const;
  const char* section(std::int64_t layer, const Group& group, std::int64_t part) const;
  std::int64_t width(std::int64_t part) const { return spec_.bounds[part + 1] - spec_.bounds[part]; }

  void serve();
  void answer(std::uint64_t request);
  void watch();
  std::uint64_t* line(std::int64_t offset) const { return reinterpret_cast<std::uint64_t*>(spec_.mailbox + offset); }

  const Kernels& kernels_;
  const Dots& dots_;
  const ExecutorSpec spec_;
  const int digits_;
  const Dot* const products_;
  const int tile_rows_;
  const std::int64_t block_bytes_;
  std::mutex mutex_;  // one computation at a time
  ThreadPool threads_;

  std::vector<std::int64_t> entries_;  // row * ranks + rank, in the order of the groups
  std::vector<Place> places_;          // of a pair
  std::vector<Group> groups_;
  std::vector<Task> tasks_;
  Activations single_, gathered_, inner_;
  std::vector<float> outputs_;  // [entry of the tile][panel][size][kPanel]
  std::int64_t parts_computed_ = 0;

  std::mutex error_mutex_;
  std::string error_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::int64_t> looked_;
  bool serving_ = false;          // the coordinator computes
  std::int64_t asked_ = 0;        // when, in ns; 0 when the arrival is known or there is no request
  std::int64_t asked_layer_ = 0;
  std::thread coordinator_;
};

}  // namespace ft
