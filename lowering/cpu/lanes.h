// FP32 numbers in registers, and codes as such numbers where a CPU converts FP16 but has no table of bytes: AVX2, NEON.
//
// E5M2 is the upper byte of an FP16 number. E4M3, moved by 7 bits to where FP16 has its exponent, is an FP16 number of
// 2^-8 times its value, subnormal or not. Only its NaN becomes a number there: `has_nan` looks for it. The upper byte of
// an E2M1 number in FP16 is all of it, and a table has these bytes.
#ifndef MXCOMPILE_LANES_H
#define MXCOMPILE_LANES_H

#include "elements.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define MXCOMPILE_LANES 8
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define MXCOMPILE_LANES 4
#endif

MXCOMPILE_VECTORIZED

namespace mxcompile {

#ifdef MXCOMPILE_LANES
constexpr int64_t WIDTH = MXCOMPILE_LANES;
constexpr int64_t CODES = 16;  // that `unpack` takes

// What the numbers of `unpack` are to be multiplied by.
template <class Elem>
constexpr int raised = Elem::emax == 8 ? 8 : 0;

// The upper bytes of E2M1's numbers in FP16, by code.
alignas(16) constexpr uint8_t FP16_OF_E2M1[16] = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46,
                                                  0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};

template <class Elem>
inline bool has_nan(const uint8_t* codes, int64_t count) {
  if (Elem::emax != 8) return false;  // FP16 has NaN and infinities where E5M2 has them
  uint8_t most[4 * CODES] = {}, all = 0;
  int64_t i = 0;
  for (; i + 4 * CODES <= count; i += 4 * CODES)
#pragma omp simd
    for (int64_t j = 0; j < 4 * CODES; j++) {
      uint8_t size = static_cast<uint8_t>(codes[i + j] << 1);
      most[j] = size > most[j] ? size : most[j];
    }
  for (; i < count; i++) all |= (codes[i] & 0x7f) == 0x7f;
#pragma omp simd reduction(| : all)
  for (int64_t j = 0; j < 4 * CODES; j++) all |= most[j] == 0xfe;
  return all;
}

inline uint8_t largest(const uint8_t* bytes, int64_t count) {
  uint8_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; i++) most = bytes[i] > most ? bytes[i] : most;
  return most;
}

// What bytes of scales stand for, times 2^raised, up to the byte `most`; of two levels E4M3, else E8M0.
template <int raised, bool two_level = false>
struct Scales {
  static_assert(!two_level || !raised, "there is no need for others");
  static constexpr int most = two_level ? 0x7e : raised ? 254 - raised : 255;
  float value[256];
  Scales() {
    for (int byte = 0; byte < 256; byte++)
      value[byte] = byte > most ? 0 : two_level ? decode<E4M3>(static_cast<uint8_t>(byte))
                    : raised    ? as_float(static_cast<uint32_t>(byte + raised) << 23)
                                : scale_value(byte);
  }
  static const Scales& all() {
    static const Scales made;
    return made;
  }
};
#endif

#if MXCOMPILE_LANES == 8
using Lanes = __m256;

inline Lanes zeros() { return _mm256_setzero_ps(); }
inline Lanes everywhere(float x) { return _mm256_set1_ps(x); }
inline Lanes load(const float* from) { return _mm256_loadu_ps(from); }
inline Lanes load(const Bfloat16* from) {
  const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
}
inline void store(float* to, Lanes x) { _mm256_storeu_ps(to, x); }
inline Lanes product(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes added(Lanes a, Lanes b, Lanes sum) { return _mm256_fmadd_ps(a, b, sum); }
// Products of 16 bits, two of them added to each lane of 32.
inline __attribute__((always_inline)) __m256i with_pairs(__m256i a, __m256i b, __m256i sum) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sum, a, b);
#elif defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}
inline void fetch(const uint8_t* from) { _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T0); }
inline void fetch_later(const uint8_t* from) { _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T1); }

inline float sum(Lanes x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// Sums of four, `stride` apart in memory.
inline void store_sums(const Lanes* x, int64_t stride, float* to) {
  __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  __m128 sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  _mm_store_ss(to, sums);
  _mm_store_ss(to + stride, _mm_movehdup_ps(sums));
  _mm_store_ss(to + 2 * stride, _mm_movehl_ps(sums, sums));
  _mm_store_ss(to + 3 * stride, _mm_shuffle_ps(sums, sums, 3));
}

template <class Elem>
inline void unpack(const uint8_t* codes, Lanes* out) {
  if (Elem::integer) {
    const Lanes step = everywhere(1.0f / 64);
    for (int i = 0; i < 2; i++) {
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i * WIDTH));
      out[i] = product(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)), step);
    }
    return;
  }
  if (Elem::per_byte == 2) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(FP16_OF_E2M1));
    __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    __m128i each = _mm_and_si128(_mm_or_si128(words, _mm_slli_epi16(words, 4)), _mm_set1_epi8(15));
    __m128i upper = _mm_shuffle_epi8(table, each);
    out[0] = _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), upper));
    out[1] = _mm256_cvtph_ps(_mm_unpackhi_epi8(_mm_setzero_si128(), upper));
    return;
  }
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), Elem::emax == 8 ? 7 : 8);
  if (Elem::emax == 8) words = _mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(words));
  out[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1));
}
#elif MXCOMPILE_LANES == 4
using Lanes = float32x4_t;

inline Lanes zeros() { return vdupq_n_f32(0); }
inline Lanes everywhere(float x) { return vdupq_n_f32(x); }
inline Lanes load(const float* from) { return vld1q_f32(from); }
inline Lanes load(const Bfloat16* from) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)), 16));
}
inline void store(float* to, Lanes x) { vst1q_f32(to, x); }
inline Lanes product(Lanes a, Lanes b) { return vmulq_f32(a, b); }
inline Lanes added(Lanes a, Lanes b, Lanes sum) { return vfmaq_f32(sum, a, b); }
inline void fetch(const uint8_t* from) { __builtin_prefetch(from); }
inline void fetch_later(const uint8_t* from) { __builtin_prefetch(from, 0, 2); }
inline float sum(Lanes x) { return vaddvq_f32(x); }

inline void store_sums(const Lanes* x, int64_t stride, float* to) {
  for (int i = 0; i < 4; i++) to[i * stride] = sum(x[i]);
}

template <class Elem>
inline void unpack(const uint8_t* codes, Lanes* out) {
  if (Elem::integer) {
    const Lanes step = everywhere(1.0f / 64);
    for (int i = 0; i < 2; i++) {
      const int16x8_t eight = vmovl_s8(vreinterpret_s8_u8(vld1_u8(codes + 2 * i * WIDTH)));
      out[2 * i] = product(vcvtq_f32_s32(vmovl_s16(vget_low_s16(eight))), step);
      out[2 * i + 1] = product(vcvtq_f32_s32(vmovl_s16(vget_high_s16(eight))), step);
    }
    return;
  }
  uint8x16_t bytes, nothing = vdupq_n_u8(0);
  if (Elem::per_byte == 2) {
    uint8x8_t pairs = vld1_u8(codes), low = vand_u8(pairs, vdup_n_u8(15)), high = vshr_n_u8(pairs, 4);
    bytes = vqtbl1q_u8(vld1q_u8(FP16_OF_E2M1), vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)));
  } else {
    bytes = vld1q_u8(codes);
  }
  uint16x8_t lower, upper;
  if (Elem::emax == 8) {
    const uint16x8_t parts = vdupq_n_u16(0xbf80);
    int8x16_t with_sign = vreinterpretq_s8_u8(bytes);
    lower = vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(with_sign), 7)), parts);
    upper = vandq_u16(vreinterpretq_u16_s16(vshll_high_n_s8(with_sign, 7)), parts);
  } else {
    lower = vreinterpretq_u16_u8(vzip1q_u8(nothing, bytes));  // bytes become the upper halves of words
    upper = vreinterpretq_u16_u8(vzip2q_u8(nothing, bytes));
  }
  float16x8_t first = vreinterpretq_f16_u16(lower), second = vreinterpretq_f16_u16(upper);
  out[0] = vcvt_f32_f16(vget_low_f16(first));
  out[1] = vcvt_high_f32_f16(first);
  out[2] = vcvt_f32_f16(vget_low_f16(second));
  out[3] = vcvt_high_f32_f16(second);
}
#endif

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
