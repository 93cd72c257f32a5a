// Depthwise convolution and the gated delta rule, one token after another for prefill and decode alike, so that a state
// inside a chunk is a plain copy.
#include <cstring>

#include "context.h"

namespace ft {
namespace {

// Calls body(slot) for every snapshot wanted after `count` rows of a sequence, and for its own slot after its last row.
template <class Body>
void states_after(const Batch& batch, std::int64_t sequence, const Segment& segment, std::int64_t count,
                  const Body& body) {
  for (std::int64_t i = 0; i < batch.snapshot_count; ++i) {
    const std::int32_t* snapshot = batch.snapshots + 3 * i;
    if (snapshot[0] == sequence && snapshot[1] == count) body(snapshot[2]);
  }
  if (count == segment.rows) body(segment.slot);
}

constexpr std::int64_t kChannels = 64;  // channels of a convolution task

}  // namespace

void conv(Context& context, const float* x, std::int64_t channels, std::int64_t width, const float* weight,
          float* state, std::int64_t slots, const Batch& batch, float* y) {
  check_segments(batch);
  check_slots(batch, slots);
  const std::int64_t keep = width - 1, blocks = ceil_div(channels, kChannels);
  // Weights [width][kChannels], remembered inputs [keep][kChannels], tap pointers.
  const std::int64_t area = (width + keep) * kChannels + 2 * width;
  float* areas = context.threads.reserve(area * context.pool.size());
  context.pool.run(batch.sequences * blocks, [&](std::int64_t task, int thread) {
    const std::int64_t sequence = task / blocks, first = task % blocks * kChannels;
    const std::int64_t n = channels - first < kChannels ? channels - first : kChannels;
    const Segment segment = segment_of(batch, sequence);
    if (segment.rows == 0) return;
    const float** taps = reinterpret_cast<const float**>(areas + thread * area);
    float* weights = areas + thread * area + 2 * width;
    float* history = weights + width * kChannels;
    const float* start = state + (segment.slot * channels + first) * keep;
    for (std::int64_t channel = 0; channel < n; ++channel) {
      for (std::int64_t j = 0; j < width; ++j) weights[j * kChannels + channel] = weight[(first + channel) * width + j];
      for (std::int64_t j = 0; j < keep; ++j) history[j * kChannels + channel] = start[channel * keep + j];
    }
    const float* rows = x + segment.first * channels + first;
    // Input `index` of the sequence of remembered inputs followed by this chunk's.
    const auto input = [&](std::int64_t index) {
      return index < keep ? history + index * kChannels : rows + (index - keep) * channels;
    };
    for (std::int64_t row = 0; row < segment.rows; ++row) {
      for (std::int64_t j = 0; j < width; ++j) taps[j] = input(row + j);
      context.kernels.conv_step(taps, weights, kChannels, width, n, y + (segment.first + row) * channels + first);
      states_after(batch, sequence, segment, row + 1, [&](std::int64_t slot) {
        float* target = state + (slot * channels + first) * keep;
        for (std::int64_t j = 0; j < keep; ++j) {
          const float* source = input(row + 1 + j);
          for (std::int64_t channel = 0; channel < n; ++channel) target[channel * keep + j] = source[channel];
        }
      });
    }
  });
}

void gated_delta(Context& context, const float* q, const float* k, const float* v, const float* decay,
                 const float* beta, const DeltaShape& shape, float* state, std::int64_t slots, const Batch& batch,
                 float* y) {
  check_segments(batch);
  check_slots(batch, slots);
  const Kernels& kernels = context.kernels;
  const std::int64_t rows = batch.rows, depth = shape.key_dim, key_width = shape.key_heads * depth;
  float* unit_q = context.inner.reserve(rows * (2 * key_width + shape.value_heads));
  float* unit_k = unit_q + rows * key_width;
  float* factors = unit_k + rows * key_width;
  const float query_scale = 1.0f / __builtin_sqrtf(static_cast<float>(depth));
  over_rows(context, rows, 2 * key_width, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t head = begin * shape.key_heads; head < end * shape.key_heads; ++head) {
      kernels.l2_norm(q + head * depth, query_scale, depth, unit_q + head * depth);
      kernels.l2_norm(k + head * depth, 1.0f, depth, unit_k + head * depth);
    }
    for (std::int64_t row = begin; row < end; ++row) {
      kernels.exp(decay + row * shape.value_heads, shape.value_heads, factors + row * shape.value_heads);
    }
  });

  const std::int64_t blocks = ceil_div(shape.value_dim, kPanel), group = shape.value_heads / shape.key_heads;
  const std::int64_t area = depth * kPanel;
  float* areas = context.threads.reserve(area * context.pool.size());
  context.pool.run(batch.sequences * shape.value_heads * blocks, [&](std::int64_t task, int thread) {
    const std::int64_t sequence = task / (shape.value_heads * blocks), head = task / blocks % shape.value_heads;
    const std::int64_t first = task % blocks * kPanel;
    const std::int64_t columns = shape.value_dim - first < kPanel ? shape.value_dim - first : kPanel;
    const std::size_t bytes = static_cast<std::size_t>(columns) * sizeof(float);
    const Segment segment = segment_of(batch, sequence);
    if (segment.rows == 0) return;
    const auto place = [&](std::int64_t slot) {
      return state + (slot * shape.value_heads + head) * depth * shape.value_dim + first;
    };
    // A single token of a whole panel works in place; otherwise a compact copy stays in the nearest cache.
    const bool in_place = segment.rows == 1 && columns == kPanel;
    float* memory = in_place ? place(segment.slot) : areas + thread * area;
    const std::int64_t stride = in_place ? shape.value_dim : kPanel;
    if (!in_place) {
      if (columns < kPanel) std::memset(memory, 0, static_cast<std::size_t>(area) * sizeof(float));
      for (std::int64_t i = 0; i < depth; ++i) {
        std::memcpy(memory + i * kPanel, place(segment.slot) + i * shape.value_dim, bytes);
      }
    }
    alignas(64) float value[kPanel] = {}, result[kPanel];
    for (std::int64_t row = 0; row < segment.rows; ++row) {
      const std::int64_t at = segment.first + row, value_head = at * shape.value_heads + head;
      const std::int64_t key = at * key_width + head / group * depth;
      std::memcpy(value, v + value_head * shape.value_dim + first, bytes);
      kernels.delta_step(memory, stride, unit_q + key, unit_k + key, value, factors[value_head], beta[value_head],
                         depth, result);
      std::memcpy(y + value_head * shape.value_dim + first, result, bytes);
      states_after(batch, sequence, segment, row + 1, [&](std::int64_t slot) {
        if (place(slot) == memory) return;
        for (std::int64_t i = 0; i < depth; ++i) {
          std::memcpy(place(slot) + i * shape.value_dim, memory + i * stride, bytes);
        }
      });
    }
  });
}

}  // namespace ft
