#include "vec_scalar.h"

#include "kernels.h"

namespace {

template <bool kExact>
void pack_halves(const std::int32_t* high, const std::int32_t* low, std::int32_t* words);

constexpr std::int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Parts {
  std::int32_t high, low;  // of the activations' integers
};

template <bool kExact>
struct Scalar {
  static constexpr bool exact = kExact;
  static constexpr int words = kExact ? 4 : 2, parts = 1;
  static constexpr std::int32_t offset = 0;
  static constexpr auto pack = pack_halves<kExact>;
  using Sum = Parts;
  using Quad = const std::int8_t[4];

  static Sum start(const std::int32_t*) { return {0, 0}; }
  static void add_quad(Sum& sum, Quad& w, const std::int32_t* x) {
    for (int i = 0; i < 4; ++i) {
      const auto half = [&](int word) {
        return static_cast<std::int16_t>(static_cast<std::uint32_t>(x[word]) >> (i < 2 ? 0 : 16));
      };
      sum.high += w[i] * half(i % 2);
      if (kExact) sum.low += w[i] * half(words - 2 + i % 2);
    }
  }
  static Vec value(const Sum& sum) {
    const Vec high{static_cast<float>(sum.high)};
    return kExact ? fma(high, set1(128.0f), {static_cast<float>(sum.low)}) : high;
  }
};

template <bool kExact>
struct Int8 : Scalar<kExact> {
  static constexpr std::int64_t bytes = ft::kInt8Bytes, codes = 2 * ft::kBlock;
  static constexpr int steps = 8, quads = 1;
  static constexpr float factor = 1.0f;

  static Words load(const char* codes, int step) { return load_words(codes + step * 4 * ft::kBlock); }
  static void add(Parts& sum, Words w, const std::int32_t* x, int) {
    std::int8_t weights[4];
    __builtin_memcpy(weights, &w.v, 4);
    Scalar<kExact>::add_quad(sum, weights, x);
  }
  static Vec scale(const char* block, int row) {
    return widen_half(reinterpret_cast<const std::uint16_t*>(block) + row);
  }
};

template <bool kExact>
struct Mxfp4 : Scalar<kExact> {
  static constexpr std::int64_t bytes = ft::kMxfp4Bytes, codes = ft::kBlock;
  static constexpr int steps = 4, quads = 2;
  static constexpr float factor = 0.5f;

  static Words load(const char* codes, int step) { return load_words(codes + step * 4 * ft::kBlock); }
  static void add(Parts& sum, Words w, const std::int32_t* x, int stride) {
    for (int half = 0; half < 2; ++half) {
      std::int8_t weights[4];
      for (int i = 0; i < 4; ++i) weights[i] = kDoubledE2m1[w.v >> (8 * i + 4 * half) & 15];
      Scalar<kExact>::add_quad(sum, weights, x + half * stride);
    }
  }
  static Vec scale(const char* block, int row) {
    return widen_exponent(reinterpret_cast<const std::uint8_t*>(block) + row);
  }
};

}  // namespace

#include "dots_body.h"

namespace ft {
const Dots& scalar_dots() {
  static constexpr Dots table = make_dots();
  return table;
}
}  // namespace ft
