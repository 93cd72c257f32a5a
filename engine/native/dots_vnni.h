// Formats for processors that add products of four bytes at once. Included by one source file per instruction set, after
// its vec_*.h: 256 bits of AVX-VNNI or 512 of AVX512-VNNI, where a lookup is one operation if there is VBMI.
#pragma once

#include "kernels.h"

namespace {

template <bool kExact>
void pack_bytes(const std::int32_t* high, const std::int32_t* low, std::int32_t* words);

#if defined(__AVX512F__)
using Bits = __m512i;
inline Bits all(std::int32_t x) { return _mm512_set1_epi32(x); }
inline Bits all(__m128i x) { return _mm512_broadcast_i32x4(x); }
inline Bits load_bits(const void* p) { return _mm512_loadu_si512(p); }
inline void store_bits(void* p, Bits x) { _mm512_storeu_si512(p, x); }
inline Bits add_products(Bits sum, Bits x, Bits y) { return _mm512_dpbusd_epi32(sum, x, y); }
inline Bits joined(Bits high, Bits low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
inline Bits high_nibbles(Bits x) { return _mm512_srli_epi16(x, 4); }
inline Vec floats(Bits x) { return {_mm512_cvtepi32_ps(x)}; }
#else
using Bits = __m256i;
inline Bits all(std::int32_t x) { return _mm256_set1_epi32(x); }
inline Bits all(__m128i x) { return _mm256_broadcastsi128_si256(x); }
inline Bits load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const Bits*>(p)); }
inline void store_bits(void* p, Bits x) { _mm256_storeu_si256(static_cast<Bits*>(p), x); }
inline Bits add_products(Bits sum, Bits x, Bits y) { return _mm256_dpbusd_avx_epi32(sum, x, y); }
inline Bits joined(Bits high, Bits low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low); }
inline Bits high_nibbles(Bits x) { return _mm256_srli_epi16(x, 4); }
inline Vec floats(Bits x) { return {_mm256_cvtepi32_ps(x)}; }
#endif

// Of every byte the one in the table that its low nibble names.
inline Bits looked_up(Bits table, Bits x) {
#if defined(__AVX512VBMI__)
  return _mm512_permutexvar_epi8(x, table);
#elif defined(__AVX512F__)
  return _mm512_shuffle_epi8(table, x & all(0x0f0f0f0f));
#else
  return _mm256_shuffle_epi8(table, x & all(0x0f0f0f0f));
#endif
}

// 256 * d2 + d1 are the high parts of activations, d0 the low ones: bytes, as the instruction takes them.
struct Digits {
  Bits d2, d1, d0;
};

template <bool kExact>
struct Vnni {
  static constexpr bool exact = kExact;
  static constexpr int words = kExact ? 3 : 2, parts = 2;
  static constexpr auto pack = pack_bytes<kExact>;
  using Sum = Digits;

  static Sum start(const std::int32_t* starts) {
    return {all(0), all(starts[0]), all(starts[1])};
  }
  static void add_quad(Sum& sum, Bits w, const std::int32_t* x) {
    sum.d2 = add_products(sum.d2, w, all(x[0]));
    sum.d1 = add_products(sum.d1, w, all(x[1]));
    if constexpr (kExact) sum.d0 = add_products(sum.d0, w, all(x[2]));
  }
  static Sum loaded(const std::int32_t* sum, int stride) {
    return {load_bits(sum), load_bits(sum + stride), load_bits(sum + (words - 1) * stride)};
  }
  static Vec value(const Sum& sum) {
    const Vec high = floats(joined(sum.d2, sum.d1));
    if constexpr (!kExact) return high;
    return fma(high, set1(128.0f), floats(sum.d0));
  }
};

template <bool kExact>
struct Int8 : Vnni<kExact> {
  static constexpr std::int64_t bytes = ft::kInt8Bytes, codes = 2 * ft::kBlock;
  static constexpr int steps = 8, quads = 1;
  static constexpr std::int32_t offset = 128;  // makes them unsigned
  static constexpr float factor = 1.0f;

  static Bits load(const char* codes, int step) {
    return load_bits(codes + step * 4 * ft::kBlock) ^ all(static_cast<std::int32_t>(0x80808080u));
  }
  static const std::int8_t* signed_bytes(const char* block, std::int8_t*) {
    return reinterpret_cast<const std::int8_t*>(block) + codes;
  }
  static void add(Digits& sum, Bits w, const std::int32_t* x, int) { Vnni<kExact>::add_quad(sum, w, x); }
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
    Bits low, high;  // twice the value, plus 12: unsigned
  };

  static Nibbles load(const char* codes, int step) {
    const __m128i raised = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return values_of(codes + step * 4 * ft::kBlock, raised);
  }
  static const std::int8_t* signed_bytes(const char* block, std::int8_t* room) {
    const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    constexpr int row = 4 * ft::kPanel;
    for (int i = 0; i < 4 * row; i += sizeof(Bits)) {
      const Nibbles nibbles = values_of(block + codes + i, doubled);
      store_bits(room + i / row * 2 * row + i % row, nibbles.low);
      store_bits(room + i / row * 2 * row + row + i % row, nibbles.high);
    }
    return room;
  }
  static Nibbles values_of(const char* words, __m128i values) {
    Bits w = load_bits(words);
    asm("" : "+v"(w));  // or it is read twice
    return {looked_up(all(values), w), looked_up(all(values), high_nibbles(w))};
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
