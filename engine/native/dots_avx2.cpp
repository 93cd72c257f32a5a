#if defined(__x86_64__)
#include "vec_avx2.h"

#include "kernels.h"

namespace {

template <bool kExact>
void pack_bytes(const std::int32_t* high, const std::int32_t* low, std::int32_t* words);
template <bool kExact>
void pack_halves(const std::int32_t* high, const std::int32_t* low, std::int32_t* words);

struct Parts {
  __m256i high, low;  // of the activations' integers
};

inline __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
inline __m256i all(std::int32_t x) { return _mm256_set1_epi32(x); }
inline __m256i load_bits(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

template <bool kExact>
struct Avx2 {
  static constexpr bool exact = kExact;
  using Sum = Parts;

  static Sum start(const std::int32_t* starts) { return {all(starts[0]), all(starts[1])}; }
  static Vec value(const Sum& sum) {
    const Vec high{_mm256_cvtepi32_ps(sum.high)};
    if constexpr (!kExact) return high;
    return fma(high, set1(128.0f), {_mm256_cvtepi32_ps(sum.low)});
  }
};

// Products of 16 bits with the high parts, of bytes with the low ones: two of them fit 16 bits, 2 * 255 * 64.
template <bool kExact>
struct Int8 : Avx2<kExact> {
  static constexpr std::int64_t bytes = ft::kInt8Bytes, codes = 2 * ft::kBlock;
  static constexpr int words = kExact ? 3 : 2, steps = 8, quads = 1, parts = 4;
  static constexpr std::int32_t offset = 128;  // makes them unsigned
  static constexpr float factor = 1.0f;
  static constexpr auto pack = pack_halves<kExact>;
  struct Bytes {
    __m256i all, even, odd;
  };

  static Bytes load(const char* codes, int step) {
    const __m256i all = _mm256_xor_si256(load_bits(codes + step * 4 * ft::kBlock), _mm256_set1_epi8(-128));
    return {all, _mm256_and_si256(all, _mm256_set1_epi16(255)), _mm256_srli_epi16(all, 8)};
  }
  static void add(Parts& sum, const Bytes& w, const std::int32_t* x, int) {
    sum.high = ::add(sum.high, _mm256_madd_epi16(w.even, all(x[0])));
    sum.high = ::add(sum.high, _mm256_madd_epi16(w.odd, all(x[1])));
    if constexpr (kExact) {
      const __m256i pairs = _mm256_maddubs_epi16(w.all, all(x[2]));
      sum.low = ::add(sum.low, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
  }
  static Vec scale(const char* block, int row) {
    return widen_half(reinterpret_cast<const std::uint16_t*>(block) + row);
  }
};

// Products of bytes: four pairs of them fit 16 bits, 4 * 2 * 24 * 128.
template <bool kExact>
struct Mxfp4 : Avx2<kExact> {
  static constexpr std::int64_t bytes = ft::kMxfp4Bytes, codes = ft::kBlock;
  static constexpr int words = kExact ? 3 : 2, steps = 2, quads = 4, parts = 2;
  static constexpr std::int32_t offset = 12;
  static constexpr float factor = 0.5f;
  static constexpr auto pack = pack_bytes<kExact>;
  struct Nibbles {
    __m256i quad[4];  // twice the value, plus 12: unsigned
  };

  static Nibbles load(const char* codes, int step) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i mask = _mm256_set1_epi8(15);
    Nibbles nibbles;
    for (int i = 0; i < 2; ++i) {
      const __m256i w = load_bits(codes + (2 * step + i) * 4 * ft::kBlock);
      nibbles.quad[2 * i] = _mm256_shuffle_epi8(table, _mm256_and_si256(w, mask));
      nibbles.quad[2 * i + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(w, 4), mask));
    }
    return nibbles;
  }
  static void add(Parts& sum, const Nibbles& w, const std::int32_t* x, int stride) {
    const auto pairs = [&](int digit) {
      __m256i quads[4];
      for (int i = 0; i < 4; ++i) quads[i] = _mm256_maddubs_epi16(w.quad[i], all(x[i * stride + digit]));
      return _mm256_add_epi16(_mm256_add_epi16(quads[0], quads[1]), _mm256_add_epi16(quads[2], quads[3]));
    };
    sum.high = ::add(sum.high, _mm256_madd_epi16(pairs(0), _mm256_set1_epi16(256)));
    sum.high = ::add(sum.high, _mm256_madd_epi16(pairs(1), _mm256_set1_epi16(1)));
    if constexpr (kExact) sum.low = ::add(sum.low, _mm256_madd_epi16(pairs(2), _mm256_set1_epi16(1)));
  }
  static Vec scale(const char* block, int row) {
    return widen_exponent(reinterpret_cast<const std::uint8_t*>(block) + row);
  }
};

}  // namespace

#include "dots_body.h"

namespace ft {
const Dots& avx2_dots() {
  static constexpr Dots table = make_dots();
  return table;
}
}  // namespace ft
#endif
