// The plain C interface that engine/native/library.py loads. Calls return 0, or 1 for a fault of the caller and 2 for
// lack of resources, with the text in ft_error(). Any change here, to Batch or to arithmetic raises kAbi.
#include <cstdio>
#include <cstring>
#include <system_error>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "executor.h"

#define FT_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kAbi = 4;

using ft::Context;
using std::int32_t;
using std::int64_t;

#if defined(__x86_64__)
bool vnni() { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"); }
bool avxvnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1u << 4) != 0;
}
bool vbmi() { return vnni() && __builtin_cpu_supports("avx512vbmi"); }
#endif

// Whether the processor multiplies tiles of bytes, and the system lets this process: its threads' state grows by 8 KiB.
bool tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned tile_int8 = 3u << 24;  // AMX-TILE and AMX-INT8
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & tile_int8) == tile_int8 &&
         syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

bool supported(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f");
  if (std::strcmp(name, "amx") == 0) return avx512 && vbmi() && tiles();
  if (std::strcmp(name, "avx512") == 0) return avx512;
  if (std::strcmp(name, "avx2") == 0) return avx2;
#endif
  return std::strcmp(name, "scalar") == 0;
}

const ft::Kernels& kernels_named(const char* name) {
#if defined(__x86_64__)
  if (std::strcmp(name, "amx") == 0 || std::strcmp(name, "avx512") == 0) return ft::avx512_kernels();
  if (std::strcmp(name, "avx2") == 0) return ft::avx2_kernels();
#endif
  return ft::scalar_kernels();
}

// All give the same bits.
const ft::Dots& dots_named(const char* name) {
#if defined(__x86_64__)
  if (std::strcmp(name, "amx") == 0) return ft::amx_dots();
  if (std::strcmp(name, "avx512") == 0 && vbmi()) return ft::vbmi_dots();
  if (std::strcmp(name, "avx512") == 0 && vnni()) return ft::vnni_dots();
  if (std::strcmp(name, "scalar") != 0) return avxvnni() ? ft::avxvnni_dots() : ft::avx2_dots();
#endif
  return ft::scalar_dots();
}

template <class Body>
int guarded(Context* context, const Body& body) {
  std::lock_guard<std::mutex> lock(context->mutex);
  ft::FlushDenormals flush;
  try {
    body();
    return 0;
  } catch (const ft::Invalid& error) {
    context->error = error.what();
    return 1;
  } catch (const std::bad_alloc&) {
    context->error = "out of memory";
    return 2;
  }
}

}  // namespace

FT_API int ft_abi() { return kAbi; }

// Whether this processor runs the instruction set: "scalar", "avx2", "avx512", or for experts "amx".
FT_API int ft_supported(const char* name) { return supported(name) ? 1 : 0; }

// Null when the instruction set is not supported or threads cannot be started.
FT_API Context* ft_create(const char* instruction_set, int threads) {
  if (!supported(instruction_set) || threads < 1) return nullptr;
  try {
    return new Context(kernels_named(instruction_set), threads);
  } catch (const std::system_error&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

FT_API void ft_destroy(Context* context) { delete context; }

FT_API const char* ft_error(Context* context) { return context->error.c_str(); }

// Asks for large pages; only a hint.
FT_API void ft_large_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  madvise(memory, static_cast<std::size_t>(bytes), MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

// Null when threads cannot be started or memory is short.
FT_API ft::Executor* ft_executor_create(const char* instruction_set, const ft::ExecutorSpec* spec) {
  try {
    return new ft::Executor(kernels_named(instruction_set), dots_named(instruction_set), *spec);
  } catch (const std::system_error&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

FT_API void ft_executor_destroy(ft::Executor* executor) { delete executor; }

// 1 with the text in `error` for a plan that cannot be followed.
FT_API int ft_executor_run(ft::Executor* executor, int64_t layer, int64_t rows, const float* x, const int32_t* plan,
                           const float* weights, float* y, char* error, int64_t room) {
  try {
    executor->run(layer, rows, x, plan, weights, y);
    return 0;
  } catch (const ft::Invalid& invalid) {
    std::snprintf(error, static_cast<std::size_t>(room), "%s", invalid.what());
    return 1;
  }
}

FT_API std::uint64_t ft_executor_read(ft::Executor* executor, const void* memory, int64_t bytes) {
  return executor->read(memory, bytes);
}

// 1 with the text in `error` when a request from the mailbox failed since the last call.
FT_API int ft_executor_error(ft::Executor* executor, char* error, int64_t room) {
  const std::string text = executor->take_error();
  std::snprintf(error, static_cast<std::size_t>(room), "%s", text.c_str());
  return text.empty() ? 0 : 1;
}

// Other threads compute on the same cores between requests.
FT_API void ft_executor_share_cores(ft::Executor* executor) { executor->share_cores(); }

FT_API void ft_executor_rouse(ft::Executor* executor) { executor->rouse(); }

FT_API int64_t ft_executor_silence(const ft::Executor* executor) { return executor->silence(); }

FT_API int ft_pack(Context* c, const void* source, int bfloat, int64_t out, int64_t in, void* target) {
  return guarded(c, [&] { ft::pack_matrix(*c, source, bfloat != 0, out, in, target); });
}

FT_API int ft_linear(Context* c, const float* x, int64_t rows, const void* weight, int bfloat, int64_t out, int64_t in,
                     const float* bias, float* y) {
  return guarded(c, [&] { ft::linear(*c, x, rows, {weight, bfloat != 0, out, in}, bias, y); });
}

FT_API int ft_pack_experts(Context* c, const void* gate_up, const void* down, int bfloat, int64_t count, int64_t hidden,
                           int64_t inner, void* packed_gate_up, void* packed_down) {
  return guarded(c, [&] {
    ft::pack_experts(*c, gate_up, down, {packed_gate_up, packed_down, bfloat != 0, count, hidden, inner});
  });
}

FT_API int ft_experts(Context* c, const float* x, const int32_t* ids, const float* weights, int64_t rows, int64_t ranks,
                      const void* gate_up, const void* down, int bfloat, int64_t count, int64_t hidden, int64_t inner,
                      float* y) {
  return guarded(c, [&] {
    ft::experts(*c, x, ids, weights, rows, ranks, {gate_up, down, bfloat != 0, count, hidden, inner}, y);
  });
}

FT_API int ft_route(Context* c, const float* logits, int64_t rows, int64_t count, int64_t ranks, int renormalize,
                    int32_t* ids, float* weights) {
  return guarded(c, [&] { ft::route(*c, logits, rows, count, ranks, renormalize != 0, ids, weights); });
}

FT_API int ft_rms_norm(Context* c, const float* x, const float* weight, const float* gate, float eps, float offset,
                       int64_t rows, int64_t n, float* y) {
  return guarded(c, [&] {
    ft::over_rows(*c, rows, n, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* row_gate = gate == nullptr ? nullptr : gate + row * n;
        c->kernels.rms_norm(x + row * n, weight, row_gate, eps, offset, n, y + row * n);
      }
    });
  });
}

FT_API int ft_silu_mul(Context* c, const float* gate_up, int64_t rows, int64_t n, float* y) {
  return guarded(c, [&] {
    ft::over_rows(*c, rows, n, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        c->kernels.silu_mul(gate_up + 2 * row * n, gate_up + (2 * row + 1) * n, n, y + row * n);
      }
    });
  });
}

// gate is [rows][n], or [rows] when `shared`.
FT_API int ft_sigmoid_mul(Context* c, const float* x, const float* gate, int shared, int64_t rows, int64_t n,
                          float* y) {
  return guarded(c, [&] {
    ft::over_rows(*c, rows, n, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (shared != 0) {
          float factor;
          c->kernels.sigmoid(gate + row, 1, &factor);
          c->kernels.scale(x + row * n, factor, n, y + row * n);
        } else {
          c->kernels.sigmoid_mul(x + row * n, gate + row * n, n, y + row * n);
        }
      }
    });
  });
}

FT_API int ft_rope(Context* c, float* x, const int32_t* positions, const float* table, int64_t context, int64_t half,
                   int64_t rows, int64_t heads, int64_t head_dim) {
  return guarded(c, [&] {
    for (int64_t row = 0; row < rows; ++row) {
      if (positions[row] < 0 || positions[row] >= context) {
        throw ft::Invalid("position " + std::to_string(positions[row]) + " is beyond the rotary table of " +
                          std::to_string(context));
      }
    }
    ft::over_rows(*c, rows, heads * head_dim, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin * heads; head < end * heads; ++head) {
        c->kernels.rope(x + head * head_dim, table + positions[head / heads] * half * 2, half);
      }
    });
  });
}

FT_API int ft_gdn_gates(Context* c, const float* a, const float* b, const float* a_log, const float* dt_bias,
                        int64_t rows, int64_t heads, float* decay, float* beta) {
  return guarded(c, [&] {
    ft::over_rows(*c, rows, heads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        c->kernels.log_decay(a + row * heads, a_log, dt_bias, heads, decay + row * heads);
        c->kernels.sigmoid(b + row * heads, heads, beta + row * heads);
      }
    });
  });
}

FT_API int ft_conv(Context* c, const float* x, int64_t channels, int64_t width, const float* weight, float* state,
                   int64_t slots, const ft::Batch* batch, float* y) {
  return guarded(c, [&] { ft::conv(*c, x, channels, width, weight, state, slots, *batch, y); });
}

FT_API int ft_gated_delta(Context* c, const float* q, const float* k, const float* v, const float* decay,
                          const float* beta, int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,
                          float* state, int64_t slots, const ft::Batch* batch, float* y) {
  return guarded(c, [&] {
    ft::gated_delta(*c, q, k, v, decay, beta, {key_heads, value_heads, key_dim, value_dim}, state, slots, *batch, y);
  });
}

FT_API int ft_attention(Context* c, const float* q, int64_t heads, void* keys, void* values, int bfloat, int64_t pages,
                        int64_t kv_heads, int64_t head_dim, float scale, const ft::Batch* batch, float* y) {
  return guarded(c, [&] {
    ft::attention(*c, q, heads, {keys, values, bfloat != 0, pages, kv_heads, head_dim}, scale, *batch, y);
  });
}

FT_API int ft_write_pages(Context* c, const float* k, const float* v, void* keys, void* values, int bfloat,
                          int64_t pages, int64_t kv_heads, int64_t head_dim, const ft::Batch* batch) {
  return guarded(c, [&] { ft::write_pages(*c, k, v, {keys, values, bfloat != 0, pages, kv_heads, head_dim}, *batch); });
}

FT_API int ft_read(Context* c, const void* memory, int64_t bytes, std::uint64_t* sum) {
  return guarded(c, [&] { *sum = ft::read_all(c->pool, memory, bytes); });
}
