// Rows of a stored weight, and what all forms of their products share (`weight_only_mm.h`).
#ifndef MXCOMPILE_WEIGHT_ROWS_H
#define MXCOMPILE_WEIGHT_ROWS_H

#include "lanes.h"

MXCOMPILE_VECTORIZED

namespace mxcompile {

constexpr int64_t ROWS = 8;        // of x that share one decoding of the weight
constexpr int64_t LINE_BYTES = 64;  // of the cache
constexpr int64_t AHEAD = 4096;    // bytes of a row between what is decoded and what is fetched from memory

// Codes and scales of rows of k numbers, `between` rows from one to the next that is decoded with it. whole: what divides
// the scales of two levels, `apart` numbers from one row to the next; null if it is 1.
template <class Elem>
struct Weight {
  const uint8_t *codes, *scales;
  int64_t k;
  const float* whole = nullptr;
  int64_t apart = 0;
  int64_t between = 1;

  int64_t width() const { return row_bytes<Elem>(k); }
  int64_t blocks() const { return num_blocks(k, Elem::block); }

  // The weight from its row n on.
  Weight from(int64_t n) const {
    return {codes + n * width(), scales + n * blocks(), k, whole ? whole + n * apart : whole, apart, between};
  }
  // From the w-th of the rows that are decoded together on.
  Weight after(int64_t w) const { return from(w * between); }

  // A scale of the first row over what divides it.
  float divided(float scale) const { return Elem::two_level && whole ? scale / *whole : scale; }

  // How far behind byte `at` of `weights` rows to fetch: at the end of rows that lie together, the rows after these.
  int64_t soon(int64_t at, int64_t weights) const {
    return at + AHEAD < width() || between > 1 ? AHEAD : AHEAD + (weights - 1) * width();
  }

  // The sums of products with scales of two levels, `stride` apart for rows of the weight, over what divides them.
  void divide(int64_t weights, int64_t count, int64_t stride, float* sums) const {
    if (!Elem::two_level || !whole) return;
    for (int64_t w = 0; w < weights; w++)
      for (int64_t i = 0; i < count; i++) sums[w * stride + i] = after(w).divided(sums[w * stride + i]);
  }
};

// Whether products with any element, and sums of some, are normal numbers: exponents within 2^±60, or no number, which
// magnitudes from `no_number` on are.
template <class X>
inline bool ordinary(const X* x, int64_t count, uint32_t no_number = INFINITY_BITS) {
  uint32_t others = 0;
#pragma omp simd reduction(| : others)
  for (int64_t i = 0; i < count; i++) {
    const uint32_t size = fp32_bits(magnitude(x[i])), least = (127 - 60) << 23, most = (127 + 60) << 23;
    others |= static_cast<uint32_t>(size - least >= most - least) & static_cast<uint32_t>(size - 1 < no_number - 1);
  }
  return !others;
}

// The first number of a line of the cache at or behind `memory`: what lies across two takes twice as long to load.
template <class T>
inline T* on_a_line(void* memory) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory);
  return reinterpret_cast<T*>((address + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES);
}

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
