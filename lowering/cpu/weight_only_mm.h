// Few rows times weights that are stored in MXFP8 or MXFP4, decoded in registers:
//
//   out[m, n] = Σ_k x[m, k] · w[n, k] · 2^(s[n, k/32] − 127) (+ bias[n])          in FP32, rounded once
//
// x is [M, K], w [N, K] codes, of E2M1 two a byte, s [N, ⌈K/32⌉] bytes, out [M, N]. Threads share rows of w, which each
// is read once for every ROWS of x. Four forms, the same sums in another order:
//
//   loops      any x and ISA: the weight's values in FP32 times x in FP32
//   fp32 dot   AVX2 and NEON: 32 codes become FP32 by shifts, one FMA applies the scale to their sum (`fp32_dot.h`); for x
//              of ordinary exponents. Rows of a weight with NaN in it, or with extreme scales, are left to the loops.
//   integers   AVX2, E2M1: 64 codes become bytes by a table, a number of x is two or three (`integer_dot.h`); x as above.
//   bf16 dot   AVX-512 with BF16 and byte permutations: codes become BF16 by a table of 128 entries, 64 at a time; two
//              dot products of pairs, then one FMA applies the scales. These instructions take subnormal numbers for
//              zeros and sum before they scale, so this form is for x of ordinary exponents: `ordinary` decides.
#ifndef MXCOMPILE_WEIGHT_ONLY_MM_H
#define MXCOMPILE_WEIGHT_ONLY_MM_H

#include "integer_dot.h"
#if defined(MXCOMPILE_BYTE_TABLES) && defined(__AVX512BF16__)
#define MXCOMPILE_BF16_DOT 1
#endif
#include <memory>

MXCOMPILE_VECTORIZED

namespace mxcompile {

constexpr int64_t ROWS = 8;       // of x that share one decoding of the weight
constexpr int64_t WEIGHTS = 4;    // rows of the weight that share one reading of x: more streams keep memory busier
constexpr int64_t MOST_WEIGHTS = 8;  // the same in FP32 on AVX2 and NEON
constexpr int64_t STEP = 64;      // codes that the dot form decodes together
constexpr int64_t TURN = 64;      // rows of the weight that a thread takes at a time, whichever is free
constexpr int64_t BETWEEN = 128;  // rows between those decoded together: as many streams, each read in order
constexpr int64_t LITTLE = 1 << 15;  // codes that are not worth waking threads for

// between: rows of the weight from one to the next that is decoded with it
struct Shape {
  int64_t m, n, k, between = 1;
  int64_t blocks() const { return (k + BLOCK - 1) / BLOCK; }
  int64_t padded() const { return (k + STEP - 1) / STEP * STEP; }
};

// The weight's values, one block at a time; `count` rows of x, FP32, padded with zeros to whole steps.
template <class Elem>
inline void sums_of_row(const float* x, const uint8_t* codes, const uint8_t* scales, Shape shape, int64_t count,
                        float* sums) {
  float lanes[ROWS][BLOCK] = {};
  for (int64_t block = 0; block < shape.blocks(); block++) {
    float weight[BLOCK], scale = scale_value(scales[block]);
    int64_t start = block * BLOCK, length = shape.k - start < BLOCK ? shape.k - start : BLOCK;
    uint8_t buffer[BLOCK];
    const uint8_t* code = spread<Elem>(codes + row_bytes<Elem>(start), length, buffer);
    if (length == BLOCK) {
#pragma omp simd
      for (int64_t i = 0; i < BLOCK; i++) weight[i] = decode<Elem>(code[i]) * scale;
    } else {
      for (int64_t i = 0; i < BLOCK; i++) weight[i] = i < length ? decode<Elem>(code[i]) * scale : 0.0f;
    }
    for (int64_t m = 0; m < count; m++) {
      const float* row = x + m * shape.padded() + start;
#pragma omp simd
      for (int64_t i = 0; i < BLOCK; i++) lanes[m][i] += row[i] * weight[i];
    }
  }
  for (int64_t m = 0; m < count; m++) {
    float sum = 0;
    for (int64_t i = 0; i < BLOCK; i++) sum += lanes[m][i];
    sums[m] = sum;
  }
}

template <class Elem>
inline void sums_by_loops(const float* x, const uint8_t* codes, const uint8_t* scales, Shape shape, int64_t count,
                          int64_t weights, float* sums) {
  for (int64_t w = 0; w < weights; w++)
    sums_of_row<Elem>(x, codes + row_bytes<Elem>(w * shape.between * shape.k), scales + w * shape.between * shape.blocks(),
                      shape, count, sums + w * ROWS);
}

#ifdef MXCOMPILE_BF16_DOT
// x in the order in which unpacking leaves 64 codes: of each 16 the first eights, then the second ones.
inline void permute(const Bfloat16* x, int64_t k, Bfloat16* out) {
  for (int64_t i = 0; i < (k + STEP - 1) / STEP * STEP; i++) {
    int64_t within = i % STEP, lane = within / 16, half = within / 8 % 2;
    out[i / STEP * STEP + half * 32 + lane * 8 + within % 8] = i < k ? x[i] : Bfloat16{0};
  }
}

template <class Elem, int rows, int weights>
inline void sums_by_dot(const Bfloat16* x, const uint8_t* codes, const uint8_t* scales, Shape shape, const Tables& t,
                        float* sums) {
  constexpr std::make_integer_sequence<int, rows> all_rows{};
  constexpr std::make_integer_sequence<int, weights> all_weights{};
  const Decoder decoder(t);
  __m512 total[weights * rows];
  for (int i = 0; i < weights * rows; i++) total[i] = _mm512_setzero_ps();
  for (int64_t k = 0; k < shape.k; k += STEP) {
    bool whole = k + STEP <= shape.k, second_block = k + BLOCK < shape.k;
    int64_t at = row_bytes<Elem>(k), width = row_bytes<Elem>(shape.k), between = shape.between;
    int64_t ahead = soon(at, width, weights, between);
    each(all_weights, [&](auto w) __attribute__((always_inline)) {
      const uint8_t *here = codes + w * between * width + at, *bytes = scales + w * between * shape.blocks() + k / BLOCK;
      _mm_prefetch(reinterpret_cast<const char*>(here + ahead), _MM_HINT_T1);  // L2 has room for more
      __m512i code = load_codes<Elem>(here, whole ? STEP : shape.k - k);
      __m512i unpacked[2];
      decoder.unpack(code, unpacked);
      __m512bh first = (__m512bh)unpacked[0], second = (__m512bh)unpacked[1];
      __m512 scale = _mm512_set1_ps(t.scale[bytes[0]]);
      if (second_block) scale = _mm512_mask_mov_ps(scale, 0xff00, _mm512_set1_ps(t.scale[bytes[1]]));
      each(all_rows, [&](auto m) __attribute__((always_inline)) {
        const Bfloat16* row = x + m * shape.padded() + k;
        __m512 dot = _mm512_dpbf16_ps(_mm512_setzero_ps(), first, (__m512bh)_mm512_loadu_si512(row));
        dot = _mm512_dpbf16_ps(dot, second, (__m512bh)_mm512_loadu_si512(row + 32));
        total[w * rows + m] = _mm512_fmadd_ps(dot, scale, total[w * rows + m]);
      });
    });
  }
  each(all_weights, [&](auto w) __attribute__((always_inline)) {
    each(all_rows, [&](auto m) __attribute__((always_inline)) {
      sums[w * ROWS + m] = _mm512_reduce_add_ps(total[w * rows + m]);
    });
  });
}

template <class Elem, int rows>
inline void sums_by_dot(const Bfloat16* x, const uint8_t* codes, const uint8_t* scales, Shape shape, const Tables& t,
                        int64_t weights, float* sums) {
  constexpr int together = rows > 4 ? 2 : WEIGHTS;  // so that all sums stay in registers
  for (int64_t w = 0; w < weights;) {
    const int64_t row = w * shape.between;
    const uint8_t *its_codes = codes + row_bytes<Elem>(row * shape.k), *its_scales = scales + row * shape.blocks();
    bool several = w + together <= weights;
    if (several)
      sums_by_dot<Elem, rows, together>(x, its_codes, its_scales, shape, t, sums + w * ROWS);
    else
      sums_by_dot<Elem, rows, 1>(x, its_codes, its_scales, shape, t, sums + w * ROWS);
    w += several ? together : 1;
  }
}

template <class Elem>
inline void sums_of_rows(const Bfloat16* x, const uint8_t* codes, const uint8_t* scales, Shape shape, int64_t count,
                        int64_t weights, float* sums) {
  static_assert(ROWS == 8, "one function for each number of rows");
  using Sums = void (*)(const Bfloat16*, const uint8_t*, const uint8_t*, Shape, const Tables&, int64_t, float*);
  constexpr Sums of_rows[] = {sums_by_dot<Elem, 1>, sums_by_dot<Elem, 2>, sums_by_dot<Elem, 3>, sums_by_dot<Elem, 4>,
                              sums_by_dot<Elem, 5>, sums_by_dot<Elem, 6>, sums_by_dot<Elem, 7>, sums_by_dot<Elem, 8>};
  of_rows[count - 1](x, codes, scales, shape, tables<Elem>(), weights, sums);
}
#endif

#ifdef MXCOMPILE_LANES
constexpr int64_t SHARING = 4;  // rows of x whose sums with two of the weight stay in registers

template <class Form, int rows>
inline bool sums_in_lanes(const float* x, const uint8_t* codes, const uint8_t* scales, Shape shape, int64_t weights,
                          float* sums) {
  constexpr int together = rows == 1 ? MOST_WEIGHTS : rows == 2 ? 4 : 2;
  using Elem = typename Form::Element;
  bool right = true;
  for (int64_t w = 0; w < weights;) {
    const int64_t row = w * shape.between;
    const uint8_t *its_codes = codes + row_bytes<Elem>(row * shape.k), *its_scales = scales + row * shape.blocks();
    bool several = w + together <= weights;
    auto some = several ? Form::template sums<rows, together> : Form::template sums<rows, 1>;
    right &= some(x, shape.padded(), its_codes, its_scales, shape.k, shape.between, ROWS, sums + w * ROWS);
    w += several ? together : 1;
  }
  return right;
}

// x as `Form::arrange` leaves it
template <class Form>
inline void sums_in_lanes(const float* x, const uint8_t* codes, const uint8_t* scales, Shape shape, int64_t count,
                          int64_t weights, float* sums) {
  static_assert(SHARING == 4, "one function for each number of rows");
  using Sums = bool (*)(const float*, const uint8_t*, const uint8_t*, Shape, int64_t, float*);
  constexpr Sums of_rows[] = {sums_in_lanes<Form, 1>, sums_in_lanes<Form, 2>, sums_in_lanes<Form, 3>,
                              sums_in_lanes<Form, 4>};
  bool right = true;
  for (int64_t m = 0; m < count; m += SHARING) {
    int64_t some = count - m < SHARING ? count - m : SHARING;
    right &= of_rows[some - 1](x + m * shape.padded(), codes, scales, shape, weights, sums + m);
  }
  if (right) return;
  std::unique_ptr<float[]> plain(new float[count * shape.padded()]);
  for (int64_t m = 0; m < count; m++)
    Form::arrange_back(x + m * shape.padded(), shape.padded(), plain.get() + m * shape.padded());
  sums_by_loops<typename Form::Element>(plain.get(), codes, scales, shape, count, weights, sums);
}
#endif

// `sums` of up to ROWS rows of x and `group` rows of the weight at a time, those of a row of the weight ROWS apart. The
// rows of a group lie `between` apart, as often as n has `group` times as many rows; the rest lie together.
template <class Elem, int64_t group, class Bias, class Out, class X, class Sums>
inline void for_outputs(const X* x, const uint8_t* codes, const uint8_t* scales, const Bias* bias, Shape shape,
                        int threads, Out* out, Sums sums) {
  const int64_t turns = 2 * threads, most = shape.n / (turns * group);  // each thread has some turns, however few rows
  const int64_t between = most > BETWEEN ? BETWEEN : most > 1 ? most : 1;
  const int64_t apart = shape.n / (group * between) * between, rest = shape.n - apart * group;
#pragma omp parallel for num_threads(threads) if (shape.n * shape.k > LITTLE) \
    schedule(dynamic, between * group > TURN ? between : TURN / group)
  for (int64_t index = 0; index < apart + (rest + group - 1) / group; index++) {
    const bool together = index >= apart;
    const int64_t n = together ? index * group : index / between * between * group + index % between;
    const int64_t weights = together && shape.n - n < group ? shape.n - n : group;
    const Shape here{shape.m, shape.n, shape.k, together ? 1 : between};
    for (int64_t m = 0; m < shape.m; m += ROWS) {
      float found[group * ROWS];
      int64_t count = shape.m - m < ROWS ? shape.m - m : ROWS;
      sums(x + m * shape.padded(), codes + row_bytes<Elem>(n * shape.k), scales + n * shape.blocks(), here, count, weights,
           found);
      for (int64_t w = 0; w < weights; w++)
        for (int64_t i = 0; i < count; i++) {
          const int64_t row = n + w * here.between;
          float sum = found[w * ROWS + i];
          narrow(bias ? sum + widen(bias[row]) : sum, out[(m + i) * shape.n + row]);
        }
    }
  }
}

template <class Elem, class X, class Bias, class Out>
inline void by_loops(const X* x, const uint8_t* codes, const uint8_t* scales, const Bias* bias, Shape shape,
                     int threads, Out* out) {
  std::unique_ptr<float[]> wide(new float[shape.m * shape.padded()]());
  for (int64_t m = 0; m < shape.m; m++)
    for (int64_t k = 0; k < shape.k; k++) wide[m * shape.padded() + k] = widen(x[m * shape.k + k]);
  for_outputs<Elem, WEIGHTS>(wide.get(), codes, scales, bias, shape, threads, out, sums_by_loops<Elem>);
}

#ifdef MXCOMPILE_LANES
template <class Form, class X, class Bias, class Out>
inline void in_lanes(const X* x, const uint8_t* codes, const uint8_t* scales, const Bias* bias, Shape shape, int threads,
                     Out* out) {
  std::unique_ptr<float[]> memory(new float[shape.m * shape.padded() + LINE]);
  float* arranged = on_a_line(memory.get());
  for (int64_t m = 0; m < shape.m; m++)
    Form::arrange(x + m * shape.k, shape.k, shape.padded(), arranged + m * shape.padded());
  using Sums = void (*)(const float*, const uint8_t*, const uint8_t*, Shape, int64_t, int64_t, float*);
  Sums sums = sums_in_lanes<Form>;
  for_outputs<typename Form::Element, MOST_WEIGHTS>(arranged, codes, scales, bias, shape, threads, out, sums);
}
#endif

template <class Elem, class X, class Bias, class Out>
inline void in_fp32(const X* x, const uint8_t* codes, const uint8_t* scales, const Bias* bias, Shape shape, int threads,
                    Out* out) {
#ifdef MXCOMPILE_LANES
  if (InLanes<Elem>::takes(x, shape.m * shape.k)) {
    if (shape.k < LONG) return in_lanes<InLanes<Elem>>(x, codes, scales, bias, shape, threads, out);
    return in_lanes<typename ForLongRows<Elem, X>::Form>(x, codes, scales, bias, shape, threads, out);
  }
#endif
  by_loops<Elem>(x, codes, scales, bias, shape, threads, out);
}

template <class Elem, class Bias, class Out>
inline void weight_only_mm(const float* x, const uint8_t* codes, const uint8_t* scales, const Bias* bias, Shape shape,
                           int threads, Out* out) {
  in_fp32<Elem>(x, codes, scales, bias, shape, threads, out);
}

template <class Elem, class Bias, class Out>
inline void weight_only_mm(const Bfloat16* x, const uint8_t* codes, const uint8_t* scales, const Bias* bias,
                           Shape shape, int threads, Out* out) {
#ifdef MXCOMPILE_BF16_DOT
  if (ordinary(x, shape.m * shape.k)) {
    std::unique_ptr<Bfloat16[]> permuted(new Bfloat16[shape.m * shape.padded()]);
    for (int64_t m = 0; m < shape.m; m++) permute(x + m * shape.k, shape.k, permuted.get() + m * shape.padded());
    using Sums = void (*)(const Bfloat16*, const uint8_t*, const uint8_t*, Shape, int64_t, int64_t, float*);
    Sums sums = sums_of_rows<Elem>;
    return for_outputs<Elem, WEIGHTS>(permuted.get(), codes, scales, bias, shape, threads, out, sums);
  }
#endif
  in_fp32<Elem>(x, codes, scales, bias, shape, threads, out);
}

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
