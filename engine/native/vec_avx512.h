// Sixteen floats in a 512-bit register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Vec {
  static constexpr int width = 16;
  static constexpr int tile_rows = 12;
  static constexpr int accumulators = 24;
  __m512 v;
};

inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline __mmask16 first(std::int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Vec load_part(const float* p, std::int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store_part(float* p, Vec a, std::int64_t n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline Vec power_of_two(Vec a) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(a.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)))};
}
inline Vec widen(const std::uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void transpose(Vec (&row)[Vec::width]) {
  __m512 t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(row[i].v, row[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(row[i].v, row[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {  // u[i + j]: column 4 q + j of rows i to i + 3 in each quarter q
    u[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 low01 = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xee);
    const __m512 low23 = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x44);
    const __m512 high23 = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xee);
    row[j].v = _mm512_shuffle_f32x4(low01, low23, 0x88);
    row[4 + j].v = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    row[8 + j].v = _mm512_shuffle_f32x4(high01, high23, 0x88);
    row[12 + j].v = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
}
inline void load_pair(const std::uint16_t* p, Vec& low, Vec& high) {
  const __m512i pairs = _mm512_loadu_si512(p);
  low.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  high.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline Vec widen_half(const std::uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// 2^(byte - 127), and 0 for 0.
inline Vec widen_exponent(const std::uint8_t* p) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 23))};
}

}  // namespace
