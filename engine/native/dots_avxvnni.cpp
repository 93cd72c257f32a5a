#if defined(__x86_64__)
#include "vec_avx2.h"

#include "dots_vnni.h"

namespace ft {
const Dots& avxvnni_dots() {
  static constexpr Dots table = make_dots();
  return table;
}
}  // namespace ft
#endif
