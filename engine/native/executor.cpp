#include "executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace ft {
namespace {

constexpr std::int64_t kBlockBytes[] = {kBlock * kPanel * 2, kInt8Bytes, kMxfp4Bytes};

// A worker looks for work this often, some milliseconds, before it sleeps: longer than a device's part of a layer.
constexpr int kWorkerSpins = 40000;
// The coordinator polls without rest for this long after a request, then naps; longer once nothing came for a second.
constexpr std::int64_t kHot = 5'000'000, kIdle = 1'000'000'000;
constexpr std::chrono::microseconds kNap{50}, kLongNap{1000};

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::uint64_t load_line(const std::uint64_t* line) { return __atomic_load_n(line, __ATOMIC_ACQUIRE); }
void store_line(std::uint64_t* line, std::uint64_t value) { __atomic_store_n(line, value, __ATOMIC_RELEASE); }

// Enough pieces for the threads to end together, each a long stretch of memory.
constexpr int kTasksPerThread = 16;

}  // namespace

// ── activations ─────────────────────────────────────────────────────────────────────────────────────────────────────

Activations::Activations(const Dots& dots, std::int64_t depth, int digits)
    : dots_(dots), depth_(depth), digits_(digits) {}

void Activations::reserve(std::int64_t pairs) {
  if (pairs <= pairs_) return;
  pairs_ = pairs;
  values_.resize(static_cast<std::size_t>(pairs * (digits_ == 0 ? depth_ : depth_ / kBlock)));
  quads_.resize(static_cast<std::size_t>(pairs * depth_ / 4 * digits_));
  sums_.resize(static_cast<std::size_t>(pairs * depth_ / kBlock * digits_));
}

void Activations::put(std::int64_t first, int size, int row, std::int64_t column, const float* values,
                      std::int64_t count) {
  const std::int64_t at = first * depth_ + column * size;
  if (digits_ == 0) {
    float* target = values_.data() + at + row;
    for (std::int64_t i = 0; i < count; ++i) target[i * size] = values[i];
    return;
  }
  for (std::int64_t k = 0; k < count; k += kBlock) {
    std::int32_t quads[kBlock / 4 * kMostDigits];
    const std::int64_t block = at / kBlock + k / kBlock * size + row;
    dots_.split(values + k, digits_, quads, &values_[block], &sums_[block * digits_]);
    std::int32_t* target = quads_.data() + (at / 4 + k / 4 * size + row) * digits_;
    for (int i = 0; i < kBlock / 4; ++i) std::copy_n(quads + i * digits_, digits_, target + i * size * digits_);
  }
}

const float* Activations::floats(std::int64_t first, int size, std::int64_t column) const {
  return values_.data() + first * depth_ + column * size;
}

Integers Activations::integers(std::int64_t first, int size, std::int64_t column) const {
  const std::int64_t at = first * depth_ + column * size;
  return {&quads_[at / 4 * digits_], &values_[at / kBlock], &sums_[at / kBlock * digits_]};
}

// ── the products ────────────────────────────────────────────────────────────────────────────────────────────────────

Executor::Executor(const Kernels& kernels, const Dots& dots, const ExecutorSpec& spec)
    : kernels_(kernels),
      dots_(dots),
      spec_(spec),
      digits_(spec.format == ExpertFormat::bf16 ? 0 : spec.exact != 0 ? kMostDigits : 1),
      products_((spec.format == ExpertFormat::int8 ? dots.int8 : dots.mxfp4)[digits_ == kMostDigits]),
      tile_rows_(digits_ == 0 ? kernels.tile_rows : dots.tile_rows),
      block_bytes_(kBlockBytes[static_cast<int>(spec.format)]),
      threads_(spec.threads, std::vector<int>(spec.cpus, spec.cpus + spec.cpu_count), kWorkerSpins),
      places_(static_cast<std::size_t>(spec.rows * spec.ranks)),
      single_(dots, spec.hidden, digits_),
      gathered_(dots, spec.hidden, digits_),
      inner_(dots, spec.inner, digits_),
      looked_(now()) {
  const int cpu = spec.cpu_count > 0 ? spec.cpus[0] : -1;
  coordinator_ = std::thread([this, cpu] {
    if (cpu >= 0) pin_to(cpu);
    serve();
  });
}

Executor::~Executor() {
  stopping_.store(true);
  coordinator_.join();
}

void Executor::run(std::int64_t layer, std::int64_t rows, const float* x, const std::int32_t* plan,
                   const float* weights, float* y) {
  std::lock_guard<std::mutex> lock(mutex_);
  FlushDenormals flush;
  compute(layer, rows, x, plan, weights, y);
}

void Executor::compute(std::int64_t layer, std::int64_t rows, const float* x, const std::int32_t* plan,
                       const float* weights, float* y) {
  if (layer < 0 || layer >= spec_.layers || rows < 0 || rows > spec_.rows) {
    throw Invalid("layer " + std::to_string(layer) + " with " + std::to_string(rows) + " rows is beyond the " +
                  std::to_string(spec_.layers) + " layers and " + std::to_string(spec_.rows) + " rows of the executor");
  }
  group_pairs(rows, plan);
  reserve(rows);
  gather(rows, x);
  gate_up(layer, x);
  down(layer);
  combine(rows, weights, y);
}

// Room for the largest request so far: most are of a few rows, and few of as many as may come.
void Executor::reserve(std::int64_t rows) {
  const std::int64_t pairs = static_cast<std::int64_t>(entries_.size());
  if (digits_ > 0) single_.reserve(rows);
  if (groups_.size() < entries_.size()) gathered_.reserve(pairs);
  inner_.reserve(pairs);
  outputs_.resize(std::max(outputs_.size(), static_cast<std::size_t>(pairs * spec_.hidden)));
}

void Executor::group_pairs(std::int64_t rows, const std::int32_t* plan) {
  entries_.clear();
  for (std::int64_t pair = 0; pair < rows * spec_.ranks; ++pair) {
    const std::int32_t expert = plan[2 * pair], first = plan[2 * pair + 1];
    places_[pair] = {0, 0, 0};
    if (expert < 0) continue;
    if (expert >= spec_.experts || first < 0 || first > spec_.parts) {
      throw Invalid("the plan names expert " + std::to_string(expert) + " from part " + std::to_string(first) +
                    "; there are " + std::to_string(spec_.experts) + " experts of " + std::to_string(spec_.parts) +
                    " parts");
    }
    if (first < spec_.parts) entries_.push_back(pair);
  }
  const auto key = [&](std::int64_t pair) { return std::make_pair(plan[2 * pair], plan[2 * pair + 1]); };
  std::sort(entries_.begin(), entries_.end(), [&](std::int64_t a, std::int64_t b) {
    return std::make_pair(key(a), a) < std::make_pair(key(b), b);
  });
  groups_.clear();
  parts_computed_ = 0;
  const std::int64_t count = static_cast<std::int64_t>(entries_.size());
  for (std::int64_t begin = 0, end; begin < count; begin = end) {
    end = begin;
    while (end < count && key(entries_[end]) == key(entries_[begin])) ++end;
    const auto [expert, first_part] = key(entries_[begin]);
    groups_.push_back({expert, first_part, begin, Tiling(end - begin, tile_rows_)});
    parts_computed_ += spec_.parts - first_part;
    const Tiling& tiling = groups_.back().tiling;
    for (std::int64_t tile = 0; tile < tiling.count; ++tile) {
      const std::int64_t first = begin + tiling.begin(tile);
      const int size = tiling.size(tile);
      for (int row = 0; row < size; ++row) places_[entries_[first + row]] = {first, size, row};
    }
  }
}

std::int64_t Executor::task_units(std::int64_t total) const {
  return std::max<std::int64_t>(1, total / (kTasksPerThread * threads_.size()));
}

// The rows of tiles side by side; floats of one row need no copy.
void Executor::gather(std::int64_t rows, const float* x) {
  if (digits_ > 0) {
    threads_.run(rows, [&](std::int64_t row, int) { single_.put(row, 1, 0, 0, x + row * spec_.hidden, spec_.hidden); });
  }
  if (groups_.size() == entries_.size()) return;
  threads_.run(static_cast<std::int64_t>(groups_.size()), [&](std::int64_t index, int) {
    const Group& group = groups_[index];
    for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
      const int size = group.tiling.size(tile);
      const std::int64_t first = group.entry + group.tiling.begin(tile);
      for (int row = 0; row < size && size > 1; ++row) {
        gathered_.put(first, size, row, 0, x + entries_[first + row] / spec_.ranks * spec_.hidden, spec_.hidden);
      }
    }
  });
}

const char* Executor::section(std::int64_t layer, const Group& group, std::int64_t part) const {
  return spec_.pool + (layer * spec_.experts + group.expert) * spec_.stride +
         3 * (spec_.bounds[part] / kBlock) * (spec_.hidden / kBlock) * block_bytes_;
}

void Executor::add_tasks(std::int64_t group, std::int64_t part, std::int64_t units, std::int64_t most) {
  const std::int64_t pieces = ceil_div(units, most);
  for (std::int64_t i = 0; i < pieces; ++i) {
    tasks_.push_back({group, part, units * i / pieces, units * (i + 1) / pieces});
  }
}

void Executor::product(const Activations& tiles, const float* row, std::int64_t first, int size, std::int64_t column,
                       const char* panel, std::int64_t depth, float* c) const {
  if (digits_ > 0) {
    products_[size - 1](tiles.integers(first, size, column), panel, depth, c);
  } else {
    tile_kernel(kernels_, true, size)(row != nullptr ? row : tiles.floats(first, size, column), panel, depth, c);
  }
}

// A unit is kBlock inner columns, two panels.
void Executor::gate_up(std::int64_t layer, const float* x) {
  const std::int64_t panel_bytes = spec_.hidden / kBlock * block_bytes_;
  const std::int64_t most = task_units(parts_computed_ * spec_.inner / spec_.parts / kBlock);
  tasks_.clear();
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    for (std::int64_t part = groups_[group].first_part; part < spec_.parts; ++part) {
      add_tasks(static_cast<std::int64_t>(group), part, width(part) / kBlock, most);
    }
  }
  threads_.run(static_cast<std::int64_t>(tasks_.size()), [&](std::int64_t index, int thread) {
    if (thread == 0) watch();
    const Task& task = tasks_[index];
    const Group& group = groups_[task.group];
    alignas(64) float c[kMaxTileRows * kPanel], activated[kMaxTileRows * kBlock];
    for (std::int64_t unit = task.begin; unit < task.end; ++unit) {
      const char* panels = section(layer, group, task.part) + unit * 2 * panel_bytes;
      for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
        const int size = group.tiling.size(tile);
        const std::int64_t first = group.entry + group.tiling.begin(tile), row = entries_[first] / spec_.ranks;
        for (int half = 0; half < 2; ++half) {
          product(size == 1 ? single_ : gathered_, size == 1 ? x + row * spec_.hidden : nullptr,
                  size == 1 ? row : first, size, 0, panels + half * panel_bytes, spec_.hidden, c);
          for (int i = 0; i < size; ++i) {
            kernels_.silu_mul(c + i * kPanel, c + i * kPanel + kHalf, kHalf, activated + i * kBlock + half * kHalf);
          }
        }
        const std::int64_t column = spec_.bounds[task.part] + unit * kBlock;
        for (int i = 0; i < size; ++i) inner_.put(first, size, i, column, activated + i * kBlock, kBlock);
      }
    }
  });
}

// A unit is a panel of all parts.
void Executor::down(std::int64_t layer) {
  const std::int64_t panels = spec_.hidden / kPanel;
  tasks_.clear();
  const std::int64_t most = task_units(panels * static_cast<std::int64_t>(groups_.size()));
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    add_tasks(static_cast<std::int64_t>(group), groups_[group].first_part, panels, most);
  }
  threads_.run(static_cast<std::int64_t>(tasks_.size()), [&](std::int64_t index, int thread) {
    if (thread == 0) watch();
    const Task& task = tasks_[index];
    const Group& group = groups_[task.group];
    alignas(64) float c[kMaxTileRows * kPanel];
    for (std::int64_t part = group.first_part; part < spec_.parts; ++part) {
      const std::int64_t gate_up_blocks = width(part) / kHalf * (spec_.hidden / kBlock);
      const char* start = section(layer, group, part) + gate_up_blocks * block_bytes_;
      for (std::int64_t panel = task.begin; panel < task.end; ++panel) {
        const char* weights = start + panel * (width(part) / kBlock) * block_bytes_;
        for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
          const int size = group.tiling.size(tile);
          const std::int64_t first = group.entry + group.tiling.begin(tile);
          product(inner_, nullptr, first, size, spec_.bounds[part], weights, width(part), c);
          float* sum = outputs_.data() + first * spec_.hidden + panel * size * kPanel;
          for (int i = 0; i < size * kPanel; ++i) sum[i] = part == group.first_part ? c[i] : sum[i] + c[i];
        }
      }
    }
  });
}

void Executor::combine(std::int64_t rows, const float* weights, float* y) {
  const std::int64_t panels = spec_.hidden / kPanel, pieces = std::min<std::int64_t>(panels, threads_.size());
  threads_.run(rows * pieces, [&](std::int64_t task, int) {
    const std::int64_t row = task / pieces, piece = task % pieces;
    for (std::int64_t panel = panels * piece / pieces; panel < panels * (piece + 1) / pieces; ++panel) {
      float* sum = y + row * spec_.hidden + panel * kPanel;
      for (int i = 0; i < kPanel; ++i) sum[i] = 0.0f;
      for (std::int64_t pair = row * spec_.ranks; pair < (row + 1) * spec_.ranks; ++pair) {
        const Place& place = places_[pair];
        if (place.size == 0) continue;
        const float* output = outputs_.data() + place.first * spec_.hidden;
        kernels_.scale_add(output + (panel * place.size + place.row) * kPanel, weights[pair], kPanel, sum);
      }
    }
  });
}

// ── the mailbox ─────────────────────────────────────────────────────────────────────────────────────────────────────

void Executor::serve() {
  FlushDenormals flush;
  for (std::int64_t last = now(); !stopping_.load(std::memory_order_relaxed);) {
    const std::int64_t time = now();
    looked_.store(time, std::memory_order_relaxed);
    watch();
    const std::uint64_t request = load_line(line(spec_.ready));
    if (request != 0) {
      answer(request);
      last = now();
    } else if (time - last < kHot) {
      for (int i = 0; i < 4; ++i) pause();
    } else {
      std::this_thread::sleep_for(time - last < kIdle ? kNap : kLongNap);
    }
  }
}

void Executor::answer(std::uint64_t request) {
  const std::int64_t start = now();
  const std::int64_t layer = static_cast<std::int64_t>(request & 0xffffffffu) - 1;
  const std::int64_t rows = static_cast<std::int64_t>(request >> 32);
  float* y = reinterpret_cast<float*>(spec_.mailbox + spec_.y);
  store_line(line(spec_.ready), 0);
  store_line(line(spec_.arrived), 0);  // an arrival seen from now on is this request's
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (layer >= 0 && layer < spec_.layers) {
      spec_.times[3 * layer + 1] = 0;
      asked_ = start, asked_layer_ = layer;
    }
    serving_ = true;
    compute(layer, rows, reinterpret_cast<const float*>(spec_.mailbox + spec_.x),
            reinterpret_cast<const std::int32_t*>(spec_.mailbox + spec_.plan),
            reinterpret_cast<const float*>(spec_.mailbox + spec_.weights), y);
    spec_.times[3 * layer] = now() - start;
    spec_.times[3 * layer + 2] = parts_computed_;
  } catch (const std::exception& error) {
    std::fill_n(y, spec_.rows * spec_.hidden, std::nanf(""));  // never the sums of an earlier request
    std::lock_guard<std::mutex> error_lock(error_mutex_);
    error_ = error.what();
    store_line(line(spec_.error), 1);
  }
  serving_ = false;
  store_line(line(spec_.served), load_line(line(spec_.served)) + 1);
  store_line(line(spec_.done), 1);
}

// Notes when the device's side of the last request is finished. For the thread that answers requests only.
void Executor::watch() {
  if (asked_ == 0 || load_line(line(spec_.arrived)) == 0) return;
  spec_.times[3 * asked_layer_ + 1] = now() - asked_;
  asked_ = 0;
}

std::string Executor::take_error() {
  std::lock_guard<std::mutex> lock(error_mutex_);
  store_line(line(spec_.error), 0);
  return std::exchange(error_, {});
}

std::int64_t Executor::silence() const { return now() - looked_.load(std::memory_order_relaxed); }

}  // namespace ft
