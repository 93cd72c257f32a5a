#if defined(__x86_64__)
#include "vec_avx512.h"

#include "kernels_body.h"

namespace ft {
const Kernels& avx512_kernels() {
  static constexpr Kernels table = make_table("avx512");
  return table;
}
}  // namespace ft
#endif
