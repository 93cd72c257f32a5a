#include "vec_scalar.h"

namespace {

constexpr std::int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Sums {
  static constexpr std::int32_t byte_offset = 0, nibble_offset = 0;
  using Bytes = Words;
  using Nibbles = Words;
  static Bytes prepare_bytes(Words w) { return w; }
  static Nibbles prepare_nibbles(Words w) { return w; }

  static std::int32_t byte_of(std::int32_t x, int i) {
    return static_cast<std::int8_t>(static_cast<std::uint32_t>(x) >> 8 * i);
  }
  void add_bytes(Bytes w, std::int32_t x) {
    for (int i = 0; i < 4; ++i) v += byte_of(static_cast<std::int32_t>(w.v), i) * byte_of(x, i);
  }
  void add_nibbles(Nibbles first, Nibbles second, std::int32_t x0, std::int32_t x1, std::int32_t x2, std::int32_t x3) {
    for (int i = 0; i < 4; ++i) {
      v += kDoubledE2m1[first.v >> 8 * i & 15] * byte_of(x0, i) +
           kDoubledE2m1[first.v >> (8 * i + 4) & 15] * byte_of(x1, i);
      v += kDoubledE2m1[second.v >> 8 * i & 15] * byte_of(x2, i) +
           kDoubledE2m1[second.v >> (8 * i + 4) & 15] * byte_of(x3, i);
    }
  }
  Vec less(std::int32_t excess) const { return {static_cast<float>(v - excess)}; }

  std::int32_t v;
};

}  // namespace

#include "dots_body.h"

namespace ft {
const Dots& scalar_dots() {
  static constexpr Dots table = make_dots();
  return table;
}
}  // namespace ft
