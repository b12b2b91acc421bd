// What tells whether a tensor's bytes are those of another call: two keyed sums for each chunk of them.
//
//   sum_t = Σᵢ (lo(xᵢ) + lo(kᵢ₊ₜ)) · (hi(xᵢ) + hi(kᵢ₊ₜ))      xᵢ, kᵢ of 64 bits, halves mod 2³², sums mod 2⁶⁴; t = 0, 1
//
// This is NH, with the second sum under the key shifted by one pair of words (Black, Halevi, Krawczyk, Krovetz and
// Rogaway, UMAC, CRYPTO '99, theorem 4.3): of two different chunks, whichever they are, the sums are equal for at most
// one key in 2⁶⁴. Chunks are as long as the key and have sums of their own, so that nothing else is mixed. A short
// last chunk counts as one that ends in zeros: tensors of other sizes are not to be compared.
#ifndef MXCOMPILE_FINGERPRINT_H
#define MXCOMPILE_FINGERPRINT_H

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace mxcompile {

constexpr int64_t WORDS = 1024;         // of a chunk, 64 bits each; the key has one more
constexpr int64_t FEW_CHUNKS = 8;       // not worth waking threads for

inline void chunk_sums(const uint8_t* x, const uint64_t* key, uint64_t* sums) {
  int64_t i = 0;
  uint64_t first = 0, second = 0;
#if defined(__AVX512F__)
  __m512i a = _mm512_setzero_si512(), b = a;
  for (; i < WORDS; i += 8) {
    __m512i word = _mm512_loadu_si512(x + 8 * i);
    __m512i p = _mm512_add_epi32(word, _mm512_loadu_si512(key + i));
    __m512i q = _mm512_add_epi32(word, _mm512_loadu_si512(key + i + 1));
    a = _mm512_add_epi64(a, _mm512_mul_epu32(p, _mm512_srli_epi64(p, 32)));
    b = _mm512_add_epi64(b, _mm512_mul_epu32(q, _mm512_srli_epi64(q, 32)));
  }
  first = static_cast<uint64_t>(_mm512_reduce_add_epi64(a));
  second = static_cast<uint64_t>(_mm512_reduce_add_epi64(b));
#elif defined(__AVX2__)
  __m256i a = _mm256_setzero_si256(), b = a;
  for (; i < WORDS; i += 4) {
    __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * i));
    __m256i p = _mm256_add_epi32(word, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key + i)));
    __m256i q = _mm256_add_epi32(word, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key + i + 1)));
    a = _mm256_add_epi64(a, _mm256_mul_epu32(p, _mm256_srli_epi64(p, 32)));
    b = _mm256_add_epi64(b, _mm256_mul_epu32(q, _mm256_srli_epi64(q, 32)));
  }
  uint64_t lanes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes + 4), b);
  first = lanes[0] + lanes[1] + lanes[2] + lanes[3];
  second = lanes[4] + lanes[5] + lanes[6] + lanes[7];
#endif
  for (; i < WORDS; i++) {
    uint64_t word;
    std::memcpy(&word, x + 8 * i, 8);
    auto product = [&](uint64_t k) {
      uint32_t low = static_cast<uint32_t>(word) + static_cast<uint32_t>(k);
      uint32_t high = static_cast<uint32_t>(word >> 32) + static_cast<uint32_t>(k >> 32);
      return static_cast<uint64_t>(low) * high;
    };
    first += product(key[i]);
    second += product(key[i + 1]);
  }
  sums[0] = first;
  sums[1] = second;
}

// Two sums for each of ⌈bytes / (8 · WORDS)⌉ chunks.
inline void fingerprint(const uint8_t* x, int64_t bytes, const uint64_t* key, int threads, uint64_t* sums) {
  constexpr int64_t LENGTH = 8 * WORDS;
  int64_t whole = bytes / LENGTH, rest = bytes % LENGTH;
#pragma omp parallel for num_threads(threads) if (whole > FEW_CHUNKS)
  for (int64_t c = 0; c < whole; c++) chunk_sums(x + c * LENGTH, key, sums + 2 * c);
  if (rest) {
    uint8_t last[LENGTH] = {};
    std::memcpy(last, x + whole * LENGTH, rest);
    chunk_sums(last, key, sums + 2 * whole);
  }
}

}  // namespace mxcompile

#endif
