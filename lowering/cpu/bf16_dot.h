// Few rows times rows of stored weights, by numbers of BF16: what `weight_only_mm.h` runs on AVX-512 with BF16 and byte
// permutations.
//
// 64 bytes of codes become BF16 numbers by a table: E2M1 of 16 words, four codes of each word after the other; others of
// 128 entries, in two halves of a byte. Dot products of pairs add the numbers of a lane, which share a scale, and one FMA
// multiplies by the scale. Up to 64 scales become numbers together: in BF16 too, which is the upper half of FP32.
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
  static constexpr int64_t OWN = SCALES > 4 ? SCALES / 4 : 1;          // of a step in 128 bits of its numbers
  static constexpr int64_t STEPS = 4 / OWN;                            // whose scales are one register
  static constexpr int64_t REGISTERS = 4, TURN = REGISTERS * STEPS;    // steps whose scales are decoded together

  const Decoder decoder{tables<std::conditional_t<Elem::two_level, E4M3, Elem>>()};  // of codes, or of such scales
  const __m512i words = _mm512_load_si512(BF16_OF_E2M1);

  inline __attribute__((always_inline)) void unpack(__m512i codes, __m512i* numbers) const {
    if constexpr (packed)
      each(std::make_integer_sequence<int, NUMBERS>(), [&](auto i) __attribute__((always_inline)) {
        numbers[i] = _mm512_permutexvar_epi16(i ? _mm512_srli_epi16(codes, 4 * i) : codes, words);
      });
    else
      decoder.unpack(codes, numbers);
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

  // Which scales of a turn 128 bits of numbers need, step after step.
  struct Order {
    alignas(64) uint8_t of[64] = {};
    constexpr Order() {
      for (int64_t i = 0; i < 64; i++)
        of[i] = static_cast<uint8_t>(i % 16 / OWN * SCALES + i / 16 * SCALES / 4 + i % OWN);
    }
  };

  static __mmask64 first(int64_t count) { return count < 64 ? (1ull << count) - 1 : ~0ull; }

  // `count` scales of a turn as BF16, which is the upper half of FP32.
  inline __attribute__((always_inline)) void halves_of_scales(const uint8_t* bytes, int64_t count, __m512i* out) const {
    static constexpr Order order;
    const __m512i given = _mm512_maskz_loadu_epi8(first(count), bytes);
    const __m512i codes = _mm512_permutexvar_epi8(_mm512_load_si512(order.of), given);
    if constexpr (Elem::two_level) return decoder.unpack(codes, out);
    const __mmask64 more = _mm512_cmplt_epu8_mask(_mm512_add_epi8(codes, _mm512_set1_epi8(1)), _mm512_set1_epi8(2));
    const __m512i low = _mm512_maskz_mov_epi8(more, _mm512_set1_epi8(static_cast<char>(0x80)));  // of 2^-127 and NaN
    out[0] = _mm512_srli_epi16(_mm512_unpacklo_epi8(low, codes), 1);
    out[1] = _mm512_srli_epi16(_mm512_unpackhi_epi8(low, codes), 1);
  }

  // Register r of scales, in the lanes of the numbers that they multiply.
  static inline __attribute__((always_inline)) __m512 scales_of(const __m512i* halves, int64_t r) {
    const __m512i half = halves[r / 2], none = _mm512_setzero_si512();
    return _mm512_castsi512_ps(r % 2 ? _mm512_unpackhi_epi16(none, half) : _mm512_unpacklo_epi16(none, half));
  }

  // Which of four lanes the scales of a step are in, for permutations within 128 bits.
  static inline __attribute__((always_inline)) __m512i lanes_of_step(int64_t step) {
    const int lane = static_cast<int>(step % STEPS);
    return OWN == 2 ? _mm512_set4_epi32(2 * lane + 1, 2 * lane + 1, 2 * lane, 2 * lane) : _mm512_set1_epi32(lane);
  }

  // `rows` of x, `padded` apart, times `weights` rows of the weight, whose sums are `stride` apart.
  template <int rows, int weights>
  static void sums(const Bfloat16* x, int64_t padded, Weight<Elem> weight, int64_t stride, float* sums) {
    constexpr std::make_integer_sequence<int, rows> all_rows{};
    constexpr std::make_integer_sequence<int, weights> all_weights{};
    const Bf16Dot dot;
    const int64_t width = weight.width(), blocks = weight.blocks(), between = weight.between;
    __m512 total[weights * rows];
    for (int i = 0; i < weights * rows; i++) total[i] = _mm512_setzero_ps();
    for (int64_t at = 0, block = 0; at < width; at += TURN * BYTES, block += TURN * SCALES) {
      const uint8_t *codes = weight.codes + at, *bytes = weight.scales + block;
      const int64_t later = weight.soon(at, weights), left = width - at;
      __m512i halves[weights][2];
      each(all_weights, [&](auto w) __attribute__((always_inline)) {
        const int64_t count = blocks - block < TURN * SCALES ? blocks - block : TURN * SCALES;
        dot.halves_of_scales(bytes + w * between * blocks, count, halves[w]);
      });
      auto step = [&](int64_t i, const __m512* shared, auto whole) __attribute__((always_inline)) {
        const __m512i lanes = lanes_of_step(i);
        __m512i numbers[weights][NUMBERS];
        each(all_weights, [&](auto w) __attribute__((always_inline)) {
          const uint8_t* here = codes + w * between * width + i * BYTES;
          _mm_prefetch(reinterpret_cast<const char*>(here + later), _MM_HINT_T1);  // L2 has room for more
          dot.unpack(whole ? _mm512_loadu_si512(here) : _mm512_maskz_loadu_epi8(first(left - i * BYTES), here), numbers[w]);
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
            total[w * rows + m] = _mm512_fmadd_ps(sum[w], _mm512_permutevar_ps(shared[w], lanes), total[w * rows + m]);
          });
        });
      };
      auto steps = [&](auto r, auto whole) __attribute__((always_inline)) {
        __m512 shared[weights];
        each(all_weights, [&](auto w) __attribute__((always_inline)) { shared[w] = scales_of(halves[w], r); });
        if constexpr (whole)
          each(std::make_integer_sequence<int, STEPS>(),
               [&](auto i) __attribute__((always_inline)) { step(r * STEPS + i, shared, whole); });
        else
          for (int64_t i = r * STEPS; i < (r + 1) * STEPS && i * BYTES < left; i++) step(i, shared, whole);
      };
      if (left < TURN * BYTES)
        for (int64_t r = 0; r < REGISTERS; r++) steps(r, std::false_type());
      else if constexpr (rows == 1)  // unrolled
        each(std::make_integer_sequence<int, REGISTERS>(),
             [&](auto r) __attribute__((always_inline)) { steps(r, std::true_type()); });
      else
        for (int64_t r = 0; r < REGISTERS; r++) steps(r, std::true_type());
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
