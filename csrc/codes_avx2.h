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
  } else if constexpr (b == 3) {
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0801));
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00400001));
    const __m256i joined = _mm256_or_si256(fours, _mm256_srli_epi64(fours, 20));
    const __m128i first = _mm_setr_epi8(0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i second = _mm_setr_epi8(-1, -1, -1, -1, -1, -1, 0, 1, 2, 8, 9, 10, -1, -1, -1, -1);
    const __m128i bytes = _mm_or_si128(_mm_shuffle_epi8(_mm256_castsi256_si128(joined), first),
                                       _mm_shuffle_epi8(_mm256_extracti128_si256(joined, 1), second));
    const int32_t rest = _mm_extract_epi32(bytes, 2);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), bytes);
    std::memcpy(out + 8, &rest, sizeof rest);
  } else {
    const Words joined = join_codes<b>(reinterpret_cast<Words>(codes));
    for (int i = 0; i < 4; ++i) {
      const uint64_t word = joined[i];
      std::memcpy(out + i * b, &word, b);
    }
  }
}

// For widths that have no shorter way: 3, 5, 6 and 7. Two loads, of all that the first and the last two words have, and
// of neighbors of theirs: words put together byte by byte would be read before their bytes are written.
template <int b>
inline __m256i unpack_bytes(const uint8_t* in) {
  constexpr int size = b == 3 ? 8 : 16, back = 4 * b - size, third = 2 * b - back;
  static_assert(size <= 4 * b && third >= 0);
  const auto load = [](const uint8_t* p) {
    return b == 3 ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))
                  : _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  };
  // Byte j of word i, or zero beyond its b bytes.
  struct Places {
    int8_t at[32];
    constexpr Places() : at() {
      for (int i = 0; i < 4; ++i) {
        const int begin = i < 2 ? i * b : third + (i - 2) * b;
        for (int j = 0; j < 8; ++j) at[8 * i + j] = int8_t(j < b ? begin + j : -1);
      }
    }
  };
  static constexpr Places places;
  const __m256i both = _mm256_set_m128i(load(in + back), load(in));
  const __m256i words =
      _mm256_shuffle_epi8(both, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(places.at)));
  return reinterpret_cast<__m256i>(split_codes<b>(reinterpret_cast<Words>(words)));
}

inline int32_t read_int32(const uint8_t* in) {
  int32_t word;
  std::memcpy(&word, in, sizeof word);
  return word;
}

}  // namespace
