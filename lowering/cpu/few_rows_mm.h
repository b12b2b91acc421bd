// Few rows times a weight that is not quantized, as it lies in memory:
//
//   out[m, n] = Σ_k x[m, k] · w[n, k] (+ bias[n])          in FP32, rounded once
//
// x is [M, K], w [N, K]. Threads share rows of w, each of which is read from memory once.
//
//   bf16 dot   AVX-512 with BF16: an instruction adds 32 products. Subnormal numbers are zeros, as for the vendor's GEMM
//   lanes      AVX2, NEON: BF16 becomes FP32, then FMAs
//   loops      other ISAs
#ifndef MXCOMPILE_FEW_ROWS_MM_H
#define MXCOMPILE_FEW_ROWS_MM_H

#include "bf16_dot.h"

MXCOMPILE_VECTORIZED

namespace mxcompile {
namespace dense {  // a package has all kernels in one file

#ifdef MXCOMPILE_BF16_DOT
using Numbers = __m512i;
using Total = __m512;
constexpr int64_t STEP = 32;    // numbers of a register
constexpr int64_t SHARING = 8;  // most rows of x whose sums stay in registers

inline Total nothing() { return _mm512_setzero_ps(); }
inline Numbers numbers(const Bfloat16* from) { return _mm512_loadu_si512(from); }
inline Total with_products(Numbers a, Numbers b, Total sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline float total_of(Total x) { return _mm512_reduce_add_ps(x); }
#elif defined(MXCOMPILE_LANES)
using Numbers = Lanes;
using Total = Lanes;
constexpr int64_t STEP = WIDTH, SHARING = 4;

inline Total nothing() { return zeros(); }
inline Numbers numbers(const Bfloat16* from) { return load(from); }
inline Total with_products(Numbers a, Numbers b, Total total) { return added(a, b, total); }
inline float total_of(Total x) { return sum(x); }
#else
using Numbers = float;
using Total = float;
constexpr int64_t STEP = 1, SHARING = 4;

inline Total nothing() { return 0; }
inline Numbers numbers(const Bfloat16* from) { return widen(*from); }
inline Total with_products(Numbers a, Numbers b, Total total) { return total + a * b; }
inline float total_of(Total x) { return x; }
inline void fetch_later(const uint8_t*) {}
#endif

constexpr int64_t MOST_WEIGHTS = 8;  // rows of w that are read together: more streams keep memory busier

// Rows of k numbers, `between` rows from one to the next that is read with it.
struct Rows {
  const Bfloat16* numbers;
  int64_t k, between = 1;

  Rows from(int64_t n) const { return {numbers + n * k, k, between}; }
};

// `rows` rows of x times `weights` rows of w, whose sums are ROWS apart.
template <int rows, int weights>
inline void sums_of(const Bfloat16* x, Rows w, float* sums) {
  constexpr std::make_integer_sequence<int, rows> all_rows{};
  constexpr std::make_integer_sequence<int, weights> all_weights{};
  const int64_t apart = w.between * w.k, whole = w.k / STEP * STEP;
  Total total[weights][rows];
  each(all_weights, [&](auto n) __attribute__((always_inline)) {
    each(all_rows, [&](auto m) __attribute__((always_inline)) { total[n][m] = nothing(); });
  });
  const auto add = [&](const Bfloat16* own, int64_t next, const Bfloat16* its, int64_t step) __attribute__((always_inline)) {
    Numbers left[rows];
    each(all_rows, [&](auto m) __attribute__((always_inline)) { left[m] = numbers(own + m * next); });
    each(all_weights, [&](auto n) __attribute__((always_inline)) {
      const Numbers right = numbers(its + n * step);
      each(all_rows, [&](auto m) __attribute__((always_inline)) { total[n][m] = with_products(right, left[m], total[n][m]); });
    });
  };
  for (int64_t at = 0; at < whole; at += STEP) {
    if (at * sizeof(Bfloat16) % LINE_BYTES == 0)
      each(all_weights, [&](auto n) __attribute__((always_inline)) {
        fetch_later(reinterpret_cast<const uint8_t*>(w.numbers + n * apart + at) + AHEAD);
      });
    add(x + at, w.k, w.numbers + at, apart);
  }
  if (whole < w.k) {
    Bfloat16 own[rows][STEP] = {}, its[weights][STEP] = {};
    for (int m = 0; m < rows; m++) std::memcpy(own[m], x + m * w.k + whole, (w.k - whole) * sizeof(Bfloat16));
    for (int n = 0; n < weights; n++) std::memcpy(its[n], w.numbers + n * apart + whole, (w.k - whole) * sizeof(Bfloat16));
    add(own[0], STEP, its[0], STEP);
  }
  each(all_weights, [&](auto n) __attribute__((always_inline)) {
    each(all_rows, [&](auto m) __attribute__((always_inline)) { sums[n * ROWS + m] = total_of(total[n][m]); });
  });
}

template <int rows>
inline void sums_of(const Bfloat16* x, Rows w, int64_t weights, float* sums) {
  constexpr int together = rows == 1 ? MOST_WEIGHTS : rows == 2 ? 4 : 2;
  for (int64_t n = 0; n < weights;) {
    const bool several = n + together <= weights;
    (several ? sums_of<rows, together> : sums_of<rows, 1>)(x, w.from(n * w.between), sums + n * ROWS);
    n += several ? together : 1;
  }
}

// x [m, k] times the transpose of w [n, k]
template <class Bias, class Out>
inline void few_rows_mm(const Bfloat16* x, const Bfloat16* w, const Bias* bias, int64_t m, int64_t n, int64_t k, int threads,
                        Out* out) {
  using Sums = void (*)(const Bfloat16*, Rows, int64_t, float*);
  constexpr Sums of_rows[] = {sums_of<1>, sums_of<2>, sums_of<3>, sums_of<4>, sums_of<5>, sums_of<6>, sums_of<7>, sums_of<8>};
  static_assert(ROWS == 8, "one function for each number of rows");
  for_outputs<MOST_WEIGHTS>(Rows{w, k}, bias, m, n, threads, out,
                            [&](int64_t start, int64_t count, Rows rows, int64_t weights, float* found) {
                              for (int64_t i = 0; i < count; i += SHARING) {
                                const int64_t some = count - i < SHARING ? count - i : SHARING;
                                of_rows[some - 1](x + (start + i) * k, rows, weights, found + i);
                              }
                            });
}

}  // namespace dense

using dense::few_rows_mm;

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
