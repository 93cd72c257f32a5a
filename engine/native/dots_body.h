// Integer products of quantised weights and activations, written once over Sums. Included by one source file per
// instruction set, after its vec_*.h and its Sums: 32-bit sums of one Vec of panel rows. Internal linkage only, as in
// kernels_body.h.
#pragma once

#include "kernels.h"

namespace {

using std::int64_t;

// sum += the four or eight products of each word, plus `offset` times the sum of the activations.
struct Int8 {
  static constexpr int64_t bytes = ft::kInt8Bytes;
  static constexpr int64_t codes = 2 * ft::kBlock;
  static constexpr int words = 8;
  static constexpr int quads = 1;
  static constexpr std::int32_t offset = Sums::byte_offset;
  using Prepared = Sums::Bytes;
  static Prepared prepare(Words words) { return Sums::prepare_bytes(words); }
  static void add(Sums& sum, Prepared weights, const std::int32_t* x, int) { sum.add_bytes(weights, x[0]); }
  static Vec scale(const char* block, int row) {
    return widen_half(reinterpret_cast<const std::uint16_t*>(block) + row);
  }
};

struct Mxfp4 {
  static constexpr int64_t bytes = ft::kMxfp4Bytes;
  static constexpr int64_t codes = ft::kBlock;
  static constexpr int words = 4;
  static constexpr int quads = 2;
  static constexpr std::int32_t offset = Sums::nibble_offset;
  using Prepared = Sums::Nibbles;
  static Prepared prepare(Words words) { return Sums::prepare_nibbles(words); }
  static void add(Sums& sum, Prepared weights, const std::int32_t* x, int rows) {
    sum.add_nibbles(weights, x[0], x[rows]);
  }
  static Vec scale(const char* block, int row) {  // half of it, as values are doubled
    return set1(0.5f) * widen_exponent(reinterpret_cast<const std::uint8_t*>(block) + row);
  }
};

template <class Format, int kRows>
void dot(const ft::Quantized& a, const void* panel, int64_t depth, float* c) {
  constexpr int all = ft::kBlock / Vec::width;
  constexpr int parts = kRows * all <= Vec::accumulators ? all : 1;
  const char* block = static_cast<const char*>(panel);
  const std::int32_t* quads = a.quads;
  for (int i = 0; i < kRows * ft::kPanel; ++i) c[i] = 0.0f;
  for (int64_t k = 0; k < depth / ft::kBlock; ++k, block += Format::bytes, quads += ft::kBlock / 4 * kRows) {
    const char* ahead = block + 4096 / Format::bytes * Format::bytes;
    for (int64_t i = 0; i < Format::bytes; i += 64) __builtin_prefetch(ahead + i);
    for (int lane = 0; lane < ft::kBlock; lane += parts * Vec::width) {
      Sums sums[parts][kRows] = {};
      for (int word = 0; word < Format::words; ++word) {
        for (int part = 0; part < parts; ++part) {
          const int row_of_block = lane + part * Vec::width;
          const auto weights =
              Format::prepare(load_words(block + Format::codes + (word * ft::kBlock + row_of_block) * 4));
          for (int row = 0; row < kRows; ++row) {
            Format::add(sums[part][row], weights, quads + word * Format::quads * kRows + row, kRows);
          }
        }
      }
      for (int part = 0; part < parts; ++part) {
        const int column = lane + part * Vec::width;
        const Vec scale = Format::scale(block, column);
        for (int row = 0; row < kRows; ++row) {
          float* out = c + row * ft::kPanel + column;
          const Vec product = sums[part][row].less(Format::offset * a.sums[k * kRows + row]);
          store(out, fma(product, scale * set1(a.scales[k * kRows + row]), load(out)));
        }
      }
    }
  }
}

template <class Format, int kRows>
constexpr void fill_dots(ft::Dot (&dots)[ft::kMaxTileRows]) {
  dots[kRows - 1] = dot<Format, kRows>;
  if constexpr (kRows < Vec::tile_rows) fill_dots<Format, kRows + 1>(dots);
}

constexpr ft::Dots make_dots(const char* name) {
  ft::Dots table{};
  table.name = name;
  table.tile_rows = Vec::tile_rows;
  fill_dots<Int8, 1>(table.int8);
  fill_dots<Mxfp4, 1>(table.mxfp4);
  return table;
}

}  // namespace
