// 32 codes, one a byte of a 256-bit register, to and from their 4·b bytes.
#pragma once

#include <immintrin.h>

#include "bits.h"

namespace {

typedef uint64_t Words __attribute__((vector_size(32)));

template <int b>
inline void pack_bytes(__m256i codes, uint8_t* out) {
  if constexpr (b == 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), codes);
  } else if constexpr (b == 4) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
    const __m256i lanes = _mm256_packus_epi16(pairs, pairs);
    const __m256i joined = _mm256_permute4x64_epi64(lanes, 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(joined));
  } else if constexpr (b == 2) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0401));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
    const __m256i bytes = _mm256_shuffle_epi8(fours, _mm256_set1_epi32(0x0c080400));
    const uint32_t halves[2] = {uint32_t(_mm256_extract_epi32(bytes, 0)),
                                uint32_t(_mm256_extract_epi32(bytes, 4))};
    std::memcpy(out, halves, sizeof halves);
  } else if constexpr (b == 1) {
    const int mask = _mm256_movemask_epi8(_mm256_slli_epi16(codes, 7));
    std::memcpy(out, &mask, sizeof mask);
  } else {
    const Words joined = join_codes<b>(reinterpret_cast<Words>(codes));
    for (int i = 0; i < 4; ++i) {
      const uint64_t word = joined[i];
      std::memcpy(out + i * b, &word, b);
    }
  }
}

// For widths that have no shorter way: 3, 5, 6 and 7.
template <int b>
inline __m256i unpack_bytes(const uint8_t* in) {
  Words words;
  for (int i = 0; i < 4; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, in + i * b, b);
    words[i] = word;
  }
  return reinterpret_cast<__m256i>(split_codes<b>(words));
}

inline int32_t read_int32(const uint8_t* in) {
  int32_t word;
  std::memcpy(&word, in, sizeof word);
  return word;
}

}  // namespace
