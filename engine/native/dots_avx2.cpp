#if defined(__x86_64__)
#include "vec_avx2.h"

namespace {

struct Sums {
  static constexpr std::int32_t byte_offset = 0, nibble_offset = 12;
  using Bytes = Words;
  struct Nibbles {
    __m256i low, high;  // twice the value, plus 12: unsigned
  };

  static Bytes prepare_bytes(Words w) { return w; }
  static Nibbles prepare_nibbles(Words w) {
    const __m256i table = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_shuffle_epi8(table, _mm256_and_si256(w.v, mask)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(w.v, 4), mask))};
  }

  // Pairs of products fit 16 bits: 2 * 127 * 128.
  void add_bytes(Bytes w, std::int32_t x) {
    const __m256i activations = _mm256_set1_epi32(x);
    add(_mm256_maddubs_epi16(_mm256_abs_epi8(activations), _mm256_sign_epi8(w.v, activations)));
  }
  // Four pairs fit as well: 4 * 2 * 24 * 128.
  void add_nibbles(Nibbles first, Nibbles second, std::int32_t x0, std::int32_t x1, std::int32_t x2, std::int32_t x3) {
    const __m256i a = _mm256_add_epi16(_mm256_maddubs_epi16(first.low, _mm256_set1_epi32(x0)),
                                       _mm256_maddubs_epi16(first.high, _mm256_set1_epi32(x1)));
    const __m256i b = _mm256_add_epi16(_mm256_maddubs_epi16(second.low, _mm256_set1_epi32(x2)),
                                       _mm256_maddubs_epi16(second.high, _mm256_set1_epi32(x3)));
    add(_mm256_add_epi16(a, b));
  }
  void add(__m256i pairs) { v = _mm256_add_epi32(v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }
  Vec less(std::int32_t excess) const {
    return {_mm256_cvtepi32_ps(_mm256_sub_epi32(v, _mm256_set1_epi32(excess)))};
  }

  __m256i v;
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
