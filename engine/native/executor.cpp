#include "executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace ft {
namespace {

constexpr std::int64_t kBlockBytes[] = {kBlock * kPanel * 2, kInt8Bytes, kMxfp4Bytes};

// A worker looks for work this often, some milliseconds, before it sleeps: longer than a device's part of a layer.
constexpr int kWorkerSpins = 100000;
// The coordinator polls without rest for so many ns after a request, or after it was roused, then naps, ever longer:
// what waits for it waits a small part of the time that has gone by.
constexpr std::int64_t kHot = 5'000'000, kLeastNap = 20'000, kMostNap = 1'000'000, kNapShare = 2000;

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::uint64_t load_line(const std::uint64_t* line) { return __atomic_load_n(line, __ATOMIC_ACQUIRE); }
void store_line(std::uint64_t* line, std::uint64_t value) { __atomic_store_n(line, value, __ATOMIC_RELEASE); }

// Every task is as long a stretch of memory as can be: processors bring ahead what is read in order. Of gate_up each
// thread gets some of the same size, as whoever is done early goes on with down. Down's become smaller towards the end,
// where all should be done together, down to a unit of so many panels.
constexpr int kTasksPerThread = 4;
constexpr std::int64_t kUnit = 2;
constexpr std::int64_t kGatheredBlocks = 16;
// Weights are asked for so many bytes before they are needed, and more of them by a task that waits for activations.
constexpr std::int64_t kAhead = 8192, kWarm = 16384;

}  // namespace

// ── the products ────────────────────────────────────────────────────────────────────────────────────────────────────

static const Products* products_of(const Dots& dots, const ExecutorSpec& spec) {
  if (spec.format == ExpertFormat::bf16) return nullptr;
  return &(spec.format == ExpertFormat::int8 ? dots.int8 : dots.mxfp4)[spec.exact != 0];
}

Executor::Executor(const Kernels& kernels, const Dots& dots, const ExecutorSpec& spec)
    : kernels_(kernels),
      spec_(spec),
      products_(products_of(dots, spec)),
      tile_rows_(products_ == nullptr ? kernels.tile_rows : dots.tile_rows),
      block_bytes_(kBlockBytes[static_cast<int>(spec.format)]),
      threads_(spec.threads, std::vector<int>(spec.cpus, spec.cpus + spec.cpu_count), kWorkerSpins),
      places_(static_cast<std::size_t>(spec.rows * spec.ranks)),
      gate_ups_left_(new PartsLeft[spec.rows * spec.ranks]),
      downs_left_(new Left[spec.hidden / kPanel]),
      halves_(new std::atomic<bool>[spec.rows * spec.ranks * spec.inner / kBlock]()),
      single_(products_, spec.hidden),
      gathered_(products_, spec.hidden),
      inner_(products_, spec.inner),
      looked_(now()),
      hot_since_(looked_.load()) {
  const int cpu = spec.cpu_count > 0 ? spec.cpus[0] : -1;
  coordinator_ = std::thread([this, cpu] {
    if (cpu >= 0) pin_to(cpu);
    sleep_precisely();
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

std::uint64_t Executor::read(const void* memory, std::int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  return read_all(threads_, memory, bytes);
}

void Executor::compute(std::int64_t layer, std::int64_t rows, const float* x, const std::int32_t* plan,
                       const float* weights, float* y) {
  const std::int64_t start = now();
  if (layer < 0 || layer >= spec_.layers || rows < 0 || rows > spec_.rows) {
    throw Invalid("layer " + std::to_string(layer) + " with " + std::to_string(rows) + " rows is beyond the " +
                  std::to_string(spec_.layers) + " layers and " + std::to_string(spec_.rows) + " rows of the executor");
  }
  group_pairs(rows, plan);
  if (entries_.empty()) {
    std::fill_n(y, rows * spec_.hidden, 0.0f);
  } else {
    run_tasks(layer, rows, x, weights, y);
  }
  spec_.times[3 * layer] = now() - start;
  spec_.times[3 * layer + 2] = parts_computed_;
}

void Executor::run_tasks(std::int64_t layer, std::int64_t rows, const float* x, const float* weights, float* y) {
  reserve(rows);
  make_tasks(rows);
  threads_.run(task_count_, [&](std::int64_t number, int thread) {
    if (thread == 0 && serving_) watch();
    const Task task = task_of(number);
    switch (task.kind) {
      case Kind::gather:
        return gather(task, x);
      case Kind::gate_up:
        return gate_up(task, layer, x);
      case Kind::down:
        down(task, layer);
        for (std::int64_t unit = task.begin; unit < task.end; ++unit) {
          if (downs_left_[unit].tasks.fetch_sub(1, std::memory_order_acq_rel) == 1) combine(unit, rows, weights, y);
        }
    }
  });
}

// Room for the largest request so far: most are of a few rows, and few of as many as may come.
void Executor::reserve(std::int64_t rows) {
  const std::int64_t pairs = static_cast<std::int64_t>(entries_.size());
  if (products_ != nullptr) {
    single_.reserve(rows);
    activated_.resize(std::max(activated_.size(), static_cast<std::size_t>(pairs * spec_.inner)));
  }
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

// All gathers, then all of gate_up, then all of down: what a task waits for is before it.
void Executor::make_tasks(std::int64_t rows) {
  const std::int64_t groups = static_cast<std::int64_t>(groups_.size());
  const std::int64_t wanted = kTasksPerThread * threads_.size();
  tasks_.clear();
  task_count_ = 0;
  make_gathers(rows);
  const std::int64_t all = parts_computed_ * spec_.inner / spec_.parts / kHalf;
  const std::int64_t most = std::max<std::int64_t>(1, all / wanted);
  for (std::int64_t group = 0; group < groups; ++group) {
    for (std::int64_t part = groups_[group].first_part; part < spec_.parts; ++part) {
      left_of(group, part).store(width(part) / kHalf, std::memory_order_relaxed);
      add_tasks(Kind::gate_up, group, part, 0, width(part) / kHalf, ceil_div(width(part) / kHalf, most));
    }
  }
  const std::int64_t units = ceil_div(panels(), kUnit);
  for (std::int64_t i = 0; i < units; ++i) downs_left_[i].tasks.store(groups, std::memory_order_relaxed);
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t later = (groups - group - 1) * panels() / threads_.size(), pairs = later > 0 ? 0 : units * 3 / 8;
    const std::int64_t share = later > 0 ? ceil_div(panels(), later) : units;
    add_tasks(Kind::down, group, 0, 0, 2 * pairs, pairs);
    add_tasks(Kind::down, group, 0, 2 * pairs, units, std::min(units, share));
  }
}

// Integers of rows that are alone with an expert, and of tiles, whose rows lie side by side in the same lines: no two
// threads write to one.
void Executor::make_gathers(std::int64_t rows) {
  gathers_.clear();
  const auto alone = [&](const Place& place) { return place.size == 1; };
  for (std::int64_t row = 0; row < rows && products_ != nullptr; ++row) {
    const Place* const places = &places_[row * spec_.ranks];
    if (std::any_of(places, places + spec_.ranks, alone)) gathers_.push_back({&single_, row, 1});
  }
  for (const Group& group : groups_) {
    for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
      const int size = group.tiling.size(tile);
      if (size > 1) gathers_.push_back({&gathered_, group.entry + group.tiling.begin(tile), size});
    }
  }
  const std::int64_t blocks = spec_.hidden / kBlock;
  std::int64_t all = 0;
  for (const Gather& gather : gathers_) all += gather.size * blocks;
  const std::int64_t most = std::max(kGatheredBlocks, all / (kTasksPerThread * threads_.size()));
  for (std::size_t of = 0; of < gathers_.size(); ++of) {
    add_tasks(Kind::gather, of, 0, 0, blocks, std::min(blocks, ceil_div(gathers_[of].size * blocks, most)));
  }
  gathers_left_.tasks.store(task_count_, std::memory_order_relaxed);
}

void Executor::add_tasks(Kind kind, std::int64_t of, std::int64_t part, std::int64_t begin, std::int64_t end,
                         std::int64_t pieces) {
  if (begin == end) return;
  const auto small = [](std::int64_t x) { return static_cast<std::int32_t>(x); };
  const std::int64_t step = ceil_div(end - begin, pieces);
  tasks_.push_back({small(task_count_), small(of), small(begin), small(end), small(step), kind,
                    static_cast<std::int8_t>(part)});
  task_count_ += ceil_div(end - begin, step);
}

Executor::Task Executor::task_of(std::int64_t number) const {
  const auto later = [](std::int64_t wanted, const Tasks& tasks) { return wanted < tasks.first; };
  const Tasks& tasks = std::upper_bound(tasks_.begin(), tasks_.end(), number, later)[-1];
  const std::int64_t begin = tasks.begin + (number - tasks.first) * tasks.step;
  return {tasks.kind, tasks.of, tasks.part, begin, std::min<std::int64_t>(begin + tasks.step, tasks.end)};
}

void Executor::gather(const Task& task, const float* x) {
  const auto [target, first, size] = gathers_[task.of];
  const std::int64_t column = task.begin * kBlock, count = (task.end - task.begin) * kBlock;
  for (int i = 0; i < size; ++i) {
    const std::int64_t row = size == 1 ? first : entries_[first + i] / spec_.ranks;
    target->put(first, size, i, column, x + row * spec_.hidden + column, count);
  }
  gathers_left_.tasks.fetch_sub(1, std::memory_order_release);
}

const char* Executor::section(std::int64_t layer, const Group& group, std::int64_t part) const {
  return spec_.pool + (layer * spec_.experts + group.expert) * spec_.stride +
         3 * (spec_.bounds[part] / kBlock) * (spec_.hidden / kBlock) * block_bytes_;
}

// Asks for the first bytes of a stretch, for which no block before it does.
void Executor::warm(const char* begin, const Stretch& stretch, std::int64_t most) const {
  const char* const end = products_ == nullptr ? begin : std::min(begin + most, stretch.end);
  for (const char* line = begin; line < end; line += 64) {
    __builtin_prefetch(line);
    asm volatile("");  // compilers remove loops of nothing else
  }
}

void Executor::product(const Activations& tiles, const float* row, std::int64_t first, int size, std::int64_t column,
                       const char* panels, std::int64_t depth, std::int64_t count, const Stretch& stretch, bool fresh,
                       float* c) const {
  const std::int64_t outputs = size * kPanel;
  if (products_ != nullptr) {
    if (fresh) std::fill_n(c, count * outputs, 0.0f);
    Integers a = tiles.integers(first, size, column);
    const std::int64_t ahead = std::min(kAhead, stretch.end - panels);
    a.ahead = ahead, a.end = stretch.end;
    a.jump = stretch.next == nullptr ? -ahead : stretch.next - stretch.end;  // to what is there, or to the next one
    products_->dots[size - 1](a, panels, depth, count, c);
    return;
  }
  alignas(64) float sums[kMaxTileRows * kPanel];
  const float* a = row != nullptr ? row : tiles.floats(first, size, column);
  for (std::int64_t panel = 0; panel < count; ++panel, panels += panel_bytes(depth, true), c += outputs) {
    tile_kernel(kernels_, true, size)(a, panels, depth, fresh ? c : sums);
    for (int i = 0; i < outputs && !fresh; ++i) c[i] += sums[i];
  }
}

void Executor::gate_up(const Task& task, std::int64_t layer, const float* x) {
  const Group& group = groups_[task.of];
  const std::int64_t panel_bytes = spec_.hidden / kBlock * block_bytes_;
  alignas(64) float c[kMaxTileRows * kPanel], activated[kMaxTileRows * kHalf];
  const auto gathered = [&] { return gathers_left_.tasks.load(std::memory_order_acquire) == 0; };
  const char* const start = section(layer, group, task.part);
  const Stretch stretch{start + task.end * panel_bytes, nullptr};
  warm(start + task.begin * panel_bytes, stretch, gathered() ? kAhead : kWarm);
  wait_until(gathered);
  for (std::int64_t panel = task.begin; panel < task.end; ++panel) {
    const char* weights = start + panel * panel_bytes;
    const std::int64_t column = spec_.bounds[task.part] + panel * kHalf, unit = column / kBlock;
    for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
      const int size = group.tiling.size(tile);
      const std::int64_t first = group.entry + group.tiling.begin(tile), row = entries_[first] / spec_.ranks;
      product(size == 1 ? single_ : gathered_, size == 1 ? x + row * spec_.hidden : nullptr, size == 1 ? row : first,
              size, 0, weights, spec_.hidden, 1, stretch, true, c);
      for (int i = 0; i < size; ++i) {
        const std::int64_t at = first * spec_.inner + (unit * size + i) * kBlock + column % kBlock;
        float* target = products_ == nullptr ? activated : &activated_[at];
        kernels_.silu_mul(c + i * kPanel, c + i * kPanel + kHalf, kHalf, target);
        if (products_ == nullptr) inner_.put(first, size, i, column, activated, kHalf);
      }
    }
    if (products_ == nullptr) continue;
    std::atomic<bool>& half = halves_[task.of * (spec_.inner / kBlock) + unit];
    if (!half.exchange(true)) continue;
    half.store(false, std::memory_order_relaxed);
    put_inner(group, unit);
  }
  left_of(task.of, task.part).fetch_sub(task.end - task.begin, std::memory_order_release);
}

// Makes integers of kBlock columns of all rows of a group.
void Executor::put_inner(const Group& group, std::int64_t unit) {
  for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
    const int size = group.tiling.size(tile);
    const std::int64_t first = group.entry + group.tiling.begin(tile);
    for (int i = 0; i < size; ++i) {
      const float* activated = &activated_[first * spec_.inner + (unit * size + i) * kBlock];
      inner_.put(first, size, i, unit * kBlock, activated, kBlock);
    }
  }
}

void Executor::down(const Task& task, std::int64_t layer) {
  const Group& group = groups_[task.of];
  const std::int64_t begin = task.begin * kUnit, end = std::min(panels(), task.end * kUnit);
  const auto panel_at = [&](std::int64_t part, std::int64_t panel) {
    return section(layer, group, part) +
           (width(part) / kHalf * (spec_.hidden / kBlock) + panel * (width(part) / kBlock)) * block_bytes_;
  };
  for (std::int64_t part = group.first_part; part < spec_.parts; ++part) {
    const Stretch stretch{panel_at(part, end), part + 1 < spec_.parts ? panel_at(part + 1, begin) : nullptr};
    if (part == group.first_part) warm(panel_at(part, begin), stretch, kAhead);
    wait_until([&] { return left_of(task.of, part).load(std::memory_order_acquire) == 0; });
    for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
      const int size = group.tiling.size(tile);
      const std::int64_t first = group.entry + group.tiling.begin(tile);
      product(inner_, nullptr, first, size, spec_.bounds[part], panel_at(part, begin), width(part), end - begin, stretch,
              part == group.first_part, outputs_.data() + first * spec_.hidden + begin * size * kPanel);
    }
  }
}

// The columns of a unit, once all groups have theirs.
void Executor::combine(std::int64_t unit, std::int64_t rows, const float* weights, float* y) const {
  const std::int64_t begin = unit * kUnit, end = std::min(panels(), begin + kUnit);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t panel = begin; panel < end; ++panel) {
      float* sum = y + row * spec_.hidden + panel * kPanel;
      for (int i = 0; i < kPanel; ++i) sum[i] = 0.0f;
      for (std::int64_t pair = row * spec_.ranks; pair < (row + 1) * spec_.ranks; ++pair) {
        const Place& place = places_[pair];
        if (place.size == 0) continue;
        const float* output = outputs_.data() + place.first * spec_.hidden;
        kernels_.scale_add(output + (panel * place.size + place.row) * kPanel, weights[pair], kPanel, sum);
      }
    }
  }
}

// ── the mailbox ─────────────────────────────────────────────────────────────────────────────────────────────────────

void Executor::serve() {
  FlushDenormals flush;
  while (!stopping_.load(std::memory_order_relaxed)) {
    const std::int64_t time = now(), idle = time - hot_since_.load(std::memory_order_relaxed);
    looked_.store(time, std::memory_order_relaxed);
    watch();
    const std::uint64_t request = load_line(line(spec_.ready));
    if (request != 0) {
      answer(request);
      hot_since_.store(now(), std::memory_order_relaxed);
    } else if (idle < kHot) {
      for (int i = 0; i < 4; ++i) pause();
    } else {
      nap(std::min(std::max(idle / kNapShare, kLeastNap), kMostNap));
    }
  }
}

// Until the time is over or somebody rouses, who wakes only this thread: it has time to wake the others.
void Executor::nap(std::int64_t nanoseconds) {
  std::unique_lock<std::mutex> lock(nap_mutex_);
  napping_.store(true);
  const auto roused = [&] { return now() - hot_since_.load() < kHot; };
  const bool early = nap_over_.wait_for(lock, std::chrono::nanoseconds(nanoseconds), roused);
  napping_.store(false);
  lock.unlock();
  if (early) threads_.rouse();
}

void Executor::rouse() {
  hot_since_.store(now());
  if (!napping_.load()) return threads_.rouse();  // it is between two naps, or busy; the others may sleep
  std::lock_guard<std::mutex> lock(nap_mutex_);
  nap_over_.notify_one();
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
