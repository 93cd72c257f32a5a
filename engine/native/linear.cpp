// Products with packed weights. The order of summation is the kernel's, so it does not depend on the number of rows.
#include <cstring>

#include "context.h"

namespace ft {
namespace {

// Activations in tile order; a single row is its own tile.
const float* tiled(Context& context, const float* x, const Tiling& tiling, std::int64_t depth) {
  if (tiling.rows == 1) return x;
  float* packed = context.packed_rows.reserve(tiling.rows * depth);
  constexpr std::int64_t block = 256;
  const std::int64_t blocks = ceil_div(depth, block);
  context.pool.run(tiling.count * blocks, [&](std::int64_t task, int) {
    const std::int64_t tile = task / blocks, start = task % blocks * block;
    const std::int64_t end = start + block < depth ? start + block : depth;
    const int rows = tiling.size(tile);
    const float* source = x + tiling.begin(tile) * depth;
    float* target = packed + tiling.begin(tile) * depth;
    for (std::int64_t i = start; i < end; ++i) {
      for (int row = 0; row < rows; ++row) target[i * rows + row] = source[row * depth + i];
    }
  });
  return packed;
}

}  // namespace

void linear(Context& context, const float* x, std::int64_t rows, const Matrix& weight, const float* bias, float* y) {
  if (rows == 0) return;
  const Tiling tiling(rows, context.kernels.tile_rows);
  const float* a = tiled(context, x, tiling, weight.in);
  const std::int64_t panels = ceil_div(weight.out, kPanel);
  // Narrow outputs are split by rows too, so that every thread has work.
  const std::int64_t wanted = ceil_div(4 * context.pool.size(), panels);
  const std::int64_t groups = wanted < tiling.count ? wanted : tiling.count;
  context.pool.run(panels * groups, [&](std::int64_t task, int) {
    const std::int64_t panel = task / groups, group = task % groups;
    const std::int64_t column = panel * kPanel;
    const std::int64_t columns = weight.out - column < kPanel ? weight.out - column : kPanel;
    const void* weights = panel_at(weight.data, panel, weight.in, weight.bfloat);
    alignas(64) float c[kMaxTileRows * kPanel];
    for (std::int64_t tile = tiling.count * group / groups; tile < tiling.count * (group + 1) / groups; ++tile) {
      const std::int64_t first = tiling.begin(tile);
      const int size = tiling.size(tile);
      tile_kernel(context.kernels, weight.bfloat, size)(a + first * weight.in, weights, weight.in, c);
      for (int row = 0; row < size; ++row) {
        float* out = y + (first + row) * weight.out + column;
        const float* result = c + row * kPanel;
        if (bias == nullptr) {
          std::memcpy(out, result, static_cast<std::size_t>(columns) * sizeof(float));
        } else {
          for (std::int64_t j = 0; j < columns; ++j) out[j] = result[j] + bias[column + j];
        }
      }
    }
  });
}

}  // namespace ft
