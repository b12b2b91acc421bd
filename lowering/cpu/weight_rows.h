// Rows of a stored weight, and what all forms of their products share (`weight_only_mm.h`).
#ifndef MXCOMPILE_WEIGHT_ROWS_H
#define MXCOMPILE_WEIGHT_ROWS_H

#include "lanes.h"

MXCOMPILE_VECTORIZED

namespace mxcompile {

constexpr int64_t ROWS = 8;        // of x that share one decoding of the weight
constexpr int64_t LINE_BYTES = 64;  // of the cache
constexpr int64_t AHEAD = 4096;    // bytes of a row between what is decoded and what is fetched from memory
constexpr int64_t TURN = 64;       // rows of the weight that a thread takes at a time, whichever is free
constexpr int64_t BETWEEN = 128;   // rows between those decoded together: as many streams, each read in order
constexpr int64_t LITTLE = 1 << 15;  // numbers that are not worth waking threads for

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

// `sums(m, count, rows, weights, found)` finds those of `count` ≤ ROWS rows of x from row m on and of `group` rows of the
// weight at a time, those of a row of the weight ROWS apart. The rows of a group lie `between` apart, as often as n has
// `group` times as many rows; the rest lie together.
template <int64_t group, class Rows, class Bias, class Out, class Sums>
inline void for_outputs(Rows weight, const Bias* bias, int64_t m, int64_t n, int threads, Out* out, Sums sums) {
  const int64_t turns = 2 * threads, most = n / (turns * group);  // each thread has some turns, however few rows
  const int64_t between = most > BETWEEN ? BETWEEN : most > 1 ? most : 1;
  const int64_t apart = n / (group * between) * between, rest = n - apart * group;
#pragma omp parallel for num_threads(threads) if (n * weight.k > LITTLE) \
    schedule(dynamic, between * group > TURN ? between : TURN / group)
  for (int64_t index = 0; index < apart + (rest + group - 1) / group; index++) {
    const bool together = index >= apart;
    const int64_t first = together ? index * group : index / between * between * group + index % between;
    const int64_t weights = together && n - first < group ? n - first : group;
    Rows rows = weight.from(first);
    rows.between = together ? 1 : between;
    for (int64_t start = 0; start < m; start += ROWS) {
      float found[group * ROWS];
      const int64_t count = m - start < ROWS ? m - start : ROWS;
      sums(start, count, rows, weights, found);
      for (int64_t w = 0; w < weights; w++)
        for (int64_t i = 0; i < count; i++) {
          const int64_t row = first + w * rows.between;
          const float sum = found[w * ROWS + i];
          narrow(bias ? sum + widen(bias[row]) : sum, out[(start + i) * n + row]);
        }
    }
  }
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
