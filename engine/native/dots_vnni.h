// Formats for 512-bit registers. Included by one source file per instruction set: with VBMI, lookups take one operation.
#pragma once

#include "vec_avx512.h"

#include "kernels.h"

namespace {

template <bool kExact>
void pack_bytes(const std::int32_t* high, const std::int32_t* low, std::int32_t* words);

// 256 * d2 + d1 are the high parts of activations, d0 the low ones: bytes, as the instruction takes them.
struct Digits {
  __m512i d2, d1, d0;
};

template <bool kExact>
struct Vnni {
  static constexpr bool exact = kExact;
  static constexpr int words = kExact ? 3 : 2, parts = 2;
  static constexpr auto pack = pack_bytes<kExact>;
  using Sum = Digits;

  static Sum start(const std::int32_t* starts) {
    return {_mm512_setzero_si512(), _mm512_set1_epi32(starts[0]), _mm512_set1_epi32(starts[1])};
  }
  static void add_quad(Sum& sum, __m512i w, const std::int32_t* x) {
    sum.d2 = _mm512_dpbusd_epi32(sum.d2, w, _mm512_set1_epi32(x[0]));
    sum.d1 = _mm512_dpbusd_epi32(sum.d1, w, _mm512_set1_epi32(x[1]));
    if constexpr (kExact) sum.d0 = _mm512_dpbusd_epi32(sum.d0, w, _mm512_set1_epi32(x[2]));
  }
  static Sum loaded(const std::int32_t* sum, int stride) {
    return {_mm512_load_si512(sum), _mm512_load_si512(sum + stride), _mm512_load_si512(sum + (words - 1) * stride)};
  }
  static Vec value(const Sum& sum) {
    const Vec high{_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sum.d2, 8), sum.d1))};
    if constexpr (!kExact) return high;
    return fma(high, set1(128.0f), {_mm512_cvtepi32_ps(sum.d0)});
  }
};

template <bool kExact>
struct Int8 : Vnni<kExact> {
  static constexpr std::int64_t bytes = ft::kInt8Bytes, codes = 2 * ft::kBlock;
  static constexpr int steps = 8, quads = 1;
  static constexpr std::int32_t offset = 128;  // makes them unsigned
  static constexpr float factor = 1.0f;

  static __m512i load(const char* codes, int step) {
    const Words w = load_words(codes + step * 4 * ft::kBlock);
    return _mm512_xor_si512(w.v, _mm512_set1_epi32(static_cast<int>(0x80808080u)));
  }
  static const std::int8_t* signed_bytes(const char* block, std::int8_t*) {
    return reinterpret_cast<const std::int8_t*>(block) + codes;
  }
  static void add(Digits& sum, __m512i w, const std::int32_t* x, int) { Vnni<kExact>::add_quad(sum, w, x); }
  static Vec scale(const char* block, int row) {
    return widen_half(reinterpret_cast<const std::uint16_t*>(block) + row);
  }
};

template <bool kExact>
struct Mxfp4 : Vnni<kExact> {
  static constexpr std::int64_t bytes = ft::kMxfp4Bytes, codes = ft::kBlock;
  static constexpr int steps = 4, quads = 2;
  static constexpr std::int32_t offset = 12;
  static constexpr float factor = 0.5f;
  struct Nibbles {
    __m512i low, high;  // twice the value, plus 12: unsigned
  };

  static Nibbles load(const char* codes, int step) {
    const __m128i raised = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return looked_up(codes + step * 4 * ft::kBlock, raised);
  }
  static const std::int8_t* signed_bytes(const char* block, std::int8_t* room) {
    const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    for (int i = 0; i < 8; ++i) {  // half a row of words
      const Nibbles nibbles = looked_up(block + codes + 64 * i, doubled);
      std::int8_t* target = room + (i / 2 * 4 + i % 2) * 64;
      _mm512_store_si512(target, nibbles.low);
      _mm512_store_si512(target + 128, nibbles.high);
    }
    return room;
  }
  static Nibbles looked_up(const char* words, __m128i values) {
    const __m512i table = _mm512_broadcast_i32x4(values);
    Words w = load_words(words);
#if defined(__AVX512VBMI__)
    asm("" : "+v"(w.v));  // or it is read twice
    return {_mm512_permutexvar_epi8(w.v, table), _mm512_permutexvar_epi8(_mm512_srli_epi16(w.v, 4), table)};
#else
    const __m512i mask = _mm512_set1_epi8(15);
    return {_mm512_shuffle_epi8(table, _mm512_and_si512(w.v, mask)),
            _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(w.v, 4), mask))};
#endif
  }
  static void add(Digits& sum, const Nibbles& w, const std::int32_t* x, int stride) {
    Vnni<kExact>::add_quad(sum, w.low, x);
    Vnni<kExact>::add_quad(sum, w.high, x + stride);
  }
  static Vec scale(const char* block, int row) {
    return widen_exponent(reinterpret_cast<const std::uint8_t*>(block) + row);
  }
};

}  // namespace

#include "dots_body.h"
