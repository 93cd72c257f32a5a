// Eight floats in a 256-bit register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Vec {
  static constexpr int width = 8;
  static constexpr int tile_rows = 6;
  static constexpr int accumulators = 12;
  __m256 v;
};

inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline __m256i first(std::int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load_part(const float* p, std::int64_t n) { return {_mm256_maskload_ps(p, first(n))}; }
inline void store_part(float* p, Vec a, std::int64_t n) { _mm256_maskstore_ps(p, first(n), a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline Vec power_of_two(Vec a) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(a.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)))};
}
inline Vec widen(const std::uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline void transpose(Vec (&row)[Vec::width]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(row[i].v, row[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(row[i].v, row[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {  // u[i + j]: column j (or 4 + j) of rows i to i + 3 in each half
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    row[j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    row[4 + j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
}
inline void load_pair(const std::uint16_t* p, Vec& low, Vec& high) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  low.v = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  high.v = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline Vec widen_half(const std::uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// 2^(byte - 127), and 0 for 0.
inline Vec widen_exponent(const std::uint8_t* p) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 23))};
}

}  // namespace
