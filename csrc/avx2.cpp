// The kernels for AVX2 with F16C.
#include "codes_avx2.h"
#include "kernels.h"

namespace {

struct Simd {
  using F = __m256;
  typedef uint32_t I __attribute__((vector_size(32)));
  static constexpr int kWidth = 8;

  static F load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
  static void store(void* p, F v) { _mm256_storeu_ps(static_cast<float*>(p), v); }
  static I load_int(const void* p) { return I(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
  static F set(float v) { return _mm256_set1_ps(v); }
  static I set_int(uint32_t v) { return I(_mm256_set1_epi32(int32_t(v))); }
  static F as_float(I v) { return F(v); }

  // Of two operands, one of them NaN, these instructions give the second: a NaN in `t` is ignored.
  static F lower(F t, F bound) { return _mm256_min_ps(t, bound); }
  static F higher(F t, F bound) { return _mm256_max_ps(t, bound); }
  static float lowest(F v) {
    __m128 half = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_min_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_min_ss(half, _mm_movehdup_ps(half)));
  }
  static float highest(F v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }

  // Truncation to at most `top`; a NaN, which converts to the sign bit alone, leaves it in `bad`.
  static I codes(F q, uint32_t top, I& bad) {
    const I truncated = I(_mm256_cvttps_epi32(q));
    bad |= truncated;
    return I(_mm256_min_epu32(__m256i(truncated), __m256i(set_int(top))));
  }
  static bool any_sign(I v) { return _mm256_movemask_ps(F(v)) != 0; }

  static void interleave(F even, F odd, F& first, F& second) {
    first = _mm256_unpacklo_ps(even, odd);
    second = _mm256_unpackhi_ps(even, odd);
  }

  template <int b>
  static void pack(const I (&codes)[4], uint8_t* out) {
    const __m256i lower = _mm256_packus_epi32(__m256i(codes[0]), __m256i(codes[1]));
    const __m256i upper = _mm256_packus_epi32(__m256i(codes[2]), __m256i(codes[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    pack_bytes<b>(_mm256_permutevar8x32_epi32(_mm256_packus_epi16(lower, upper), order), out);
  }

  template <int b>
  struct Decoder {
    F low, unit;
    Decoder(float low, float unit) : low(set(low)), unit(set(unit)) {}

    void operator()(const uint8_t* in, F (&values)[4]) const {
      __m256i codes[4];
      if constexpr (b == 8) {
        for (int i = 0; i < 4; ++i) codes[i] = _mm256_cvtepu8_epi32(eight(in + 8 * i));
      } else if constexpr (b == 4) {
        for (int i = 0; i < 4; ++i) {
          const __m256i pairs = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(read_int32(in + 4 * i)));
          const __m256i spread = _mm256_or_si256(pairs, _mm256_slli_epi64(pairs, 28));
          codes[i] = _mm256_and_si256(spread, _mm256_set1_epi32(15));
        }
      } else if constexpr (b == 2 || b == 1) {
        const __m256i shifts = _mm256_setr_epi32(0, b, 2 * b, 3 * b, 4 * b, 5 * b, 6 * b, 7 * b);
        for (int i = 0; i < 4; ++i) {
          uint16_t word = 0;
          std::memcpy(&word, in + b * i, b);
          const __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
          codes[i] = _mm256_and_si256(shifted, _mm256_set1_epi32((1 << b) - 1));
        }
      } else {
        const __m256i bytes = unpack_bytes<b>(in);
        const __m128i lower = _mm256_castsi256_si128(bytes), upper = _mm256_extracti128_si256(bytes, 1);
        codes[0] = _mm256_cvtepu8_epi32(lower);
        codes[1] = _mm256_cvtepu8_epi32(_mm_srli_si128(lower, 8));
        codes[2] = _mm256_cvtepu8_epi32(upper);
        codes[3] = _mm256_cvtepu8_epi32(_mm_srli_si128(upper, 8));
      }
      for (int i = 0; i < 4; ++i) values[i] = low + unit * _mm256_cvtepi32_ps(codes[i]);
    }

   private:
    static __m128i eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  };

  struct Fp32 {
    static constexpr int kSize = 4;
    static F load(const void* p) { return Simd::load(p); }
    static void store(void* p, F v) { Simd::store(p, v); }
  };
  struct Fp16 {
    static constexpr int kSize = 2;
    static F load(const void* p) { return _mm256_cvtph_ps(halves(p)); }
    static void store(void* p, F v) { put(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
  };
  struct Bf16 {
    static constexpr int kSize = 2;
    static F load(const void* p) { return F(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves(p)), 16)); }
    static void store(void* p, F v) {
      const I bits = I(v);
      const I rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
      const I value = I(v == v) ? rounded : set_int(0x7fc0);
      const __m256i words = _mm256_packus_epi32(__m256i(value), __m256i(value));
      put(p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0x08)));
    }
  };

 private:
  static __m128i halves(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static void put(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
};

}  // namespace

#include "blocks.h"

const trimtab::Kernels trimtab::avx2_kernels[3] = {kernels_for<Simd::Fp32>(), kernels_for<Simd::Fp16>(),
                                                   kernels_for<Simd::Bf16>()};
