// Integer products of quantised weights and activations, written once over Sums. Included by one source file per
// instruction set, after its vec_*.h and its Sums: 32-bit sums of one Vec of panel rows. Internal linkage only, as in
// kernels_body.h.
#pragma once

#include "kernels.h"

namespace {

using std::int64_t;

// A step takes as many words of a row as lie `quads` quads of k: sum += their products, plus `offset` times the sum of
// the activations.
struct Int8 {
  static constexpr int64_t bytes = ft::kInt8Bytes;
  static constexpr int64_t codes = 2 * ft::kBlock;
  static constexpr int steps = 8, words = 1, quads = 1;
  static constexpr std::int32_t offset = Sums::byte_offset;
  using Prepared = Sums::Bytes;
  static Prepared prepare(const char* word) { return Sums::prepare_bytes(load_words(word)); }
  static void add(Sums& sum, Prepared weights, const std::int32_t* x, int) { sum.add_bytes(weights, x[0]); }
  static Vec scale(const char* block, int row) {
    return widen_half(reinterpret_cast<const std::uint16_t*>(block) + row);
  }
};

struct Mxfp4 {
  static constexpr int64_t bytes = ft::kMxfp4Bytes;
  static constexpr int64_t codes = ft::kBlock;
  static constexpr int steps = 2, words = 2, quads = 4;
  static constexpr std::int32_t offset = Sums::nibble_offset;
  struct Prepared {
    Sums::Nibbles first, second;
  };
  static Prepared prepare(const char* word) {
    return {Sums::prepare_nibbles(load_words(word)), Sums::prepare_nibbles(load_words(word + 4 * ft::kBlock))};
  }
  static void add(Sums& sum, const Prepared& weights, const std::int32_t* x, int stride) {
    sum.add_nibbles(weights.first, weights.second, x[0], x[stride], x[2 * stride], x[3 * stride]);
  }
  static Vec scale(const char* block, int row) {  // half of it, as values are doubled
    return set1(0.5f) * widen_exponent(reinterpret_cast<const std::uint8_t*>(block) + row);
  }
};

template <class Format, int kDigits, int kRows>
void dot(const ft::Integers& a, const void* panel, int64_t depth, float* c) {
  constexpr int all = ft::kBlock / Vec::width;
  constexpr int fitting = Vec::accumulators * 2 / 3 / (kDigits * kRows);  // the rest of the registers: weights
  constexpr int parts = fitting >= all ? all : fitting >= all / 2 && all > 1 ? all / 2 : 1;
  constexpr int stride = kRows * kDigits;  // of one k
  const char* block = static_cast<const char*>(panel);
  const std::int32_t* quads = a.quads;
  for (int i = 0; i < kRows * ft::kPanel; ++i) c[i] = 0.0f;
  for (int64_t k = 0; k < depth / ft::kBlock; ++k, block += Format::bytes, quads += ft::kBlock / 4 * stride) {
    const char* ahead = block + 4096 / Format::bytes * Format::bytes;
    for (int64_t i = 0; i < Format::bytes; i += 64) __builtin_prefetch(ahead + i);
    for (int lane = 0; lane < ft::kBlock; lane += parts * Vec::width) {
      Sums sums[parts][stride] = {};
      for (int step = 0; step < Format::steps; ++step) {
#pragma GCC unroll 4
        for (int part = 0; part < parts; ++part) {
          const int word = step * Format::words * ft::kBlock + lane + part * Vec::width;
          const auto weights = Format::prepare(block + Format::codes + 4 * word);
#pragma GCC unroll 36
          for (int i = 0; i < stride; ++i) {
            Format::add(sums[part][i], weights, quads + step * Format::quads * stride + i, stride);
          }
        }
      }
      for (int part = 0; part < parts; ++part) {
        const int column = lane + part * Vec::width;
        const Vec scale = Format::scale(block, column);
        for (int row = 0; row < kRows; ++row) {
          const Sums* digit = sums[part] + row * kDigits;
          const std::int32_t* excess = a.sums + k * stride + row * kDigits;
          Vec product = digit[kDigits - 1].less(Format::offset * excess[kDigits - 1]);
          for (int i = kDigits - 2; i >= 0; --i) {
            product = fma(product, set1(256.0f), digit[i].less(Format::offset * excess[i]));
          }
          float* out = c + row * ft::kPanel + column;
          store(out, fma(product, scale * set1(a.scales[k * kRows + row]), load(out)));
        }
      }
    }
  }
}

void split(const float* x, int digits, std::int32_t* quads, float* scale, std::int32_t* sums) {
  Vec largest = set1(0.0f), nothing = set1(0.0f);  // nothing becomes NaN where a value is not finite
  for (int i = 0; i < ft::kBlock; i += Vec::width) {
    const Vec value = load(x + i);
    largest = max(largest, max(value, set1(0.0f) - value));
    nothing = nothing + value * set1(0.0f);
  }
  float lanes[Vec::width], nothings[Vec::width], magnitude = 0.0f, bad = 0.0f;
  store(lanes, largest), store(nothings, nothing);
  for (int i = 0; i < Vec::width; ++i) magnitude = lanes[i] > magnitude ? lanes[i] : magnitude, bad += nothings[i];
  const float range = digits == 1 ? 127.0f : 4194303.0f;
  *scale = magnitude / range + bad;
  // Adding 1.5 * 2^23 rounds to the nearest even integer, which is then the difference of the bits.
  constexpr float magic = 12582912.0f;
  constexpr std::int32_t magic_bits = 0x4b400000;
  const Vec inverse = set1(magnitude > 0.0f ? range / magnitude : 0.0f);
  float shifted[ft::kBlock];
  std::int32_t integers[ft::kBlock];
  for (int i = 0; i < ft::kBlock; i += Vec::width) store(shifted + i, fma(load(x + i), inverse, set1(magic)));
  __builtin_memcpy(integers, shifted, sizeof integers);
  for (std::int32_t& integer : integers) integer -= magic_bits;
  for (int digit = 0; digit < digits; ++digit) {
    std::int8_t bytes[ft::kBlock];
    std::int32_t sum = 0;
    for (int i = 0; i < ft::kBlock; ++i) {
      bytes[i] = static_cast<std::int8_t>(integers[i]);
      sum += bytes[i];
      integers[i] = (integers[i] - bytes[i]) >> 8;
    }
    sums[digit] = sum;
    for (int i = 0; i < ft::kBlock / 4; ++i) __builtin_memcpy(quads + i * digits + digit, bytes + 4 * i, 4);
  }
}

template <class Format, int kDigits, int kRows>
constexpr void fill_dots(ft::Dot (&dots)[ft::kMaxTileRows]) {
  dots[kRows - 1] = dot<Format, kDigits, kRows>;
  if constexpr (kRows < Vec::tile_rows) fill_dots<Format, kDigits, kRows + 1>(dots);
}

constexpr ft::Dots make_dots() {
  ft::Dots table{};
  table.tile_rows = Vec::tile_rows;
  fill_dots<Int8, 1, 1>(table.int8[0]);
  fill_dots<Int8, 3, 1>(table.int8[1]);
  fill_dots<Mxfp4, 1, 1>(table.mxfp4[0]);
  fill_dots<Mxfp4, 3, 1>(table.mxfp4[1]);
  table.split = split;
  return table;
}

}  // namespace
