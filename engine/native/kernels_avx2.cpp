#if defined(__x86_64__)
#include "vec_avx2.h"

#include "kernels_body.h"

namespace ft {
const Kernels& avx2_kernels() {
  static constexpr Kernels table = make_table("avx2");
  return table;
}
}  // namespace ft
#endif
