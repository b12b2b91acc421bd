// Few rows times rows of stored weights in MXINT8, in integers of 16 bits: what `weight_only_mm.h` runs on AVX2.
//
//   Σ x·k/64·2^s  =  Σ_blocks 2^s · 2^(e−20) · Σ X·k,    X = round(x · 2^(14−e)),  2^e ≤ max |x| < 2^(e+1)
//
// All sums of a block are exact until they are multiplied by its scales. So is X of an x that MXINT8 has; BF16 is exact
// down to 2^-7 of the largest of its block, and rounded to 2^-15 of it below: for long rows, whose sums in FP32 may lose
// as much. An instruction multiplies 16 pairs and adds two products in each lane; with VNNI it adds the sum before, too.
#ifndef MXCOMPILE_INT16_DOT_H
#define MXCOMPILE_INT16_DOT_H

#include "fp32_dot.h"

MXCOMPILE_VECTORIZED

namespace mxcompile {

#if MXCOMPILE_LANES == 8
// A row of x is its X, then a factor 2^(e−20) for each block, in half of FP32's memory and a 32nd.
struct Int16Numbers {
  using Number = __m256i;
  struct Codes {};  // all are finite
  static constexpr int parts = 2, low = 0, up = 0, bits = 14;

  static inline __attribute__((always_inline)) void unpack(const uint8_t* codes, Codes&, Number* out) {
    for (int i = 0; i < parts; i++)
      out[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + i));
  }

  template <int count>
  static inline __attribute__((always_inline)) Lanes dot(const Number* number, const float* x, int64_t padded,
                                                         int64_t index, int) {
    const __m256i* row = reinterpret_cast<const __m256i*>(x) + index * parts;
    const __m256i first = _mm256_madd_epi16(number[0], _mm256_loadu_si256(row));
    const __m256i both = with_pairs(number[1], _mm256_loadu_si256(row + 1), first);
    return product(_mm256_cvtepi32_ps(both), everywhere(x[padded / 2 + index]));
  }

  static Codes none() { return {}; }
  static bool finite(Codes) { return true; }
};

struct Int16Dot : InLanes<INT8, Int16Numbers> {
  static constexpr int bits = Int16Numbers::bits;

  // The biased exponent of the largest of up to 32 numbers, 127 of none.
  template <class X>
  static uint32_t exponent(const X* x, int64_t count) {
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) most = fp32_bits(magnitude(x[i])) > most ? fp32_bits(magnitude(x[i])) : most;
    return most ? most >> 23 : 127;
  }

  static float nearest(float x, uint32_t exponent) {
    const float middle = 12582912.0f;  // 1.5 · 2^23
    return (x * scale_value(127 + 127 + bits - exponent) + middle) - middle;
  }

  // Whether factors of a block are normal numbers: smaller numbers in it are zeros beside its largest. Infinities and NaN are
  // no integers.
  static bool is_ordinary(uint32_t exponent) { return exponent >= 127 - 60 && exponent < 127 + 60; }

  template <class X>
  static bool takes(const X* x, int64_t count, int64_t k) {
    bool ordinary = true;
    for (int64_t row = 0; row < count; row += k)
      for (int64_t at = 0; at < k; at += BLOCK) ordinary &= is_ordinary(exponent(x + row + at, k - at < BLOCK ? k - at : BLOCK));
    return ordinary && ((std::is_same_v<X, Bfloat16> && k >= LONG) || exact(x, count, k));
  }

  template <class X>
  static bool exact(const X* x, int64_t count, int64_t k) {
    for (int64_t row = 0; row < count; row += k)
      for (int64_t at = 0; at < k; at += BLOCK) {
        const X* block = x + row + at;
        const int64_t some = k - at < BLOCK ? k - at : BLOCK;
        const uint32_t its = exponent(block, some);
        const float factor = scale_value(127 + 127 + bits - its);
        uint32_t others = 0;
#pragma omp simd reduction(| : others)
        for (int64_t i = 0; i < some; i++) others |= nearest(widen(block[i]), its) != widen(block[i]) * factor;
        if (others) return false;
      }
    return true;
  }

  // X of up to 32 numbers, then zeros. Returns their exponent.
  template <class X>
  static uint32_t round_block(const X* x, int64_t count, int16_t* out) {
    const uint32_t its = exponent(x, count);
    if (count < BLOCK) std::memset(out, 0, BLOCK * sizeof(int16_t));
#pragma omp simd
    for (int64_t i = 0; i < count; i++) out[i] = static_cast<int16_t>(nearest(widen(x[i]), its));
    return its;
  }

  template <class X>
  static void arrange(const X* x, int64_t k, int64_t padded, float* out) {
    int16_t* number = reinterpret_cast<int16_t*>(out);
    for (int64_t at = 0; at < padded; at += BLOCK) {
      const int64_t count = k - at < BLOCK ? (k > at ? k - at : 0) : BLOCK;
      const uint32_t its = round_block(x + at, count, number + at);
      out[padded / 2 + at / BLOCK] = scale_value(its - bits - INT8::mantissa_bits);
    }
  }

  static void arrange_back(const float* x, int64_t padded, float* out) {
    const int16_t* number = reinterpret_cast<const int16_t*>(x);
    for (int64_t i = 0; i < padded; i++) out[i] = 64.0f * number[i] * x[padded / 2 + i / BLOCK];
  }
};
#endif

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
