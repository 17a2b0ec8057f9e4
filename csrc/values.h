// The arithmetic of the codec on runs of values, over the `Simd` of the file that includes this
// one. Everything has internal linkage: code compiled for one instruction set must never be linked
// into another's.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

using F = Simd::F;
using I = Simd::I;

// Codes are made and read 32 at a time: the least number that fills whole bytes and whole words
// for every width of code and of register.
constexpr int kGroup = 32;
constexpr int kVectors = kGroup / Simd::kWidth;

inline int64_t code_bytes(int64_t n, int bits) { return n / 8 * bits + (n % 8 * bits + 7) / 8; }

struct Pair {
  float low, unit;
};

// ---- pass 1: the bounds of a block -----------------------------------------------------------

struct Bounds {
  F low[kVectors], high[kVectors];

  Bounds() {
    for (int i = 0; i < kVectors; ++i) {
      low[i] = Simd::set(__builtin_inff());
      high[i] = Simd::set(-__builtin_inff());
    }
  }

  void group(const float* t) {
    for (int i = 0; i < kVectors; ++i) {
      const F v = Simd::load(t + i * Simd::kWidth);
      low[i] = Simd::lower(v, low[i]);
      high[i] = Simd::higher(v, high[i]);
    }
  }

  void add(const float* t, int64_t n) {
    Bounds self = *this;  // a copy, which the compiler keeps in registers
    int64_t i = 0;
    for (; i + kGroup <= n; i += kGroup) self.group(t + i);
    if (i < n) {
      float rest[kGroup];
      for (int j = 0; j < kGroup; ++j) rest[j] = t[i + j < n ? i + j : i];
      self.group(rest);
    }
    *this = self;
  }

  float lowest() const {
    F v = low[0];
    for (int i = 1; i < kVectors; ++i) v = Simd::lower(low[i], v);
    return Simd::lowest(v);
  }
  float highest() const {
    F v = high[0];
    for (int i = 1; i < kVectors; ++i) v = Simd::higher(high[i], v);
    return Simd::highest(v);
  }
};

// ---- pass 2: codes ----------------------------------------------------------------------------

// The offsets r of 32 elements at a time, in order.
struct Nearest {
  explicit Nearest(uint64_t) {}
  void next(F (&r)[kVectors]) {
    for (int i = 0; i < kVectors; ++i) r[i] = Simd::set(0.5f);
  }
};

class Stochastic {
 public:
  explicit Stochastic(uint64_t key) : k1_(Simd::set_int(uint32_t(key >> 32))) {
    // Words are ordered so that interleaving their halves, within each four lanes, gives the
    // elements in order.
    uint32_t word[Simd::kWidth];
    for (int i = 0; i < Simd::kWidth; ++i) {
      const int order = i / 4 * 2 + i % 2 + (i % 4 >= 2 ? Simd::kWidth / 2 : 0);
      word[i] = uint32_t(key) + uint32_t(order);
    }
    word_ = Simd::load_int(word);
  }

  void next(F (&r)[kVectors]) {
    for (int i = 0; i < kVectors; i += 2) {
      I x = word_;
      x ^= x >> 16;
      x *= 0x7feb352du;
      x = x ^ x >> 15 ^ k1_;
      x *= 0x846ca68bu;
      x ^= x >> 16;
      Simd::interleave(offset(x << 7), offset(x >> 9), r[i], r[i + 1]);
      word_ += uint32_t(Simd::kWidth);
    }
  }

 private:
  // (2u + 1) · 2⁻¹⁷ from u in bits 7 to 22: the fraction of a float in [1, 2), less 1, exactly.
  static F offset(I u) {
    return Simd::as_float((u & 0x007fff80u) | 0x3f800040u) - Simd::set(1.0f);
  }

  I k1_, word_;
};

struct Quantizer {
  float low, inv;
  I bad = Simd::set_int(0);

  template <int b, class Rounding>
  void group(const float* t, Rounding& rounding, uint8_t* out) {
    F r[kVectors];
    I codes[kVectors];
    rounding.next(r);
    for (int i = 0; i < kVectors; ++i) {
      F q = (Simd::load(t + i * Simd::kWidth) - Simd::set(low)) * Simd::set(inv);
      q = q + r[i];
      codes[i] = Simd::codes(q, (1u << b) - 1, bad);
    }
    Simd::pack<b>(codes, out);
  }

  // `ahead` is fetched meanwhile, `stride` bytes for each group: the memory would rest otherwise.
  template <int b, class Rounding>
  void run(const float* t, int64_t n, Rounding& offsets, uint8_t* out, const uint8_t* ahead, int stride) {
    Quantizer self = *this;
    Rounding rounding = offsets;
    int64_t i = 0;
    for (; i + kGroup <= n; i += kGroup) {
      self.group<b>(t + i, rounding, out);
      out += 4 * b;
      for (int line = 0; line < stride; line += 64) __builtin_prefetch(ahead + line);
      ahead += stride;
    }
    if (i < n) {
      float rest[kGroup];
      uint8_t packed[4 * b];
      // `low` has code 0: what follows the last code is zero, as padding must be.
      for (int j = 0; j < kGroup; ++j) rest[j] = i + j < n ? t[i + j] : low;
      self.group<b>(rest, rounding, packed);
      std::memcpy(out, packed, size_t(code_bytes(n - i, b)));
    }
    *this = self;
    offsets = rounding;
  }
};

// Encodes m values that `source` yields in runs of at most `source.kRun`. Returns false for a
// block that is not finite; its codes are then unspecified.
template <int b, class Rounding, class Source>
bool encode_values(Source& source, int64_t m, uint64_t key, Pair& pair, uint8_t* codes,
                   const uint8_t* ahead, int stride) {
  Bounds bounds;
  const float* t = nullptr;
  for (int64_t i = 0; i < m; i += Source::kRun) {
    const int64_t n = m - i < Source::kRun ? m - i : Source::kRun;
    t = source.values(i, n);
    bounds.add(t, n);
  }
  const float low = bounds.lowest() + 0.0f;
  const float range = bounds.highest() - low;
  if (!__builtin_isfinite(range)) return false;
  const float unit = range * (1.0f / ((1 << b) - 1));
  const bool flat = !(unit >= 0x1p-126f);
  pair = {low, flat ? 0.0f : unit};

  Quantizer quantizer{low, flat ? 0.0f : 1.0f / unit};
  Rounding rounding(key);
  for (int64_t i = 0; i < m; i += Source::kRun) {
    const int64_t n = m - i < Source::kRun ? m - i : Source::kRun;
    if (m > Source::kRun) t = source.values(i, n);
    quantizer.run<b>(t, n, rounding, codes + i / 8 * b, ahead, stride);
  }
  return !Simd::any_sign(quantizer.bad);
}

// ---- decoding ---------------------------------------------------------------------------------

template <class T, bool add>
inline void emit(const F (&values)[kVectors], uint8_t* y) {
  for (int i = 0; i < kVectors; ++i) {
    uint8_t* const p = y + i * Simd::kWidth * T::kSize;
    T::store(p, add ? T::load(p) + values[i] : values[i]);
  }
}

template <int b, class T, bool add>
void decode_values(const uint8_t* codes, Pair pair, uint8_t* y, int64_t n) {
  const Simd::Decoder<b> decoder(pair.low, pair.unit);
  F values[kVectors];
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    decoder(codes, values);
    emit<T, add>(values, y);
    codes += 4 * b;
    y += kGroup * T::kSize;
  }
  if (i == n) return;
  uint8_t packed[4 * b] = {}, rest[kGroup * T::kSize] = {};
  const size_t bytes = size_t(n - i) * T::kSize;
  std::memcpy(packed, codes, size_t(code_bytes(n - i, b)));
  if (add) std::memcpy(rest, y, bytes);
  decoder(packed, values);
  emit<T, add>(values, rest);
  std::memcpy(y, rest, bytes);
}

// ---- values of any type -----------------------------------------------------------------------

// to = from · scale (+ to): the conversions and sums that raw segments and staging need.
template <class From, class To, bool add>
void convert(const uint8_t* from, uint8_t* to, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + Simd::kWidth <= n; i += Simd::kWidth) {
    const F v = From::load(from + i * From::kSize) * Simd::set(scale);
    uint8_t* const p = to + i * To::kSize;
    To::store(p, add ? To::load(p) + v : v);
  }
  if (i == n) return;
  uint8_t x[Simd::kWidth * From::kSize] = {}, y[Simd::kWidth * To::kSize] = {};
  std::memcpy(x, from + i * From::kSize, size_t(n - i) * From::kSize);
  if (add) std::memcpy(y, to + i * To::kSize, size_t(n - i) * To::kSize);
  const F v = From::load(x) * Simd::set(scale);
  To::store(y, add ? To::load(y) + v : v);
  std::memcpy(to + i * To::kSize, y, size_t(n - i) * To::kSize);
}

}  // namespace
