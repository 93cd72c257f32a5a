#if defined(__x86_64__)
#include "vec_avx512.h"

#include "dots_vnni.h"

namespace {

// Of the AMX unit, which multiplies bytes of up to 16 rows; the system must have let the process use it.
template <int kRows>
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {  // six of sums, one of activations, one of weights
      shape.row_bytes[tile] = tile == 6 ? ft::kBlock : 64;
      shape.rows[tile] = tile == 7 ? ft::kBlock / 4 : kHeight;
    }
    written(&shape);
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // sums[row][column] = sum over k of x[row][k] * weights[k / 4][column][k % 4].
  void multiply(const std::int32_t* x, const std::int8_t* weights, std::int32_t* sums) const {
    constexpr int from = kHeight * ft::kBlock / 4, to = kHeight * ft::kPanel;
    written(weights);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_loadd(7, weights, 128);
    _tile_loadd(6, x, 32);
    _tile_dpbssd(0, 6, 7);
    if constexpr (kCount > 1) {
      _tile_loadd(6, x + from, 32);
      _tile_dpbssd(1, 6, 7);
    }
    if constexpr (kCount > 2) {
      _tile_loadd(6, x + 2 * from, 32);
      _tile_dpbssd(2, 6, 7);
    }
    _tile_loadd(7, weights + 64, 128);
    _tile_loadd(6, x, 32);
    _tile_dpbssd(3, 6, 7);
    if constexpr (kCount > 1) {
      _tile_loadd(6, x + from, 32);
      _tile_dpbssd(4, 6, 7);
    }
    if constexpr (kCount > 2) {
      _tile_loadd(6, x + 2 * from, 32);
      _tile_dpbssd(5, 6, 7);
    }
    _tile_stored(0, sums, 128);
    if constexpr (kCount > 1) _tile_stored(1, sums + to, 128);
    if constexpr (kCount > 2) _tile_stored(2, sums + 2 * to, 128);
    _tile_stored(3, sums + 16, 128);
    if constexpr (kCount > 1) _tile_stored(4, sums + to + 16, 128);
    if constexpr (kCount > 2) _tile_stored(5, sums + 2 * to + 16, 128);
  }

 private:
  static constexpr int kCount = kRows <= 16 ? 1 : kRows <= 32 && kRows % 2 == 0 ? 2 : 3, kHeight = kRows / kCount;
  static_assert(kHeight <= 16 && kHeight * kCount == kRows);

  // Compilers do not know that the instructions read memory.
  static void written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }
};

struct Amx {
  static constexpr int rows = 16, from = 4;
  template <int kRows>
  using Tiles = ::Tiles<kRows>;
};

}  // namespace

namespace ft {
const Dots& vbmi_dots() {
  static constexpr Dots table = make_dots();
  return table;
}

const Dots& amx_dots() {
  static constexpr Dots table = make_dots<Amx>();
  return table;
}
}  // namespace ft
#endif
