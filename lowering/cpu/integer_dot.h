// Few rows times rows of stored weights in E2M1, in integers: what `weight_only_mm.h` runs on AVX2.
//
//   Σ x·w·2^s  =  Σ_blocks 2^s · 2^(e−b−1) · (Σ X·(2w + 12) − 12·Σ X),    X = round(x · 2^(b−e)),  2^e ≤ max |x| < 2^(e+1)
//
// Twice an element is an integer of at most 12, so that a table of 16 bytes has 2w + 12 without a sign. The second sum is
// one of x alone. X is some signed bytes: 32 products with one of them are one instruction, and all sums are exact until
// they are multiplied by the scales.
//
//   3 parts   b = 20, a·2^15 + b·2^7 + c: an x is rounded to 2^-21 of the largest of its block
//   2 parts   b = 14, a·2^8 + b: to 2^-15, which is at most 2^-10 of the mean of its block of 32; BF16 is exact down to 2^-7
//             of the largest. For BF16 and long rows, whose sums in FP32 may lose as much.
#ifndef MXCOMPILE_INTEGER_DOT_H
#define MXCOMPILE_INTEGER_DOT_H

#include "fp32_dot.h"

MXCOMPILE_VECTORIZED

namespace mxcompile {

#if MXCOMPILE_LANES == 8
// Two blocks of x, eight of which every lane of sums has, in parts for even codes and for odd ones.
struct Arranged {
  int8_t even[3][BLOCK], odd[3][BLOCK];
  int32_t offset[WIDTH];
  float factor[WIDTH];
};

static_assert(sizeof(Arranged) == 2 * BLOCK * sizeof(float), "as much memory as x has in FP32");

template <class Elem, int parts>
struct Integers {
  using Element = Elem;
  static constexpr int64_t TOGETHER = 2 * BLOCK;
  static constexpr int bits = parts == 3 ? 20 : 14;
  static constexpr int raised = Elem::two_level ? 8 : 0;  // what its scales' numbers are to be multiplied by

  static constexpr int16_t weights[3] = {parts == 3 ? -32768 : -256, parts == 3 ? 128 : 1, 1};  // of the parts

  // Infinities and NaN are no integers.
  template <class X>
  static bool takes(const X* x, int64_t count, int64_t) {
    return ordinary(x, count, ~0u);
  }

  template <class X>
  static void arrange(const X* x, int64_t k, int64_t padded, float* out) {
    Arranged* to = reinterpret_cast<Arranged*>(out);
    for (int64_t at = 0; at < padded; at += BLOCK) {
      float block[BLOCK] = {};
      const int64_t count = k - at < BLOCK ? (k > at ? k - at : 0) : BLOCK;
#pragma omp simd
      for (int64_t i = 0; i < count; i++) block[i] = widen(x[at + i]);
      arrange_block(block, to[at / TOGETHER], at / BLOCK % 2);
    }
  }

  static void arrange_block(const float* x, Arranged& to, int64_t half) {
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < BLOCK; i++) most = magnitude(x[i]) > most ? magnitude(x[i]) : most;
    const uint32_t field = most ? most >> 23 : 127;
    const float factor = as_float((127 + 127 + bits - field) << 23), nearest = 12582912.0f;  // 1.5 · 2^23
    int32_t number[BLOCK], lane[WIDTH / 2] = {};
#pragma omp simd
    for (int64_t i = 0; i < BLOCK; i++)
      number[i] = static_cast<int32_t>(as_bits(x[i] * factor + nearest)) - static_cast<int32_t>(as_bits(nearest));
    for (int64_t i = 0; i < BLOCK; i++) lane[i / WIDTH] += number[i];
    for (int64_t i = 0; i < BLOCK; i++) {
      int8_t(*bytes)[BLOCK] = i % 2 ? to.odd : to.even;
      const int64_t place = half * (BLOCK / 2) + i / 2;
      const int32_t low = parts == 3 ? ((number[i] + 64) & 127) - 64 : 0;
      const int32_t upper = (number[i] - low) >> (parts == 3 ? 7 : 0);
      const int8_t middle = static_cast<int8_t>(upper);
      bytes[0][place] = static_cast<int8_t>(-((upper - middle) >> 8));  // the negative: 128 and 2^15 have too many bits
      bytes[1][place] = middle;
      bytes[2][place] = static_cast<int8_t>(low);
    }
    for (int64_t i = 0; i < WIDTH / 2; i++) {
      to.offset[half * (WIDTH / 2) + i] = -12 * lane[i];
      to.factor[half * (WIDTH / 2) + i] = as_float((field - bits - 1 + raised) << 23);
    }
  }

  static void arrange_back(const float* x, int64_t padded, float* out) {
    const Arranged* from = reinterpret_cast<const Arranged*>(x);
    for (int64_t i = 0; i < padded; i++) {
      const Arranged& pair = from[i / TOGETHER];
      const int64_t half = i / BLOCK % 2, place = half * (BLOCK / 2) + i % BLOCK / 2;
      const int8_t(*bytes)[BLOCK] = i % 2 ? pair.odd : pair.even;
      int32_t number = 0;
      for (int part = 0; part < parts; part++) number += bytes[part][place] * weights[part];
      out[i] = static_cast<float>(number) * (2.0f * scale_value(127 - raised) * pair.factor[half * (WIDTH / 2)]);
    }
  }

  static inline __attribute__((always_inline)) __m256i integers(const void* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }

  // Lanes of sums of two blocks with `x`. even, odd: bytes of the table for codes 2i and 2i + 1.
  static inline __attribute__((always_inline)) __m256i sums_of_codes(__m256i even, __m256i odd, const Arranged& x) {
    __m256i total = integers(x.offset);
    for (int i = 0; i < parts; i++) {
      const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(even, integers(x.even[i])),
                                             _mm256_maddubs_epi16(odd, integers(x.odd[i])));
      total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(weights[i])));
    }
    return total;
  }

  // `scale` times the sums of two blocks of codes with each row of x, added to `total`.
  template <int rows>
  static inline __attribute__((always_inline)) void add(const uint8_t* codes, Lanes scale, const Arranged* x,
                                                        int64_t apart, Lanes* total) {
    const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0,  //
                                           12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    const __m256i low = _mm256_set1_epi8(15), code = integers(codes);
    const __m256i even = _mm256_shuffle_epi8(table, _mm256_and_si256(code, low));
    const __m256i odd = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(code, 4), low));
    each(std::make_integer_sequence<int, rows>(), [&](auto m) __attribute__((always_inline)) {
      const Arranged& here = x[m * apart];
      const Lanes dot = _mm256_cvtepi32_ps(sums_of_codes(even, odd, here));
      total[m] = added(product(dot, load(here.factor)), scale, total[m]);
    });
  }

  // Numbers of eight scales that are not NaN: of the blocks that have the lower four lanes, then the upper four. Those of
  // two levels are 2^-8 of their values.
  static inline __attribute__((always_inline)) Lanes eight_scales(const uint8_t* scales) {
    const __m128i order = Elem::two_level ? _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1)
                                          : _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i bytes = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales)), order);
    if (Elem::two_level) return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
    const __m256i field = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(field, _mm256_set1_epi32(0x00400000)));
  }

  template <int rows, int weights>
  static bool sums(const float* x, int64_t padded, Weight<Elem> weight, int64_t stride, float* sums) {
    constexpr std::make_integer_sequence<int, rows> all_rows{};
    constexpr std::make_integer_sequence<int, weights> all_weights{};
    constexpr int64_t bytes = TOGETHER / 2, scales = TOGETHER / Elem::block;
    constexpr int share = 8 / scales;  // steps whose scales are one register
    const int64_t blocks = weight.blocks(), width = weight.width(), pairs = padded / TOGETHER, between = weight.between;
    for (int w = 0; w < weights; w++)
      if (largest(weight.scales + w * between * blocks, blocks) > Scales<0, Elem::two_level>::most) return false;
    const Subnormals subnormals;
    const Arranged* here = reinterpret_cast<const Arranged*>(x);
    Lanes total[weights * rows];
    for (int i = 0; i < weights * rows; i++) total[i] = zeros();
    int64_t at = 0, index = 0;
    for (; at + 4 * bytes <= width; at += 4 * bytes, index += 4 * scales, here += 4) {
      const int64_t later = weight.soon(at, weights);
      each(all_weights, [&](auto w) __attribute__((always_inline)) {
        const uint8_t* first = weight.codes + w * between * width + at;
        fetch_later(first + later);
        fetch_later(first + later + 2 * bytes);
        Lanes shared;
        each(std::make_integer_sequence<int, 4>(), [&](auto i) __attribute__((always_inline)) {
          constexpr int within = i % share, lanes = Elem::two_level ? (within ? 0xfa : 0x50) : within * 0x55;
          if (!within) shared = eight_scales(weight.scales + w * between * blocks + index + i * scales);
          add<rows>(first + i * bytes, _mm256_permute_ps(shared, lanes), here + i, pairs, total + w * rows);
        });
      });
    }
    for (; at < width; at += bytes, index += scales, here++) {
      const int64_t rest = width - at < bytes ? width - at : bytes, left = blocks - index < scales ? blocks - index : scales;
      each(all_weights, [&](auto w) __attribute__((always_inline)) {
        uint8_t last[bytes] = {}, its[8] = {};
        std::memcpy(last, weight.codes + w * between * width + at, rest);
        std::memcpy(its, weight.scales + w * between * blocks + index, left);
        add<rows>(last, _mm256_permute_ps(eight_scales(its), Elem::two_level ? 0x50 : 0), here, pairs, total + w * rows);
      });
    }
    each(all_weights, [&](auto w) __attribute__((always_inline)) {
      each(all_rows, [&](auto m) __attribute__((always_inline)) { sums[w * stride + m] = sum(total[w * rows + m]); });
    });
    return true;
  }
};

template <>
struct InLanes<E2M1> : Integers<E2M1, 3> {};

template <>
struct InLanes<NVFP4> : Integers<NVFP4, 3> {};

template <class Elem>
struct ForLongRows<Elem, Bfloat16, std::enable_if_t<Elem::per_byte == 2>> {
  using Form = Integers<Elem, 2>;
};
#endif

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
