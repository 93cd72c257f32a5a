#include "activations.h"

#include <algorithm>

namespace ft {
namespace {

constexpr int kMostWords = 4;

}  // namespace

Activations::Activations(const Products* products, std::int64_t depth)
    : products_(products), depth_(depth) {}

void Activations::reserve(std::int64_t pairs) {
  if (pairs <= pairs_) return;
  pairs_ = pairs;
  const std::int64_t blocks = pairs * depth_ / kBlock;
  values_.resize(static_cast<std::size_t>(products_ == nullptr ? pairs * depth_ : blocks));
  if (products_ == nullptr) return;
  words_.resize(static_cast<std::size_t>(blocks * kBlock / 4 * products_->words));
  starts_.resize(static_cast<std::size_t>(blocks * 2));
}

void Activations::put(std::int64_t first, int size, int row, std::int64_t column, const float* values,
                      std::int64_t count) {
  const std::int64_t at = first * depth_ + column * size;
  if (products_ == nullptr) {
    float* target = values_.data() + at + row;
    for (std::int64_t i = 0; i < count; ++i) target[i * size] = values[i];
    return;
  }
  const int words = products_->words;
  const bool tiled = size >= products_->tiled, as_split = size == 1 && !tiled;
  for (std::int64_t k = 0; k < count; k += kBlock) {
    const std::int64_t block = at / kBlock + k / kBlock * size;
    std::int32_t* target = words_.data() + block * kBlock / 4 * words;
    std::int32_t split[kBlock / 4 * kMostWords];
    products_->split(values + k, as_split ? target : split, &values_[block + row], &starts_[(block + row) * 2]);
    for (int quad = 0; quad < kBlock / 4 && !as_split; ++quad) {
      for (int word = 0; word < words; ++word) {
        target[tiled ? (word * size + row) * kBlock / 4 + quad : (quad * size + row) * words + word] =
            split[quad * words + word];
      }
    }
  }
}

const float* Activations::floats(std::int64_t first, int size, std::int64_t column) const {
  return values_.data() + first * depth_ + column * size;
}

Integers Activations::integers(std::int64_t first, int size, std::int64_t column) const {
  const std::int64_t at = first * depth_ + column * size;
  const std::int64_t block = at / kBlock;
  return {&words_[block * kBlock / 4 * products_->words], &values_[block], &starts_[block * 2], 0, nullptr, 0};
}

}  // namespace ft
