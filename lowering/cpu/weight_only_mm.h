// Few rows times weights that are stored in MXFP8, MXINT8, MXFP4 or NVFP4, decoded in registers:
//
//   out[m, n] = Σ_k x[m, k] · w[n, k] · 2^(s[n, k/32] − 127) (+ bias[n])          in FP32, rounded once
//   out[m, n] = Σ_k x[m, k] · w[n, k] · s[n, k/16] / whole[n] (+ bias[n])         NVFP4, s in E4M3
//
// x is [M, K], w [N, K] codes, of E2M1 two a byte, s a byte for each block, out [M, N]. Threads share rows of w, which each
// is read once for every ROWS of x. Five forms, the same sums in another order:
//
//   loops      any x and ISA: the weight's values in FP32 times x in FP32
//   fp32 dot   AVX2 and NEON: 32 codes become FP32 by shifts, one FMA applies the scale to their sum (`fp32_dot.h`); for x
//              of ordinary exponents. Rows of a weight with NaN in it, or with extreme scales, are left to the loops.
//   int16      AVX2, NEON with dot products, INT8: 32 codes times integers of 16 bits (`int16_dot.h`); for x of BF16 and long rows, or that are
//              such integers, as all of MXINT8 are.
//   integers   AVX2, E2M1: 64 codes become bytes by a table, a number of x is two or three (`integer_dot.h`); x as above.
//   bf16 dot   AVX-512 with BF16 and byte permutations: codes become BF16 by a table (`bf16_dot.h`); for x of BF16,
//              of ordinary exponents.
#ifndef MXCOMPILE_WEIGHT_ONLY_MM_H
#define MXCOMPILE_WEIGHT_ONLY_MM_H

#include "bf16_dot.h"
#include "int16_dot.h"
#include "integer_dot.h"
#include <memory>

MXCOMPILE_VECTORIZED

namespace mxcompile {

constexpr int64_t WEIGHTS = 4;    // rows of the weight that share one reading of x: more streams keep memory busier
#ifdef __znver3__
constexpr int64_t MOST_WEIGHTS = 4;  // the same in lanes: a Zen 3 reads four streams 1.3 times as fast as eight
#else
constexpr int64_t MOST_WEIGHTS = 8;  // the same in lanes of AVX2 and NEON
#endif

inline int64_t padded(int64_t k) { return (k + 127) / 128 * 128; }  // to steps of any form

// The weight's values, one block at a time; `count` rows of x, FP32, padded with zeros to whole steps.
template <class Elem>
inline void sums_of_row(const float* x, Weight<Elem> weight, int64_t count, float* sums) {
  constexpr int64_t block = Elem::block;
  float lanes[ROWS][block] = {};
  for (int64_t index = 0; index < weight.blocks(); index++) {
    float value[block], scale = weight.divided(scale_number<Elem>(weight.scales[index]));
    int64_t start = index * block, length = weight.k - start < block ? weight.k - start : block;
    uint8_t buffer[block];
    const uint8_t* code = spread<Elem>(weight.codes + row_bytes<Elem>(start), length, buffer);
    if (length == block) {
#pragma omp simd
      for (int64_t i = 0; i < block; i++) value[i] = decode<Elem>(code[i]) * scale;
    } else {
      for (int64_t i = 0; i < block; i++) value[i] = i < length ? decode<Elem>(code[i]) * scale : 0.0f;
    }
    for (int64_t m = 0; m < count; m++) {
      const float* row = x + m * padded(weight.k) + start;
#pragma omp simd
      for (int64_t i = 0; i < block; i++) lanes[m][i] += row[i] * value[i];
    }
  }
  for (int64_t m = 0; m < count; m++) {
    float sum = 0;
    for (int64_t i = 0; i < block; i++) sum += lanes[m][i];
    sums[m] = sum;
  }
}

template <class Elem>
inline void sums_by_loops(const float* x, Weight<Elem> weight, int64_t count, int64_t weights, float* sums) {
  for (int64_t w = 0; w < weights; w++) sums_of_row(x, weight.after(w), count, sums + w * ROWS);
}

#ifdef MXCOMPILE_BF16_DOT
template <class Elem, int rows>
inline void sums_by_dot(const Bfloat16* x, Weight<Elem> weight, int64_t weights, float* sums) {
  constexpr int together = rows > 4 ? 2 : WEIGHTS;  // so that all sums stay in registers
  for (int64_t w = 0; w < weights;) {
    const bool several = w + together <= weights;
    auto some = several ? Bf16Dot<Elem>::template sums<rows, together> : Bf16Dot<Elem>::template sums<rows, 1>;
    some(x, padded(weight.k), weight.after(w), ROWS, sums + w * ROWS);
    w += several ? together : 1;
  }
}

template <class Elem>
inline void sums_by_dot(const Bfloat16* x, Weight<Elem> weight, int64_t count, int64_t weights, float* sums) {
  static_assert(ROWS == 8, "one function for each number of rows");
  using Sums = void (*)(const Bfloat16*, Weight<Elem>, int64_t, float*);
  constexpr Sums of_rows[] = {sums_by_dot<Elem, 1>, sums_by_dot<Elem, 2>, sums_by_dot<Elem, 3>, sums_by_dot<Elem, 4>,
                              sums_by_dot<Elem, 5>, sums_by_dot<Elem, 6>, sums_by_dot<Elem, 7>, sums_by_dot<Elem, 8>};
  of_rows[count - 1](x, weight, weights, sums);
  weight.divide(weights, count, ROWS, sums);
}
#endif

#ifdef MXCOMPILE_LANES
constexpr int64_t SHARING = 4;  // rows of x whose sums with two of the weight stay in registers

template <class Form, int rows>
inline bool sums_in_lanes(const float* x, Weight<typename Form::Element> weight, int64_t weights, float* sums) {
  constexpr int together = rows == 1 ? MOST_WEIGHTS : rows == 2 ? 4 : 2;
  bool right = true;
  for (int64_t w = 0; w < weights;) {
    const bool several = w + together <= weights;
    auto some = several ? Form::template sums<rows, together> : Form::template sums<rows, 1>;
    right &= some(x, padded(weight.k), weight.after(w), ROWS, sums + w * ROWS);
    w += several ? together : 1;
  }
  return right;
}

// x as `Form::arrange` leaves it
template <class Form>
inline void sums_in_lanes(const float* x, Weight<typename Form::Element> weight, int64_t count, int64_t weights,
                          float* sums) {
  static_assert(SHARING == 4, "one function for each number of rows");
  using Sums = bool (*)(const float*, Weight<typename Form::Element>, int64_t, float*);
  constexpr Sums of_rows[] = {sums_in_lanes<Form, 1>, sums_in_lanes<Form, 2>, sums_in_lanes<Form, 3>,
                              sums_in_lanes<Form, 4>};
  const int64_t length = padded(weight.k);
  bool right = true;
  for (int64_t m = 0; m < count; m += SHARING) {
    int64_t some = count - m < SHARING ? count - m : SHARING;
    right &= of_rows[some - 1](x + m * length, weight, weights, sums + m);
  }
  if (right) return weight.divide(weights, count, ROWS, sums);
  std::unique_ptr<float[]> plain(new float[count * length]);
  for (int64_t m = 0; m < count; m++) Form::arrange_back(x + m * length, length, plain.get() + m * length);
  sums_by_loops(plain.get(), weight, count, weights, sums);
}
#endif

template <class X, class Elem, class Bias, class Out>
inline void by_loops(const X* x, Weight<Elem> weight, const Bias* bias, int64_t m, int64_t n, int threads, Out* out) {
  const int64_t k = weight.k, length = padded(k);
  std::unique_ptr<float[]> wide(new float[m * length]());
  for (int64_t row = 0; row < m; row++)
    for (int64_t i = 0; i < k; i++) wide[row * length + i] = widen(x[row * k + i]);
  for_outputs<WEIGHTS>(weight, bias, m, n, threads, out,
                       [&](int64_t start, int64_t count, Weight<Elem> rows, int64_t weights, float* found) {
                         sums_by_loops(wide.get() + start * length, rows, count, weights, found);
                       });
}

#ifdef MXCOMPILE_LANES
template <class Form, class X, class Elem, class Bias, class Out>
inline void in_lanes(const X* x, Weight<Elem> weight, const Bias* bias, int64_t m, int64_t n, int threads, Out* out) {
  const int64_t k = weight.k, length = padded(k);
  std::unique_ptr<uint8_t[]> memory(new uint8_t[m * length * sizeof(float) + LINE_BYTES]);
  float* arranged = on_a_line<float>(memory.get());
  for (int64_t row = 0; row < m; row++) Form::arrange(x + row * k, k, length, arranged + row * length);
  for_outputs<MOST_WEIGHTS>(weight, bias, m, n, threads, out,
                            [&](int64_t start, int64_t count, Weight<Elem> rows, int64_t weights, float* found) {
                              sums_in_lanes<Form>(arranged + start * length, rows, count, weights, found);
                            });
}
#endif

#ifdef MXCOMPILE_BF16_DOT
template <class Elem, class Bias, class Out>
inline void in_bf16(const Bfloat16* x, Weight<Elem> weight, const Bias* bias, int64_t m, int64_t n, int threads, Out* out) {
  const int64_t k = weight.k, length = padded(k);
  std::unique_ptr<uint8_t[]> memory(new uint8_t[m * length * sizeof(Bfloat16) + LINE_BYTES]);
  Bfloat16* arranged = on_a_line<Bfloat16>(memory.get());
  for (int64_t row = 0; row < m; row++) Bf16Dot<Elem>::arrange(x + row * k, k, length, arranged + row * length);
  for_outputs<WEIGHTS>(weight, bias, m, n, threads, out,
                       [&](int64_t start, int64_t count, Weight<Elem> rows, int64_t weights, float* found) {
                         sums_by_dot(arranged + start * length, rows, count, weights, found);
                       });
}
#endif

// x [m, weight.k] times the transpose of the weight [n, weight.k]
template <class X, class Elem, class Bias, class Out>
inline void weight_only_mm(const X* x, Weight<Elem> weight, const Bias* bias, int64_t m, int64_t n, int threads, Out* out) {
  [[maybe_unused]] const int64_t count = m * weight.k;
#ifdef MXCOMPILE_BF16_DOT
  if constexpr (std::is_same_v<X, Bfloat16>)
    if (ordinary(x, count)) return in_bf16(x, weight, bias, m, n, threads, out);
#endif
#ifdef MXCOMPILE_INT16_DOT
  if constexpr (Elem::integer)
    if (Int16Dot::takes(x, count, weight.k)) return in_lanes<Int16Dot>(x, weight, bias, m, n, threads, out);
#endif
#ifdef MXCOMPILE_LANES
  if (InLanes<Elem>::takes(x, count, weight.k)) {
    if (weight.k < LONG) return in_lanes<InLanes<Elem>>(x, weight, bias, m, n, threads, out);
    return in_lanes<typename ForLongRows<Elem, X>::Form>(x, weight, bias, m, n, threads, out);
  }
#endif
  by_loops(x, weight, bias, m, n, threads, out);
}

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
