// The kernels for any processor: four lanes in the compiler's own vector types.
#include "kernels.h"

#include "bits.h"

namespace {

struct Simd {
  typedef float F __attribute__((vector_size(16)));
  typedef uint32_t I __attribute__((vector_size(16)));
  typedef int32_t Mask __attribute__((vector_size(16)));
  static constexpr int kWidth = 4;

  static F load(const void* p) { return read<F>(p); }
  static void store(void* p, F v) { std::memcpy(p, &v, sizeof v); }
  static I load_int(const void* p) { return read<I>(p); }
  static F set(float v) { return F{v, v, v, v}; }
  static I set_int(uint32_t v) { return I{v, v, v, v}; }
  static F as_float(I v) { return (F)v; }

  // A NaN in `t` leaves the bound as it is.
  static F lower(F t, F bound) { return t < bound ? t : bound; }
  static F higher(F t, F bound) { return t > bound ? t : bound; }
  static float lowest(F v) {
    float best = v[0];
    for (int i = 1; i < kWidth; ++i) best = v[i] < best ? v[i] : best;
    return best;
  }
  static float highest(F v) {
    float best = v[0];
    for (int i = 1; i < kWidth; ++i) best = v[i] > best ? v[i] : best;
    return best;
  }

  // Truncation to at most `top`; a NaN sets the sign bit of a lane of `bad`.
  static I codes(F q, uint32_t top, I& bad) {
    bad |= (I)(q != q);
    return (I)__builtin_convertvector(lower(q, set(float(top))), Mask);
  }
  static bool any_sign(I v) { return ((v[0] | v[1] | v[2] | v[3]) >> 31) != 0; }

  static void interleave(F even, F odd, F& first, F& second) {
    first = F{even[0], odd[0], even[1], odd[1]};
    second = F{even[2], odd[2], even[3], odd[3]};
  }

  template <int b>
  static void pack(const I (&codes)[8], uint8_t* out) {
    uint64_t words[4];
    for (int i = 0; i < 4; ++i) {
      words[i] = 0;
      for (int j = 0; j < 8; ++j) words[i] |= uint64_t{codes[2 * i + j / 4][j % 4]} << 8 * j;
    }
    pack_words<b>(words, out);
  }

  template <int b>
  struct Decoder {
    float low, unit;
    Decoder(float low, float unit) : low(low), unit(unit) {}
    void operator()(const uint8_t* in, F (&values)[8]) const {
      uint64_t words[4];
      unpack_words<b>(in, words);
      for (int i = 0; i < 8; ++i) {
        const uint32_t four = uint32_t(words[i / 2] >> 32 * (i % 2));
        const I code = I{four, four >> 8, four >> 16, four >> 24} & 0xffu;
        values[i] = set(low) + set(unit) * __builtin_convertvector((Mask)code, F);
      }
    }
  };

  struct Fp32 {
    static constexpr int kSize = 4;
    static F load(const void* p) { return Simd::load(p); }
    static void store(void* p, F v) { Simd::store(p, v); }
  };
  struct Bf16 {
    static constexpr int kSize = 2;
    static F load(const void* p) {
      const uint64_t h = read<uint64_t>(p);
      const I v = {uint32_t(h) << 16, uint32_t(h) & 0xffff0000u, uint32_t(h >> 32) << 16,
                   uint32_t(h >> 32) & 0xffff0000u};
      return (F)v;
    }
    static void store(void* p, F v) {
      const I bits = (I)v;
      const I rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
      put(p, v == v ? rounded : set_int(0x7fc0));
    }
  };
  struct Fp16 {
    static constexpr int kSize = 2;
    static F load(const void* p) {
      const uint64_t h = read<uint64_t>(p);
      const I half = {uint32_t(h) & 0xffffu, uint32_t(h) >> 16, uint32_t(h >> 32) & 0xffffu,
                      uint32_t(h >> 48)};
      const I magnitude = (half & 0x7fffu) << 13;
      // Multiplying moves the exponent's bias and makes subnormals normal; Inf and NaN need theirs set.
      F v = (F)magnitude * set(0x1p112f);
      v = magnitude >= 0x0f800000u ? (F)(magnitude | 0x7f800000u) : v;
      return (F)((I)v | (half & 0x8000u) << 16);
    }
    static void store(void* p, F v) {
      const I bits = (I)v, magnitude = bits & 0x7fffffffu;
      const I normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
      // Adding 0.5 lines a subnormal's last place up with fp32's and rounds it there.
      const I small = (I)((F)magnitude + set(0.5f)) - 0x3f000000u;
      I half = magnitude < 0x38800000u ? small : normal;
      half = magnitude >= 0x47800000u ? set_int(0x7c00) : half;
      half = magnitude > 0x7f800000u ? (magnitude >> 13 & 0x1ffu) | 0x7e00u : half;
      put(p, half | (bits >> 16 & 0x8000u));
    }
  };

 private:
  template <class V>
  static V read(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void put(void* p, I v) {
    const uint16_t half[4] = {uint16_t(v[0]), uint16_t(v[1]), uint16_t(v[2]), uint16_t(v[3])};
    std::memcpy(p, half, sizeof half);
  }
};

}  // namespace

#include "blocks.h"

const trimtab::Kernels trimtab::portable_kernels[3] = {
    kernels_for<Simd::Fp32>(), kernels_for<Simd::Fp16>(), kernels_for<Simd::Bf16>()};
