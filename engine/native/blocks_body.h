// Products with quantised weight blocks. Included by kernels_body.h; the same rules hold.
#pragma once

namespace {

// A block is its scales, then its codes: words [kWords][32 rows], word v of a row holding the next 32 / kBits k.
struct Int8 {
  static constexpr int64_t bytes = ft::kInt8Bytes;
  static constexpr int64_t codes = 2 * ft::kBlock;
  static constexpr int per_word = 4;
  static Words decode(Words words) { return words; }
  static Vec value(Words words, int k) { return byte_value(words, k); }
  static Vec scale(const char* block, int row) {
    return widen_half(reinterpret_cast<const std::uint16_t*>(block) + row);
  }
};

struct Mxfp4 {
  static constexpr int64_t bytes = ft::kMxfp4Bytes;
  static constexpr int64_t codes = ft::kBlock;
  static constexpr int per_word = 8;
  static Codes decode(Words words) { return decode_nibbles(words); }
  // k = 0 to 3 are the low nibbles of the four bytes, 4 to 7 the high ones.
  static Vec value(Codes codes, int k) { return nibble_value(codes, k % 4 * 2 + k / 4); }
  static Vec scale(const char* block, int row) {  // half of it, as values are doubled
    return set1(0.5f) * widen_exponent(reinterpret_cast<const std::uint8_t*>(block) + row);
  }
};

template <class Format>
inline void prefetch_block(const char* block) {
  for (int64_t i = 0; i < Format::bytes; i += 64) __builtin_prefetch(block + i);
}

template <class Format, int kRows>
void block_tile(const float* a, const void* panel, int64_t depth, float* c) {
  constexpr int all = ft::kBlock / Vec::width;
  constexpr int fitting = Vec::accumulators / (2 * kRows);
  constexpr int parts = fitting >= all ? all : fitting >= all / 2 && all > 1 ? all / 2 : 1;
  constexpr int words = ft::kBlock / Format::per_word;
  const char* block = static_cast<const char*>(panel);
  for (int i = 0; i < kRows * ft::kPanel; ++i) c[i] = 0.0f;
  for (int64_t k = 0; k < depth; k += ft::kBlock, block += Format::bytes, a += ft::kBlock * kRows) {
    prefetch_block<Format>(block + 4096 / Format::bytes * Format::bytes);
    for (int lane = 0; lane < ft::kBlock; lane += parts * Vec::width) {
      Vec sums[2][parts][kRows];
      for (auto& chain : sums) {
        for (auto& part : chain) {
          for (Vec& sum : part) sum = set1(0.0f);
        }
      }
      for (int word = 0; word < words; ++word) {
        const float* x = a + word * Format::per_word * kRows;
        for (int part = 0; part < parts; ++part) {
          const int row_of_block = lane + part * Vec::width;
          const auto codes =
              Format::decode(load_words(block + Format::codes + (word * ft::kBlock + row_of_block) * 4));
#pragma GCC unroll 8
          for (int i = 0; i < Format::per_word; ++i) {
            const Vec weight = Format::value(codes, i);
            for (int row = 0; row < kRows; ++row) {
              sums[i % 2][part][row] = fma(set1(x[i * kRows + row]), weight, sums[i % 2][part][row]);
            }
          }
        }
      }
      for (int part = 0; part < parts; ++part) {
        const int column = lane + part * Vec::width;
        const Vec scale = Format::scale(block, column);
        for (int row = 0; row < kRows; ++row) {
          float* out = c + row * ft::kPanel + column;
          store(out, fma(sums[0][part][row] + sums[1][part][row], scale, load(out)));
        }
      }
    }
  }
}

template <class Format, int kRows>
constexpr void fill_block_tiles(ft::Tile (&tiles)[ft::kMaxTileRows]) {
  tiles[kRows - 1] = block_tile<Format, kRows>;
  if constexpr (kRows < Vec::tile_rows) fill_block_tiles<Format, kRows + 1>(tiles);
}

void quantize(const float* x, int64_t depth, std::int8_t* integers, float* scales, std::int32_t* sums) {
  for (int64_t block = 0; block < depth / ft::kBlock; ++block, x += ft::kBlock, integers += ft::kBlock) {
    Vec largest = set1(0.0f), nothing = set1(0.0f);  // nothing becomes NaN where a value is not finite
    for (int i = 0; i < ft::kBlock; i += Vec::width) {
      const Vec value = load(x + i);
      largest = max(largest, max(value, set1(0.0f) - value));
      nothing = nothing + value * set1(0.0f);
    }
    float lanes[Vec::width], poison[Vec::width];
    store(lanes, largest), store(poison, nothing);
    float magnitude = 0.0f, bad = 0.0f;
    for (int i = 0; i < Vec::width; ++i) magnitude = max1(magnitude, lanes[i]), bad += poison[i];
    scales[block] = magnitude / 127.0f + bad;
    // Adding 1.5 * 2^23 rounds to the nearest even integer and leaves it in the lowest bits.
    const Vec inverse = set1(magnitude > 0.0f ? 127.0f / magnitude : 0.0f);
    float shifted[ft::kBlock];
    for (int i = 0; i < ft::kBlock; i += Vec::width) store(shifted + i, fma(load(x + i), inverse, set1(12582912.0f)));
    std::int32_t sum = 0;
    for (int i = 0; i < ft::kBlock; ++i) {
      std::uint32_t bits;
      __builtin_memcpy(&bits, shifted + i, sizeof bits);
      integers[i] = static_cast<std::int8_t>(bits);
      sum += integers[i];
    }
    sums[block] = sum;
  }
}

}  // namespace
