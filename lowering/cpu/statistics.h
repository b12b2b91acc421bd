// What a cast to MXFP8 loses: sums over a tensor, and a histogram of scale bytes.
//
//   x [outer, length, inner], blocks along `length`   →   FIELDS of mxcompile/ops/watch.py, then a count of each byte
//
// A value counts as cut, lost or poisoned as the reference counts it. Sums of squares are FP64. A tensor is split into
// the same parts whatever the number of threads is, so the sums are the same bits.
#ifndef MXCOMPILE_STATISTICS_H
#define MXCOMPILE_STATISTICS_H

#include <vector>

#include "casts.h"

MXCOMPILE_VECTORIZED

namespace mxcompile {

constexpr int64_t BYTES = 256, PARTS = 32;

struct Sums {
  uint32_t most = 0, gap = 0;  // bits of the largest finite magnitude; INFINITY_BITS − those of the least non-zero one
  int64_t elements = 0, nonzero = 0, underflow = 0, saturated = 0, nan = 0, inf = 0, poisoned = 0;
  double signal = 0, noise = 0;
  int64_t scales[BYTES] = {};

  void add(const Sums& other) {
    most = other.most > most ? other.most : most;
    gap = other.gap > gap ? other.gap : gap;
    elements += other.elements;
    nonzero += other.nonzero;
    underflow += other.underflow;
    saturated += other.saturated;
    nan += other.nan;
    inf += other.inf;
    poisoned += other.poisoned;
    signal += other.signal;
    noise += other.noise;
    for (int64_t byte = 0; byte < BYTES; byte++) scales[byte] += other.scales[byte];
  }

  void write(double* out) const {
    *out++ = as_float(most);
    *out++ = as_float(INFINITY_BITS - gap);
    for (int64_t count : {elements, nonzero, underflow, saturated, nan, inf, poisoned}) *out++ = static_cast<double>(count);
    *out++ = signal;
    *out++ = noise;
    for (int64_t count : scales) *out++ = static_cast<double>(count);
  }
};

template <class Elem, Rounding rounding, class Source>
struct Statistics {
  using Scaled = Cast<Elem, rounding, Source, float>;
  using Magnitude = typename Scaled::Magnitude;

  // up to COLUMNS elements under their factors; clean: they and their casts are finite
  template <bool clean>
  static void add(const Source* x, int64_t count, const float* inverse, const float* scale, Sums& sums) {
    float known[COLUMNS], made[COLUMNS];
    uint32_t most = sums.most, gap = sums.gap, nonzero = 0, lost = 0, cut = 0, nan = 0, inf = 0, exact = 0;
    #pragma omp simd reduction(max : most, gap) reduction(+ : nonzero, lost, cut, nan, inf, exact)
    for (int64_t i = 0; i < count; i++) {
      const float wide = widen(x[i]);
      const uint32_t size = as_bits(wide) & MAGNITUDE;
      const float element = rounded<Elem>(saturated<Elem, rounding>(wide * inverse[i]));
      const float value = element * scale[i];
      const uint32_t cast = as_bits(value) & MAGNITUDE, limit = as_bits(element) & MAGNITUDE;
      const bool finite = clean | (size < INFINITY_BITS), both = clean | (finite & (cast < INFINITY_BITS));
      const uint32_t own = finite ? size : 0, below = own != 0 ? INFINITY_BITS - own : 0;
      most = own > most ? own : most;
      gap = below > gap ? below : gap;
      nonzero += own != 0 ? 1 : 0;
      lost += both & (size != 0) & (cast == 0) ? 1 : 0;
      cut += both & (limit == as_bits(Elem::max)) & (size > cast) ? 1 : 0;
      nan += !clean & (size > INFINITY_BITS) ? 1 : 0;
      inf += !clean & (size == INFINITY_BITS) ? 1 : 0;
      exact += both ? 1 : 0;
      known[i] = both ? wide : 0.0f;
      made[i] = both ? value : 0.0f;
    }
    double signal = 0, noise = 0;
    #pragma omp simd reduction(+ : signal, noise)
    for (int64_t i = 0; i < count; i++) {
      const double one = known[i], error = static_cast<double>(made[i]) - one;
      signal += one * one;
      noise += error * error;
    }
    sums.most = most;
    sums.gap = gap;
    sums.elements += count;
    sums.nonzero += nonzero;
    sums.underflow += lost;
    sums.saturated += cut;
    sums.nan += nan;
    sums.inf += inf;
    sums.poisoned += count - nan - inf - exact;
    sums.signal += signal;
    sums.noise += noise;
  }

  // the same, with the bytes of their blocks
  static void add(const Source* x, int64_t count, const float* inverse, const float* scale, const uint8_t* bytes,
                  int64_t blocks, Sums& sums) {
    constexpr uint8_t least_overflowing = 127 + 127 - Elem::emax;  // under which an element may be beyond FP32
    uint8_t most = 0;
    #pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < blocks; i++) most = bytes[i] > most ? bytes[i] : most;
    if (most < least_overflowing)
      add<true>(x, count, inverse, scale, sums);
    else
      add<false>(x, count, inverse, scale, sums);
  }

  // up to COLUMNS elements of a row, blocks along it
  static void row(const Source* x, int64_t count, uint8_t* bytes, Sums& sums) {
    Magnitude most[GROUP] = {};
    float inverse[GROUP], scale[GROUP];
    uint8_t made[GROUP];
    const int64_t blocks = num_blocks(count);
    for (int64_t i = 0; i < blocks; i++) most[i] = Scaled::amax(x + i * BLOCK, least(BLOCK, count - i * BLOCK));
    Scaled::scales_of(most, GROUP, inverse, scale, made);
    float spread[COLUMNS], back[COLUMNS];
    for (int64_t i = 0; i < blocks; i++) {
      for (int64_t j = i * BLOCK; j < (i + 1) * BLOCK; j++) {
        spread[j] = inverse[i];
        back[j] = scale[i];
      }
      sums.scales[made[i]]++;
    }
    if (bytes) std::memcpy(bytes, made, blocks);
    add(x, count, spread, back, made, blocks, sums);
  }

  // `height` ≤ 32 rows, `width` apart, of up to COLUMNS: a block in each column, or one in each 32 of them if square
  template <bool square>
  static void strip(const Source* x, int64_t height, int64_t count, int64_t width, uint8_t* bytes, Sums& sums) {
    float inverse[COLUMNS], scale[COLUMNS];
    uint8_t made[COLUMNS];
    Scaled::template scales_of_columns<square>(x, height, count, width, inverse, scale, made);
    for (int64_t i = 0; i < count; i += square ? BLOCK : 1) sums.scales[made[i]]++;
    if (bytes) std::memcpy(bytes, made, count);
    for (int64_t r = 0; r < height; r++)
      add(x + r * width, count, inverse, scale, made, count, sums);
  }

  // body(i, sums) for every i; returns all sums
  template <class Body>
  static Sums summed(int64_t number, int64_t elements, [[maybe_unused]] int threads, Body body) {
    std::vector<Sums> parts(least(PARTS, number));
    const int64_t count = static_cast<int64_t>(parts.size());
    #pragma omp parallel for num_threads(threads) if (elements > FEW)
    for (int64_t part = 0; part < count; part++)
      for (int64_t i = part * number / count; i < (part + 1) * number / count; i++) body(i, parts[part]);
    Sums all;
    for (const Sums& part : parts) all.add(part);
    return all;
  }

  // the value of the cast of x under a scale
  static float value(Source x, uint8_t byte) {
    return rounded<Elem>(saturated<Elem, rounding>(widen(x) * inverse_scale_value(byte))) * scale_value(byte);
  }

  // Blocks along rows of `width`; `keep` values, evenly spread.
  static void rows(const Source* x, int64_t number, int64_t width, int threads, double* out, int64_t keep, float* kept) {
    const int64_t across = num_blocks(width);
    std::vector<uint8_t> bytes(keep ? number * across : 0);
    summed(number, number * width, threads, [&](int64_t r, Sums& sums) {
      for (int64_t start = 0; start < width; start += COLUMNS)
        row(x + r * width + start, least(COLUMNS, width - start),
            keep ? bytes.data() + r * across + start / BLOCK : nullptr, sums);
    }).write(out);
    #pragma omp parallel for num_threads(threads) if (keep > FEW)
    for (int64_t i = 0; i < keep; i++) {
      const int64_t at = i * (number * width) / keep;
      kept[i] = value(x[at], bytes[at / width * across + at % width / BLOCK]);
    }
  }

  // Blocks along columns of matrices [length, width]; if square, one scale for 32×32 elements.
  template <bool square>
  static void matrices(const Source* x, int64_t number, int64_t length, int64_t width, int threads, double* out,
                       int64_t keep, float* kept) {
    const int64_t across = (width + COLUMNS - 1) / COLUMNS, blocks = num_blocks(length);
    std::vector<uint8_t> bytes(keep ? number * blocks * width : 0);
    summed(number * blocks * across, number * length * width, threads, [&](int64_t i, Sums& sums) {
      const int64_t part = i / across, start = i % across * COLUMNS, first = part % blocks * BLOCK;
      strip<square>(x + (part / blocks * length + first) * width + start, least(BLOCK, length - first),
                    least(COLUMNS, width - start), width, keep ? bytes.data() + part * width + start : nullptr, sums);
    }).write(out);
    #pragma omp parallel for num_threads(threads) if (keep > FEW)
    for (int64_t i = 0; i < keep; i++) {
      const int64_t at = i * (number * length * width) / keep, line = at / width;
      kept[i] = value(x[at], bytes[(line / length * blocks + line % length / BLOCK) * width + at % width]);
    }
  }
};

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
