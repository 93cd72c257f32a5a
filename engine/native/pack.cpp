// Weights in the order in which the kernels read them: panels of 32 output columns, [depth][32].
#include "context.h"

namespace ft {
namespace {

// Fills one panel from up to kPanel weight rows of `depth` elements; a null row is zeros.
template <class T>
void pack_panel(const T* const* columns, std::int64_t depth, T* panel) {
  constexpr std::int64_t block = 128;
  for (std::int64_t start = 0; start < depth; start += block) {
    const std::int64_t end = start + block < depth ? start + block : depth;
    for (int column = 0; column < kPanel; ++column) {
      const T* source = columns[column];
      const int place = sizeof(T) == 2 ? 2 * (column % kHalf) + column / kHalf : column;
      for (std::int64_t i = start; i < end; ++i) panel[i * kPanel + place] = source == nullptr ? T(0) : source[i];
    }
  }
}

template <class T>
void pack_rows(Context& context, const T* source, std::int64_t out, std::int64_t in, T* target) {
  context.pool.run(ceil_div(out, kPanel), [&](std::int64_t panel, int) {
    const T* columns[kPanel];
    for (int j = 0; j < kPanel; ++j) {
      const std::int64_t row = panel * kPanel + j;
      columns[j] = row < out ? source + row * in : nullptr;
    }
    pack_panel(columns, in, target + panel * in * kPanel);
  });
}

// Gate columns in the first half of each panel and up columns of the same index in the second.
template <class T>
void pack_gate_up(Context& context, const T* source, std::int64_t inner, std::int64_t hidden, T* target) {
  context.pool.run(ceil_div(inner, kHalf), [&](std::int64_t panel, int) {
    const T* columns[kPanel];
    for (int j = 0; j < kHalf; ++j) {
      const std::int64_t row = panel * kHalf + j;
      columns[j] = row < inner ? source + row * hidden : nullptr;
      columns[kHalf + j] = row < inner ? source + (inner + row) * hidden : nullptr;
    }
    pack_panel(columns, hidden, target + panel * hidden * kPanel);
  });
}

template <class T>
void pack_experts_as(Context& context, const T* gate_up, const T* down, const Experts& e) {
  T* packed_gate_up = static_cast<T*>(const_cast<void*>(e.gate_up));
  T* packed_down = static_cast<T*>(const_cast<void*>(e.down));
  for (std::int64_t expert = 0; expert < e.count; ++expert) {
    pack_gate_up(context, gate_up + expert * 2 * e.inner * e.hidden, e.inner, e.hidden,
                 packed_gate_up + expert * ceil_div(e.inner, kHalf) * e.hidden * kPanel);
    pack_rows(context, down + expert * e.hidden * e.inner, e.hidden, e.inner,
              packed_down + expert * ceil_div(e.hidden, kPanel) * e.inner * kPanel);
  }
}

}  // namespace

void pack_matrix(Context& context, const void* source, bool bfloat, std::int64_t out, std::int64_t in, void* target) {
  if (bfloat) {
    pack_rows(context, static_cast<const std::uint16_t*>(source), out, in, static_cast<std::uint16_t*>(target));
  } else {
    pack_rows(context, static_cast<const float*>(source), out, in, static_cast<float*>(target));
  }
}

void pack_experts(Context& context, const void* gate_up, const void* down, const Experts& target) {
  if (target.bfloat) {
    pack_experts_as(context, static_cast<const std::uint16_t*>(gate_up), static_cast<const std::uint16_t*>(down),
                    target);
  } else {
    pack_experts_as(context, static_cast<const float*>(gate_up), static_cast<const float*>(down), target);
  }
}

}  // namespace ft
