// Attention of few queries over keys and values in MXFP8 or MXINT8, decoded in registers, or in FP32 or BF16:
//
//   s[t] = factor · Σ_d q[d] · k[t, d] (+ mask[t])     out[d] = Σ_t e^s[t] · v[t, d] / Σ_t e^s[t]          in FP32
//
// q is [B, H, Q, D]; elements of k and v [B, KV, T, D], scales of codes [B, KV, T, ⌈D/32⌉] bytes; out [B, Q, H, D], rounded
// once. H/KV heads share a head of keys and values, of which every byte is read once for all their queries, TILE keys at a
// time, with a running maximum. Tiles that the mask excludes for all of them (−∞) are not read. Without a key that takes
// part the result is 0. Threads share heads, and parts of the keys where there are few heads.
//
//   Loops      any ISA: values in FP32, one row after the other
//   InOrder    AVX2 and NEON: codes become FP32 by FP16 (`lanes.h`), scales multiply as below; tiles that hold NaN codes or
//              extreme scales are left to the loops
//   Registers  AVX-512 with byte permutations: 64 codes at a time become FP32 by a table; scales multiply partial sums of
//              keys and the weights of values, so that elements need no scaling
//   Dense      AVX2 and NEON: FP32 or BF16 elements, which have no scales
#ifndef MXCOMPILE_ATTENTION_H
#define MXCOMPILE_ATTENTION_H

#include "lanes.h"
#include <memory>

MXCOMPILE_VECTORIZED

namespace mxcompile {

constexpr int64_t TILE = 64;      // keys between two looks at the maximum
constexpr int64_t TOGETHER = 4;   // queries that share one decoding
constexpr int64_t STEP_DIMS = 64;  // of a row, decoded together
constexpr int64_t LANES = 16;
constexpr int64_t SHARES = 4;     // of the work for each thread, where heads alone are too few

struct Attention {
  int64_t batch, heads, kv_heads, queries, keys, dim;
  int64_t mask_batch, mask_head, mask_query;  // elements between neighbours, 0 where they share
  float factor;
  int64_t rows() const { return heads / kv_heads * queries; }  // of a head of keys: its heads times queries
  int64_t padded() const { return (dim + STEP_DIMS - 1) / STEP_DIMS * STEP_DIMS; }
  int64_t blocks() const { return (dim + BLOCK - 1) / BLOCK; }
};

template <class Elem>
constexpr int64_t element_bytes = 1;
template <>
constexpr int64_t element_bytes<float> = 4;
template <>
constexpr int64_t element_bytes<Bfloat16> = 2;

struct Rows {  // of keys or values: `count` of them. codes: bytes of their elements
  const uint8_t *codes, *scales;
  int64_t count;
};

// Scores of keys, or totals of values: a function for each number of queries that share one decoding.
using ByQueries = void (*[TOGETHER])(const Attention&, const float*, const Rows&, const uint8_t*, float*);
static_assert(TOGETHER == 4, "tables of this type have four functions");

// e^x for −87 ≤ x ≤ 0, within 2 units in the last place; NaN stays.
// x = n·ln 2 + f, e^f by Cephes' polynomial (S. Moshier, expf), ln 2 in two parts so that f is exact.
inline float ordinary_exp(float x) {
  float shifted = x * 1.44269504f + 12582912.0f;  // n in its low bits
  float n = shifted - 12582912.0f;
  float f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * f + 1.3981999507e-3f;
  sum = sum * f + 8.3334519073e-3f;
  sum = sum * f + 4.1665795894e-2f;
  sum = sum * f + 1.6666665459e-1f;
  sum = sum * f + 5.0000001201e-1f;
  sum = sum * (f * f) + f + 1.0f;
  float power = as_float((as_bits(shifted) - as_bits(12582912.0f) + 127) << 23);
  return sum * power;
}

// The same for any x ≤ 0; 0 below −87, where results would be subnormal.
inline float exp_of(float x) { return x < -87.0f ? 0.0f : ordinary_exp(x); }

template <class Elem>
struct Loops {
  static int64_t place(int64_t d) { return d; }  // where a query's element d lies, and a result's

  static void decode_row(const Attention& a, const Rows& from, int64_t row, float* out) {
    if constexpr (element_bytes<Elem> > 1) {
      const Elem* elements = reinterpret_cast<const Elem*>(from.codes) + row * a.dim;
#pragma omp simd
      for (int64_t d = 0; d < a.dim; d++) out[d] = widen(elements[d]);
    } else {
      decode_codes(a, from, row, out);
    }
  }

  static void decode_codes(const Attention& a, const Rows& from, int64_t row, float* out) {
    const uint8_t *codes = from.codes + row * a.dim, *scales = from.scales + row * a.blocks();
    for (int64_t block = 0; block < a.blocks(); block++) {
      float scale = scale_value(scales[block]);
      int64_t start = block * BLOCK, end = a.dim - start < BLOCK ? a.dim : start + BLOCK;
#pragma omp simd
      for (int64_t d = start; d < end; d++) out[d] = decode<Elem>(codes[d]) * scale;
    }
  }

  // products of `rows` queries with each key, TILE apart
  static void scores(const Attention& a, const float* q, int64_t rows, const Rows& keys, const uint8_t*, float* out) {
    std::unique_ptr<float[]> row(new float[a.padded()]());
    for (int64_t t = 0; t < keys.count; t++) {
      decode_row(a, keys, t, row.get());
      for (int64_t r = 0; r < rows; r++) {
        const float* query = q + r * a.padded();
        float lanes[LANES] = {}, sum = 0;
        for (int64_t d = 0; d < a.padded(); d += LANES) {
#pragma omp simd
          for (int64_t i = 0; i < LANES; i++) lanes[i] += query[d + i] * row[d + i];
        }
        for (int64_t i = 0; i < LANES; i++) sum += lanes[i];
        out[r * TILE + t] = sum;
      }
    }
  }

  // values times weights, which lie TILE apart, added to `rows` totals
  static void add(const Attention& a, const float* weights, int64_t rows, const Rows& values, const uint8_t*,
                  float* totals) {
    std::unique_ptr<float[]> row(new float[a.padded()]());
    for (int64_t t = 0; t < values.count; t++) {
      decode_row(a, values, t, row.get());
      for (int64_t r = 0; r < rows; r++) {
        float weight = weights[r * TILE + t], *total = totals + r * a.padded();
#pragma omp simd
        for (int64_t d = 0; d < a.dim; d++) total[d] += weight * row[d];
      }
    }
  }
};

#ifdef MXCOMPILE_BYTE_TABLES
template <class Elem>
struct Registers {
  // Halves of 32-bit words and halves of 128-bit lanes take turns when bytes become FP32.
  static int64_t place(int64_t d) {
    int64_t within = d % STEP_DIMS, lane = within / 16, half = within / 8 % 2, element = within % 8;
    return d - within + (2 * half + element % 2) * LANES + 4 * lane + element / 2;
  }

  struct Step {  // 64 codes of a row, in FP32, and the scales of the two blocks they lie in
    __m512 part[4], scale;

    Step(const Decoder& decoder, const Tables& t, const Attention& a, const Rows& rows, int64_t row, int64_t d) {
      const uint8_t *codes = rows.codes + row * a.dim + d, *bytes = rows.scales + row * a.blocks() + d / BLOCK;
      bool whole = d + STEP_DIMS <= a.dim;
      __mmask64 inside = whole ? ~0ull : ~0ull >> (STEP_DIMS - (a.dim - d));
      __m512i words[2];
      decoder.unpack(whole ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8(inside, codes), words);
      for (int i = 0; i < 2; i++) {
        part[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(words[i], 16));
        part[2 * i + 1] =
            _mm512_castsi512_ps(_mm512_and_si512(words[i], _mm512_set1_epi32(static_cast<int>(0xffff0000))));
      }
      scale = _mm512_set1_ps(t.scale[bytes[0]]);
      if (d + BLOCK < a.dim) scale = _mm512_mask_mov_ps(scale, 0xff00, _mm512_set1_ps(t.scale[bytes[1]]));
    }
  };

  template <int rows>
  static void scores_of(const Attention& a, const float* q, const Rows& keys, const uint8_t* soon, float* out) {
    const Tables& t = tables<Elem>();
    const Decoder decoder(t);
    for (int64_t key = 0; key < keys.count; key++) {
      __m512 total[rows];
      for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
      for (int64_t d = 0; d < a.dim; d += STEP_DIMS) {
        _mm_prefetch(reinterpret_cast<const char*>(soon + key * a.dim + d), _MM_HINT_T0);
        const Step step(decoder, t, a, keys, key, d);
        for (int r = 0; r < rows; r++) {
          const float* query = q + r * a.padded() + d;
          __m512 dot = _mm512_mul_ps(step.part[0], _mm512_loadu_ps(query));
          for (int i = 1; i < 4; i++) dot = _mm512_fmadd_ps(step.part[i], _mm512_loadu_ps(query + i * LANES), dot);
          total[r] = _mm512_fmadd_ps(dot, step.scale, total[r]);
        }
      }
      for (int r = 0; r < rows; r++) out[r * TILE + key] = _mm512_reduce_add_ps(total[r]);
    }
  }

  template <int rows>
  static void add_of(const Attention& a, const float* weights, const Rows& values, const uint8_t* soon, float* totals) {
    const Tables& t = tables<Elem>();
    const Decoder decoder(t);
    for (int64_t d = 0; d < a.dim; d += STEP_DIMS) {
      __m512 sums[rows][4];
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++) sums[r][i] = _mm512_loadu_ps(totals + r * a.padded() + d + i * LANES);
      for (int64_t key = 0; key < values.count; key++) {
        _mm_prefetch(reinterpret_cast<const char*>(soon + key * a.dim + d), _MM_HINT_T0);
        const Step step(decoder, t, a, values, key, d);
        for (int r = 0; r < rows; r++) {
          __m512 weight = _mm512_mul_ps(_mm512_set1_ps(weights[r * TILE + key]), step.scale);
          for (int i = 0; i < 4; i++) sums[r][i] = _mm512_fmadd_ps(step.part[i], weight, sums[r][i]);
        }
      }
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++) _mm512_storeu_ps(totals + r * a.padded() + d + i * LANES, sums[r][i]);
    }
  }

  static void scores(const Attention& a, const float* q, int64_t rows, const Rows& keys, const uint8_t* soon,
                     float* out) {
    static_assert(TOGETHER == 4, "one case for each number of queries");
    switch (rows) {
      case 1: return scores_of<1>(a, q, keys, soon, out);
      case 2: return scores_of<2>(a, q, keys, soon, out);
      case 3: return scores_of<3>(a, q, keys, soon, out);
      default: return scores_of<4>(a, q, keys, soon, out);
    }
  }

  static void add(const Attention& a, const float* weights, int64_t rows, const Rows& values, const uint8_t* soon,
                  float* totals) {
    switch (rows) {
      case 1: return add_of<1>(a, weights, values, soon, totals);
      case 2: return add_of<2>(a, weights, values, soon, totals);
      case 3: return add_of<3>(a, weights, values, soon, totals);
      default: return add_of<4>(a, weights, values, soon, totals);
    }
  }
};
#endif

#ifdef MXCOMPILE_LANES
template <class Elem>
struct InOrder : Loops<Elem> {
  static constexpr int PARTS = BLOCK / WIDTH, CHUNK = CODES / WIDTH;

  static const Scales<raised<Elem>>& powers() { return Scales<raised<Elem>>::all(); }

  static bool usual(const Attention& a, const Rows& rows) {
    return largest(rows.scales, rows.count * a.blocks()) <= powers().most &&
           !has_nan<Elem>(rows.codes, rows.count * a.dim);
  }

  // `CODES` codes from `d` on of a row; unless all blocks are `whole`, there are zeros behind its end
  template <bool whole>
  static inline __attribute__((always_inline)) void unpack_some(int64_t dim, const uint8_t* row, int64_t d, Lanes* out) {
    if (whole || d + CODES <= dim) return unpack<Elem>(row + d, out);
    uint8_t some[CODES] = {};
    if (d < dim) std::memcpy(some, row + d, dim - d);
    unpack<Elem>(some, out);
  }

  template <int rows, bool whole>
  static void scores_of(const Attention& a, const float* q, const Rows& keys, const uint8_t* soon, float* out) {
    const int64_t dim = a.dim, padded = a.padded(), blocks = a.blocks();
    const float* power = powers().value;
    for (int64_t key = 0; key < keys.count; key++) {
      const uint8_t *codes = keys.codes + key * dim, *scales = keys.scales + key * blocks;
      Lanes total[rows];
      for (int r = 0; r < rows; r++) total[r] = zeros();
      for (int64_t block = 0; block < blocks; block++) {
        const int64_t d = block * BLOCK;
        fetch(soon + key * dim + d);
        Lanes part[PARTS];
        for (int64_t i = 0; i < BLOCK; i += CODES) unpack_some<whole>(dim, codes, d + i, part + i / WIDTH);
        const Lanes scale = everywhere(power[scales[block]]);
        for (int r = 0; r < rows; r++) {
          const float* query = q + r * padded + d;
          Lanes dot = product(part[0], load(query));
          for (int i = 1; i < PARTS; i++) dot = added(part[i], load(query + i * WIDTH), dot);
          total[r] = added(dot, scale, total[r]);
        }
      }
      if constexpr (rows == 4)
        store_sums(total, TILE, out + key);
      else
        for (int r = 0; r < rows; r++) out[r * TILE + key] = sum(total[r]);
    }
  }

  // `weights` times the scales of a block of each value
  template <int rows>
  static void scale_weights(const Attention& a, const float* weights, const Rows& values, int64_t block, float* out) {
    const float* power = powers().value;
    float scales[TILE] = {};
    for (int64_t key = 0; key < values.count; key++) scales[key] = power[values.scales[key * a.blocks() + block]];
    for (int64_t key = 0; key < TILE; key += WIDTH)
      for (int r = 0; r < rows; r++)
        store(out + r * TILE + key, product(load(weights + r * TILE + key), load(scales + key)));
  }

  template <int rows, bool whole>
  static void add_of(const Attention& a, const float* weights, const Rows& values, const uint8_t* soon, float* totals) {
    const int64_t dim = a.dim, padded = a.padded(), count = values.count;
    float scaled[rows * TILE];
    for (int64_t d = 0; d < dim; d += CODES) {
      if (d % BLOCK == 0) scale_weights<rows>(a, weights, values, d / BLOCK, scaled);
      Lanes sums[rows][CHUNK];
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < CHUNK; i++) sums[r][i] = load(totals + r * padded + d + i * WIDTH);
      const uint8_t *codes = values.codes, *later = soon + d * (TILE / CODES);
      for (int64_t key = 0; key < count; key++, codes += dim) {
        if (key % 4 == 0) fetch(later + key * CODES);
        Lanes part[CHUNK];
        unpack_some<whole>(dim, codes, d, part);
        for (int r = 0; r < rows; r++) {
          const Lanes weight = everywhere(scaled[r * TILE + key]);
          for (int i = 0; i < CHUNK; i++) sums[r][i] = added(part[i], weight, sums[r][i]);
        }
      }
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < CHUNK; i++) store(totals + r * padded + d + i * WIDTH, sums[r][i]);
    }
  }

  static void scores(const Attention& a, const float* q, int64_t rows, const Rows& keys, const uint8_t* soon,
                     float* out) {
    if (!usual(a, keys)) return Loops<Elem>::scores(a, q, rows, keys, soon, out);
    constexpr ByQueries of_rows[] = {{scores_of<1, false>, scores_of<2, false>, scores_of<3, false>, scores_of<4, false>},
                                     {scores_of<1, true>, scores_of<2, true>, scores_of<3, true>, scores_of<4, true>}};
    of_rows[a.dim % BLOCK == 0][rows - 1](a, q, keys, soon, out);
  }

  static void add(const Attention& a, const float* weights, int64_t rows, const Rows& values, const uint8_t* soon,
                  float* totals) {
    if (!usual(a, values)) return Loops<Elem>::add(a, weights, rows, values, soon, totals);
    constexpr ByQueries of_rows[] = {{add_of<1, false>, add_of<2, false>, add_of<3, false>, add_of<4, false>},
                                     {add_of<1, true>, add_of<2, true>, add_of<3, true>, add_of<4, true>}};
    of_rows[a.dim % BLOCK == 0][rows - 1](a, weights, values, soon, totals);
  }
};
#endif

#ifdef MXCOMPILE_LANES
template <class Elem>
struct Dense : Loops<Elem> {
  static constexpr int CHUNK = CODES / WIDTH;
  static constexpr int64_t LINE = 64 / element_bytes<Elem>;  // elements of a cache line

  static const Elem* elements(const Rows& rows) { return reinterpret_cast<const Elem*>(rows.codes); }

  template <int rows>
  static void scores_of(const Attention& a, const float* q, const Rows& keys, const uint8_t* soon, float* out) {
    const Elem* row = elements(keys);
    for (int64_t key = 0; key < keys.count; key++, row += a.dim) {
      Lanes total[rows];
      for (int r = 0; r < rows; r++) total[r] = zeros();
      for (int64_t d = 0; d < a.dim; d += WIDTH) {
        if (d % LINE == 0) fetch(soon + (key * a.dim + d) * element_bytes<Elem>);
        const Lanes part = load(row + d);
        for (int r = 0; r < rows; r++) total[r] = added(part, load(q + r * a.padded() + d), total[r]);
      }
      for (int r = 0; r < rows; r++) out[r * TILE + key] = sum(total[r]);
    }
  }

  template <int rows>
  static void add_of(const Attention& a, const float* weights, const Rows& values, const uint8_t* soon, float* totals) {
    for (int64_t d = 0; d < a.dim; d += CODES) {
      Lanes sums[rows][CHUNK];
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < CHUNK; i++) sums[r][i] = load(totals + r * a.padded() + d + i * WIDTH);
      const Elem* row = elements(values) + d;
      for (int64_t key = 0; key < values.count; key++, row += a.dim) {
        if (d % LINE == 0) fetch(soon + (key * a.dim + d) * element_bytes<Elem>);
        Lanes part[CHUNK];
        for (int i = 0; i < CHUNK; i++) part[i] = load(row + i * WIDTH);
        for (int r = 0; r < rows; r++) {
          const Lanes weight = everywhere(weights[r * TILE + key]);
          for (int i = 0; i < CHUNK; i++) sums[r][i] = added(part[i], weight, sums[r][i]);
        }
      }
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < CHUNK; i++) store(totals + r * a.padded() + d + i * WIDTH, sums[r][i]);
    }
  }

  static void scores(const Attention& a, const float* q, int64_t rows, const Rows& keys, const uint8_t* soon,
                     float* out) {
    if (a.dim % CODES) return Loops<Elem>::scores(a, q, rows, keys, soon, out);
    constexpr ByQueries of_rows = {scores_of<1>, scores_of<2>, scores_of<3>, scores_of<4>};
    of_rows[rows - 1](a, q, keys, soon, out);
  }

  static void add(const Attention& a, const float* weights, int64_t rows, const Rows& values, const uint8_t* soon,
                  float* totals) {
    if (a.dim % CODES) return Loops<Elem>::add(a, weights, rows, values, soon, totals);
    constexpr ByQueries of_rows = {add_of<1>, add_of<2>, add_of<3>, add_of<4>};
    of_rows[rows - 1](a, weights, values, soon, totals);
  }
};
#endif

struct Running {  // softmax so far of one query
  float most, sum;
};

// TILE scores become weights e^(s − most); what was summed under an earlier maximum is scaled down.
inline void weigh(float* scores, Running& running, float* total, int64_t dims) {
  float lanes[LANES], most = running.most;
  for (int64_t i = 0; i < LANES; i++) lanes[i] = most;
  for (int64_t t = 0; t < TILE; t += LANES) {
#pragma omp simd
    for (int64_t i = 0; i < LANES; i++) {
      float s = scores[t + i];
      lanes[i] = s > lanes[i] || s != s ? s : lanes[i];  // NaN stays
    }
  }
  for (int64_t i = 0; i < LANES; i++) most = lanes[i] > most || lanes[i] != lanes[i] ? lanes[i] : most;
  bool nothing = most == -as_float(INFINITY_BITS);
  float before = running.most == most || nothing ? 1.0f : running.sum == 0 ? 0.0f : exp_of(running.most - most);
  float least = nothing ? 0.0f : most;  // all weights are 0 then: e^−∞
  for (int64_t i = 0; i < LANES; i++) lanes[i] = 0;
  for (int64_t t = 0; t < TILE; t += LANES) {
    float some[LANES];  // first of all, then as `exp_of`: compilers make no vectors of a choice to compute
#pragma omp simd
    for (int64_t i = 0; i < LANES; i++) some[i] = ordinary_exp(scores[t + i] - least);
#pragma omp simd
    for (int64_t i = 0; i < LANES; i++) {
      float weight = scores[t + i] - least < -87.0f ? 0.0f : some[i];
      scores[t + i] = weight;
      lanes[i] += weight;
    }
  }
  float sum = 0;
  for (int64_t i = 0; i < LANES; i++) sum += lanes[i];
  running = {most, running.sum * before + sum};
  if (before != 1.0f) {
#pragma omp simd
    for (int64_t d = 0; d < dims; d++) total[d] *= before;
  }
}

// Everything one head of keys and values, and of its keys some tiles, needs and gives.
template <class Form, class Mask>
struct Part {
  const Attention& a;
  const float* q;    // [rows, padded], as the form places elements, times the factor
  Rows keys, values;  // all of the head
  int64_t element;    // bytes of an element
  const Mask* mask;  // of its first head; null without one
  Running* running;
  float* totals;     // [rows, padded]

  // The mask of TILE keys in the place of scores, −∞ behind the last; whether any takes part.
  bool masked(int64_t first, int64_t count, float* out) const {
    const float excluded = -as_float(INFINITY_BITS);
    uint32_t any = 0;
    for (int64_t r = 0; r < a.rows(); r++) {
      const Mask* row = mask ? mask + r / a.queries * a.mask_head + r % a.queries * a.mask_query + first : nullptr;
      float* to = out + r * TILE;
      for (int64_t t = count; t < TILE; t++) to[t] = excluded;
#pragma omp simd reduction(| : any)
      for (int64_t t = 0; t < count; t++) {
        to[t] = row ? widen(row[t]) : 0.0f;
        any |= as_bits(to[t]) ^ as_bits(excluded);
      }
    }
    return any;
  }

  void run(int64_t first_tile, int64_t last_tile) const {
    std::unique_ptr<float[]> added(new float[2 * a.rows() * TILE]);
    float* scores = added.get() + a.rows() * TILE;
    for (int64_t r = 0; r < a.rows(); r++) running[r] = {-as_float(INFINITY_BITS), 0};
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
      int64_t first = tile * TILE, count = keys.count - first < TILE ? keys.count - first : TILE;
      if (!masked(first, count, added.get())) continue;
      Rows k{keys.codes + first * a.dim * element, keys.scales + first * a.blocks(), count};
      Rows v{values.codes + first * a.dim * element, values.scales + first * a.blocks(), count};
      for (int64_t r = 0; r < a.rows(); r += TOGETHER) {
        int64_t some = a.rows() - r < TOGETHER ? a.rows() - r : TOGETHER;
        float *s = scores + r * TILE, *total = totals + r * a.padded();
        Form::scores(a, q + r * a.padded(), some, k, v.codes, s);
        for (int64_t i = 0; i < some; i++) {
          float* extra = added.get() + (r + i) * TILE;
#pragma omp simd
          for (int64_t t = 0; t < TILE; t++) s[i * TILE + t] = t < count ? s[i * TILE + t] + extra[t] : extra[t];
          weigh(s + i * TILE, running[r + i], total + i * a.padded(), a.padded());
        }
        Form::add(a, s, some, v, k.codes + TILE * a.dim * element, total);
      }
    }
  }
};

// Parts of the keys, each under its own maximum, put together.
template <class Form, class Out>
inline void merge(const Attention& a, int64_t group, int64_t splits, const Running* running, const float* totals,
                  Out* out) {
  int64_t b = group / a.kv_heads, first_head = group % a.kv_heads * (a.heads / a.kv_heads);
  std::unique_ptr<float[]> whole(new float[a.padded()]);
  for (int64_t r = 0; r < a.rows(); r++) {
    float most = -as_float(INFINITY_BITS), sum = 0;
    for (int64_t s = 0; s < splits; s++) {
      float its = running[s * a.rows() + r].most;
      most = its > most || its != its ? its : most;
    }
    for (int64_t d = 0; d < a.padded(); d++) whole[d] = 0;
    for (int64_t s = 0; s < splits; s++) {
      const Running& part = running[s * a.rows() + r];
      const float* total = totals + (s * a.rows() + r) * a.padded();
      float share = part.most == most ? 1.0f : part.sum == 0 ? 0.0f : exp_of(part.most - most);
      sum += part.sum * share;
      for (int64_t d = 0; d < a.padded(); d++) whole[d] += total[d] * share;
    }
    Out* row = out + ((b * a.queries + r % a.queries) * a.heads + first_head + r / a.queries) * a.dim;
    for (int64_t d = 0; d < a.dim; d++) narrow(sum == 0 ? 0.0f : whole[Form::place(d)] / sum, row[d]);
  }
}

template <class Form, class Query, class Mask, class Out>
inline void attention_by(const Query* q, Rows keys, Rows values, int64_t element, const Mask* mask, const Attention& a,
                         int threads, Out* out) {
  int64_t groups = a.batch * a.kv_heads, rows = a.rows(), tiles = (a.keys + TILE - 1) / TILE;
  if (groups * rows == 0) return;
  int64_t wanted = (SHARES * threads + groups - 1) / groups, splits = wanted < tiles ? wanted : tiles ? tiles : 1;
  std::unique_ptr<float[]> wide(new float[groups * rows * a.padded()]());
  std::unique_ptr<float[]> totals(new float[groups * splits * rows * a.padded()]());
  std::unique_ptr<Running[]> running(new Running[groups * splits * rows]);
  for (int64_t r = 0; r < groups * rows; r++)
    for (int64_t d = 0; d < a.dim; d++) wide[r * a.padded() + Form::place(d)] = widen(q[r * a.dim + d]) * a.factor;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < groups * splits; task++) {
      int64_t group = task / splits, split = task % splits, codes = group * a.keys * a.dim * element;
      int64_t scales = group * a.keys * a.blocks(), head = group % a.kv_heads * (a.heads / a.kv_heads);
      const Mask* its = mask ? mask + group / a.kv_heads * a.mask_batch + head * a.mask_head : nullptr;
      Part<Form, Mask> part{a,
                            wide.get() + group * rows * a.padded(),
                            {keys.codes + codes, keys.scales + scales, a.keys},
                            {values.codes + codes, values.scales + scales, a.keys},
                            element,
                            its,
                            running.get() + task * rows,
                            totals.get() + task * rows * a.padded()};
      part.run(tiles * split / splits, tiles * (split + 1) / splits);
    }
#pragma omp for schedule(static)
    for (int64_t group = 0; group < groups; group++)
      merge<Form>(a, group, splits, running.get() + group * splits * rows,
                  totals.get() + group * splits * rows * a.padded(), out);
  }
}

// FP32 or BF16 keys and values.
template <class Elem, class Query, class Mask, class Out>
inline void dense_attention(const Query* q, const Elem* keys, const Elem* values, const Mask* mask, const Attention& a,
                            int threads, Out* out) {
  const uint8_t *k = reinterpret_cast<const uint8_t*>(keys), *v = reinterpret_cast<const uint8_t*>(values);
  Rows all_keys{k, k, a.keys}, all_values{v, v, a.keys};  // nothing reads the scales
#ifdef MXCOMPILE_LANES
  attention_by<Dense<Elem>>(q, all_keys, all_values, element_bytes<Elem>, mask, a, threads, out);
#else
  attention_by<Loops<Elem>>(q, all_keys, all_values, element_bytes<Elem>, mask, a, threads, out);
#endif
}

template <class Elem, class Query, class Mask, class Out>
inline void attention(const Query* q, const uint8_t* keys, const uint8_t* key_scales, const uint8_t* values,
                      const uint8_t* value_scales, const Mask* mask, const Attention& a, int threads, Out* out) {
  Rows k{keys, key_scales, a.keys}, v{values, value_scales, a.keys};
#ifdef MXCOMPILE_BYTE_TABLES
  if constexpr (!Elem::integer)
    attention_by<Registers<Elem>>(q, k, v, 1, mask, a, threads, out);
  else
#endif
#ifdef MXCOMPILE_LANES
  attention_by<InOrder<Elem>>(q, k, v, 1, mask, a, threads, out);
#else
  attention_by<Loops<Elem>>(q, k, v, 1, mask, a, threads, out);
#endif
}

}  // namespace mxcompile

MXCOMPILE_VECTORIZED_END

#endif
