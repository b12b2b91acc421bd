// Casts of a tensor to MXFP8 and MXINT8, and back.
//
//   values   what the quantized elements stand for
//   codes    the quantized elements
//   scales   a byte for each block
//
// A tensor is [outer, length, inner], in that order in memory, and its blocks run along `length`; along rows `inner`
// is 1. Casts of one matrix in both layouts read tiles of 32 rows twice, the second time from the cache. Of the
// results those are made whose pointers are not null. Threads share tiles; each writes its own.
#ifndef MXCOMPILE_CASTS_H
#define MXCOMPILE_CASTS_H

#include "weight_rows.h"

MXCOMPILE_VECTORIZED

namespace mxcompile {

constexpr int64_t GROUP = 8;               // blocks of a row whose scales are computed together
constexpr int64_t COLUMNS = GROUP * BLOCK;  // 32 rows of so many columns stay in the first-level cache
constexpr int64_t FEW = 1 << 14;           // elements that are not worth waking threads for

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
inline T* moved(T* pointer, int64_t by) {
  return pointer ? pointer + by : nullptr;
}

template <class Value>
struct Results {
  Value* values;
  uint8_t* codes;
  uint8_t* scales;

  Results chosen(int64_t bits) const {
    return {bits & 1 ? values : nullptr, bits & 2 ? codes : nullptr, bits & 4 ? scales : nullptr};
  }
};

// One number for all elements of a block, in the place of an array with one for each.
struct Same {
  float value;
  float operator[](int64_t) const { return value; }
};

// body(part, tile) for every pair
template <class Body>
inline void for_tiles(int64_t parts, int64_t tiles, int64_t elements, int threads, Body body) {
#pragma omp parallel for num_threads(threads) if (elements > FEW)
  for (int64_t i = 0; i < parts * tiles; i++) body(i / tiles, i % tiles);
}

template <class Elem, Rounding rounding, class Source, class Value>
struct Cast {
  using Magnitude = decltype(magnitude(Source()));

  template <class Factors>
  static void write_values(const Source* x, int64_t count, Factors inverse, Factors scale, Value* values) {
    #pragma omp simd
    for (int64_t i = 0; i < count; i++)
      narrow(rounded<Elem>(saturated<Elem, rounding>(widen(x[i]) * inverse[i])) * scale[i], values[i]);
  }

  template <class Factors>
  static void write_codes(const Source* x, int64_t count, Factors inverse, uint8_t* codes) {
    #pragma omp simd
    for (int64_t i = 0; i < count; i++) codes[i] = encode<Elem>(saturated<Elem, rounding>(widen(x[i]) * inverse[i]));
  }

  static Magnitude amax(const Source* x, int64_t count) {
    Magnitude most = 0;
    #pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) most = magnitude(x[i]) > most ? magnitude(x[i]) : most;
    return most;
  }

  static void scales_of(const Magnitude* most, int64_t count, float* inverse, float* scale, uint8_t* bytes) {
    #pragma omp simd
    for (int64_t i = 0; i < count; i++) {
      uint32_t byte = scale_byte<Elem, rounding>(fp32_bits(most[i]));
      inverse[i] = inverse_scale_value(byte);
      scale[i] = scale_value(byte);
      bytes[i] = static_cast<uint8_t>(byte);
    }
  }

  // the largest of each 32 of COLUMNS maxima, for all of them
  static void share(Magnitude* most) {
    for (int64_t at = 0; at < COLUMNS; at += BLOCK) {
      Magnitude all = 0;
      #pragma omp simd reduction(max : all)
      for (int64_t i = at; i < at + BLOCK; i++) all = most[i] > all ? most[i] : all;
      #pragma omp simd
      for (int64_t i = at; i < at + BLOCK; i++) most[i] = all;
    }
  }

  // up to COLUMNS elements of a row, blocks along it
  static void row(const Source* x, int64_t count, Results<Value> out) {
    Magnitude most[GROUP] = {};
    float inverse[GROUP], scale[GROUP];
    uint8_t bytes[GROUP];
    int64_t whole = count / BLOCK, rest = count % BLOCK, end = whole * BLOCK;
    for (int64_t i = 0; i < whole; i++) most[i] = amax(x + i * BLOCK, BLOCK);
    if (rest) most[whole] = amax(x + end, rest);
    scales_of(most, GROUP, inverse, scale, bytes);
    if (out.scales) std::memcpy(out.scales, bytes, num_blocks(count));
    if (out.values) {
      for (int64_t i = 0; i < whole; i++)
        write_values(x + i * BLOCK, BLOCK, Same{inverse[i]}, Same{scale[i]}, out.values + i * BLOCK);
      if (rest) write_values(x + end, rest, Same{inverse[whole]}, Same{scale[whole]}, out.values + end);
    }
    if (out.codes) {
      for (int64_t i = 0; i < whole; i++) write_codes(x + i * BLOCK, BLOCK, Same{inverse[i]}, out.codes + i * BLOCK);
      if (rest) write_codes(x + end, rest, Same{inverse[whole]}, out.codes + end);
    }
  }

  // scales of `height` ≤ 32 rows, `width` apart, of up to COLUMNS: for each column, or for each 32 of them if square
  template <bool square>
  static void scales_of_columns(const Source* x, int64_t height, int64_t count, int64_t width, float* inverse,
                                float* scale, uint8_t* bytes) {
    Magnitude most[COLUMNS] = {};
    for (int64_t r = 0; r < height; r++) {
      const Source* from = x + r * width;
      #pragma omp simd
      for (int64_t i = 0; i < count; i++) most[i] = magnitude(from[i]) > most[i] ? magnitude(from[i]) : most[i];
    }
    if (square) share(most);
    scales_of(most, COLUMNS, inverse, scale, bytes);
  }

  // the blocks of such rows
  template <bool square>
  static void strip(const Source* x, int64_t height, int64_t count, int64_t width, Results<Value> out) {
    float inverse[COLUMNS], scale[COLUMNS];
    uint8_t bytes[COLUMNS];
    scales_of_columns<square>(x, height, count, width, inverse, scale, bytes);
    if (out.scales) std::memcpy(out.scales, bytes, count);
    for (int64_t r = 0; r < height; r++) {
      int64_t at = r * width;
      const float *factors = inverse, *scales = scale;
      if (out.values) write_values(x + at, count, factors, scales, out.values + at);
      if (out.codes) write_codes(x + at, count, factors, out.codes + at);
    }
  }

  // blocks along rows of `width`
  static void rows(const Source* x, int64_t number, int64_t width, int threads, Results<Value> out) {
    for_tiles(number, 1, number * width, threads, [=](int64_t r, int64_t) {
      for (int64_t start = 0; start < width; start += COLUMNS) {
        int64_t at = r * width + start;
        row(x + at, least(COLUMNS, width - start),
            {moved(out.values, at), moved(out.codes, at), moved(out.scales, r * num_blocks(width) + start / BLOCK)});
      }
    });
  }

  // Blocks along columns of matrices [length, width], and along their rows too where `along` has results. If square,
  // the one scale of a tile is repeated along its columns in `down` and along its rows in `along`, which has no others.
  template <bool square>
  static void matrices(const Source* x, int64_t number, int64_t length, int64_t width, int threads,
                       Results<Value> down, Results<Value> along) {
    int64_t across = (width + COLUMNS - 1) / COLUMNS, blocks = num_blocks(length), steps = num_blocks(width);
    bool both = along.values || along.codes || along.scales;
    for_tiles(number * blocks, across, number * length * width, threads, [=](int64_t part, int64_t tile) {
      int64_t first = part % blocks * BLOCK, start = tile * COLUMNS, count = least(COLUMNS, width - start);
      int64_t height = least(BLOCK, length - first), top = part / blocks * length + first;
      int64_t at = top * width + start;
      uint8_t bytes[COLUMNS];
      uint8_t* scales = square ? bytes : moved(down.scales, part * width + start);
      strip<square>(x + at, height, count, width, {moved(down.values, at), moved(down.codes, at), scales});
      if (square && down.scales) std::memcpy(down.scales + part * width + start, bytes, count);
      for (int64_t r = 0; both && r < height; r++) {
        uint8_t* to = moved(along.scales, (top + r) * steps + start / BLOCK);
        int64_t from = at + r * width;
        if (!square)
          row(x + from, count, {moved(along.values, from), moved(along.codes, from), to});
        else
          for (int64_t i = 0; i < num_blocks(count); i++) to[i] = bytes[i * BLOCK];
      }
    });
  }

  // Copies of matrices [length, width] along their rows and along their columns. The bits of `wanted` say which results
  // there are: values, codes and scales along rows, then along columns. So casts that differ only in their results are
  // one kernel, for which a C++ compiler starts once. If square, elements are the same along both.
  template <bool square>
  static void copies(const Source* x, int64_t number, int64_t length, int64_t width, int threads, int64_t wanted,
                     Results<Value> along, Results<Value> down) {
    along = along.chosen(wanted), down = down.chosen(wanted >> 3);
    if (square)
      matrices<true>(x, number, length, width, threads,
                     {along.values ? along.values : down.values, along.codes ? along.codes : down.codes, down.scales},
                     {nullptr, nullptr, along.scales});
    else if (wanted >> 3)
      matrices<false>(x, number, length, width, threads, down, along);
    else
      rows(x, number * length, width, threads, along);
  }
};

constexpr int64_t PAIR = 2 * BLOCK;  // codes that become values together

// PAIR codes, some of which may share bytes, as values; false where the loops below have to.
template <class Elem>
inline bool dequantize_pair([[maybe_unused]] Weight<Elem> here, [[maybe_unused]] float* values) {
#ifdef MXCOMPILE_LANES
  const auto& powers = Scales<raised<Elem>, Elem::two_level>::all();
  if (largest(here.scales, PAIR / Elem::block) > powers.most || has_nan<Elem>(here.codes, PAIR)) return false;
  for (int64_t at = 0; at < PAIR; at += CODES) {
    const Lanes scale = everywhere(here.divided(powers.value[here.scales[at / Elem::block]]));
    Lanes part[CODES / WIDTH];
    unpack<Elem>(here.codes + row_bytes<Elem>(at), part);
    for (int64_t i = 0; i < CODES / WIDTH; i++) store(values + at + i * WIDTH, product(part[i], scale));
  }
  return true;
#else
  return false;
#endif
}

// As BF16 by a table of bytes. A scale adds to the exponents of all but zeros and what is not finite, where it leaves
// every element's a normal one. Of two levels as FP32 by a table of words, times scales that leave normal numbers, which
// alone are rounded.
template <class Elem>
inline bool dequantize_pair([[maybe_unused]] Weight<Elem> here, [[maybe_unused]] Bfloat16* values) {
#ifdef MXCOMPILE_BYTE_TABLES
  if constexpr (Elem::two_level) {
#ifdef __AVX512BF16__
    const __m512 table = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    constexpr float least_normal = 2.0f / (1ull << 63) / (1ull << 63);  // 2^-125: of a scale
    alignas(64) uint8_t codes[PAIR];
    _mm512_store_si512(codes, load_codes<Elem>(here.codes, PAIR));
    for (int64_t i = 0; i < PAIR / Elem::block; i++) {
      const float scale = here.divided(scale_number<Elem>(here.scales[i]));
      if (scale != 0.0f && as_float(magnitude(scale)) < least_normal) return false;
      const __m128i some = _mm_load_si128(reinterpret_cast<const __m128i*>(codes + i * Elem::block));
      const __m512 value = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(some), table), _mm512_set1_ps(scale));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + i * Elem::block), (__m256i)_mm512_cvtneps_pbh(value));
    }
    return true;
#else
    return false;
#endif
  }
  constexpr int least_byte = 17, most_byte = 239;
  const uint8_t *codes = here.codes, *scales = here.scales;
  for (int64_t i = 0; i < 2; i++)
    if (scales[i] < least_byte || scales[i] > most_byte) return false;
  constexpr char sizes = (1 << (Elem::bits - 1)) - 1;
  const __m512i lower = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), upper = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  __m512i code = load_codes<Elem>(codes, 2 * BLOCK), unpacked[2];
  Decoder(tables<Elem>()).template unpack<Elem::integer>(code, unpacked);
  __m512i size = _mm512_and_si512(code, _mm512_set1_epi8(Elem::integer ? -1 : sizes));
  __mmask64 scaled = _mm512_test_epi8_mask(size, size);
  if constexpr (!Elem::integer) scaled &= _mm512_cmplt_epu8_mask(size, _mm512_set1_epi8(Elem::not_finite));
  for (int64_t i = 0; i < 2; i++) {
    __m512i value = _mm512_permutex2var_epi64(unpacked[0], i ? upper : lower, unpacked[1]);  // in order again
    __m512i exponent = _mm512_set1_epi16(static_cast<int16_t>((scales[i] - 127) * 128));
    value = _mm512_mask_add_epi16(value, static_cast<__mmask32>(scaled >> (32 * i)), value, exponent);
    _mm512_storeu_si512(values + i * BLOCK, value);
  }
  return true;
#else
  return false;
#endif
}

// The values of a row from `start`, a multiple of PAIR, on: PAIR of them, or what is left.
template <class Elem, class Value>
inline void dequantize_part(Weight<Elem> row, int64_t start, Value* values) {
  constexpr int64_t BLOCK = Elem::block;
  row.codes += row_bytes<Elem>(start), row.scales += start / BLOCK;
  if (start + PAIR <= row.k && dequantize_pair(row, values)) return;
  const int64_t left = least(PAIR, row.k - start);
  for (int64_t at = 0; at < left; at += BLOCK) {
    const int64_t count = least(BLOCK, left - at);
    uint8_t buffer[BLOCK];
    const uint8_t* code = spread<Elem>(row.codes + row_bytes<Elem>(at), count, buffer);
    const float scale = row.divided(scale_number<Elem>(row.scales[at / BLOCK]));
    if (count == BLOCK)
      #pragma omp simd
      for (int64_t i = 0; i < BLOCK; i++) narrow(decode<Elem>(code[i]) * scale, values[at + i]);
    else
      #pragma omp simd
      for (int64_t i = 0; i < count; i++) narrow(decode<Elem>(code[i]) * scale, values[at + i]);
  }
}

// Values of `number` rows of stored data, blocks along them.
template <class Elem, class Value>
inline void dequantize_rows(Weight<Elem> weight, int64_t number, int threads, Value* values) {
  for_tiles(number, 1, number * weight.k, threads, [=](int64_t r, int64_t) {
    for (int64_t start = 0; start < weight.k; start += PAIR)
      dequantize_part(weight.from(r), start, values + r * weight.k + start);
  });
}

// The same of matrices [length, width], blocks along their columns, in which neighbours may share a byte.
template <class Elem, class Value>
inline void dequantize_columns(const uint8_t* codes, const uint8_t* scales, int64_t number, int64_t length,
                               int64_t width, int threads, Value* values) {
  int64_t across = (width + COLUMNS - 1) / COLUMNS, blocks = num_blocks(length);
  for_tiles(number * blocks, across, number * length * width, threads, [=](int64_t part, int64_t tile) {
    int64_t first = part % blocks * BLOCK, start = tile * COLUMNS, count = least(COLUMNS, width - start);
    int64_t height = least(BLOCK, length - first), top = part / blocks * length + first;
    float scale[COLUMNS];
    #pragma omp simd
    for (int64_t i = 0; i < count; i++) scale[i] = scale_value(scales[part * width + start + i]);
    for (int64_t r = 0; r < height; r++) {
      int64_t at = (top + r) * width + start;
      const uint8_t* here = codes + row_bytes<Elem>(top + r) * width + start;
      const int shift = r % Elem::per_byte * Elem::bits, mask = (1 << Elem::bits) - 1;
      #pragma omp simd
      for (int64_t i = 0; i < count; i++)
        narrow(decode<Elem>(static_cast<uint8_t>(here[i] >> shift & mask)) * scale[i], values[at + i]);
    }
  });
}

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
