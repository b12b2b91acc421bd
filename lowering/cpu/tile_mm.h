// Many rows of BF16 times a stored weight by AMX, whose tiles hold 16 rows of 32 BF16 numbers:
//
//   out[m, n] = Σ_k x[m, k] · w[n, k] (+ bias[n])          values in BF16, sums in FP32, rounded once
//
// The values of w are those that a dequantization to BF16 writes, but no matrix of them is in memory. Rows of w are the
// left operands of tiles, as they lie. Rows of x are the right ones, so pairs of numbers of 16 rows lie together: x is
// packed once, and a tile of sums is transposed before it is written.
//
// While a panel of w is multiplied, the next one is decoded: vectors and tiles work at the same time.
#ifndef MXCOMPILE_TILE_MM_H
#define MXCOMPILE_TILE_MM_H

#include "casts.h"
#include "weight_only_mm.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && defined(MXCOMPILE_BF16_DOT)
#include <sys/syscall.h>
#include <unistd.h>
#define MXCOMPILE_TILES 1
#endif

MXCOMPILE_VECTORIZED

namespace mxcompile {

#ifdef MXCOMPILE_TILES
namespace tiles {

constexpr int64_t TILE_ROWS = 16, STEP = PAIR;      // rows of a tile; numbers of K that are decoded together, of two tiles
constexpr int64_t SIDE = 2 * TILE_ROWS;            // rows of x, and of w, that are multiplied together
constexpr int64_t PART = TILE_ROWS * STEP;         // numbers of TILE_ROWS rows and a step
constexpr int64_t STRETCH = 8;                     // steps of K: their panel of w stays in the first-level cache
constexpr int64_t FEW_STEPS = 64;                   // of SIDE rows of x: for few rows, long steps through memory are faster
constexpr int64_t FETCHED = 4;                     // rows between what is decoded and what is fetched from memory
constexpr int64_t MOST_COLUMNS = 512, CHUNK = 512;  // rows of w, and of x, whose sums stay in the second-level cache

// The process has to ask for tiles. Returns whether it may use them.
inline bool granted() {
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool has = syscall(SYS_arch_prctl, request, tile_data) == 0;
  return has;
}

// All tiles of a thread in their full size, as long as this exists.
struct FullSize {
  struct alignas(64) Sizes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  FullSize() {
    Sizes sizes;
    for (int i = 0; i < 8; i++) sizes.row_bytes[i] = 64, sizes.rows[i] = TILE_ROWS;
    _tile_loadconfig(&sizes);
  }
  ~FullSize() { _tile_release(); }
};

// Rows and columns of 16 × 16 words change places.
inline __attribute__((always_inline)) void transpose_words(__m512i* x) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
      y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
    x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
  }
}

template <class Elem>
struct Stored {
  Weight<Elem> weight;
  int64_t rows;

  // STEP values of a row from `start` on, with zeros for what is not there.
  inline __attribute__((always_inline)) void decode(int64_t row, int64_t start, Bfloat16* out) const {
    if (weight.k - start < STEP || row >= rows) std::memset(out, 0, STEP * sizeof(Bfloat16));
    if (row < rows) dequantize_part(weight.from(row), start, out);
  }

  // What `decode` will read of a later row.
  void fetch(int64_t row, int64_t start) const {
    const Weight<Elem> later = weight.from(row + FETCHED);
    _mm_prefetch(reinterpret_cast<const char*>(later.codes + row_bytes<Elem>(start)), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(later.scales + start / Elem::block), _MM_HINT_T1);
  }
};

// A step of TILE_ROWS rows of x from `first` on as two tiles, as right operands have it, with zeros for what is not there.
inline void pack_right(const Bfloat16* x, int64_t m, int64_t k, int64_t first, int64_t start, Bfloat16* out) {
  alignas(64) Bfloat16 rows[PART] = {};
  const int64_t count = least(STEP, k - start), there = least(TILE_ROWS, m - first);
  for (int64_t r = 0; r < there; r++)
    std::memcpy(rows + r * STEP, x + (first + r) * k + start, count * sizeof(Bfloat16));
  for (int64_t half = 0; half < 2; half++) {
    __m512i words[TILE_ROWS];
    for (int64_t r = 0; r < TILE_ROWS; r++) words[r] = _mm512_load_si512(rows + r * STEP + half * STEP / 2);
    transpose_words(words);
    for (int64_t r = 0; r < TILE_ROWS; r++) _mm512_store_si512(out + half * PART / 2 + r * STEP / 2, words[r]);
  }
}

// Adds to the four tiles of sums the products of half a step: SIDE rows of w, and twice TILE_ROWS rows of x, `apart`
// numbers from one to the other. Rows of x come from the second-level cache, and do not displace the panel in the first.
inline __attribute__((always_inline)) void add_products(const Bfloat16* w, const Bfloat16* x, int64_t apart) {
  constexpr int row_bytes = STEP * sizeof(Bfloat16);
  _tile_loadd(4, w, row_bytes);
  _tile_stream_loadd(6, x, LINE_BYTES);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, w + PART, row_bytes);
  _tile_dpbf16ps(2, 5, 6);
  _tile_stream_loadd(7, x + apart, LINE_BYTES);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
}

constexpr int64_t TILE_SUMS = TILE_ROWS * TILE_ROWS, SUMS = 4 * TILE_SUMS;

inline __attribute__((always_inline)) void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline __attribute__((always_inline)) void load_sums(const float* from) {
  _tile_loadd(0, from, LINE_BYTES);
  _tile_loadd(1, from + TILE_SUMS, LINE_BYTES);
  _tile_loadd(2, from + 2 * TILE_SUMS, LINE_BYTES);
  _tile_loadd(3, from + 3 * TILE_SUMS, LINE_BYTES);
}

inline __attribute__((always_inline)) void store_sums(float* to) {
  _tile_stored(0, to, LINE_BYTES);
  _tile_stored(1, to + TILE_SUMS, LINE_BYTES);
  _tile_stored(2, to + 2 * TILE_SUMS, LINE_BYTES);
  _tile_stored(3, to + 3 * TILE_SUMS, LINE_BYTES);
}

inline void store_row(__m512 first, __m512 second, __mmask32 inside, float* to) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>(inside), first);
  _mm512_mask_storeu_ps(to + TILE_ROWS, static_cast<__mmask16>(inside >> TILE_ROWS), second);
}
inline void store_row(__m512 first, __m512 second, __mmask32 inside, Bfloat16* to) {
  _mm512_mask_storeu_epi16(to, inside, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// The sums of `columns` ≤ SIDE rows of w and of `rows` ≤ SIDE rows of x to their places, `width` apart.
template <class Bias, class Out>
inline void write_sums(const float* sums, const Bias* bias, int64_t rows, int64_t columns, int64_t width, Out* out) {
  const __mmask32 inside = ~0u >> (SIDE - columns);
  float added[SIDE] = {};
  for (int64_t i = 0; bias && i < columns; i++) added[i] = widen(bias[i]);
  const __m512 left = _mm512_loadu_ps(added), right = _mm512_loadu_ps(added + TILE_ROWS);
  for (int64_t half = 0; half < 2; half++) {
    __m512i first[TILE_ROWS], second[TILE_ROWS];
    for (int64_t r = 0; r < TILE_ROWS; r++) {
      first[r] = _mm512_load_si512(sums + half * TILE_SUMS + r * TILE_ROWS);
      second[r] = _mm512_load_si512(sums + (half + 2) * TILE_SUMS + r * TILE_ROWS);
    }
    transpose_words(first);
    transpose_words(second);
    for (int64_t r = 0; r < least(TILE_ROWS, rows - half * TILE_ROWS); r++)
      store_row(_mm512_add_ps((__m512)first[r], left), _mm512_add_ps((__m512)second[r], right), inside,
                out + (half * TILE_ROWS + r) * width);
  }
}

// A number of steps as stretches of nearly one length.
struct Stretches {
  int64_t steps, length;
  Stretches(int64_t k, int64_t pairs) : steps((k + STEP - 1) / STEP) {
    const int64_t most = pairs * STRETCH < FEW_STEPS ? FEW_STEPS / pairs : STRETCH, count = (steps + most - 1) / most;
    length = (steps + count - 1) / count;
  }
  int64_t after(int64_t start) const { return start < steps ? least(length, steps - start) : 0; }
};

// Some rows of x, packed, times the rows of w.
template <class Elem>
struct Product {
  const Stored<Elem>& w;
  const Stretches stretches;
  const Bfloat16* right;  // x, packed
  int64_t above, rows;    // of x

  int64_t pairs() const { return (rows + SIDE - 1) / SIDE; }

  // Sums of SIDE rows of w in `panel` and all of x, of `count` steps from `start` on. Calls `prepare` after each half
  // of a step of SIDE rows of x, and `write` with their last sums.
  template <class Prepare, class Write>
  void multiply(const Bfloat16* panel, int64_t start, int64_t count, float* sums, Prepare prepare, Write write) const {
    const bool is_first = start == 0, is_last = start + count == stretches.steps;
    alignas(64) float last[SUMS];
    for (int64_t pair = 0; pair < pairs(); pair++) {
      float* own = is_last ? last : sums + pair * SUMS;
      const Bfloat16* x = right + (start * 2 * pairs() + pair * 2 * count) * PART;
      if (is_first)
        zero_sums();
      else
        load_sums(sums + pair * SUMS);
      for (int64_t step = 0; step < count; step++) {
        for (int64_t half = 0; half < 2; half++) {
          add_products(panel + step * 2 * PART + half * STEP / 2, x + step * PART + half * PART / 2, count * PART);
          prepare();
        }
      }
      store_sums(own);
      if (is_last) write(pair, last);
    }
  }

  // The `unit`-th row and step of SIDE rows and `count` steps, in the order in which they lie in memory.
  void decode(int64_t unit, int64_t column, int64_t start, int64_t count, Bfloat16* panel) const {
    const int64_t row = unit / count, step = unit % count;
    w.fetch(column + row, (start + step) * STEP);
    w.decode(column + row, (start + step) * STEP, panel + step * 2 * PART + row * STEP);
  }

  // Rows of w from `first` to `end`. panels: two for a stretch. sums: of all these rows and x.
  template <class Bias, class Out>
  void columns(int64_t first, int64_t end, const Bias* bias, Bfloat16* panels, float* sums, Out* out) const {
    const int64_t number = pairs();
    Bfloat16 *panel = panels, *next = panels + stretches.length * 2 * PART;
    for (int64_t unit = 0; unit < SIDE * stretches.after(0); unit++) decode(unit, first, 0, stretches.after(0), panel);
    for (int64_t start = 0; start < stretches.steps; start += stretches.length)
      for (int64_t column = first; column < end; column += SIDE) {
        const int64_t count = stretches.after(start), other = column + SIDE < end ? column + SIDE : first;
        const int64_t later = other == first ? start + stretches.length : start;
        const int64_t turns = 2 * number * count, steps = stretches.after(later), left = SIDE * steps;
        const int64_t each = (left + turns - 1) / turns;
        int64_t unit = 0;
        auto prepare = [&]() __attribute__((always_inline)) {
          for (const int64_t last = least(unit + each, left); unit < last; unit++) decode(unit, other, later, steps, next);
        };
        auto write = [&](int64_t pair, const float* last) {
          const int64_t row = pair * SIDE, width = w.rows;
          write_sums(last, bias ? bias + column : bias, least(SIDE, rows - row), least(SIDE, end - column), width,
                     out + (above + row) * width + column);
        };
        multiply(panel, start, count, sums + (column - first) / SIDE * number * SUMS, prepare, write);
        std::swap(panel, next);
      }
  }
};

template <class Elem, class Bias, class Out>
inline void multiply(const Bfloat16* x, int64_t m, Stored<Elem> w, const Bias* bias, int threads, Out* out) {
  if (!m) return;
  const int64_t k = w.weight.k, most = least(CHUNK, (m + SIDE - 1) / SIDE * SIDE);
  const Stretches stretches(k, most / SIDE);
  const int64_t steps = stretches.steps;
  const int64_t turns = threads * ((w.rows + threads * MOST_COLUMNS - 1) / (threads * MOST_COLUMNS));
  const int64_t columns = ((w.rows + turns - 1) / turns + SIDE - 1) / SIDE * SIDE;
  const int64_t num_sums = stretches.length < steps ? most * columns : 0;  // that wait for the next stretch
  std::unique_ptr<uint8_t[]> memory(new uint8_t[most * steps * STEP * sizeof(Bfloat16) + LINE_BYTES]);
  Bfloat16* right = on_a_line<Bfloat16>(memory.get());
#pragma omp parallel num_threads(threads)
  {
    const FullSize full_size;
    const int64_t panels = 4 * stretches.length * PART * sizeof(Bfloat16);
    std::unique_ptr<uint8_t[]> own(new uint8_t[panels + num_sums * sizeof(float) + LINE_BYTES]);
    Bfloat16* panel = on_a_line<Bfloat16>(own.get());
    float* sums = reinterpret_cast<float*>(panel + 4 * stretches.length * PART);
    for (int64_t above = 0; above < m; above += most) {
      const Product<Elem> product{w, stretches, right, above, least(most, m - above)};
      const int64_t parts = 2 * product.pairs();
#pragma omp for
      for (int64_t part = 0; part < parts; part++)
        for (int64_t step = 0; step < steps; step++) {
          const int64_t start = step / stretches.length * stretches.length, count = stretches.after(start);
          Bfloat16* to = right + (start * parts + part * count + step - start) * PART;
          pack_right(x, m, k, above + part * TILE_ROWS, step * STEP, to);
        }
#pragma omp for schedule(dynamic)
      for (int64_t first = 0; first < w.rows; first += columns)
        product.columns(first, least(first + columns, w.rows), bias, panel, sums, out);
    }
  }
}

}  // namespace tiles
#endif

// x [m, weight.k] times the transpose of the weight [n, weight.k], fastest for 7 rows and more
template <class Elem, class Bias, class Out>
inline void tile_weight_mm(const Bfloat16* x, Weight<Elem> weight, const Bias* bias, int64_t m, int64_t n, int threads, Out* out) {
#ifdef MXCOMPILE_TILES
  if (tiles::granted()) return tiles::multiply(x, m, tiles::Stored<Elem>{weight, n}, bias, threads, out);
#endif
  weight_only_mm(x, weight, bias, m, n, threads, out);
}

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
