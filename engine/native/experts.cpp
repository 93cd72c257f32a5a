// Routing and the routed FFNs. Rows that chose the same expert share one read of its weights.
#include <vector>

#include "context.h"

namespace ft {
namespace {

// The (row, rank) pairs of one expert; `entry` is their first index in the list ordered by expert.
struct Group {
  std::int64_t expert, entry;
  Tiling tiling;
};

// Pairs ordered by expert, and within one by row: entries[i] = row * ranks + rank.
std::vector<Group> group_by_expert(const std::int32_t* ids, std::int64_t pairs, std::int64_t count, int tile_rows,
                                   std::vector<std::int64_t>& entries) {
  std::vector<std::int64_t> end(static_cast<std::size_t>(count) + 1, 0);
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    if (ids[pair] < 0 || ids[pair] >= count) {
      throw Invalid("expert id " + std::to_string(ids[pair]) + " is not in [0, " + std::to_string(count) + ")");
    }
    ++end[ids[pair] + 1];
  }
  std::vector<Group> groups;
  for (std::int64_t expert = 0; expert < count; ++expert) {
    if (end[expert + 1] > 0) groups.push_back({expert, end[expert], Tiling(end[expert + 1], tile_rows)});
    end[expert + 1] += end[expert];
  }
  entries.resize(static_cast<std::size_t>(pairs));
  for (std::int64_t pair = 0; pair < pairs; ++pair) entries[end[ids[pair]]++] = pair;
  return groups;
}

// Calls body(group, first panel, last panel) so that a task reads a stretch of one expert's weights.
template <class Body>
void over_panels(Context& context, const std::vector<Group>& groups, std::int64_t panels, const Body& body) {
  const std::int64_t wanted = ceil_div(8 * context.pool.size(), static_cast<std::int64_t>(groups.size()));
  const std::int64_t pieces = wanted < panels ? wanted : panels;
  context.pool.run(static_cast<std::int64_t>(groups.size()) * pieces, [&](std::int64_t task, int) {
    const std::int64_t piece = task % pieces;
    body(groups[task / pieces], panels * piece / pieces, panels * (piece + 1) / pieces);
  });
}

}  // namespace

void experts(Context& context, const float* x, const std::int32_t* ids, const float* weights, std::int64_t rows,
             std::int64_t ranks, const Experts& e, float* y) {
  if (rows == 0) return;
  const Kernels& kernels = context.kernels;
  const std::int64_t pairs = rows * ranks;
  std::vector<std::int64_t> entries;
  const std::vector<Group> groups = group_by_expert(ids, pairs, e.count, kernels.tile_rows, entries);
  float* gathered = context.packed_rows.reserve(pairs * e.hidden);
  float* inner = context.inner.reserve(pairs * e.inner);
  float* outputs = context.outputs.reserve(pairs * e.hidden);

  context.pool.run(static_cast<std::int64_t>(groups.size()), [&](std::int64_t index, int) {
    const Group& group = groups[index];
    for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
      const int size = group.tiling.size(tile);
      const std::int64_t first = group.entry + group.tiling.begin(tile);
      float* target = gathered + first * e.hidden;
      for (int row = 0; row < size; ++row) {
        const float* source = x + entries[first + row] / ranks * e.hidden;
        for (std::int64_t i = 0; i < e.hidden; ++i) target[i * size + row] = source[i];
      }
    }
  });

  const std::int64_t inner_panels = ceil_div(e.inner, kHalf);
  over_panels(context, groups, inner_panels, [&](const Group& group, std::int64_t begin, std::int64_t end) {
    alignas(64) float c[kMaxTileRows * kPanel], activated[kHalf];
    for (std::int64_t panel = begin; panel < end; ++panel) {
      const void* packed = panel_at(e.gate_up, group.expert * inner_panels + panel, e.hidden, e.bfloat);
      const std::int64_t column = panel * kHalf;
      const std::int64_t columns = e.inner - column < kHalf ? e.inner - column : kHalf;
      for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
        const int size = group.tiling.size(tile);
        const std::int64_t first = group.entry + group.tiling.begin(tile);
        tile_kernel(kernels, e.bfloat, size)(gathered + first * e.hidden, packed, e.hidden, c);
        float* target = inner + first * e.inner;
        for (int row = 0; row < size; ++row) {
          kernels.silu_mul(c + row * kPanel, c + row * kPanel + kHalf, columns, activated);
          for (std::int64_t j = 0; j < columns; ++j) target[(column + j) * size + row] = activated[j];
        }
      }
    }
  });

  const std::int64_t hidden_panels = ceil_div(e.hidden, kPanel);
  over_panels(context, groups, hidden_panels, [&](const Group& group, std::int64_t begin, std::int64_t end) {
    alignas(64) float c[kMaxTileRows * kPanel];
    for (std::int64_t panel = begin; panel < end; ++panel) {
      const void* packed = panel_at(e.down, group.expert * hidden_panels + panel, e.inner, e.bfloat);
      const std::int64_t column = panel * kPanel;
      const std::int64_t columns = e.hidden - column < kPanel ? e.hidden - column : kPanel;
      for (std::int64_t tile = 0; tile < group.tiling.count; ++tile) {
        const int size = group.tiling.size(tile);
        const std::int64_t first = group.entry + group.tiling.begin(tile);
        tile_kernel(kernels, e.bfloat, size)(inner + first * e.inner, packed, e.inner, c);
        for (int row = 0; row < size; ++row) {
          float* target = outputs + entries[first + row] * e.hidden + column;
          for (std::int64_t j = 0; j < columns; ++j) target[j] = c[row * kPanel + j];
        }
      }
    }
  });

  over_rows(context, rows, ranks * e.hidden, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const float* output = outputs + row * ranks * e.hidden;
      kernels.scale(output, weights[row * ranks], e.hidden, y + row * e.hidden);
      for (std::int64_t rank = 1; rank < ranks; ++rank) {
        kernels.scale_add(output + rank * e.hidden, weights[row * ranks + rank], e.hidden, y + row * e.hidden);
      }
    }
  });
}

void route(Context& context, const float* logits, std::int64_t rows, std::int64_t count, std::int64_t ranks,
           bool renormalize, std::int32_t* ids, float* weights) {
  float* probabilities = context.inner.reserve(rows * count);
  over_rows(context, rows, count * (ranks + 8), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      float* p = probabilities + row * count;
      std::int32_t* chosen = ids + row * ranks;
      float* weight = weights + row * ranks;
      context.kernels.softmax(logits + row * count, count, p);
      if (p[0] != p[0]) {  // a logit that is NaN or infinite makes every probability NaN; the order is the index
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          chosen[rank] = static_cast<std::int32_t>(rank);
          weight[rank] = p[0];
        }
        continue;
      }
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        std::int64_t best = 0;
        for (std::int64_t i = 1; i < count; ++i) best = p[i] > p[best] ? i : best;
        chosen[rank] = static_cast<std::int32_t>(best);
        weight[rank] = p[best];
        p[best] = -1.0f;
      }
      if (!renormalize) continue;
      float total = weight[0];
      for (std::int64_t rank = 1; rank < ranks; ++rank) total += weight[rank];
      for (std::int64_t rank = 0; rank < ranks; ++rank) weight[rank] /= total;
    }
  });
}

}  // namespace ft
