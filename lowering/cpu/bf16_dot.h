// Few rows times rows of stored weights, by numbers of BF16: what `weight_only_mm.h` runs on AVX-512 with BF16 and byte
// permutations.
//
// 64 bytes of codes become BF16 numbers by a table: E2M1 of 16 words, four codes of each word after the other; others of
// 128 entries, in two halves of a byte, and so do NVFP4's scales, 64 at once. Dot products of pairs add the numbers of a
// lane, which share a scale, and one FMA multiplies by the scale. FP32 is as fast on AVX2.
//
// These instructions take subnormal numbers for zeros and sum before they scale: x is of ordinary exponents.
#ifndef MXCOMPILE_BF16_DOT_H
#define MXCOMPILE_BF16_DOT_H

#include "weight_rows.h"
#if defined(MXCOMPILE_BYTE_TABLES) && defined(__AVX512BF16__)
#define MXCOMPILE_BF16_DOT 1
#endif

MXCOMPILE_VECTORIZED

namespace mxcompile {

#ifdef MXCOMPILE_BF16_DOT
// BF16 of E2M1's codes, twice: the fifth bit of an index is the next code's.
alignas(64) constexpr uint16_t BF16_OF_E2M1[32] = {
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

template <class Elem>
struct Bf16Dot {
  static constexpr bool packed = Elem::per_byte == 2;
  static constexpr int64_t BYTES = 64, STEP = BYTES * Elem::per_byte;  // codes that are decoded together
  static constexpr int NUMBERS = STEP / 32;                            // registers of them
  static constexpr int64_t SCALES = STEP / Elem::block;                // of a step
  static constexpr int64_t STEPS = Elem::two_level ? 2 : 4;            // whose scales are one register
  static constexpr int64_t REGISTERS = Elem::two_level ? 4 : 1;        // of scales that are decoded together
  static constexpr int64_t SHARED = STEPS * REGISTERS;                 // steps whose scales are

  const Decoder decoder{tables<std::conditional_t<Elem::two_level, E4M3, Elem>>()};  // of codes, or of such scales
  const __m512i words = _mm512_load_si512(BF16_OF_E2M1);

  inline __attribute__((always_inline)) void unpack(__m512i codes, __m512i* numbers) const {
    if constexpr (packed)
      each(std::make_integer_sequence<int, NUMBERS>(), [&](auto i) __attribute__((always_inline)) {
        numbers[i] = _mm512_permutexvar_epi16(i ? _mm512_srli_epi16(codes, 4 * i) : codes, words);
      });
    else
      decoder.template unpack<Elem::integer>(codes, numbers);
  }

  // Where `unpack` leaves number i of a step.
  struct Places {
    uint8_t of[STEP] = {};
    constexpr Places() {
      for (int64_t i = 0; i < STEP; i++)
        of[i] = static_cast<uint8_t>(packed ? i % 4 * 32 + i / 4 : i / 8 % 2 * 32 + i / 16 * 8 + i % 8);
    }
  };

  // A row of x in this order, padded with zeros to whole steps.
  static void arrange(const Bfloat16* x, int64_t k, int64_t padded, Bfloat16* out) {
    static constexpr Places places;
    for (int64_t at = 0; at < padded; at += STEP) {
      Bfloat16 last[STEP] = {};
      if (at + STEP > k && at < k) std::memcpy(last, x + at, (k - at) * sizeof(Bfloat16));
      const Bfloat16* from = at + STEP > k ? last : x + at;
      for (int64_t i = 0; i < STEP; i++) out[at + places.of[i]] = from[i];
    }
  }

  // Where scales of two levels come from: in 128 bits two of each step.
  struct Pairs {
    alignas(64) uint8_t of[64] = {};
    constexpr Pairs() {
      for (int64_t i = 0; i < 64; i++) of[i] = static_cast<uint8_t>(i % 16 / 2 * 8 + i / 16 * 2 + i % 2);
    }
  };

  // The scales of SHARED steps, in the lanes of the numbers that they multiply.
  inline __attribute__((always_inline)) void numbers_of_scales(const uint8_t* bytes, __m512* out) const {
    if constexpr (Elem::two_level) {  // BF16 is the upper half of FP32
      static constexpr Pairs pairs;
      __m512i words[2];
      decoder.unpack(_mm512_permutexvar_epi8(_mm512_load_si512(pairs.of), _mm512_loadu_si512(bytes)), words);
      const __m512i none = _mm512_setzero_si512();
      each(std::make_integer_sequence<int, 2>(), [&](auto i) __attribute__((always_inline)) {
        out[2 * i] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(none, words[i]));
        out[2 * i + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(none, words[i]));
      });
    } else {
      const __m128i order = packed ? _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
                                   : _mm_setr_epi8(0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7);
      const __m128i* from = reinterpret_cast<const __m128i*>(bytes);
      const __m128i some = SHARED * SCALES == 16 ? _mm_loadu_si128(from) : _mm_loadl_epi64(from);
      const __m512i field = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_shuffle_epi8(some, order)), 23);
      const __m512i number = _mm512_max_epu32(field, _mm512_set1_epi32(0x00400000));
      const __mmask16 nan = _mm512_cmpeq_epi32_mask(field, _mm512_set1_epi32(INFINITY_BITS));
      *out = _mm512_castsi512_ps(_mm512_mask_mov_epi32(number, nan, _mm512_set1_epi32(NAN_BITS)));
    }
  }

  // Which of four lanes the scales of a step are in, for permutations within 128 bits.
  static inline __attribute__((always_inline)) __m512i lanes_of_step(int64_t step) {
    const int first = static_cast<int>(step % STEPS);
    return Elem::two_level ? _mm512_set4_epi32(2 * first + 1, 2 * first + 1, 2 * first, 2 * first) : _mm512_set1_epi32(first);
  }

  // `rows` of x, `padded` apart, times `weights` rows of the weight, whose sums are `stride` apart.
  template <int rows, int weights>
  static void sums(const Bfloat16* x, int64_t padded, Weight<Elem> weight, int64_t stride, float* sums) {
    constexpr std::make_integer_sequence<int, rows> all_rows{};
    constexpr std::make_integer_sequence<int, weights> all_weights{};
    constexpr int64_t TURN_BYTES = SHARED * BYTES, TURN_SCALES = SHARED * SCALES;
    const Bf16Dot dot;
    const int64_t width = weight.width(), blocks = weight.blocks(), between = weight.between;
    __m512 total[weights * rows];
    for (int i = 0; i < weights * rows; i++) total[i] = _mm512_setzero_ps();
    for (int64_t at = 0, block = 0; at < width; at += TURN_BYTES, block += TURN_SCALES) {
      const uint8_t *codes = weight.codes + at, *bytes = weight.scales + block;
      int64_t apart = between * width, scales_apart = between * blocks, steps = SHARED;
      uint8_t last[weights][TURN_BYTES], last_bytes[weights][TURN_SCALES];
      if (at + TURN_BYTES > width) {  // what is left, before zeros
        for (int w = 0; w < weights; w++) {
          std::memcpy(std::memset(last[w], 0, TURN_BYTES), codes + w * apart, width - at);
          std::memcpy(std::memset(last_bytes[w], 0, TURN_SCALES), bytes + w * scales_apart, blocks - block);
        }
        codes = last[0], bytes = last_bytes[0], apart = TURN_BYTES, scales_apart = TURN_SCALES;
        steps = (width - at + BYTES - 1) / BYTES;
      }
      const int64_t later = weight.soon(at, weights);
      __m512 shared[weights][REGISTERS];
      each(all_weights, [&](auto w) __attribute__((always_inline)) {
        dot.numbers_of_scales(bytes + w * scales_apart, shared[w]);
      });
      auto step = [&](int64_t i) __attribute__((always_inline)) {
        if (i >= steps) return;
        const __m512i lanes = lanes_of_step(i);
        __m512i numbers[weights][NUMBERS];
        each(all_weights, [&](auto w) __attribute__((always_inline)) {
          const uint8_t* here = codes + w * apart + i * BYTES;
          _mm_prefetch(reinterpret_cast<const char*>(here + later), _MM_HINT_T1);  // L2 has room for more
          dot.unpack(_mm512_loadu_si512(here), numbers[w]);
        });
        each(all_rows, [&](auto m) __attribute__((always_inline)) {
          const Bfloat16* row = x + m * padded + at * Elem::per_byte + i * STEP;
          __m512 sum[weights];
          each(all_weights, [&](auto w) __attribute__((always_inline)) { sum[w] = _mm512_setzero_ps(); });
          each(std::make_integer_sequence<int, NUMBERS>(), [&](auto n) __attribute__((always_inline)) {
            const __m512bh own = (__m512bh)_mm512_load_si512(row + 32 * n);
            each(all_weights, [&](auto w) __attribute__((always_inline)) {
              sum[w] = _mm512_dpbf16_ps(sum[w], (__m512bh)numbers[w][n], own);
            });
          });
          each(all_weights, [&](auto w) __attribute__((always_inline)) {
            const __m512 scale = _mm512_permutevar_ps(shared[w][i / STEPS], lanes);
            total[w * rows + m] = _mm512_fmadd_ps(sum[w], scale, total[w * rows + m]);
          });
        });
      };
      if constexpr (rows == 1)  // unrolled
        each(std::make_integer_sequence<int, SHARED>(), step);
      else
        each(std::make_integer_sequence<int, REGISTERS>(), [&](auto r) __attribute__((always_inline)) {
          for (int64_t i = r * STEPS; i < (r + 1) * STEPS; i++) step(i);
        });
    }
    each(all_weights, [&](auto w) __attribute__((always_inline)) {
      each(all_rows, [&](auto m) __attribute__((always_inline)) {
        sums[w * stride + m] = _mm512_reduce_add_ps(total[w * rows + m]);
      });
    });
  }
};
#endif

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
