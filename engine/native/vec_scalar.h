// One float at a time, for any processor.
#pragma once

#include <cstdint>

namespace {

inline std::uint32_t bits(float x) {
  std::uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
}
inline float from_bits(std::uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
}

struct Vec {
  static constexpr int width = 1;
  static constexpr int tile_rows = 6;
  static constexpr int accumulators = 12;
  float v;
};

inline Vec set1(float x) { return {x}; }
inline Vec load(const float* p) { return {*p}; }
inline void store(float* p, Vec a) { *p = a.v; }
inline Vec load_part(const float* p, std::int64_t) { return {*p}; }
inline void store_part(float* p, Vec a, std::int64_t) { *p = a.v; }
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {__builtin_fmaf(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec if_less(Vec a, Vec b, Vec yes, Vec no) { return a.v < b.v ? yes : no; }
// 2^n, where a is n + 1.5 * 2^23.
inline Vec power_of_two(Vec a) { return {from_bits((bits(a.v) << 23) + 0x3f800000u)}; }
inline Vec widen(const std::uint16_t* p) { return {from_bits(static_cast<std::uint32_t>(*p) << 16)}; }
inline void transpose(Vec (&)[Vec::width]) {}
// Two weights, `half` columns apart, of one bfloat16 pair.
inline void load_pair(const std::uint16_t* p, Vec& low, Vec& high) {
  low.v = from_bits(static_cast<std::uint32_t>(p[0]) << 16);
  high.v = from_bits(static_cast<std::uint32_t>(p[1]) << 16);
}

inline Vec widen_half(const std::uint16_t* p) {
  const std::uint32_t sign = static_cast<std::uint32_t>(*p & 0x8000) << 16, magnitude = *p & 0x7fff;
  if (magnitude < 0x400) {  // denormal
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return {sign == 0 ? value : -value};
  }
  if (magnitude >= 0x7c00) return {from_bits(sign | 0x7f800000u | magnitude << 13)};
  return {from_bits(sign | ((magnitude << 13) + 0x38000000u))};
}
// 2^(byte - 127), and 0 for 0.
inline Vec widen_exponent(const std::uint8_t* p) { return {from_bits(static_cast<std::uint32_t>(*p) << 23)}; }

}  // namespace
