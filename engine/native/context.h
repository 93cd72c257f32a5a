// What a call needs: threads, kernels, scratch memory that only grows, and the last error.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "threads.h"

namespace ft {

// A fault of the caller; its text becomes the Python exception's.
struct Invalid : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

// Contents are lost when it grows.
class Scratch {
 public:
  float* reserve(std::int64_t floats) {
    if (floats > capacity_) {
      memory_.reset();
      capacity_ = 0;
      const std::size_t bytes = static_cast<std::size_t>(round_up(floats * 4, 64));
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      if (!memory_) throw std::bad_alloc();
      capacity_ = floats;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  std::int64_t capacity_ = 0;
};

struct Context {
  Context(const Kernels& table, int size) : kernels(table), pool(size) {}

  const Kernels& kernels;
  ThreadPool pool;
  std::mutex mutex;  // one call at a time
  std::string error;
  Scratch packed_rows;  // activations in tile order
  Scratch inner;        // between the two products of an expert, and normalised recurrence inputs
  Scratch outputs;      // expert outputs before they are summed
  Scratch threads;      // private areas of the threads
};

// One step's sequences; see engine/layers/ops.py. The layout is mirrored in engine/native/library.py.
struct Batch {
  std::int64_t rows;
  std::int64_t sequences;
  std::int64_t pages_per_sequence;
  std::int64_t snapshot_count;
  const std::int32_t* segments;    // [sequences][4]: first row, rows, position, slot
  const std::int32_t* page_table;  // [sequences][pages_per_sequence]
  const std::int32_t* snapshots;   // [snapshot_count][3]: segment, rows before it, slot
};

struct Segment {
  std::int64_t first, rows, position, slot;
};

inline Segment segment_of(const Batch& batch, std::int64_t sequence) {
  const std::int32_t* s = batch.segments + 4 * sequence;
  return {s[0], s[1], s[2], s[3]};
}

void check_segments(const Batch& batch);
void check_slots(const Batch& batch, std::int64_t slots);
void check_pages(const Batch& batch, std::int64_t pages);

// Rows in tiles of nearly equal size: tile t holds rows [begin(t), begin(t + 1)), stored [depth][rows of the tile].
struct Tiling {
  std::int64_t rows, count;
  Tiling(std::int64_t all, int most) : rows(all), count(ceil_div(all, most)) {}
  std::int64_t begin(std::int64_t tile) const { return rows * tile / count; }
  int size(std::int64_t tile) const { return static_cast<int>(begin(tile + 1) - begin(tile)); }
};

inline Tile tile_kernel(const Kernels& kernels, bool bfloat, int rows) { return kernels.tile[bfloat][rows - 1]; }

inline std::int64_t panel_bytes(std::int64_t depth, bool bfloat) { return depth * kPanel * (bfloat ? 2 : 4); }
inline const void* panel_at(const void* packed, std::int64_t panel, std::int64_t depth, bool bfloat) {
  return static_cast<const char*>(packed) + panel * panel_bytes(depth, bfloat);
}

// Calls body(begin, end) over rows in parallel pieces of at least some 16 thousand elements.
template <class Body>
void over_rows(Context& context, std::int64_t rows, std::int64_t width, const Body& body) {
  const std::int64_t grain = ceil_div(16384, width);
  context.pool.run(ceil_div(rows, grain), [&](std::int64_t task, int) {
    const std::int64_t begin = task * grain;
    body(begin, begin + grain < rows ? begin + grain : rows);
  });
}

// ── operations ──────────────────────────────────────────────────────────────────────────────────────────────────

struct Matrix {  // packed weights [out][in]
  const void* data;
  bool bfloat;
  std::int64_t out, in;
};

struct Experts {  // packed: gate_up [experts][inner / 16 panels], down [experts][hidden / 32 panels]
  const void* gate_up;
  const void* down;
  bool bfloat;
  std::int64_t count, hidden, inner;
};

struct Pages {  // [pages][kPage][kv_heads][head_dim]
  void* keys;
  void* values;
  bool bfloat;
  std::int64_t count, kv_heads, head_dim;
};

void pack_matrix(Context&, const void* source, bool bfloat, std::int64_t out, std::int64_t in, void* target);
void pack_experts(Context&, const void* gate_up, const void* down, const Experts& target);
void linear(Context&, const float* x, std::int64_t rows, const Matrix& weight, const float* bias, float* y);
void experts(Context&, const float* x, const std::int32_t* ids, const float* weights, std::int64_t rows,
             std::int64_t ranks, const Experts& experts, float* y);
void route(Context&, const float* logits, std::int64_t rows, std::int64_t count, std::int64_t ranks, bool renormalize,
           std::int32_t* ids, float* weights);
void conv(Context&, const float* x, std::int64_t channels, std::int64_t width, const float* weight, float* state,
          std::int64_t slots, const Batch& batch, float* y);

struct DeltaShape {
  std::int64_t key_heads, value_heads, key_dim, value_dim;
};
void gated_delta(Context&, const float* q, const float* k, const float* v, const float* decay, const float* beta,
                 const DeltaShape& shape, float* state, std::int64_t slots, const Batch& batch, float* y);
void attention(Context&, const float* q, std::int64_t heads, const Pages& pages, float scale, const Batch& batch,
               float* y);
// XOR of the 64-bit words of the whole MiB in `memory`.
std::uint64_t read_all(ThreadPool&, const void* memory, std::int64_t bytes);
void write_pages(Context&, const float* k, const float* v, const Pages& pages, const Batch& batch);

}  // namespace ft
