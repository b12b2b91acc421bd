// MX elements and scales in C++: the bit arithmetic that casts and products share.
//
//   byte   from the FP32 bits of a block's amax                                    scale_byte<Elem, rounding>
//   code   of y = x · 2^(127 − byte), |y| ≤ max or NaN                             encode<Elem>
//   value  of a code, and of y rounded to the element type                         decode<Elem>, rounded<Elem>
//
// Codes of E2M1 share bytes, two in each, the first in the low half: a row of k codes has row_bytes<Elem>(k).
//
// Rounding adds C = 2^(e + 23 − p) to |y|, e the exponent of y, at least that of the smallest normal value: the sum
// ends at the last of p stored bits, so the addition rounds it to nearest even, subnormals included, and its low bits
// are the element's. All functions are branch-free, so that loops over them become vectors of whatever ISA the
// compiler is told. They need IEEE additions: no reassociation, no flushing of subnormal results.
//
// Reference: mxcompile/formats/numerics.py.
#ifndef MXCOMPILE_ELEMENTS_H
#define MXCOMPILE_ELEMENTS_H

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BW__) && defined(__AVX512VBMI__)
#include <immintrin.h>
#define MXCOMPILE_BYTE_TABLES 1
#endif

// Inductor turns GCC's vectorizer off, as its own loops are written in vectors; ours are written as loops. Its option
// -fno-unsafe-math-optimizations revokes -fno-trapping-math, without which choices are no vectors in AVX2.
#if defined(__GNUC__) && !defined(__clang__)
#define MXCOMPILE_VECTORIZED _Pragma("GCC push_options") _Pragma("GCC optimize(\"tree-loop-vectorize,no-trapping-math\")")
#define MXCOMPILE_VECTORIZED_END _Pragma("GCC pop_options")
#else
#define MXCOMPILE_VECTORIZED
#define MXCOMPILE_VECTORIZED_END
#endif

MXCOMPILE_VECTORIZED

namespace mxcompile {

constexpr int64_t BLOCK = 32;
constexpr uint32_t INFINITY_BITS = 0x7f800000, NAN_BITS = 0x7fc00000, MAGNITUDE = 0x7fffffff;
constexpr uint32_t SCALE_NAN = 255;

enum class Rounding { rceil, floor, ceil, even };

struct MX {  // a scale of E8M0 for 32 elements
  static constexpr int64_t block = BLOCK;
  static constexpr bool two_level = false, integer = false;
};

struct E4M3 : MX {
  static constexpr int mantissa_bits = 3, emax = 8, min_field = 121;  // min_field: biased exponent of 2^-6
  static constexpr int bits = 8, per_byte = 1, not_finite = 0x7f;     // not_finite: the first such code
  static constexpr float max = 448.0f;
};

struct E5M2 : MX {
  static constexpr int mantissa_bits = 2, emax = 15, min_field = 113;
  static constexpr int bits = 8, per_byte = 1, not_finite = 0x7c;
  static constexpr float max = 57344.0f;
};

struct INT8 : MX {  // k/64, k in two's complement
  static constexpr int mantissa_bits = 6, emax = 0, min_field = 127;
  static constexpr int bits = 8, per_byte = 1;
  static constexpr float max = 127.0f / 64;
  static constexpr bool integer = true;
};

struct E2M1 : MX {
  static constexpr int mantissa_bits = 1, emax = 2, min_field = 127;
  static constexpr int bits = 4, per_byte = 2, not_finite = 8;
  static constexpr float max = 6.0f;
};

struct NVFP4 : E2M1 {  // a scale of E4M3 for 16 elements; a number of the tensor or of the row divides all of them
  static constexpr int64_t block = 16;
  static constexpr bool two_level = true;
};

inline int64_t num_blocks(int64_t length, int64_t block = BLOCK) { return (length + block - 1) / block; }

template <class Elem>
constexpr int64_t row_bytes(int64_t k) {
  return k / Elem::per_byte;
}

// `count` codes as one a byte, in `buffer` unless they are so.
template <class Elem>
inline const uint8_t* spread(const uint8_t* codes, int64_t count, uint8_t* buffer) {
  if (Elem::per_byte == 1) return codes;
#pragma omp simd
  for (int64_t i = 0; i < count / 2; i++) {
    buffer[2 * i] = codes[i] & 15;
    buffer[2 * i + 1] = codes[i] >> 4;
  }
  return buffer;
}

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// A BF16 number is the high half of an FP32 one.
struct Bfloat16 {
  uint16_t bits;
};

inline float widen(Bfloat16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(float x) { return x; }
inline uint16_t magnitude(Bfloat16 x) { return x.bits & 0x7fff; }
inline uint32_t magnitude(float x) { return as_bits(x) & MAGNITUDE; }
inline uint32_t fp32_bits(uint16_t magnitude) { return static_cast<uint32_t>(magnitude) << 16; }
inline uint32_t fp32_bits(uint32_t magnitude) { return magnitude; }

inline void narrow(float value, float& out) { out = value; }
inline void narrow(float value, Bfloat16& out) {
  uint32_t bits = as_bits(value);
  uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out.bits = static_cast<uint16_t>((bits & MAGNITUDE) > INFINITY_BITS ? 0x7fc0 : nearest);
}

template <class Elem, Rounding rounding>
inline uint32_t scale_byte(uint32_t amax) {
  constexpr int32_t ones = (1 << 23) - 1, smallest_normal = 1 << 23;
  constexpr float gap = 2 - Elem::max / (1 << Elem::emax);  // from the largest element to the next power of two
  constexpr int32_t added = rounding == Rounding::rceil  ? static_cast<int32_t>(gap * (1 << 23)) - 1
                            : rounding == Rounding::even ? 1 << (22 - Elem::mantissa_bits)
                            : rounding == Rounding::ceil ? ones
                                                         : 0;
  int32_t bits = static_cast<int32_t>(amax);
  if (Elem::emax == 0) bits = bits < smallest_normal ? 2 * bits - smallest_normal : bits;  // for others the byte is 0
  int32_t byte = ((bits + added) >> 23) - Elem::emax;
  byte = byte < 0 ? 0 : byte;
  byte = byte > 254 ? 254 : byte;
  return amax >= INFINITY_BITS ? SCALE_NAN : static_cast<uint32_t>(byte);
}

// 2^(byte − 127), NaN for 255
inline float scale_value(uint32_t byte) {
  uint32_t bits = byte == 0 ? 0x00400000 : byte << 23;
  return as_float(byte == SCALE_NAN ? NAN_BITS : bits);
}

// 2^(127 − byte), NaN for 255
inline float inverse_scale_value(uint32_t byte) {
  uint32_t bits = byte == 254 ? 0x00400000 : (254 - byte) << 23;
  return as_float(byte == SCALE_NAN ? NAN_BITS : bits);
}

template <class Elem>
struct Split {  // |y| as the exponent that rules its last bit, in place, and the constant that rounds to that bit
  uint32_t exponent, constant;
  explicit Split(uint32_t magnitude) {
    constexpr uint32_t least = static_cast<uint32_t>(Elem::min_field) << 23;
    uint32_t own = magnitude & INFINITY_BITS;
    exponent = own > least ? own : least;
    constant = exponent + (static_cast<uint32_t>(23 - Elem::mantissa_bits) << 23);
  }
};

// FLOOR and EVEN derive scales under which y may exceed the largest element; NaN stays. `whole_steps` saturates integers.
template <class Elem, Rounding rounding>
inline float saturated(float y) {
  if (Elem::integer || rounding == Rounding::rceil || rounding == Rounding::ceil) return y;
  y = y > Elem::max ? Elem::max : y;
  return y < -Elem::max ? -Elem::max : y;
}

// The nearest integer, to even, to the steps of an integer type in y; any for NaN. Also the largest scale needs saturation.
template <class Elem>
inline int32_t whole_steps(float y) {
  const float large = 1.5f * (1 << (23 - Elem::mantissa_bits));  // a sum with it ends at a step
  constexpr int32_t most = static_cast<int32_t>(Elem::max * (1 << Elem::mantissa_bits));
  int32_t number = static_cast<int32_t>(as_bits(y + large) - as_bits(large));
  number = number > most ? most : number;
  return number < -most ? -most : number;
}

template <class Elem>
inline float rounded(float y) {
  if constexpr (Elem::integer) return static_cast<float>(whole_steps<Elem>(y)) / (1 << Elem::mantissa_bits);  // of NaN the scale is NaN
  uint32_t bits = as_bits(y);
  Split<Elem> split(bits & MAGNITUDE);
  float value = (as_float(bits & MAGNITUDE) + as_float(split.constant)) - as_float(split.constant);
  return as_float(as_bits(value) | (bits & ~MAGNITUDE));
}

template <class Elem>
inline uint8_t encode(float y) {
  if constexpr (Elem::integer) return static_cast<uint8_t>(y != y ? 0 : whole_steps<Elem>(y));
  uint32_t bits = as_bits(y), size = bits & MAGNITUDE;
  constexpr uint32_t first = static_cast<uint32_t>(Elem::min_field) << Elem::mantissa_bits;
  Split<Elem> split(size);
  uint32_t steps = as_bits(as_float(size) + as_float(split.constant)) - split.constant;
  uint32_t code = (split.exponent >> (23 - Elem::mantissa_bits)) - first + steps;
  code = size > INFINITY_BITS ? 0x7f : code;
  return static_cast<uint8_t>(code | ((bits >> 24) & 0x80));
}

template <class Elem>
inline float decode(uint8_t code) {
  const float step = as_float(static_cast<uint32_t>(Elem::min_field - Elem::mantissa_bits) << 23);  // of subnormals
  if constexpr (Elem::integer) {
    return static_cast<float>(static_cast<int8_t>(code)) * step;
  } else {
    constexpr int shift = 23 - Elem::mantissa_bits;
    constexpr uint32_t bias = static_cast<uint32_t>(Elem::min_field - 1) << 23, sign = 1u << (Elem::bits - 1);
    constexpr uint32_t not_finite = Elem::not_finite;  // E5M2 has infinities from there
    uint32_t size = code & (sign - 1);
    // an integer times the step of the subnormals; a normal value is its bits, moved
    float subnormal = static_cast<float>(static_cast<int32_t>(size)) * step;
    uint32_t value = size < (1u << Elem::mantissa_bits) ? as_bits(subnormal) : (size << shift) + bias;
    uint32_t special = Elem::emax != 8 && size == not_finite ? INFINITY_BITS : NAN_BITS;
    value = size >= not_finite ? special : value;
    return as_float(value | ((code & sign) << (32 - Elem::bits)));
  }
}

// What a byte of a weight's scales stands for.
template <class Elem>
inline float scale_number(uint8_t byte) {
  return Elem::two_level ? decode<E4M3>(byte) : scale_value(byte);
}

// f of 0, 1, … as constants: sums that constants index stay in registers, those that a loop indexes do not.
template <class F, int... index>
inline __attribute__((always_inline)) void each(std::integer_sequence<int, index...>, F f) {
  (f(std::integral_constant<int, index>()), ...);
}

#ifdef MXCOMPILE_BYTE_TABLES
struct Tables {
  alignas(64) uint8_t high[128], low[128];
  float scale[256];
};

template <class Elem>
inline const Tables& tables() {
  static const Tables made = [] {
    Tables t;
    for (int code = 0; code < 128; code++) {  // of fewer bits with the sign
      const uint32_t most = Elem::integer && !code ? 128 : 0;  // the low 7 bits of the largest magnitude are zero
      uint32_t bits = as_bits(decode<Elem>(static_cast<uint8_t>(code | most))) & (Elem::integer ? MAGNITUDE : ~0u);
      t.high[code] = static_cast<uint8_t>(bits >> 24);
      t.low[code] = static_cast<uint8_t>(bits >> 16);
    }
    for (uint32_t byte = 0; byte < 256; byte++) t.scale[byte] = scale_value(byte);
    return t;
  }();
  return made;
}

// Up to 64 codes, one a byte.
template <class Elem>
inline __m512i load_codes(const uint8_t* codes, int64_t count) {
  const bool whole = count == 64;
  if (Elem::per_byte == 1)
    return whole ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8(~0ull >> (64 - count), codes);
  const __mmask32 inside = whole ? ~0u : ~0u >> (32 - count / 2);
  __m512i words = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(inside, codes));
  return _mm512_and_si512(_mm512_or_si512(words, _mm512_slli_epi16(words, 4)), _mm512_set1_epi8(15));
}

// 64 codes as BF16 numbers, by their bytes in registers.
struct Decoder {
  __m512i h0, h1, l0, l1;

  explicit Decoder(const Tables& t)
      : h0(_mm512_load_si512(t.high)), h1(_mm512_load_si512(t.high + 64)),
        l0(_mm512_load_si512(t.low)), l1(_mm512_load_si512(t.low + 64)) {}

  // of each 16 codes the first eights, then the second ones; of integers by their magnitudes
  template <bool integer = false>
  void unpack(__m512i codes, __m512i* out) const {
    const __m512i place = integer ? _mm512_abs_epi8(codes) : codes;
    const __mmask64 some = integer ? _mm512_test_epi8_mask(codes, codes) : ~0ull;
    __m512i high = _mm512_maskz_permutex2var_epi8(some, h0, place, h1);  // by the low 7 bits of each byte
    __m512i low = _mm512_permutex2var_epi8(l0, place, l1);
    high = _mm512_or_si512(high, _mm512_and_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80))));
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
  }
};
#endif

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
