// The inner loops, written once over Vec. Included by one source file per instruction set, after its vec_*.h.
// Everything here has internal linkage and uses no library templates: code compiled for a newer processor must not be
// merged with code that an older one runs.
#pragma once

#include "kernels.h"

namespace {

using std::int64_t;

constexpr int kLanes = 16;
constexpr float kInfinity = __builtin_inff();

// Calls body(first, count) for every Vec-wide stretch of [0, n).
template <class Body>
inline void stretches(int64_t n, const Body& body) {
  for (int64_t i = 0; i < n; i += Vec::width) body(i, n - i < Vec::width ? n - i : Vec::width);
}

inline Vec load_upto(const float* p, int64_t n) { return n == Vec::width ? load(p) : load_part(p, n); }
inline void store_upto(float* p, Vec a, int64_t n) {
  if (n == Vec::width) {
    store(p, a);
  } else {
    store_part(p, a, n);
  }
}

// ── functions of one element ────────────────────────────────────────────────────────────────────────────────────

// e^x within 2 units in the last place; 0 below -87, e^88 above 88, NaN for NaN.
inline Vec exp(Vec x) {
  const Vec lowest = set1(-87.0f), magic = set1(12582912.0f);
  const Vec clamped = min(set1(88.0f), max(lowest, x));
  const Vec shifted = fma(clamped, set1(1.44269504088896341f), magic);
  const Vec n = shifted - magic;
  const Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), clamped));
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  return if_less(x, lowest, set1(0.0f), p * power_of_two(shifted));
}

inline float exp1(float x) {
  float y;
  store_part(&y, exp(set1(x)), 1);
  return y;
}

inline Vec sigmoid(Vec x) { return set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - x)); }
inline Vec silu(Vec x) { return x / (set1(1.0f) + exp(set1(0.0f) - x)); }

// max(x, 0) + log(1 + u) with u = e^-|x|; the logarithm is 2 atanh(z), z = u / (2 + u) <= 1/3, by its series.
inline Vec softplus(Vec x) {
  const Vec u = exp(min(x, set1(0.0f) - x));
  const Vec z = u / (set1(2.0f) + u), square = z * z;
  Vec p = set1(1.0f / 17);
  p = fma(p, square, set1(1.0f / 15));
  p = fma(p, square, set1(1.0f / 13));
  p = fma(p, square, set1(1.0f / 11));
  p = fma(p, square, set1(1.0f / 9));
  p = fma(p, square, set1(1.0f / 7));
  p = fma(p, square, set1(1.0f / 5));
  p = fma(p, square, set1(1.0f / 3));
  p = fma(p, square, set1(1.0f));
  return max(x, set1(0.0f)) + set1(2.0f) * z * p;
}

void silu_mul(const float* gate, const float* up, int64_t n, float* out) {
  stretches(n, [&](int64_t i, int64_t m) {
    store_upto(out + i, silu(load_upto(gate + i, m)) * load_upto(up + i, m), m);
  });
}

void sigmoid_mul(const float* x, const float* gate, int64_t n, float* out) {
  stretches(n, [&](int64_t i, int64_t m) {
    store_upto(out + i, load_upto(x + i, m) * sigmoid(load_upto(gate + i, m)), m);
  });
}

void sigmoid_row(const float* x, int64_t n, float* out) {
  stretches(n, [&](int64_t i, int64_t m) { store_upto(out + i, sigmoid(load_upto(x + i, m)), m); });
}

void scale(const float* x, float factor, int64_t n, float* out) {
  stretches(n, [&](int64_t i, int64_t m) { store_upto(out + i, load_upto(x + i, m) * set1(factor), m); });
}

void scale_add(const float* x, float factor, int64_t n, float* sum) {
  stretches(n, [&](int64_t i, int64_t m) {
    store_upto(sum + i, fma(load_upto(x + i, m), set1(factor), load_upto(sum + i, m)), m);
  });
}

void exp_row(const float* x, int64_t n, float* out) {
  stretches(n, [&](int64_t i, int64_t m) { store_upto(out + i, exp(load_upto(x + i, m)), m); });
}

void log_decay(const float* a, const float* a_log, const float* dt_bias, int64_t n, float* out) {
  stretches(n, [&](int64_t i, int64_t m) {
    const Vec rate = exp(load_upto(a_log + i, m));
    store_upto(out + i, (set1(0.0f) - rate) * softplus(load_upto(a + i, m) + load_upto(dt_bias + i, m)), m);
  });
}

void rope(float* head, const float* cos_sin, int64_t half) {
  float cosines[kLanes], sines[kLanes];
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t block = half - i < kLanes ? half - i : kLanes;
    for (int64_t j = 0; j < block; ++j) cosines[j] = cos_sin[2 * (i + j)], sines[j] = cos_sin[2 * (i + j) + 1];
    stretches(block, [&](int64_t j, int64_t m) {
      const Vec c = load_upto(cosines + j, m), s = load_upto(sines + j, m);
      const Vec x = load_upto(head + i + j, m), y = load_upto(head + half + i + j, m);
      store_upto(head + i + j, fma(x, c, set1(0.0f) - y * s), m);
      store_upto(head + half + i + j, fma(y, c, x * s), m);
    });
  }
}

// ── functions of a row ──────────────────────────────────────────────────────────────────────────────────────────

// Sixteen virtual lanes, whatever the register width.
struct Lanes {
  static constexpr int parts = kLanes / Vec::width;
  Vec part[parts];
};

inline Lanes fill(float x) {
  Lanes lanes;
  for (Vec& part : lanes.part) part = set1(x);
  return lanes;
}

// Combines lanes i and i + 8, then i and i + 4, then 2, then 1.
template <class Combine>
inline float reduce(const Lanes& lanes, const Combine& combine) {
  float x[kLanes];
  for (int part = 0; part < Lanes::parts; ++part) store(x + part * Vec::width, lanes.part[part]);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = combine(x[i], x[i + half]);
  }
  return x[0];
}

inline float add1(float a, float b) { return a + b; }
inline float max1(float a, float b) { return a > b ? a : b; }

// Element i of the row belongs to lane i % 16; each lane takes its elements in order.
template <class Step>
inline Lanes accumulate(int64_t n, float start, const Step& step) {
  Lanes lanes = fill(start);
  int part = 0;
  stretches(n, [&](int64_t i, int64_t m) {
    lanes.part[part] = step(lanes.part[part], i, m);
    part = part + 1 == Lanes::parts ? 0 : part + 1;
  });
  return lanes;
}

inline float sum_of_squares(const float* x, int64_t n) {
  return reduce(accumulate(n, 0.0f,
                           [&](Vec sum, int64_t i, int64_t m) {
                             const Vec value = load_upto(x + i, m);
                             return fma(value, value, sum);
                           }),
                add1);
}

void rms_norm(const float* x, const float* weight, const float* gate, float eps, float offset, int64_t n, float* out) {
  const float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
  stretches(n, [&](int64_t i, int64_t m) {
    Vec y = load_upto(x + i, m) * set1(inverse) * (set1(offset) + load_upto(weight + i, m));
    if (gate != nullptr) y = y * silu(load_upto(gate + i, m));
    store_upto(out + i, y, m);
  });
}

void l2_norm(const float* x, float factor, int64_t n, float* out) {
  const float inverse = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) + 1e-6f);
  stretches(n, [&](int64_t i, int64_t m) {
    store_upto(out + i, load_upto(x + i, m) * set1(inverse) * set1(factor), m);
  });
}

inline float maximum_of(const float* x, int64_t n) {
  const int64_t whole = n / kLanes * kLanes;
  const auto step = [&](Vec top, int64_t i, int64_t) { return max(top, load(x + i)); };
  float maximum = reduce(accumulate(whole, -kInfinity, step), max1);
  for (int64_t i = whole; i < n; ++i) maximum = max1(maximum, x[i]);
  return maximum;
}

// out = e^(x - maximum); returns their sum. Lanes past the end add nothing.
inline float exponentials(const float* x, float maximum, int64_t n, float* out) {
  stretches(n, [&](int64_t i, int64_t m) { store_upto(out + i, exp(load_upto(x + i, m) - set1(maximum)), m); });
  return reduce(accumulate(n, 0.0f, [&](Vec sum, int64_t i, int64_t m) { return sum + load_upto(out + i, m); }), add1);
}

void softmax(const float* x, int64_t n, float* out) {
  const float sum = exponentials(x, maximum_of(x, n), n, out);
  stretches(n, [&](int64_t i, int64_t m) { store_upto(out + i, load_upto(out + i, m) / set1(sum), m); });
}

// ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────

inline Vec widen_upto(const std::uint16_t* p, int64_t n) {
  if (n == Vec::width) return widen(p);
  std::uint16_t copy[Vec::width] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return widen(copy);
}
inline Vec widen_upto(const float* p, int64_t n) { return load_upto(p, n); }

template <class T>
void load_keys_as(const T* keys, int64_t stride, int64_t count, int64_t depth, float* panels) {
  for (int64_t key = 0; key < count || key % ft::kPanel != 0; key += Vec::width) {
    float* panel = panels + key / ft::kPanel * depth * ft::kPanel + key % ft::kPanel;
    stretches(depth, [&](int64_t i, int64_t m) {
      Vec rows[Vec::width];
      for (int j = 0; j < Vec::width; ++j) {
        rows[j] = key + j < count ? widen_upto(keys + (key + j) * stride + i, m) : set1(0.0f);
      }
      transpose(rows);
      for (int j = 0; j < m; ++j) store(panel + (i + j) * ft::kPanel, rows[j]);
    });
  }
}

template <class T>
void load_values_as(const T* values, int64_t stride, int64_t count, int64_t depth, float* panels) {
  for (int64_t column = 0; column < depth; column += ft::kPanel) {
    const int64_t columns = depth - column < ft::kPanel ? depth - column : ft::kPanel;
    for (int64_t key = 0; key < count; ++key) {
      float* row = panels + column * ft::kPage + key * ft::kPanel;
      for (int64_t j = columns; j < ft::kPanel; ++j) row[j] = 0.0f;
      stretches(columns, [&](int64_t j, int64_t m) {
        store_upto(row + j, widen_upto(values + key * stride + column + j, m), m);
      });
    }
  }
}

void load_keys(const void* keys, bool bfloat, int64_t stride, int64_t count, int64_t depth, float* panels) {
  if (bfloat) {
    load_keys_as(static_cast<const std::uint16_t*>(keys), stride, count, depth, panels);
  } else {
    load_keys_as(static_cast<const float*>(keys), stride, count, depth, panels);
  }
}

void load_values(const void* values, bool bfloat, int64_t stride, int64_t count, int64_t depth, float* panels) {
  if (bfloat) {
    load_values_as(static_cast<const std::uint16_t*>(values), stride, count, depth, panels);
  } else {
    load_values_as(static_cast<const float*>(values), stride, count, depth, panels);
  }
}

void page_softmax(float* scores, int64_t valid, float* maximum, float* sum) {
  for (int64_t i = valid; i < ft::kPage; ++i) scores[i] = -kInfinity;
  *maximum = maximum_of(scores, ft::kPage);
  *sum = exponentials(scores, *maximum, ft::kPage, scores);
}

void page_merge(float page_maximum, float page_sum, const float* page_out, int64_t n, float* maximum, float* sum,
                float* out) {
  const float top = max1(*maximum, page_maximum);
  const float keep = exp1(*maximum - top), take = exp1(page_maximum - top);
  *maximum = top;
  *sum = __builtin_fmaf(page_sum, take, *sum * keep);
  stretches(n, [&](int64_t i, int64_t m) {
    store_upto(out + i, fma(load_upto(page_out + i, m), set1(take), load_upto(out + i, m) * set1(keep)), m);
  });
}

// ── recurrences ─────────────────────────────────────────────────────────────────────────────────────────────────

void delta_step(float* memory, int64_t stride, const float* q, const float* k, const float* v, float decay, float beta,
                int64_t depth, float* out) {
  constexpr int parts = ft::kPanel / Vec::width;
  constexpr int together = parts < 4 ? parts : 4;
  const Vec keep = set1(decay);
  for (int base = 0; base < parts; base += together) {
    Vec recalled[together], result[together], delta[together];
    for (int j = 0; j < together; ++j) recalled[j] = result[j] = set1(0.0f);
    float* column = memory + base * Vec::width;
    for (int64_t i = 0; i < depth; ++i) {
      for (int j = 0; j < together; ++j) {
        recalled[j] = fma(load(column + i * stride + j * Vec::width) * keep, set1(k[i]), recalled[j]);
      }
    }
    for (int j = 0; j < together; ++j) {
      delta[j] = (load(v + (base + j) * Vec::width) - recalled[j]) * set1(beta);
    }
    for (int64_t i = 0; i < depth; ++i) {
      for (int j = 0; j < together; ++j) {
        float* cell = column + i * stride + j * Vec::width;
        const Vec updated = fma(set1(k[i]), delta[j], load(cell) * keep);
        store(cell, updated);
        result[j] = fma(updated, set1(q[i]), result[j]);
      }
    }
    for (int j = 0; j < together; ++j) store(out + (base + j) * Vec::width, result[j]);
  }
}

void conv_step(const float* const* taps, const float* weights, int64_t stride, int64_t width, int64_t n, float* out) {
  stretches(n, [&](int64_t i, int64_t m) {
    Vec sum = set1(0.0f);
    for (int64_t tap = 0; tap < width; ++tap) {
      sum = fma(load_upto(taps[tap] + i, m), load_upto(weights + tap * stride + i, m), sum);
    }
    store_upto(out + i, silu(sum), m);
  });
}

// ── matrix products ─────────────────────────────────────────────────────────────────────────────────────────────

template <bool kBfloat>
inline void load_weights(const void* panel, int64_t i, int lane, Vec& low, Vec& high) {
  if constexpr (kBfloat) {
    load_pair(static_cast<const std::uint16_t*>(panel) + i * ft::kPanel + 2 * lane, low, high);
  } else {
    low = load(static_cast<const float*>(panel) + i * ft::kPanel + lane);
    high = load(static_cast<const float*>(panel) + i * ft::kPanel + ft::kHalf + lane);
  }
}

template <bool kBfloat, int kRows>
void tile(const float* a, const void* panel, int64_t depth, float* c) {
  // As many columns at once as the registers hold; few rows take the panel in one pass over memory.
  constexpr int all = kLanes / Vec::width;
  constexpr int parts = kRows * 2 * all <= Vec::accumulators ? all : 1;
  constexpr int64_t row_bytes = ft::kPanel * (kBfloat ? 2 : 4);
  for (int lane = 0; lane < kLanes; lane += parts * Vec::width) {
    Vec low[parts][kRows], high[parts][kRows];
    for (int part = 0; part < parts; ++part) {
      for (int row = 0; row < kRows; ++row) low[part][row] = high[part][row] = set1(0.0f);
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < depth; ++i) {
      // Panels follow one another in memory: reading past this one's end warms the next.
      if constexpr (kRows <= 4) __builtin_prefetch(static_cast<const char*>(panel) + (i + 128) * row_bytes);
      for (int part = 0; part < parts; ++part) {
        Vec w0, w1;
        load_weights<kBfloat>(panel, i, lane + part * Vec::width, w0, w1);
        for (int row = 0; row < kRows; ++row) {
          const Vec x = set1(a[i * kRows + row]);
          low[part][row] = fma(x, w0, low[part][row]);
          high[part][row] = fma(x, w1, high[part][row]);
        }
      }
    }
    for (int part = 0; part < parts; ++part) {
      for (int row = 0; row < kRows; ++row) {
        float* out = c + row * ft::kPanel + lane + part * Vec::width;
        store(out, low[part][row]);
        store(out + ft::kHalf, high[part][row]);
      }
    }
  }
}

template <bool kBfloat, int kRows>
constexpr void fill_tiles(ft::Kernels& table) {
  table.tile[kBfloat][kRows - 1] = tile<kBfloat, kRows>;
  if constexpr (kRows < Vec::tile_rows) fill_tiles<kBfloat, kRows + 1>(table);
}

constexpr ft::Kernels make_table(const char* name) {
  ft::Kernels table{};
  table.name = name;
  table.tile_rows = Vec::tile_rows;
  fill_tiles<false, 1>(table);
  fill_tiles<true, 1>(table);
  table.silu_mul = silu_mul;
  table.sigmoid_mul = sigmoid_mul;
  table.sigmoid = sigmoid_row;
  table.scale = scale;
  table.scale_add = scale_add;
  table.exp = exp_row;
  table.log_decay = log_decay;
  table.rms_norm = rms_norm;
  table.l2_norm = l2_norm;
  table.softmax = softmax;
  table.rope = rope;
  table.load_keys = load_keys;
  table.load_values = load_values;
  table.page_softmax = page_softmax;
  table.page_merge = page_merge;
  table.delta_step = delta_step;
  table.conv_step = conv_step;
  return table;
}

}  // namespace
