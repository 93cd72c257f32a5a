// Computes routed experts from the host's pool, for this process and for a device that asks through a mailbox.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "activations.h"
#include "context.h"

namespace ft {

constexpr int kMostParts = 4;

enum class ExpertFormat : std::int32_t { bf16, int8, mxfp4 };

// The pool and the mailbox; mirrored in engine/native/library.py, the mailbox explained in engine/experts/executor.py.
struct ExecutorSpec {
  std::int32_t threads;    // that compute, the coordinator being one of them
  std::int32_t cpu_count;  // 0, or as many as threads
  const std::int32_t* cpus;
  std::int32_t exact;  // 0: int8 and mxfp4 with activations of 16 bits, else 23
  ExpertFormat format;
  const char* pool;  // [layers * experts] blobs, `stride` bytes apart
  std::int64_t stride, layers, experts, hidden, inner, parts;
  std::int64_t bounds[kMostParts + 1];
  std::int64_t rows, ranks;  // at most so many rows in a request; ranks in each
  char* mailbox;
  std::int64_t ready, done, error, served, arrived, x, plan, weights, y;  // offsets in the mailbox
  std::int64_t* times;  // [layers][3]: ns from request to answer, ns from request to arrival or 0, parts computed
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

  // As read_all, with the threads that compute experts.
  std::uint64_t read(const void* memory, std::int64_t bytes);

  // The error of a request from the mailbox, once; empty without one.
  std::string take_error();
  // Nanoseconds since the coordinator last looked at the mailbox.
  std::int64_t silence() const;
  // A device is about to ask: threads that went to sleep wake up meanwhile.
  void rouse();
  void share_cores() { threads_.sleep_at_once(); }

 private:
  // The pairs of one expert with the same first part: entries_ [entry, ...) in tiles.
  struct Group {
    std::int64_t expert, first_part, entry;
    Tiling tiling;
  };
  // Activations of a row, `first`, or of the tile of `size` pairs that begins at entry `first`.
  struct Gather {
    Activations* target;
    std::int64_t first;
    int size;
  };
  // Blocks [begin, end) of a Gather, or panels of a group's part, or units of all its parts.
  enum class Kind : std::int8_t { gather, gate_up, down };
  struct Task {
    Kind kind;
    std::int64_t of, part, begin, end;
  };
  // The tasks from number `first` on: of blocks, panels or units [begin, end) each has `step`, the last one the rest.
  struct Tasks {
    std::int32_t first, of, begin, end, step;
    Kind kind;
    std::int8_t part;
  };
  // Weights that a thread reads in order up to `end`, and then from `next` on, which is null where it is not known.
  struct Stretch {
    const char *end, *next;
  };
  // Where a pair is: in row `row` of the tile of `size` pairs that begins at entry `first`; size 0: nowhere.
  struct Place {
    std::int64_t first;
    int size, row;
  };
  // What a task waits for, or the last one of which goes on; each in a cache line of its own.
  struct alignas(64) Left {
    std::atomic<std::int64_t> tasks{0};
  };

  struct alignas(64) PartsLeft {
    std::atomic<std::int64_t> panels[kMostParts];
  };

  void compute(std::int64_t layer, std::int64_t rows, const float* x, const std::int32_t* plan, const float* weights,
               float* y);
  void run_tasks(std::int64_t layer, std::int64_t rows, const float* x, const float* weights, float* y);
  void group_pairs(std::int64_t rows, const std::int32_t* plan);
  void reserve(std::int64_t rows);
  void make_tasks(std::int64_t rows);
  void make_gathers(std::int64_t rows);
  void gather(const Task& task, const float* x);
  void gate_up(const Task& task, std::int64_t layer, const float* x);
  void put_inner(const Group& group, std::int64_t unit);
  void down(const Task& task, std::int64_t layer);
  void combine(std::int64_t unit, std::int64_t rows, const float* weights, float* y) const;
  void add_tasks(Kind kind, std::int64_t of, std::int64_t part, std::int64_t begin, std::int64_t end,
                 std::int64_t pieces);
  Task task_of(std::int64_t number) const;
  void product(const Activations& tiles, const float* row, std::int64_t first, int size, std::int64_t column,
               const char* panels, std::int64_t depth, std::int64_t count, const Stretch& stretch, bool fresh,
               float* c) const;
  void warm(const char* begin, const Stretch& stretch, std::int64_t most) const;
  const char* section(std::int64_t layer, const Group& group, std::int64_t part) const;
  std::atomic<std::int64_t>& left_of(std::int64_t group, std::int64_t part) const {
    return gate_ups_left_[group].panels[part];
  }
  std::int64_t panels() const { return spec_.hidden / kPanel; }
  std::int64_t width(std::int64_t part) const { return spec_.bounds[part + 1] - spec_.bounds[part]; }

  void serve();
  void nap(std::int64_t nanoseconds);
  void answer(std::uint64_t request);
  void watch();
  std::uint64_t* line(std::int64_t offset) const { return reinterpret_cast<std::uint64_t*>(spec_.mailbox + offset); }

  const Kernels& kernels_;
  const ExecutorSpec spec_;
  const Products* const products_;  // of integers; null for floats
  const int tile_rows_;
  const std::int64_t block_bytes_;
  std::mutex mutex_;  // one computation at a time
  ThreadPool threads_;

  std::vector<std::int64_t> entries_;  // row * ranks + rank, in the order of the groups
  std::vector<Place> places_;          // of a pair
  std::vector<Group> groups_;
  std::vector<Gather> gathers_;
  std::vector<Tasks> tasks_;
  std::int64_t task_count_ = 0;
  Left gathers_left_;
  std::unique_ptr<PartsLeft[]> gate_ups_left_;  // panels of a group's parts
  std::unique_ptr<Left[]> downs_left_;     // groups, by unit
  std::unique_ptr<std::atomic<bool>[]> halves_;  // [group][inner / kBlock]: one of two panels is there, not the other
  Activations single_, gathered_, inner_;
  std::vector<float> activated_;  // [entry of the tile][inner / kBlock][size][kBlock]
  std::vector<float> outputs_;    // [entry of the tile][panel][size][kPanel]
  std::int64_t parts_computed_ = 0;

  std::mutex error_mutex_;
  std::string error_;
  std::atomic<bool> stopping_{false};
  std::atomic<std::int64_t> looked_, hot_since_;
  std::mutex nap_mutex_;
  std::condition_variable nap_over_;
  std::atomic<bool> napping_{false};
  bool serving_ = false;          // the coordinator computes
  std::int64_t asked_ = 0;        // when, in ns; 0 when the arrival is known or there is no request
  std::int64_t asked_layer_ = 0;
  std::thread coordinator_;
};

}  // namespace ft
