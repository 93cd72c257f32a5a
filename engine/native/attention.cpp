// Paged causal attention. Each page is reduced on its own and merged into the running result in absolute order, so a
// row's result depends on its position and keys only. Rows and the query heads that share a key head are processed
// together: both products are weight-panel products with keys or values as the panel.
#include <cstring>
#include <vector>

#include "context.h"

namespace ft {
namespace {

constexpr std::int64_t kRows = 16;  // tokens of a task

struct Task {
  std::int64_t sequence, row, rows, kv_head;  // row counts from the segment's first
};

std::uint16_t narrow(float x) {  // to nearest, ties to even
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Private memory of one thread.
struct Area {
  float *keys, *values, *queries, *running, *page_out, *maxima, *sums, *scores, *weights, *product;
  static std::int64_t lay_out(std::int64_t virtual_rows, std::int64_t depth, float* base, Area* area) {
    const std::int64_t wide = round_up(depth, kPanel);
    std::int64_t used = 0;
    const auto take = [&](float* Area::*member, std::int64_t floats) {
      if (area != nullptr) area->*member = base + used;
      used += round_up(floats, 16);
    };
    take(&Area::keys, kPage * depth);
    take(&Area::values, kPage * wide);
    take(&Area::queries, virtual_rows * depth);
    take(&Area::running, virtual_rows * depth);
    take(&Area::page_out, kMaxTileRows * wide);
    take(&Area::maxima, virtual_rows);
    take(&Area::sums, virtual_rows);
    take(&Area::scores, kMaxTileRows * kPage);
    take(&Area::weights, kMaxTileRows * kPage);
    take(&Area::product, kMaxTileRows * kPanel);
    return used;
  }
};

class Worker {
 public:
  Worker(const Kernels& kernels, const Pages& pages, const Batch& batch, const float* q, std::int64_t heads,
         float scale, float* y)
      : kernels_(kernels), pages_(pages), batch_(batch), q_(q), y_(y), heads_(heads), group_(heads / pages.kv_heads),
        scale_(scale) {}

  void run(const Task& task, Area& area) const {
    const Segment segment = segment_of(batch_, task.sequence);
    const std::int64_t depth = pages_.head_dim, virtual_rows = task.rows * group_;
    const std::int64_t position = segment.position + task.row, row = segment.first + task.row;
    const Tiling tiling(virtual_rows, kernels_.tile_rows);
    load_queries(task, row, tiling, area);
    std::memset(area.running, 0, static_cast<std::size_t>(virtual_rows * depth) * sizeof(float));
    for (std::int64_t i = 0; i < virtual_rows; ++i) area.maxima[i] = -__builtin_inff(), area.sums[i] = 0.0f;

    const std::int64_t keys = position + task.rows;
    for (std::int64_t page = 0; page * kPage < keys; ++page) {
      const std::int64_t valid = keys - page * kPage < kPage ? keys - page * kPage : kPage;
      const std::int64_t physical = batch_.page_table[task.sequence * batch_.pages_per_sequence + page];
      load_page(physical, task.kv_head, valid, area);
      for (std::int64_t tile = 0; tile < tiling.count; ++tile) {
        reduce_page(tiling, tile, position - page * kPage, valid, area);
      }
    }
    for (std::int64_t i = 0; i < virtual_rows; ++i) {
      float* out = y_ + ((row + i / group_) * heads_ + task.kv_head * group_ + i % group_) * depth;
      const float inverse = 1.0f / area.sums[i];
      for (std::int64_t j = 0; j < depth; ++j) out[j] = area.running[i * depth + j] * inverse;
    }
  }

 private:
  void load_page(std::int64_t page, std::int64_t kv_head, std::int64_t count, Area& area) const {
    const std::int64_t depth = pages_.head_dim, stride = pages_.kv_heads * depth;
    const std::int64_t offset = (page * kPage * stride + kv_head * depth) * (pages_.bfloat ? 2 : 4);
    const char* keys = static_cast<const char*>(pages_.keys) + offset;
    const char* values = static_cast<const char*>(pages_.values) + offset;
    kernels_.load_keys(keys, pages_.bfloat, stride, count, depth, area.keys);
    kernels_.load_values(values, pages_.bfloat, stride, count, depth, area.values);
  }

  void load_queries(const Task& task, std::int64_t row, const Tiling& tiling, Area& area) const {
    const std::int64_t depth = pages_.head_dim;
    for (std::int64_t tile = 0; tile < tiling.count; ++tile) {
      const int size = tiling.size(tile);
      float* target = area.queries + tiling.begin(tile) * depth;
      for (int r = 0; r < size; ++r) {
        const std::int64_t i = tiling.begin(tile) + r;
        const float* source = q_ + ((row + i / group_) * heads_ + task.kv_head * group_ + i % group_) * depth;
        for (std::int64_t j = 0; j < depth; ++j) target[j * size + r] = source[j] * scale_;
      }
    }
  }

  // `ahead`: position of the task's first row minus that of the page's first key.
  void reduce_page(const Tiling& tiling, std::int64_t tile, std::int64_t ahead, std::int64_t valid, Area& area) const {
    const std::int64_t depth = pages_.head_dim, first = tiling.begin(tile);
    const int size = tiling.size(tile);
    const auto visible = [&](int r) {  // keys of this page that row r may see
      const std::int64_t n = ahead + (first + r) / group_ + 1;
      return n < 0 ? 0 : n < kPage ? n : kPage;
    };
    if (visible(size - 1) == 0) return;
    const Tile product = tile_kernel(kernels_, false, size);
    for (std::int64_t panel = 0; panel * kPanel < valid; ++panel) {
      product(area.queries + first * depth, area.keys + panel * depth * kPanel, depth, area.product);
      for (int r = 0; r < size; ++r) {
        std::memcpy(area.scores + r * kPage + panel * kPanel, area.product + r * kPanel, kPanel * sizeof(float));
      }
    }
    // Rows that see the same keys are mixed together; a key that a row does not see takes no part in its result, not
    // even with weight 0, which would turn an infinite value into NaN.
    for (int begin = 0, end = 0; begin < size; begin = end) {
      const std::int64_t keys = visible(begin);
      for (end = begin + 1; end < size && visible(end) == keys;) ++end;
      if (keys > 0) mix(first + begin, end - begin, keys, area.scores + begin * kPage, area);
    }
  }

  // Merges what `rows` virtual rows from `first` on see in a page, its first `keys` keys, into their running results.
  void mix(std::int64_t first, int rows, std::int64_t keys, float* scores, Area& area) const {
    const std::int64_t depth = pages_.head_dim, wide = round_up(depth, kPanel);
    float maxima[kMaxTileRows], sums[kMaxTileRows];
    for (int r = 0; r < rows; ++r) {
      kernels_.page_softmax(scores + r * kPage, keys, &maxima[r], &sums[r]);
      for (std::int64_t key = 0; key < keys; ++key) area.weights[key * rows + r] = scores[r * kPage + key];
    }
    const Tile product = tile_kernel(kernels_, false, rows);
    for (std::int64_t column = 0; column < wide; column += kPanel) {
      product(area.weights, area.values + column * kPage, keys, area.product);
      for (int r = 0; r < rows; ++r) {
        std::memcpy(area.page_out + r * wide + column, area.product + r * kPanel, kPanel * sizeof(float));
      }
    }
    for (int r = 0; r < rows; ++r) {
      const std::int64_t i = first + r;
      kernels_.page_merge(maxima[r], sums[r], area.page_out + r * wide, depth, &area.maxima[i], &area.sums[i],
                          area.running + i * depth);
    }
  }

  const Kernels& kernels_;
  const Pages& pages_;
  const Batch& batch_;
  const float* q_;
  float* y_;
  std::int64_t heads_, group_;
  float scale_;
};

template <class T>
void store_row(const float* source, std::int64_t n, T* target) {
  for (std::int64_t i = 0; i < n; ++i) {
    if constexpr (sizeof(T) == 2) {
      target[i] = narrow(source[i]);
    } else {
      target[i] = source[i];
    }
  }
}

template <class T>
void write_as(Context& context, const float* k, const float* v, const Pages& pages, const Batch& batch) {
  const std::int64_t width = pages.kv_heads * pages.head_dim;
  for (std::int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const Segment segment = segment_of(batch, sequence);
    const std::int32_t* table = batch.page_table + sequence * batch.pages_per_sequence;
    over_rows(context, segment.rows, 2 * width, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t position = segment.position + i, row = segment.first + i;
        const std::int64_t page = table[position / kPage];
        const std::int64_t target = (page * kPage + position % kPage) * width;
        store_row(k + row * width, width, static_cast<T*>(pages.keys) + target);
        store_row(v + row * width, width, static_cast<T*>(pages.values) + target);
      }
    });
  }
}

}  // namespace

void attention(Context& context, const float* q, std::int64_t heads, const Pages& pages, float scale,
               const Batch& batch, float* y) {
  check_segments(batch);
  check_pages(batch, pages.count);
  std::vector<Task> tasks;
  for (std::int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const std::int64_t rows = segment_of(batch, sequence).rows;
    // The last rows have the most keys; starting with them leaves the short tasks for the end.
    for (std::int64_t block = ceil_div(rows, kRows) - 1; block >= 0; --block) {
      const std::int64_t row = block * kRows;
      for (std::int64_t head = 0; head < pages.kv_heads; ++head) {
        tasks.push_back({sequence, row, rows - row < kRows ? rows - row : kRows, head});
      }
    }
  }
  const std::int64_t virtual_rows = kRows * (heads / pages.kv_heads);
  const std::int64_t floats = Area::lay_out(virtual_rows, pages.head_dim, nullptr, nullptr);
  float* areas = context.threads.reserve(floats * context.pool.size());
  const Worker worker(context.kernels, pages, batch, q, heads, scale, y);
  context.pool.run(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t index, int thread) {
    Area area;
    Area::lay_out(virtual_rows, pages.head_dim, areas + thread * floats, &area);
    worker.run(tasks[index], area);
  });
}

void write_pages(Context& context, const float* k, const float* v, const Pages& pages, const Batch& batch) {
  check_segments(batch);
  check_pages(batch, pages.count);
  if (pages.bfloat) {
    write_as<std::uint16_t>(context, k, v, pages, batch);
  } else {
    write_as<float>(context, k, v, pages, batch);
  }
}

}  // namespace ft
