#if defined(__x86_64__)
#include "vec_avx512.h"

namespace {

struct Sums {
  static constexpr std::int32_t byte_offset = 128, nibble_offset = 12;
  using Bytes = Words;  // the values plus 128: unsigned
  struct Nibbles {
    __m512i low, high;  // twice the value, plus 12: unsigned
  };

  static Bytes prepare_bytes(Words w) {
    return {_mm512_xor_si512(w.v, _mm512_set1_epi32(static_cast<int>(0x80808080u)))};
  }
  static Nibbles prepare_nibbles(Words w) {
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i mask = _mm512_set1_epi8(15);
    return {_mm512_shuffle_epi8(table, _mm512_and_si512(w.v, mask)),
            _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(w.v, 4), mask))};
  }

  void add_bytes(Bytes w, std::int32_t x) { v = _mm512_dpbusd_epi32(v, w.v, _mm512_set1_epi32(x)); }
  void add_nibbles(Nibbles first, Nibbles second, std::int32_t x0, std::int32_t x1, std::int32_t x2, std::int32_t x3) {
    v = _mm512_dpbusd_epi32(v, first.low, _mm512_set1_epi32(x0));
    v = _mm512_dpbusd_epi32(v, first.high, _mm512_set1_epi32(x1));
    v = _mm512_dpbusd_epi32(v, second.low, _mm512_set1_epi32(x2));
    v = _mm512_dpbusd_epi32(v, second.high, _mm512_set1_epi32(x3));
  }
  Vec less(std::int32_t excess) const {
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(v, _mm512_set1_epi32(excess)))};
  }

  __m512i v;
};

}  // namespace

#include "dots_body.h"

namespace ft {
const Dots& vnni_dots() {
  static constexpr Dots table = make_dots();
  return table;
}
}  // namespace ft
#endif
