// The kernels for AVX-512 (F, BW, VL, DQ).
#include "codes_avx2.h"
#include "kernels.h"

namespace {

struct Simd {
  using F = __m512;
  typedef uint32_t I __attribute__((vector_size(64)));
  static constexpr int kWidth = 16;

  static F load(const void* p) { return _mm512_loadu_ps(p); }
  static void store(void* p, F v) { _mm512_storeu_ps(p, v); }
  static I load_int(const void* p) { return I(_mm512_loadu_si512(p)); }
  static F set(float v) { return _mm512_set1_ps(v); }
  static I set_int(uint32_t v) { return I(_mm512_set1_epi32(int32_t(v))); }
  static F as_float(I v) { return F(v); }

  // Of two operands, one of them NaN, these instructions give the second: a NaN in `t` is ignored.
  static F lower(F t, F bound) { return _mm512_min_ps(t, bound); }
  static F higher(F t, F bound) { return _mm512_max_ps(t, bound); }
  static float lowest(F v) { return _mm512_reduce_min_ps(v); }
  static float highest(F v) { return _mm512_reduce_max_ps(v); }

  // Truncation to at most `top`; a NaN, which converts to the sign bit alone, leaves it in `bad`.
  static I codes(F q, uint32_t top, I& bad) {
    const I truncated = I(_mm512_cvttps_epi32(q));
    bad |= truncated;
    return I(_mm512_min_epu32(__m512i(truncated), __m512i(set_int(top))));
  }
  static bool any_sign(I v) { return _mm512_movepi32_mask(__m512i(v)) != 0; }

  static void interleave(F even, F odd, F& first, F& second) {
    first = _mm512_unpacklo_ps(even, odd);
    second = _mm512_unpackhi_ps(even, odd);
  }

  template <int b>
  static void pack(const I (&codes)[2], uint8_t* out) {
    if constexpr (b == 4) {
      for (int i = 0; i < 2; ++i) {
        const __m512i c = __m512i(codes[i]);
        const __m512i pairs = _mm512_or_si512(c, _mm512_srli_epi64(c, 28));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out + 8 * i), _mm512_cvtepi64_epi8(pairs));
      }
    } else if constexpr (b == 3) {
      __m128i pairs[2];
      for (int i = 0; i < 2; ++i) {
        const __m512i c = __m512i(codes[i]);
        pairs[i] = _mm512_cvtepi64_epi8(_mm512_or_si512(c, _mm512_srli_epi64(c, 29)));
      }
      const __m128i both = _mm_unpacklo_epi64(pairs[0], pairs[1]);
      const __m128i fours = _mm_maddubs_epi16(both, _mm_set1_epi16(1 | 1 << 14));
      const __m128i eights = _mm_madd_epi16(fours, _mm_set1_epi32(1 | 1 << 28));
      const __m128i bytes =
          _mm_shuffle_epi8(eights, _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
      const int32_t rest = _mm_extract_epi32(bytes, 2);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out), bytes);
      std::memcpy(out + 8, &rest, sizeof rest);
    } else if constexpr (b == 1) {
      for (int i = 0; i < 2; ++i) {
        const __mmask16 mask = _mm512_test_epi32_mask(__m512i(codes[i]), _mm512_set1_epi32(1));
        std::memcpy(out + 2 * i, &mask, 2);
      }
    } else {
      pack_bytes<b>(_mm256_set_m128i(_mm512_cvtepi32_epi8(__m512i(codes[1])),
                                     _mm512_cvtepi32_epi8(__m512i(codes[0]))),
                    out);
    }
  }

  // Up to 4 bits, the values of a block are looked up in one register; beyond, computed.
  template <int b, bool table = (b <= 4)>
  struct Decoder {
    F values_of;
    Decoder(float low, float unit) {
      const I code = I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} & ((1u << b) - 1);
      values_of = set(low) + set(unit) * _mm512_cvtepi32_ps(__m512i(code));
    }

    // The look-up uses 4 bits of a lane, and its table repeats for shorter codes: no mask is needed.
    void operator()(const uint8_t* in, F (&values)[2]) const {
      __m512i codes[2];
      if constexpr (b == 4) {
        for (int i = 0; i < 2; ++i) {
          const __m512i pairs = _mm512_cvtepu8_epi64(eight(in + 8 * i));
          codes[i] = _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28));
        }
      } else if constexpr (b == 3) {
        // Eight codes are three bytes, which are read with their neighbor: the last with the one before them.
        const I shifts = I{0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7} * b;
        const I later = I{0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8};
        codes[0] = _mm512_srlv_epi32(words(in, in + 3), __m512i(shifts));
        codes[1] = _mm512_srlv_epi32(words(in + 6, in + 8), __m512i(shifts + later));
      } else {
        const __m512i shifts = __m512i(I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * b);
        for (int i = 0; i < 2; ++i) {
          uint32_t word = 0;
          std::memcpy(&word, in + 2 * b * i, 2 * b);
          codes[i] = _mm512_srlv_epi32(_mm512_set1_epi32(int32_t(word)), shifts);
        }
      }
      for (int i = 0; i < 2; ++i) values[i] = _mm512_permutexvar_ps(codes[i], values_of);
    }

   private:
    // One word in the first half of the lanes, another in the second.
    static __m512i words(const uint8_t* first, const uint8_t* second) {
      return _mm512_mask_set1_epi32(_mm512_set1_epi32(read_int32(first)), 0xff00, read_int32(second));
    }
    static __m128i eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  };

  template <int b>
  struct Decoder<b, false> {
    F low, unit;
    Decoder(float low, float unit) : low(set(low)), unit(set(unit)) {}

    void operator()(const uint8_t* in, F (&values)[2]) const {
      const __m256i bytes = b == 8 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)) : rest(in);
      values[0] = value(_mm256_castsi256_si128(bytes));
      values[1] = value(_mm256_extracti128_si256(bytes, 1));
    }

   private:
    static __m256i rest(const uint8_t* in) { return unpack_bytes<b == 8 ? 7 : b>(in); }
    F value(__m128i codes) const { return low + unit * _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes)); }
  };

  struct Fp32 {
    static constexpr int kSize = 4;
    static F load(const void* p) { return Simd::load(p); }
    static void store(void* p, F v) { Simd::store(p, v); }
  };
  struct Fp16 {
    static constexpr int kSize = 2;
    static F load(const void* p) { return _mm512_cvtph_ps(halves(p)); }
    static void store(void* p, F v) { put(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
  };
  struct Bf16 {
    static constexpr int kSize = 2;
    static F load(const void* p) { return F(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(p)), 16)); }
    static void store(void* p, F v) {
      const I bits = I(v);
      const I rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
      const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      put(p, _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(__m512i(rounded), nan, 0x7fc0)));
    }
  };

 private:
  static __m256i halves(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void put(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
};

}  // namespace

#include "blocks.h"

const trimtab::Kernels trimtab::avx512_kernels[3] = {kernels_for<Simd::Fp32>(), kernels_for<Simd::Fp16>(),
                                                     kernels_for<Simd::Bf16>()};
