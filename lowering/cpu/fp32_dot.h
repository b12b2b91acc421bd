// Few rows times rows of stored weights, in registers of FP32: what `weight_only_mm.h` runs on AVX2 and on NEON.
//
// Codes become numbers that are 2^-Form::low of their values. Up to 32 share a scale, which one FMA applies to their sum. `arrange` puts x in the order of the numbers, and multiplies it by 2^Form::up.
//
//   NEON   by FP16 (`lanes.h`)
//   AVX2   the code's bits at the place where FP32 has its exponent, and the sign: 2^-120 of the value of E4M3, 2^-112 of
//          E5M2's, in two operations a number less than by FP16. Subnormal elements are subnormal numbers there, NaN is
//          none: x is raised so that its products are normal numbers, and NaN is looked for.
#ifndef MXCOMPILE_FP32_DOT_H
#define MXCOMPILE_FP32_DOT_H

#include "weight_rows.h"

MXCOMPILE_VECTORIZED

namespace mxcompile {

#ifdef MXCOMPILE_LANES
struct Fp32Numbers {
  using Number = Lanes;

  // Sums, in lanes, of products of `count` registers, which are at `at` of a block of 32, with block `index` of a row of x.
  template <int count>
  static inline __attribute__((always_inline)) Lanes dot(const Number* number, const float* x, int64_t, int64_t index, int at) {
    const float* row = x + index * BLOCK + at * WIDTH;
    Lanes dot = product(number[0], load(row));
    for (int i = 1; i < count; i++) dot = added(number[i], load(row + i * WIDTH), dot);
    return dot;
  }
};
#endif

#if MXCOMPILE_LANES == 8
// FP32 flushes no subnormal numbers while there is one of these, whatever the thread was told.
struct Subnormals {
  static constexpr unsigned flushing = 0x8040;
  const unsigned before = _mm_getcsr();
  Subnormals() {
    if (before & flushing) _mm_setcsr(before & ~flushing);
  }
  ~Subnormals() {
    if (before & flushing) _mm_setcsr(before);
  }
};

template <class Elem>
struct Dot : Fp32Numbers {
  using Codes = __m256i;
  static constexpr int parts = 4, low = Elem::emax == 8 ? 120 : 112, up = 64;
  static constexpr int shift = 7 - Elem::mantissa_bits;

  static int64_t place(int64_t i) { return (3 - i % 4) * WIDTH + i / 4; }  // of code i of 32

  // Products of signed bytes with powers of two are the bytes moved to where FP32's upper half has them. `most` becomes
  // the largest of all codes' magnitudes, doubled.
  static inline __attribute__((always_inline)) void unpack(const uint8_t* codes, Codes& most, Lanes* out) {
    const __m256i odd = _mm256_set1_epi16(1 << (8 + shift)), even = _mm256_set1_epi16(1 << shift);
    const __m256i number = _mm256_set1_epi32(static_cast<int>(0x80000000u | 0x7fu << (16 + shift)));
    __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    asm("" : "+x"(code));  // once: GCC reads it for every use
    most = _mm256_max_epu8(most, _mm256_add_epi8(code, code));
    __m256i upper = _mm256_maddubs_epi16(odd, code), lower = _mm256_maddubs_epi16(even, code);
    out[0] = _mm256_castsi256_ps(_mm256_and_si256(upper, number));
    out[1] = _mm256_castsi256_ps(_mm256_and_si256(lower, number));
    out[2] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(upper, 16), number));
    out[3] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(lower, 16), number));
  }

  static Codes none() { return _mm256_setzero_si256(); }

  static bool finite(Codes most) {
    const __m256i limit = _mm256_set1_epi8(static_cast<char>(Elem::emax == 8 ? 0xfe : 0xf8));
    return !_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(most, limit), most));
  }
};

template <>
struct Dot<INT8> : Fp32Numbers {
  struct Codes {};  // all are finite
  static constexpr int parts = 4, low = -INT8::mantissa_bits, up = low;

  static int64_t place(int64_t i) { return i; }

  static inline __attribute__((always_inline)) void unpack(const uint8_t* codes, Codes&, Lanes* out) {
    for (int i = 0; i < parts; i++) {
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i * WIDTH));
      out[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
    }
  }

  static Codes none() { return {}; }
  static bool finite(Codes) { return true; }
};
#elif MXCOMPILE_LANES == 4
struct Subnormals {};  // FP16 is converted exactly in any mode

template <class Elem>
struct Dot : Fp32Numbers {
  using Codes = uint8x16_t;
  static constexpr int parts = 8, low = raised<Elem>, up = 0;

  static int64_t place(int64_t i) { return i; }

  static inline __attribute__((always_inline)) void unpack(const uint8_t* codes, Codes& most, Lanes* out) {
    for (int64_t i = 0; i < BLOCK; i += CODES) {
      if (Elem::emax == 8) most = vmaxq_u8(most, vshlq_n_u8(vld1q_u8(codes + i), 1));
      mxcompile::unpack<Elem>(codes + row_bytes<Elem>(i), out + i / WIDTH);
    }
  }

  static Codes none() { return vdupq_n_u8(0); }
  static bool finite(Codes most) { return Elem::emax != 8 || vmaxvq_u8(most) != 0xfe; }
};
#endif

#ifdef MXCOMPILE_LANES
constexpr int64_t LONG = 512;  // numbers whose sums in FP32 may lose 2^-15

// How x lies in memory, and its products with rows of the weight. E2M1 on AVX2 has its own (`integer_dot.h`).
template <class Elem, class Numbers = Dot<Elem>>
struct InLanes {
  using Element = Elem;

  // Whether the sums are right for such x, rows of any length.
  template <class X>
  static bool takes(const X* x, int64_t count, int64_t) {
    return ordinary(x, count);
  }

  // `up` and the order of codes for one row of x, padded with zeros to `padded`, whole blocks.
  template <class X>
  static void arrange(const X* x, int64_t k, int64_t padded, float* out) {
    const float factor = scale_value(127 + Numbers::up);
    for (int64_t at = 0; at < padded; at += BLOCK) {
      float block[BLOCK] = {};
      const int64_t count = k - at < BLOCK ? (k > at ? k - at : 0) : BLOCK;
#pragma omp simd
      for (int64_t i = 0; i < count; i++) block[i] = widen(x[at + i]) * factor;
      for (int64_t i = 0; i < BLOCK; i++) out[at + Numbers::place(i)] = block[i];
    }
  }

  // Back from there.
  static void arrange_back(const float* x, int64_t padded, float* out) {
    const float factor = scale_value(127 - Numbers::up);
    for (int64_t at = 0; at < padded; at += BLOCK)
      for (int64_t i = 0; i < BLOCK; i++) out[at + i] = x[at + Numbers::place(i)] * factor;
  }

  // `rows` of x, `padded` apart, times `weights` rows of the weight, whose sums are `stride` apart. Returns false where
  // the sums are not right: for codes that are no finite numbers, and for scales that `Scales` does not have.
  template <int rows, int weights>
  static bool sums(const float* x, int64_t padded, Weight<Elem> weight, int64_t stride, float* sums) {
    constexpr std::make_integer_sequence<int, rows> all_rows{};
    constexpr std::make_integer_sequence<int, weights> all_weights{};
    constexpr int64_t bytes = row_bytes<Elem>(BLOCK), scales = BLOCK / Elem::block;
    constexpr int share = Numbers::parts / scales;  // numbers that share a scale
    const auto& powers = Scales<Numbers::low - Numbers::up, Elem::two_level>::all();
    const int64_t blocks = weight.blocks(), whole = weight.k / BLOCK, width = weight.width(), between = weight.between;
    for (int w = 0; w < weights && powers.most < 255; w++)
      if (largest(weight.scales + w * between * blocks, blocks) > powers.most) return false;
    [[maybe_unused]] const Subnormals subnormals;
    auto most = Numbers::none();
    Lanes total[weights * rows];
    for (int i = 0; i < weights * rows; i++) total[i] = zeros();
    auto block = [&](const uint8_t* first, int64_t step, int64_t index) __attribute__((always_inline)) {
      each(all_weights, [&](auto w) __attribute__((always_inline)) {
        typename Numbers::Number part[Numbers::parts];
        Numbers::unpack(first + w * step, most, part);
        each(std::make_integer_sequence<int, scales>(), [&](auto s) __attribute__((always_inline)) {
          const int64_t own = index * scales + s;
          const Lanes scale = everywhere(powers.value[weight.scales[w * between * blocks + (own < blocks ? own : 0)]]);
          each(all_rows, [&](auto m) __attribute__((always_inline)) {
            const float* row = x + m * padded;
            const Lanes dot = Numbers::template dot<share>(part + s * share, row, padded, index, s * share);
            total[w * rows + m] = added(dot, scale, total[w * rows + m]);
          });
        });
      });
    };
    for (int64_t index = 0; index < whole; index += 2) {
      const uint8_t* first = weight.codes + index * bytes;
      const int64_t later = weight.soon(index * bytes, weights);
      each(all_weights, [&](auto w) __attribute__((always_inline)) { fetch_later(first + w * between * width + later); });
      block(first, between * width, index);
      if (index + 1 < whole) block(first + bytes, between * width, index + 1);
    }
    if (whole < num_blocks(weight.k)) {
      uint8_t last[weights * bytes] = {};
      const int64_t done = whole * bytes;
      for (int w = 0; w < weights; w++)
        std::memcpy(last + w * bytes, weight.codes + w * between * width + done, width - done);
      block(last, bytes, whole);
    }
    each(all_weights, [&](auto w) __attribute__((always_inline)) {
      each(all_rows, [&](auto m) __attribute__((always_inline)) { sums[w * stride + m] = sum(total[w * rows + m]); });
    });
    return Numbers::finite(most);
  }
};

// The form for rows of at least LONG numbers X.
template <class Elem, class X, class = void>
struct ForLongRows {
  using Form = InLanes<Elem>;
};
#endif

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
