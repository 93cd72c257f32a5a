// The inner loops, one table per instruction set. All tables give the same bits: every output element is one fixed
// sequence of correctly rounded operations, and sums over a row use 16 virtual lanes and one fixed tree. Only the sign
// and payload of a NaN may differ: they follow the order of operands, which a compiler is free to choose.
#pragma once

#include <cstdint>

namespace ft {

constexpr int kPanel = 32;     // output columns of a weight panel
constexpr int kHalf = 16;      // columns j and j + kHalf of a panel are stored side by side in bfloat16
constexpr int kMaxTileRows = 16;
constexpr int kPage = 64;      // tokens in a page of keys and values

// c[r][column] = sum over i of a[i][r] * panel[i][column], one fused chain in the order of i.
// a is [depth][rows], c is [rows][kPanel], panel holds depth * kPanel weights.
using Tile = void (*)(const float* a, const void* panel, std::int64_t depth, float* c);

// Weight blocks of 32 rows and 32 k that share a scale per row; laid out in engine/experts/layout.py.
constexpr int kBlock = 32;
constexpr std::int64_t kInt8Bytes = 1088;
constexpr std::int64_t kMxfp4Bytes = 544;

// Activations as integers, each kBlock of k with its own scale: a[k][row] = scales[k / 32][row] * (128 * high + low),
// 23 bits: what is lost is less than 2^-22 of the largest activation of the block, as much as a sum of float32 loses.
// Or without `low`, 16 bits. How they are packed is up to the instruction set.
struct Integers {
  const std::int32_t* words;   // as Products has them
  const float* scales;         // [depth / kBlock][rows]
  const std::int32_t* starts;  // [depth / kBlock][rows][2], with which the sums of high and of low begin
  std::int64_t ahead;          // what so many bytes after a block is asked for when it is computed
  const char* end;             // where that is from here on, it is `jump` bytes further on
  std::int64_t jump;
};

// Of `count` panels one after the other, c[panel][r][column] += block after block, (a's scale * the weights' scale) *
// (128 * the exact integer product with high + that with low), rounded where the latter two are added.
using Dot = void (*)(const Integers& a, const void* panels, std::int64_t depth, std::int64_t count, float* c);

// Words of four activations, `words` of each: [depth / 4][rows][words], and of at least `tiled` rows
// [depth / kBlock][words][rows][kBlock / 4].
struct Products {
  int words, tiled;
  Dot dots[kMaxTileRows];  // [rows - 1]
  // kBlock activations to words [8][words], a scale and starts [2]. One that is not finite makes the scale NaN.
  void (*split)(const float* x, std::int32_t* words, float* scale, std::int32_t* starts);
};

struct Dots {
  int tile_rows;
  Products int8[2], mxfp4[2];  // [with 23 bits rather than 16]
};

struct Kernels {
  const char* name;
  int tile_rows;                      // at most kMaxTileRows
  Tile tile[2][kMaxTileRows];         // [weights are bfloat16][rows - 1]

  void (*silu_mul)(const float* gate, const float* up, std::int64_t n, float* out);
  void (*sigmoid_mul)(const float* x, const float* gate, std::int64_t n, float* out);
  void (*sigmoid)(const float* x, std::int64_t n, float* out);
  void (*scale)(const float* x, float factor, std::int64_t n, float* out);
  void (*scale_add)(const float* x, float factor, std::int64_t n, float* sum);   // sum = fma(x, factor, sum)
  void (*exp)(const float* x, std::int64_t n, float* out);
  void (*log_decay)(const float* a, const float* a_log, const float* dt_bias, std::int64_t n, float* out);
  void (*rms_norm)(const float* x, const float* weight, const float* gate, float eps, float offset, std::int64_t n,
                   float* out);       // gate may be null
  void (*l2_norm)(const float* x, float factor, std::int64_t n, float* out);
  void (*softmax)(const float* x, std::int64_t n, float* out);
  void (*rope)(float* head, const float* cos_sin, std::int64_t half);

  // `count` keys of a page, `stride` elements apart, as panels [key / 32][depth][32], and values as panels
  // [column / 32][key][32], in float32. The last panel is filled up with zeros.
  void (*load_keys)(const void* keys, bool bfloat, std::int64_t stride, std::int64_t count, std::int64_t depth,
                    float* panels);
  void (*load_values)(const void* values, bool bfloat, std::int64_t stride, std::int64_t count, std::int64_t depth,
                      float* panels);
  // Turns kPage scores, the first `valid` of them real, into exponentials relative to their maximum.
  void (*page_softmax)(float* scores, std::int64_t valid, float* maximum, float* sum);
  // Merges a page's result into the running one: (maximum, sum, out) with (page_maximum, page_sum, page_out).
  void (*page_merge)(float page_maximum, float page_sum, const float* page_out, std::int64_t n, float* maximum,
                     float* sum, float* out);

  // One token of the gated delta rule on kPanel value columns: memory [depth][stride], v and out [kPanel].
  void (*delta_step)(float* memory, std::int64_t stride, const float* q, const float* k, const float* v, float decay,
                     float beta, std::int64_t depth, float* out);
  // One token of a depthwise convolution and SiLU: taps[j] points at n inputs, weights are [width][stride].
  void (*conv_step)(const float* const* taps, const float* weights, std::int64_t stride, std::int64_t width,
                    std::int64_t n, float* out);
};

const Kernels& scalar_kernels();
const Dots& scalar_dots();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Dots& avx2_dots();
const Dots& avxvnni_dots();
const Dots& vnni_dots();
const Dots& vbmi_dots();
const Dots& amx_dots();
#endif

}  // namespace ft
