#include "vec_scalar.h"

#include "kernels_body.h"

namespace ft {
const Kernels& scalar_kernels() {
  static constexpr Kernels table = make_table("scalar");
  return table;
}
}  // namespace ft
