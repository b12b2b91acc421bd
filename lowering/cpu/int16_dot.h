// Few rows times rows of stored weights in MXINT8, in integers of 16 bits: what `weight_only_mm.h` runs on AVX2, and on
// NEON with dot products.
//
//   Σ x·k/64·2^s  =  Σ_blocks 2^s · 2^(e−20) · Σ X·k,    X = round(x · 2^(14−e)),  2^e ≤ max |x| < 2^(e+1)
//
// All sums of a block are exact until they are multiplied by its scales. So is X of an x that MXINT8 has; BF16 is exact
// down to 2^-7 of the largest of its block, and rounded to 2^-15 of it below: for long rows, whose sums in FP32 may lose
// as much.
//
//   AVX2   an instruction multiplies 16 pairs and adds two products in each lane; with VNNI it adds the sum before, too
//   NEON   X = b − 256·a, two signed bytes: an instruction multiplies 16 of a or b with codes, and adds four in each lane
#ifndef MXCOMPILE_INT16_DOT_H
#define MXCOMPILE_INT16_DOT_H

#include "fp32_dot.h"

MXCOMPILE_VECTORIZED

namespace mxcompile {

#if MXCOMPILE_LANES == 8 || (MXCOMPILE_LANES == 4 && defined(__ARM_FEATURE_DOTPROD))
#define MXCOMPILE_INT16_DOT
// A row of x is its X, then a factor 2^(e−20) for each block, in half of FP32's memory and a 32nd.
struct Int16 {
  struct Codes {};  // all are finite
  static constexpr int parts = 2, low = 0, up = 0, bits = 14;

  static Codes none() { return {}; }
  static bool finite(Codes) { return true; }
};

#if MXCOMPILE_LANES == 8
struct Int16Numbers : Int16 {
  using Number = __m256i;
  static constexpr float least = -32768;  // the least X

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

  static void arrange_block(int16_t*) {}
  static int number(const int16_t* block, int64_t i) { return block[i]; }
};
#else
struct Int16Numbers : Int16 {
  using Number = int8x16_t;
  static constexpr float least = -255 * 128;  // a smaller X has an a of 128

  static inline __attribute__((always_inline)) void unpack(const uint8_t* codes, Codes&, Number* out) {
    for (int i = 0; i < parts; i++) out[i] = vreinterpretq_s8_u8(vld1q_u8(codes + i * CODES));
  }

  template <int count>
  static inline __attribute__((always_inline)) Lanes dot(const Number* number, const float* x, int64_t padded,
                                                         int64_t index, int) {
    const int8_t* row = reinterpret_cast<const int8_t*>(x) + index * 2 * BLOCK;
    int32x4_t sum[2];  // of a, of b
    for (int i = 0; i < 2; i++) {
      sum[i] = vdotq_s32(vdupq_n_s32(0), number[0], vld1q_s8(row + i * BLOCK));
      sum[i] = vdotq_s32(sum[i], number[1], vld1q_s8(row + i * BLOCK + CODES));
    }
    const int32x4_t both = vsubq_s32(sum[1], vshlq_n_s32(sum[0], 8));
    return product(vcvtq_f32_s32(both), everywhere(x[padded / 2 + index]));
  }

  // All a of a block, then all b. X is at least `least`, as all of BF16 are.
  static void arrange_block(int16_t* block) {
    int8_t bytes[2 * BLOCK];
    for (int64_t i = 0; i < BLOCK; i++) {
      bytes[BLOCK + i] = static_cast<int8_t>(block[i]);
      bytes[i] = static_cast<int8_t>(-((block[i] - bytes[BLOCK + i]) >> 8));
    }
    std::memcpy(block, bytes, sizeof(bytes));
  }
  static int number(const int16_t* block, int64_t i) {
    const int8_t* bytes = reinterpret_cast<const int8_t*>(block);
    return bytes[BLOCK + i] - 256 * bytes[i];
  }
};
#endif

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
        for (int64_t i = 0; i < some; i++) {
          const float x = nearest(widen(block[i]), its);
          others |= static_cast<uint32_t>(x != widen(block[i]) * factor) | static_cast<uint32_t>(x < Int16Numbers::least);
        }
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
      Int16Numbers::arrange_block(number + at);
      out[padded / 2 + at / BLOCK] = scale_value(its - bits - INT8::mantissa_bits);
    }
  }

  static void arrange_back(const float* x, int64_t padded, float* out) {
    const int16_t* number = reinterpret_cast<const int16_t*>(x);
    for (int64_t at = 0; at < padded; at += BLOCK)
      for (int64_t i = 0; i < BLOCK; i++) out[at + i] = 64.0f * Int16Numbers::number(number + at, i) * x[padded / 2 + at / BLOCK];
  }
};
#endif

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
