#include "vec_scalar.h"

#include "kernels.h"

namespace {

template <bool kExact>
void pack_bytes(const std::int32_t* high, const std::int32_t* low, std::int32_t* words);

constexpr std::int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// What the AMX unit does, so that what is common to both is tested on every machine.
template <int kRows>
struct Tiles {
  // sums[row][column] = sum over k of x[row][k] * weights[k / 4][column][k % 4].
  void multiply(const std::int32_t* x, const std::int8_t* weights, std::int32_t* sums) const {
    const std::int8_t* row = reinterpret_cast<const std::int8_t*>(x);
    for (int i = 0; i < kRows; ++i, row += ft::kBlock, sums += ft::kPanel) {
      for (int column = 0; column < ft::kPanel; ++column) sums[column] = 0;
      for (int quad = 0; quad < ft::kBlock / 4; ++quad) {
        const std::int8_t *a = row + 4 * quad, *w = weights + 4 * quad * ft::kPanel;
        for (int column = 0; column < ft::kPanel; ++column, w += 4) {
          sums[column] += a[0] * w[0] + a[1] * w[1] + a[2] * w[2] + a[3] * w[3];
        }
      }
    }
  }
};

struct Emulated {
  static constexpr int rows = 16, from = 1;
  template <int kRows>
  using Tiles = ::Tiles<kRows>;
};

struct Parts {
  std::int32_t high, low;  // of the activations' integers
};

template <bool kExact>
struct Scalar {
  static constexpr bool exact = kExact;
  static constexpr int words = kExact ? 3 : 2;
  static constexpr std::int32_t offset = 0;
  static constexpr auto pack = pack_bytes<kExact>;
  using Sum = Parts;

  static Sum loaded(const std::int32_t* sum, int stride) {
    return {256 * sum[0] + sum[stride], kExact ? sum[2 * stride] : 0};
  }
  static Vec value(const Sum& sum) {
    const Vec high{static_cast<float>(sum.high)};
    return kExact ? fma(high, set1(128.0f), {static_cast<float>(sum.low)}) : high;
  }
};

template <bool kExact>
struct Int8 : Scalar<kExact> {
  static constexpr std::int64_t bytes = ft::kInt8Bytes, codes = 2 * ft::kBlock;
  static constexpr float factor = 1.0f;

  static const std::int8_t* signed_bytes(const char* block, std::int8_t*) {
    return reinterpret_cast<const std::int8_t*>(block) + codes;
  }
  static Vec scale(const char* block, int row) {
    return widen_half(reinterpret_cast<const std::uint16_t*>(block) + row);
  }
};

template <bool kExact>
struct Mxfp4 : Scalar<kExact> {
  static constexpr std::int64_t bytes = ft::kMxfp4Bytes, codes = ft::kBlock;
  static constexpr float factor = 0.5f;

  static const std::int8_t* signed_bytes(const char* block, std::int8_t* room) {
    constexpr int quad = 4 * ft::kPanel;
    const auto* octets = reinterpret_cast<const std::uint8_t*>(block + codes);
    for (std::int8_t* to = room; to < room + ft::kBlock * ft::kPanel; to += 2 * quad, octets += quad) {
      for (int i = 0; i < quad; ++i) to[i] = kDoubledE2m1[octets[i] & 15], to[quad + i] = kDoubledE2m1[octets[i] >> 4];
    }
    return room;
  }
  static Vec scale(const char* block, int row) {
    return widen_exponent(reinterpret_cast<const std::uint8_t*>(block) + row);
  }
};

}  // namespace

#include "dots_body.h"

namespace ft {
const Dots& scalar_dots() {
  static constexpr Dots table = make_dots<Emulated>();
  return table;
}
}  // namespace ft
