// Products of two matrices in MXINT8, in integers:
//
//   out[m, n] = Σ_blocks 2^(s[m, block] + t[n, block] − 254) · 2^-12 · Σ_k x[m, k] · w[n, k] (+ bias[n])
//
// x [M, K], w [N, K] codes, s and t bytes for each 32 of them; either matrix may lie transposed in memory. The sum of a block is exact; it is scaled and added in FP32.
// A panel of PANEL rows of w is packed for the instruction, multiplied by all rows of x, and forgotten: no second copy
// of a weight stays in memory. Rows of x are packed some at a time, and multiplied TILE at a time.
//
//   bytes    AVX-512 with VNNI: four products a lane, of w + 128, which is unsigned, with x; less 128 · Σ x of the block
//   int16    AVX2: codes become integers of 16 bits, two products a lane. Bytes would need a sign and as many steps
//   dot      NEON with dot products: four products a lane, of signed bytes
//   i8mm     NEON with products of matrices: eight products a lane; a register has the sums of two rows of each side
//   loops    other ISAs, and extreme scales: one sum after the other, scaled in FP64
//
// The int16 form also takes x in BF16, as `int16_dot.h` rounds it: `many_rows_mm`.
#ifndef MXCOMPILE_INTEGER_MM_H
#define MXCOMPILE_INTEGER_MM_H

#include "weight_only_mm.h"
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define MXCOMPILE_INTEGER_LANES 16
#elif MXCOMPILE_LANES == 8
#define MXCOMPILE_INTEGER_LANES 8
#elif MXCOMPILE_LANES == 4 && defined(__ARM_FEATURE_DOTPROD)
#define MXCOMPILE_INTEGER_LANES 4
#endif

MXCOMPILE_VECTORIZED

namespace mxcompile {
namespace integers {  // a package has all kernels in one file

#if MXCOMPILE_INTEGER_LANES == 16
using Number = int8_t;
constexpr int64_t PART = 16, STRETCH = 32;  // lanes; blocks of K of which operands stay in the first-level cache
constexpr int OFFSET = 128;  // that packed codes of w have
constexpr int64_t HIGH = 1, TOGETHER = 4;  // rows of x whose sums a register has; products of a lane
#elif MXCOMPILE_INTEGER_LANES == 4
using Number = int8_t;
constexpr int64_t PART = 4, STRETCH = 32;
constexpr int OFFSET = 0;
#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr int64_t HIGH = 2, TOGETHER = 8;
#else
constexpr int64_t HIGH = 1, TOGETHER = 4;
#endif
#else  // AVX2
using Number = int16_t;
constexpr int64_t PART = 8, STRETCH = 16;
constexpr int OFFSET = 0;
constexpr int64_t HIGH = 1, TOGETHER = 2;
#endif
constexpr int64_t TILE = 6, PANEL = 2 * PART;  // rows of x and of w whose sums stay in registers
constexpr int64_t WIDE = PART / HIGH;  // rows of w whose sums a register has
constexpr int64_t DOWN = TILE / HIGH, ACROSS = PANEL / WIDE;  // registers
constexpr int64_t CHUNK = 1024;  // about how many rows of x share the packing of a panel
constexpr int64_t SMALL = 1 << 20;  // products that are not worth waking threads for
constexpr int LEAST_BYTE = 10, MOST_BYTE = 227;  // of scales whose products with sums are normal numbers

// Rows of codes and scales. across: memory holds the transposed matrices, as a cast along the first dimension writes them.
struct Codes {
  const uint8_t *codes, *scales;
  int64_t rows, k;
  bool across;

  int64_t blocks() const { return num_blocks(k); }

  int8_t code(int64_t row, int64_t i) const { return static_cast<int8_t>(codes[across ? i * rows + row : row * k + i]); }
  uint8_t scale(int64_t row, int64_t index) const {
    return scales[across ? index * rows + row : row * blocks() + index];
  }

  // The codes of a block of `count` ≤ 32 rows from `first` on, `apart` bytes from one to the next. Transposed codes and
  // zeros for what is not there are in `buffer`.
  const int8_t* block(int64_t first, int64_t count, int64_t index, int8_t* buffer, int64_t& apart) const {
    const int64_t start = index * BLOCK, length = k - start < BLOCK ? k - start : BLOCK;
    if (across) {
      const int64_t there = rows - first < count ? rows - first : count;
      if (length < BLOCK || there < count) std::memset(buffer, 0, count * BLOCK);
      const int8_t* here = reinterpret_cast<const int8_t*>(codes) + start * rows + first;
      for (int64_t i = 0; i < length; i++)
        for (int64_t r = 0; r < there; r++) buffer[r * BLOCK + i] = here[i * rows + r];
      apart = BLOCK;
      return buffer;
    }
    const int8_t* here = reinterpret_cast<const int8_t*>(codes) + first * k + start;
    apart = k;
    if (length == BLOCK && first + count <= rows) return here;
    std::memset(buffer, 0, count * BLOCK);
    for (int64_t r = 0; r < count && first + r < rows; r++) std::memcpy(buffer + r * BLOCK, here + r * k, length);
    apart = BLOCK;
    return buffer;
  }
};

// Rows of numbers that are no codes.
template <class X>
struct Numbers {
  const X* x;
  int64_t rows, k;

  int64_t blocks() const { return num_blocks(k); }
};

// Rows of codes, TILE or PANEL of them together, a block after the other. scale: 2^-6 of its value, 0 of blocks of zeros.
// less: the sum of the codes of a block, times −OFFSET.
struct Packed {
  std::unique_ptr<uint8_t[]> memory;
  Number* codes;
  float* scale;
  int32_t* less;

  Packed(int64_t rows, int64_t blocks) {
    const int64_t numbers = rows * blocks;
    memory.reset(new uint8_t[numbers * (BLOCK * sizeof(Number) + sizeof(float) + sizeof(int32_t)) + 3 * LINE_BYTES]);
    codes = on_a_line<Number>(memory.get());
    scale = on_a_line<float>(codes + numbers * BLOCK);
    less = reinterpret_cast<int32_t*>(scale + numbers);
  }

  // Returns whether the scale is extreme.
  bool set_scale(int64_t at, bool some, uint8_t byte) {
    scale[at] = (some || byte == SCALE_NAN ? scale_value(byte) : 0.0f) * (1.0f / 64);
    return some && byte != SCALE_NAN && (byte < LEAST_BYTE || byte > MOST_BYTE);
  }
};

// A block of codes to row r of a tile. sum: of the codes, where OFFSET is not 0. Returns whether a code is not 0.
#if MXCOMPILE_INTEGER_LANES == 16
inline bool copy_block(const int8_t* from, int64_t r, Number* tile, int32_t& sum) {
  const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile + r * BLOCK), codes);
  const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), codes);
  __m128i total = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0x4e));  // the upper half to the lower one
  sum = _mm_extract_epi32(total, 0) + _mm_extract_epi32(total, 1);
  return _mm256_test_epi8_mask(codes, codes) != 0;
}
#elif MXCOMPILE_INTEGER_LANES == 8
inline bool copy_block(const int8_t* from, int64_t r, Number* tile, int32_t& sum) {
  int32_t some = sum = 0;
  Number* to = tile + r * BLOCK;
#pragma omp simd reduction(| : some)
  for (int64_t i = 0; i < BLOCK; i++) to[i] = from[i], some |= from[i];
  return some;
}
#elif MXCOMPILE_INTEGER_LANES == 4
inline bool are_zeros(const int8_t* block) {
  return !vmaxvq_u32(vreinterpretq_u32_s8(vorrq_s8(vld1q_s8(block), vld1q_s8(block + BLOCK / 2))));
}

inline bool copy_block(const int8_t* from, int64_t r, Number* tile, int32_t& sum) {
  Number* to = tile + (r - r % HIGH) * BLOCK + r % HIGH * TOGETHER;
  for (int64_t i = 0; i < BLOCK; i += TOGETHER) std::memcpy(to + i * HIGH, from + i, TOGETHER);
  sum = 0;
  return !are_zeros(from);
}
#endif

#ifdef MXCOMPILE_INTEGER_LANES
// TILE rows of x from `first` on, those of a block one behind the other, to place `at`. Returns whether a scale is extreme.
inline bool pack_tile(Codes from, int64_t first, int64_t at, Packed& to) {
  bool extreme = false;
  for (int64_t index = 0; index < from.blocks(); index++) {
    int8_t buffer[TILE * BLOCK];
    int64_t apart;
    const int8_t* here = from.block(first, TILE, index, buffer, apart);
    for (int64_t r = 0; r < TILE; r++, at++) {
      int32_t sum;
      const bool some = copy_block(here + r * apart, r, to.codes + (at - r) * BLOCK, sum);
      to.less[at] = -OFFSET * sum;
      extreme |= to.set_scale(at, some, first + r < from.rows ? from.scale(first + r, index) : 0);
    }
  }
  return extreme;
}

#if MXCOMPILE_INTEGER_LANES == 8
template <class X>
inline bool pack_tile(Numbers<X> from, int64_t first, int64_t at, Packed& to) {
  bool extreme = false;
  for (int64_t start = 0; start < from.k; start += BLOCK)
    for (int64_t row = first; row < first + TILE; row++, at++) {
      const int64_t length = from.k - start < BLOCK ? from.k - start : BLOCK, count = row < from.rows ? length : 0;
      const uint32_t exponent = Int16Dot::round_block(from.x + row * from.k + start, count, to.codes + at * BLOCK);
      extreme |= !Int16Dot::is_ordinary(exponent);
      to.less[at] = 0;
      to.scale[at] = scale_value(exponent - Int16Dot::bits);
    }
  return extreme;
}
#endif

#if MXCOMPILE_INTEGER_LANES == 16
using Sums = __m512i;
using Scaled = __m512;

inline Sums equal(int32_t x) { return _mm512_set1_epi32(x); }
inline Sums load_codes(const Number* from) { return _mm512_load_si512(from); }
inline Sums with_products(Sums w, Sums x, Sums sum) { return _mm512_dpbusd_epi32(sum, w, x); }
inline Scaled equal(float x) { return _mm512_set1_ps(x); }
inline Scaled load_sums(const float* from) { return _mm512_loadu_ps(from); }
inline void store_sums(float* to, Scaled x) { _mm512_storeu_ps(to, x); }
inline Scaled with_scaled(Sums sum, Scaled left, Scaled right, Scaled total) {
  return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), left), right, total);
}

// Four codes of each of PART rows plus OFFSET, then the next four of each, at distances of PANEL rows. Returns what is not
// 0 of each row.
inline Sums store_flipped(Sums four, Number* to) {
  _mm512_store_si512(to, _mm512_xor_si512(four, _mm512_set1_epi8(-128)));
  return four;
}

inline Sums pack_rows(Codes from, int64_t first, int64_t index, Number* to) {
  int8_t buffer[PART * BLOCK];
  int64_t apart;
  const int8_t* here = from.block(first, PART, index, buffer, apart);
  const auto row = [&](int64_t r) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(here + r * apart)); };
  __m512i four[2][4];  // words of rows 0 to 7 and 8 to 15: in the quarters of the i-th, words i and i + 4 of four rows, twice
  for (int64_t half = 0; half < 2; half++) {
    __m512i two[4], pair[4];
    for (int64_t r = 0; r < 4; r++)
      two[r] = _mm512_inserti64x4(_mm512_castsi256_si512(row(8 * half + r)), row(8 * half + r + 4), 1);
    for (int64_t r = 0; r < 4; r += 2) {
      pair[r] = _mm512_unpacklo_epi32(two[r], two[r + 1]);
      pair[r + 1] = _mm512_unpackhi_epi32(two[r], two[r + 1]);
    }
    for (int64_t i = 0; i < 2; i++) {
      four[half][2 * i] = _mm512_unpacklo_epi64(pair[i], pair[i + 2]);
      four[half][2 * i + 1] = _mm512_unpackhi_epi64(pair[i], pair[i + 2]);
    }
  }
  Sums all = _mm512_setzero_si512();
  for (int64_t i = 0; i < 4; i++) {
    const __m512i low = _mm512_shuffle_i32x4(four[0][i], four[1][i], 0x88);  // quarters 0 and 2 of both
    const __m512i high = _mm512_shuffle_i32x4(four[0][i], four[1][i], 0xdd);
    all = _mm512_or_si512(all, store_flipped(low, to + 4 * i * PANEL));
    all = _mm512_or_si512(all, store_flipped(high, to + 4 * (i + 4) * PANEL));
  }
  return all;
}

inline Sums pack_across(Codes from, int64_t first, int64_t index, Number* to) {
  const int64_t there = from.rows - first < PART ? from.rows - first : PART;
  const __mmask16 inside = there > 0 ? static_cast<__mmask16>((1 << there) - 1) : 0;
  const int8_t* here = reinterpret_cast<const int8_t*>(from.codes) + first;
  const auto codes = [&](int64_t i) {  // the i-th of each row, in the lowest byte of a lane
    const __mmask16 mask = i < from.k ? inside : 0;
    return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, mask ? here + i * from.rows : here));
  };
  Sums all = _mm512_setzero_si512();
  for (int64_t i = 0; i < BLOCK; i += 4) {
    const int64_t at = index * BLOCK + i;
    const __m512i low = _mm512_or_si512(codes(at), _mm512_slli_epi32(codes(at + 1), 8));
    const __m512i high = _mm512_or_si512(codes(at + 2), _mm512_slli_epi32(codes(at + 3), 8));
    const __m512i four = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    all = _mm512_or_si512(all, store_flipped(four, to + i * PANEL));
  }
  return all;
}

// The rows that have a bit.
inline uint32_t not_zero(Sums all) { return _mm512_test_epi32_mask(all, all); }
#elif MXCOMPILE_INTEGER_LANES == 8
using Sums = __m256i;
using Scaled = __m256;

inline Sums equal(int32_t x) { return _mm256_set1_epi32(x); }
inline Sums load_codes(const Number* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); }
inline __attribute__((always_inline)) Sums with_products(Sums w, Sums x, Sums sum) {
  sum = with_pairs(w, x, sum);
  asm("" : "+x"(sum));  // in this order: GCC would need more registers than there are
  return sum;
}
inline Scaled equal(float x) { return _mm256_set1_ps(x); }
inline Scaled load_sums(const float* from) { return _mm256_loadu_ps(from); }
inline void store_sums(float* to, Scaled x) { _mm256_storeu_ps(to, x); }
inline Scaled with_scaled(Sums sum, Scaled left, Scaled right, Scaled total) {
  return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), left), right, total);
}

// Two codes of each of PART rows, then the next two of each, at distances of PANEL rows. Returns what is not 0 of each row.
inline Sums pack_rows(Codes from, int64_t first, int64_t index, Number* to) {
  int8_t buffer[PART * BLOCK];
  int64_t apart;
  const int8_t* here = from.block(first, PART, index, buffer, apart);
  __m256i row[PART], pair[PART], four[PART], all = _mm256_setzero_si256();
  for (int64_t r = 0; r < PART; r++) row[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(here + r * apart));
  for (int64_t r = 0; r < PART; r += 2) {
    pair[r] = _mm256_unpacklo_epi32(row[r], row[r + 1]);
    pair[r + 1] = _mm256_unpackhi_epi32(row[r], row[r + 1]);
  }
  for (int64_t r = 0; r < PART; r += 4)
    for (int64_t i = 0; i < 2; i++) {
      four[r + 2 * i] = _mm256_unpacklo_epi64(pair[r + i], pair[r + i + 2]);
      four[r + 2 * i + 1] = _mm256_unpackhi_epi64(pair[r + i], pair[r + i + 2]);
    }
  // Bytes of a lane to the upper halves of words, which a shift extends by their signs.
  const __m256i first_two = _mm256_set1_epi32(0x01ff00ff) , last_two = _mm256_set1_epi32(0x03ff02ff);
  const __m256i lanes = _mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12,  //
                                         0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
  const __m256i low = _mm256_or_si256(first_two, lanes), high = _mm256_or_si256(last_two, lanes);
  for (int64_t i = 0; i < PART; i++) {
    const __m256i own = i < 4 ? _mm256_permute2x128_si256(four[i], four[i + 4], 0x20)
                              : _mm256_permute2x128_si256(four[i - 4], four[i], 0x31);
    all = _mm256_or_si256(all, own);
    __m256i* there = reinterpret_cast<__m256i*>(to + 4 * i * PANEL);
    _mm256_store_si256(there, _mm256_srai_epi16(_mm256_shuffle_epi8(own, low), 8));
    _mm256_store_si256(there + PANEL / PART, _mm256_srai_epi16(_mm256_shuffle_epi8(own, high), 8));
  }
  return all;
}

inline Sums pack_across(Codes from, int64_t first, int64_t index, Number* to) {
  if (first + PART > from.rows || (index + 1) * BLOCK > from.k) return pack_rows(from, first, index, to);
  const uint8_t* here = from.codes + index * BLOCK * from.rows + first;
  const auto codes = [&](int64_t i) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(here + i * from.rows)); };
  __m256i all = _mm256_setzero_si256();
  for (int64_t i = 0; i < BLOCK; i += 2) {
    const __m256i two = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(codes(i), codes(i + 1)));
    all = _mm256_or_si256(all, two);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + i * PANEL), two);
  }
  return all;
}

inline uint32_t not_zero(Sums all) {
  return ~_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(all, _mm256_setzero_si256())));
}
#else
using Sums = int32x4_t;
using Scaled = float32x4_t;

inline Sums equal(int32_t x) { return vdupq_n_s32(x); }
inline Sums load_codes(const Number* from) { return vreinterpretq_s32_s8(vld1q_s8(from)); }
inline Sums with_products(Sums w, Sums x, Sums sum) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  return vmmlaq_s32(sum, vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(w));
#else
  return vdotq_s32(sum, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
#endif
}
inline Scaled equal(float x) { return vdupq_n_f32(x); }
inline Scaled load_sums(const float* from) { return vld1q_f32(from); }
inline void store_sums(float* to, Scaled x) { vst1q_f32(to, x); }
inline Scaled with_scaled(Sums sum, Scaled left, Scaled right, Scaled total) {
  return vfmaq_f32(total, vmulq_f32(vcvtq_f32_s32(sum), left), right);
}

// TOGETHER codes of each of PART rows, then the next of each, at distances of PANEL rows. Returns the rows with a bit.
inline uint32_t pack_rows(Codes from, int64_t first, int64_t index, Number* to) {
  int8_t buffer[PART * BLOCK];
  int64_t apart;
  const int8_t* here = from.block(first, PART, index, buffer, apart);
  uint32_t some = 0;
  for (int64_t r = 0; r < PART; r++) {
    const int8_t* row = here + r * apart;
    for (int64_t i = 0; i < BLOCK; i += TOGETHER) std::memcpy(to + i * PANEL + r * TOGETHER, row + i, TOGETHER);
    some |= static_cast<uint32_t>(!are_zeros(row)) << r;
  }
  return some;
}

inline uint32_t pack_across(Codes from, int64_t first, int64_t index, Number* to) { return pack_rows(from, first, index, to); }
inline uint32_t not_zero(uint32_t rows) { return rows; }
#endif

// Codes and scales of x and scales of w as a register of sums needs them: for each of the sums that it has.
#ifdef __ARM_FEATURE_MATMUL_INT8
inline Sums codes_of_x(const Number* from) { return load_codes(from); }
inline Scaled scales_of_x(const float* from) {
  const Scaled two = vcombine_f32(vld1_f32(from), vdup_n_f32(0));
  return vzip1q_f32(two, two);
}
inline Scaled scales_of_w(const float* from) { return vcombine_f32(vld1_f32(from), vld1_f32(from)); }
#else
inline Sums codes_of_x(const Number* from) {
  int32_t codes;
  std::memcpy(&codes, from, sizeof(codes));
  return equal(codes);
}
inline Scaled scales_of_x(const float* from) { return equal(*from); }
inline Scaled scales_of_w(const float* from) { return load_sums(from); }
#endif

// PANEL rows of w from `first` on, as `pack_rows` has them. Returns whether a scale is extreme.
inline bool pack_panel(Codes from, int64_t first, Packed& to) {
  bool extreme = false;
  for (int64_t index = 0; index < from.blocks(); index++)
    for (int64_t start = 0; start < PANEL; start += PART) {
      Number* to_block = to.codes + index * BLOCK * PANEL + start * TOGETHER;
      const uint32_t some = not_zero(from.across ? pack_across(from, first + start, index, to_block)
                                                 : pack_rows(from, first + start, index, to_block));
      for (int64_t r = 0; r < PART; r++) {
        const int64_t row = first + start + r;
        const uint8_t byte = row < from.rows ? from.scale(row, index) : 0;
        extreme |= to.set_scale(index * PANEL + start + r, some >> r & 1, byte);
      }
    }
  return extreme;
}

// Where `out` of a tile has the sum of row r of x and row c of w.
inline int64_t place_of_sum(int64_t r, int64_t c) {
  return (r / HIGH * ACROSS + c / WIDE) * PART + r % HIGH * WIDE + c % WIDE;
}

// Adds to `out`, TILE × PANEL sums, those of `blocks` blocks.
inline void add_tile(const Number* x, const float* s, const int32_t* less, const Number* w, const float* t, int64_t blocks,
                     float* out) {
  constexpr std::make_integer_sequence<int, DOWN> down{};
  constexpr std::make_integer_sequence<int, ACROSS> across{};
  Scaled total[DOWN][ACROSS];
  each(down, [&](auto m) __attribute__((always_inline)) {
    each(across, [&](auto n) __attribute__((always_inline)) { total[m][n] = load_sums(out + (m * ACROSS + n) * PART); });
  });
  for (int64_t block = 0; block < blocks; block++) {
    Sums sum[DOWN][ACROSS];
    each(down, [&](auto m) __attribute__((always_inline)) {
      each(across, [&](auto n) __attribute__((always_inline)) { sum[m][n] = equal(OFFSET ? less[block * TILE + m] : 0); });
    });
    const Number *its = w + block * BLOCK * PANEL, *own = x + block * TILE * BLOCK;
    each(std::make_integer_sequence<int, BLOCK / TOGETHER>(), [&](auto i) __attribute__((always_inline)) {
      Sums codes[ACROSS];
      each(across, [&](auto n) __attribute__((always_inline)) { codes[n] = load_codes(its + (i * PANEL + n * WIDE) * TOGETHER); });
      each(down, [&](auto m) __attribute__((always_inline)) {
        const Sums some = codes_of_x(own + (m * BLOCK + i * TOGETHER) * HIGH);
        each(across, [&](auto n) __attribute__((always_inline)) { sum[m][n] = with_products(codes[n], some, sum[m][n]); });
      });
      if (PART == 4) asm volatile("" ::: "memory");  // GCC would load for later steps, into more registers than there are
    });
    Scaled scale[ACROSS];
    each(across, [&](auto n) __attribute__((always_inline)) { scale[n] = scales_of_w(t + block * PANEL + n * WIDE); });
    each(down, [&](auto m) __attribute__((always_inline)) {
      const Scaled factor = scales_of_x(s + block * TILE + m * HIGH);
      each(across, [&](auto n) __attribute__((always_inline)) {
        total[m][n] = with_scaled(sum[m][n], scale[n], factor, total[m][n]);
      });
    });
  }
  each(down, [&](auto m) __attribute__((always_inline)) {
    each(across, [&](auto n) __attribute__((always_inline)) { store_sums(out + (m * ACROSS + n) * PART, total[m][n]); });
  });
}

// `tiles` tiles of x times PANEL rows of w from `first` on, in `total`. Returns false if a scale of w is extreme.
inline bool panel_sums(const Packed& x, int64_t tiles, Codes w, int64_t first, Packed& panel, float* total) {
  if (pack_panel(w, first, panel)) return false;
  const int64_t blocks = w.blocks();
  std::memset(total, 0, tiles * TILE * PANEL * sizeof(float));
  for (int64_t start = 0; start < blocks; start += STRETCH) {
    const int64_t count = blocks - start < STRETCH ? blocks - start : STRETCH, its = start * PANEL;
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t own = (tile * blocks + start) * TILE;
      add_tile(x.codes + own * BLOCK, x.scale + own, x.less + own, panel.codes + its * BLOCK, panel.scale + its, count,
               total + tile * TILE * PANEL);
    }
  }
  return true;
}

// x: Codes or Numbers. Returns false if a scale is extreme.
template <class Side, class Bias, class Out>
inline bool integer_mm_in_lanes(Side x, Codes w, const Bias* bias, int threads, Out* out) {
  const int64_t blocks = x.blocks(), chunks = (x.rows + CHUNK - 1) / CHUNK;
  const int64_t most = chunks ? (x.rows + chunks * TILE - 1) / (chunks * TILE) : 0;  // tiles that are packed together
  bool extreme = false;
  Packed packed(most * TILE, blocks);
  for (int64_t above = 0; above < x.rows && !extreme; above += most * TILE) {
    const int64_t left = (x.rows - above + TILE - 1) / TILE, tiles = left < most ? left : most;
    const int64_t rows = x.rows - above < tiles * TILE ? x.rows - above : tiles * TILE;
#pragma omp parallel num_threads(threads) reduction(| : extreme) if (x.rows * w.rows * x.k > SMALL)
    {
#pragma omp for
      for (int64_t tile = 0; tile < tiles; tile++)
        extreme |= pack_tile(x, above + tile * TILE, tile * TILE * blocks, packed);
      Packed panel(PANEL, blocks);
      std::unique_ptr<float[]> total(new float[tiles * TILE * PANEL]);
#pragma omp for schedule(dynamic)
      for (int64_t first = 0; first < w.rows; first += PANEL) {
        if (extreme) continue;
        extreme |= !panel_sums(packed, tiles, w, first, panel, total.get());
        const int64_t columns = w.rows - first < PANEL ? w.rows - first : PANEL;
        for (int64_t r = 0; r < rows; r++)
          for (int64_t c = 0; c < columns; c++) {
            const float sum = total[r / TILE * TILE * PANEL + place_of_sum(r % TILE, c)];
            narrow(bias ? sum + widen(bias[first + c]) : sum, out[(above + r) * w.rows + first + c]);
          }
      }
    }
  }
  return !extreme;
}
#endif

template <class Bias, class Out>
inline void integer_mm_by_loops(Codes x, Codes w, const Bias* bias, int threads, Out* out) {
  const int64_t blocks = x.blocks();
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < w.rows; n++)
    for (int64_t m = 0; m < x.rows; m++) {
      float total = bias ? widen(bias[n]) : 0.0f;
      for (int64_t index = 0; index < blocks; index++) {
        const int64_t start = index * BLOCK, count = x.k - start < BLOCK ? x.k - start : BLOCK;
        int32_t sum = 0;
        for (int64_t i = start; i < start + count; i++)
          sum += x.code(m, i) * w.code(n, i);
        const double scale = static_cast<double>(scale_value(x.scale(m, index))) / 4096;
        total += static_cast<float>(sum * scale * scale_value(w.scale(n, index)));
      }
      narrow(total, out[m * w.rows + n]);
    }
}

// x [M, K] times the transpose of w [N, K]
template <class Bias, class Out>
inline void integer_mm(Codes x, Codes w, const Bias* bias, int threads, Out* out) {
#ifdef MXCOMPILE_INTEGER_LANES
  if (integer_mm_in_lanes(x, w, bias, threads, out)) return;
#endif
  integer_mm_by_loops(x, w, bias, threads, out);
}

// x [m, weight.k], of at least LONG columns, times the transpose of the weight [n, weight.k]
template <class Bias, class Out>
inline void many_rows_mm(const Bfloat16* x, Weight<INT8> weight, const Bias* bias, int64_t m, int64_t n, int threads, Out* out) {
#if MXCOMPILE_INTEGER_LANES == 8
  const Codes codes{weight.codes, weight.scales, n, weight.k, false};
  if (integer_mm_in_lanes(Numbers<Bfloat16>{x, m, weight.k}, codes, bias, threads, out)) return;
#endif
  by_loops(x, weight, bias, m, n, threads, out);
}

}  // namespace integers

using integers::Codes;
using integers::integer_mm;
using integers::many_rows_mm;

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
