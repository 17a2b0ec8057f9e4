// 8-bit operands for AVX-512 (F, BW, VL, DQ).
#include <immintrin.h>

#include "quantize.h"

namespace {

constexpr int64_t kWidth = 16;

__mmask16 mask_of(int64_t left) { return left >= kWidth ? 0xffff : __mmask16((1u << left) - 1); }

// Lanes beyond the row's end read as zero.
__m512 loaded(const float* values, const float* column_factor, __m512 row_factor, int64_t i, __mmask16 mask) {
  const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, values + i), row_factor);
  if (column_factor == nullptr) return scaled;
  return _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(mask, column_factor + i));
}

__m512i size_bits(__m512 x) { return _mm512_castps_si512(_mm512_abs_ps(x)); }

uint32_t magnitude(const float* values, const float* column_factor, float row_factor, int64_t columns) {
  const __m512 factor = _mm512_set1_ps(row_factor);
  __m512i most[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= columns; i += 4 * kWidth) {
    for (int u = 0; u < 4; ++u) {
      const __m512 x = loaded(values, column_factor, factor, i + u * kWidth, 0xffff);
      most[u] = _mm512_max_epu32(most[u], size_bits(x));
    }
  }
  for (; i < columns; i += kWidth) {
    const __m512 x = loaded(values, column_factor, factor, i, mask_of(columns - i));
    most[0] = _mm512_max_epu32(most[0], size_bits(x));
  }
  return _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_max_epu32(most[0], most[1]), _mm512_max_epu32(most[2], most[3])));
}

void magnitudes(const float* values, const float* column_factor, float row_factor, uint32_t* magnitudes,
                int64_t columns) {
  const __m512 factor = _mm512_set1_ps(row_factor);
  for (int64_t i = 0; i < columns; i += kWidth) {
    const __mmask16 mask = mask_of(columns - i);
    const __m512i size = size_bits(loaded(values, column_factor, factor, i, mask));
    const __m512i before = _mm512_maskz_loadu_epi32(mask, magnitudes + i);
    _mm512_mask_storeu_epi32(magnitudes + i, mask, _mm512_max_epu32(before, size));
  }
}

// trimtab-lb32's words for 16 pairs: 32 numbers of 16 bits, in the elements' order.
__m512i words(uint32_t pair, uint32_t k0, uint32_t k1) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i x = _mm512_add_epi32(_mm512_set1_epi32(int32_t(pair + k0)), lanes);
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7feb352d));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
  x = _mm512_xor_si512(x, _mm512_set1_epi32(int32_t(k1)));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(int32_t(0x846ca68b)));
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

// The bits 0x43000000 | u are the number 128 + u·2⁻¹⁶: the difference, u·2⁻¹⁶ + 2⁻¹⁷, is exact.
__m512 offsets(__m256i bits) {
  const __m512i number = _mm512_or_si512(_mm512_cvtepu16_epi32(bits), _mm512_set1_epi32(0x43000000));
  return _mm512_sub_ps(_mm512_castsi512_ps(number), _mm512_set1_ps(128.0f - 0x1p-17f));
}

__m128i rounded(__m512 x, __m512 inverse, __m512 offset) {
  const __m512 q = _mm512_add_ps(_mm512_mul_ps(x, inverse), offset);
  const __m512i down = _mm512_cvt_roundps_epi32(q, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __m512i code = _mm512_max_epi32(down, _mm512_set1_epi32(-127));
  // An inverse of 0 stands for zeros or for values that are not numbers: either has codes 0.
  const __mmask16 any = _mm512_cmp_ps_mask(inverse, _mm512_setzero_ps(), _CMP_NEQ_OQ);
  return _mm512_maskz_cvtsepi32_epi8(0xffff, _mm512_maskz_mov_epi32(any, code));
}

template <bool stochastic>
void codes_of(const float* values, const float* column_factor, float row_factor, const float* inverses,
              float inverse, uint64_t row_key, int64_t first, int8_t* codes, int64_t columns) {
  const __m512 factor = _mm512_set1_ps(row_factor), half = _mm512_set1_ps(0.5f);
  const uint32_t k0 = uint32_t(row_key), k1 = uint32_t(row_key >> 32);
  for (int64_t i = 0; i < columns; i += 2 * kWidth) {
    const __m512i bits = stochastic ? words(uint32_t((first + i) >> 1), k0, k1) : __m512i();
    for (int h = 0; h < 2; ++h) {
      const int64_t at = i + h * kWidth;
      if (at >= columns) break;
      const __mmask16 mask = mask_of(columns - at);
      const __m512 by =
          inverses == nullptr ? _mm512_set1_ps(inverse) : _mm512_maskz_loadu_ps(mask, inverses + at);
      const __m256i sixteen = h == 0 ? _mm512_castsi512_si256(bits) : _mm512_extracti64x4_epi64(bits, 1);
      const __m512 offset = stochastic ? offsets(sixteen) : half;
      const __m512 x = loaded(values, column_factor, factor, at, mask);
      _mm_mask_storeu_epi8(codes + at, mask, rounded(x, by, offset));
    }
  }
}

void codes(const float* values, const float* column_factor, float row_factor, const float* inverses,
           float inverse, uint64_t row_key, int64_t first, bool stochastic, int8_t* codes, int64_t columns) {
  const auto run = stochastic ? codes_of<true> : codes_of<false>;
  run(values, column_factor, row_factor, inverses, inverse, row_key, first, codes, columns);
}

void dequantize(void* sums, float row_scale, const float* column_scale, const float* bias, int64_t columns) {
  char* at = static_cast<char*>(sums);
  const __m512 row = _mm512_set1_ps(row_scale);
  for (int64_t i = 0; i < columns; i += kWidth, at += 4 * kWidth) {
    const __mmask16 mask = mask_of(columns - i);
    __m512 scale = row;
    if (column_scale != nullptr) scale = _mm512_mul_ps(row, _mm512_maskz_loadu_ps(mask, column_scale + i));
    __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(mask, at)), scale);
    if (bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, bias + i));
    _mm512_mask_storeu_ps(at, mask, value);
  }
}

}  // namespace

const trimtab::QuantizeKernels trimtab::avx512_quantize = {magnitude, magnitudes, codes, dequantize};
