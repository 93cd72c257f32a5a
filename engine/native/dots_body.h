// Integer products of quantised weights and activations, written once over Int8 and Mxfp4. Included by one source file
// per instruction set, after its vec_*.h and these two. Internal linkage only, as in kernels_body.h.
//
// A format has, for exact activations or not: `words` of a quad of activations and `pack`, which makes them; `steps` of
// `quads` quads that a block's 32-bit words are taken in, for `parts` registers of rows side by side; `load`, the words
// of one step for Vec::width rows; a Sum of 32-bit integers, to which `add` adds their products; `offset`, what its
// weights have too much; and `factor`, for weights that are doubled, which is put into the activations' scales.
#pragma once

#include "kernels.h"

namespace {

using std::int64_t;

// What is to be asked for with a block.
inline const char* wanted_with(const char* block, const ft::Integers& a) {
  const char* wanted = block + a.ahead;
  return wanted < a.end ? wanted : wanted + a.jump;
}

template <int kBytes>
inline void ask(const char* wanted) {
#pragma GCC unroll 16
  for (int line = 0; line < kBytes / 64; ++line) __builtin_prefetch(wanted + 64 * line);
}

template <class Format, int kRows>
void dot(const ft::Integers& a, const void* panels, int64_t depth, int64_t count, float* c) {
  constexpr int stride = kRows * Format::words;  // of a quad
  constexpr int parts = kRows == 1 ? Format::parts : 1;
  constexpr int asked = (Format::bytes - Format::codes) / Format::steps;
  const char* block = static_cast<const char*>(panels);
  for (int64_t panel = 0; panel < count; ++panel, c += kRows * ft::kPanel) {
    const std::int32_t *x = a.words, *starts = a.starts;
    const float* scales = a.scales;
    for (int64_t k = 0; k < depth; k += ft::kBlock) {
      const char* wanted = wanted_with(block, a);
      for (int lane = 0; lane < ft::kPanel; lane += parts * Vec::width) {
        typename Format::Sum sums[parts][kRows];
        for (int part = 0; part < parts; ++part) {
          for (int row = 0; row < kRows; ++row) sums[part][row] = Format::start(starts + 2 * row);
        }
#if defined(__AVX512F__) || defined(__AVXVNNI__)  // with more sums they would not stay in registers
#pragma GCC unroll 8
#else
#pragma GCC unroll 1
#endif
        for (int step = 0; step < Format::steps; ++step) {
          if (lane == 0) ask<asked>(wanted + step * asked);  // all at once would wait for one another
#pragma GCC unroll 4
          for (int part = 0; part < parts; ++part) {
            const auto weights = Format::load(block + Format::codes + 4 * (lane + part * Vec::width), step);
#pragma GCC unroll 12
            for (int row = 0; row < kRows; ++row) {
              Format::add(sums[part][row], weights, x + step * Format::quads * stride + row * Format::words, stride);
            }
          }
        }
        for (int part = 0; part < parts; ++part) {
          const int column = lane + part * Vec::width;
          const Vec scale = Format::scale(block, column);
          for (int row = 0; row < kRows; ++row) {
            float* out = c + row * ft::kPanel + column;
            store(out, fma(Format::value(sums[part][row]), scale * set1(scales[row]), load(out)));
          }
        }
      }
      block += Format::bytes, x += ft::kBlock / 4 * stride, starts += 2 * kRows, scales += kRows;
    }
  }
}

// As dot, of activations in tiles: a block is a product of matrices of bytes, [words * rows][kBlock] by [kBlock][kPanel].
// The next block's is begun before this one's is added, which it does not wait for.
template <class Tiled, class Format, int kRows>
void dot_tiles(const ft::Integers& a, const void* panels, int64_t depth, int64_t count, float* c) {
  constexpr int words = Format::words;
  constexpr int64_t block_words = kRows * words * ft::kBlock / 4;
  const int64_t blocks = depth / ft::kBlock;
  const char* block = static_cast<const char*>(panels);
  const typename Tiled::template Tiles<words * kRows> tiles;
  alignas(64) std::int32_t sums[2][words][kRows][ft::kPanel];
  alignas(64) std::int8_t room[ft::kBlock * ft::kPanel];
  tiles.multiply(a.words, Format::signed_bytes(block, room), sums[0][0][0]);
  for (int64_t number = 0, at = 0; number < count * blocks; ++number) {
    ask<Format::bytes>(wanted_with(block, a));
    const int64_t next = at + 1 == blocks ? 0 : at + 1;
    if (number + 1 < count * blocks) {
      tiles.multiply(a.words + next * block_words, Format::signed_bytes(block + Format::bytes, room),
                     sums[(number + 1) % 2][0][0]);
    }
    for (int column = 0; column < ft::kPanel; column += Vec::width) {
      const Vec scale = Format::scale(block, column);
      for (int row = 0; row < kRows; ++row) {
        const std::int32_t* sum = &sums[number % 2][0][row][column];
        float* out = c + row * ft::kPanel + column;
        const Vec factor = scale * set1(a.scales[at * kRows + row]);
        store(out, fma(Format::value(Format::loaded(sum, kRows * ft::kPanel)), factor, load(out)));
      }
    }
    block += Format::bytes, at = next;
    if (at == 0) c += kRows * ft::kPanel;
  }
}

template <class Format>
void split(const float* x, std::int32_t* words, float* scale, std::int32_t* starts) {
  constexpr std::int32_t infinite = 0x7f800000;
  std::int32_t high[ft::kBlock], low[ft::kBlock], largest = 0, highs = 0, lows = 0;
  typedef std::int32_t Word __attribute__((may_alias));
  const Word* const bits = reinterpret_cast<const Word*>(x);
  for (int i = 0; i < ft::kBlock; ++i) {  // magnitudes have the order of their bits; NaN is above infinity
    const std::int32_t magnitude = bits[i] & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  float magnitude;
  __builtin_memcpy(&magnitude, &largest, sizeof magnitude);
  const float range = Format::exact ? 4177855.0f : 32639.0f;  // 127 * 256 + 127, and as much again in its last digit
  *scale = largest < infinite ? magnitude / range * Format::factor : __builtin_nanf("");
  // Adding 1.5 * 2^23 rounds to the nearest even integer, which is then the difference of the bits.
  constexpr float magic = 12582912.0f;
  constexpr std::int32_t magic_bits = 0x4b400000;
  const Vec inverse = set1(magnitude > 0.0f ? range / magnitude : 0.0f);
  float shifted[ft::kBlock];
  for (int i = 0; i < ft::kBlock; i += Vec::width) store(shifted + i, fma(load(x + i), inverse, set1(magic)));
  __builtin_memcpy(high, shifted, sizeof high);
  for (int i = 0; i < ft::kBlock; ++i) {
    const std::int32_t integer = high[i] - magic_bits;
    high[i] = Format::exact ? (integer + 64) >> 7 : integer;
    low[i] = integer - high[i] * (Format::exact ? 128 : 1);
    highs += high[i], lows += low[i];
  }
  starts[0] = -Format::offset * highs, starts[1] = -Format::offset * lows;
  Format::pack(high, low, words);
}

// Bytes [digit][4] of every quad: the high byte of `high`, the low one, and with exact ones `low`.
template <bool kExact>
void pack_bytes(const std::int32_t* high, const std::int32_t* low, std::int32_t* words) {
  constexpr int digits = kExact ? 3 : 2;
  std::int8_t bytes[digits][ft::kBlock];
  for (int i = 0; i < ft::kBlock; ++i) {
    const std::int8_t byte = static_cast<std::int8_t>(high[i]);
    bytes[0][i] = static_cast<std::int8_t>((high[i] - byte) >> 8);
    bytes[1][i] = byte;
    if (kExact) bytes[digits - 1][i] = static_cast<std::int8_t>(low[i]);
  }
  for (int quad = 0; quad < ft::kBlock / 4; ++quad) {
    for (int digit = 0; digit < digits; ++digit) __builtin_memcpy(words++, bytes[digit] + 4 * quad, 4);
  }
}

// Halves [0 2][1 3] of `high` of every quad, and with exact ones the bytes of `low`.
template <bool kExact>
void pack_halves(const std::int32_t* high, const std::int32_t* low, std::int32_t* words) {
  for (int quad = 0; quad < ft::kBlock; quad += 4) {
    for (int i = quad; i < quad + 2; ++i) {
      *words++ = (high[i] & 0xffff) | static_cast<std::int32_t>(static_cast<std::uint32_t>(high[i + 2]) << 16);
    }
    if (!kExact) continue;
    std::int8_t bytes[4];
    for (int i = 0; i < 4; ++i) bytes[i] = static_cast<std::int8_t>(low[quad + i]);
    __builtin_memcpy(words++, bytes, 4);
  }
}

// Of a table: `rows` of a tile at most, by matrices from `from` on.
struct NotTiled {
  static constexpr int rows = Vec::tile_rows, from = rows + 1;
};

template <class Tiled, class Format, int kRows = 1>
constexpr void fill_dots(ft::Dot (&dots)[ft::kMaxTileRows]) {
  if constexpr (kRows >= Tiled::from) {
    dots[kRows - 1] = dot_tiles<Tiled, Format, kRows>;
  } else {
    dots[kRows - 1] = dot<Format, kRows>;
  }
  if constexpr (kRows < Tiled::rows) fill_dots<Tiled, Format, kRows + 1>(dots);
}

template <class Tiled, class Format>
constexpr ft::Products make_products() {
  ft::Products products{Format::words, Tiled::from, {}, split<Format>};
  fill_dots<Tiled, Format>(products.dots);
  return products;
}

template <class Tiled = NotTiled>
constexpr ft::Dots make_dots() {
  return {Tiled::rows,
          {make_products<Tiled, Int8<false>>(), make_products<Tiled, Int8<true>>()},
          {make_products<Tiled, Mxfp4<false>>(), make_products<Tiled, Mxfp4<true>>()}};
}

}  // namespace
