// Activations of (row, rank) pairs in tiles of `size` pairs: what the kernels take as `a`. Floats where there are no
// products of integers, else Integers.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace ft {

class Activations {
 public:
  Activations(const Products* products, std::int64_t depth);
  // Room for so many pairs; what was put before is lost when it grows.
  void reserve(std::int64_t pairs);
  // `count` values of row `row` of the tile that begins at pair `first`; of Integers a multiple of kBlock.
  void put(std::int64_t first, int size, int row, std::int64_t column, const float* values, std::int64_t count);
  const float* floats(std::int64_t first, int size, std::int64_t column) const;
  Integers integers(std::int64_t first, int size, std::int64_t column) const;

 private:
  const Products* products_;
  const std::int64_t depth_;
  std::int64_t pairs_ = 0;
  std::vector<float> values_;  // or the scales
  std::vector<std::int32_t> words_, starts_;
};

}  // namespace ft
