// The codec, block by block, over the `Simd` of the file that includes this one. Everything has
// internal linkage: code compiled for one instruction set must never be linked into another's.
#pragma once

#include "hash.h"
#include "kernels.h"

namespace {

using trimtab::Task;
using F = Simd::F;
using I = Simd::I;

// Codes are made and read 32 at a time: the least number that fills whole bytes and whole words
// for every width of code and of register.
constexpr int kGroup = 32;
constexpr int kVectors = kGroup / Simd::kWidth;

// Values are staged in fp32 this many at a time, which leaves room for them in the first cache.
constexpr int64_t kStage = 4096;

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

struct Quantiser {
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
    Quantiser self = *this;
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

  Quantiser quantiser{low, flat ? 0.0f : 1.0f / unit};
  Rounding rounding(key);
  for (int64_t i = 0; i < m; i += Source::kRun) {
    const int64_t n = m - i < Source::kRun ? m - i : Source::kRun;
    if (m > Source::kRun) t = source.values(i, n);
    quantiser.run<b>(t, n, rounding, codes + i / 8 * b, ahead, stride);
  }
  return !Simd::any_sign(quantiser.bad);
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

// fp32 values as they lie.
struct Direct {
  static constexpr int64_t kRun = INT64_MAX / 2;
  const uint8_t* x;
  const float* values(int64_t, int64_t) const { return reinterpret_cast<const float*>(x); }
};

// Values of any type, scaled.
template <class T>
struct Scaled {
  static constexpr int64_t kRun = kStage;
  const uint8_t* x;
  float scale;
  alignas(64) float stage[kStage];

  Scaled(const uint8_t* x, float scale) : x(x), scale(scale) {}

  const float* values(int64_t begin, int64_t n) {
    convert<T, Simd::Fp32, false>(x + begin * T::kSize, reinterpret_cast<uint8_t*>(stage), n, scale);
    return stage;
  }
};

// The place of one block in a task.
struct Block {
  int64_t index, begin, length;

  Block(const Task& task, int64_t k) : index(k), begin(k * block_elements(task)) {
    const int64_t left = task.numel - begin;
    length = left < block_elements(task) ? left : block_elements(task);
  }
  int64_t pair_at() const { return 8 * index; }
  int64_t codes_at(const Task& task) const {
    return 8 * blocks_of(task) + index * code_bytes(task.block, task.bits);
  }
};

inline Pair read_pair(const uint8_t* p) {
  Pair pair;
  std::memcpy(&pair, p, sizeof pair);
  return pair;
}

// The sum of one's own values and the peers' payloads.
template <int b, class T>
struct Summed {
  static constexpr int64_t kRun = kStage;
  const Task& task;
  const Block& place;
  Scaled<T> own;

  Summed(const Task& task, const Block& place, const uint8_t* x)
      : task(task), place(place), own(x, task.scale) {}

  const float* values(int64_t begin, int64_t n) {
    own.values(begin, n);
    uint8_t* const sum = reinterpret_cast<uint8_t*>(own.stage);
    for (int64_t i = 0; i < task.peer_count; ++i) {
      const uint8_t* const peer = static_cast<const uint8_t*>(task.peers[i]) + task.start;
      decode_values<b, Simd::Fp32, true>(peer + place.codes_at(task) + begin / 8 * b,
                                         read_pair(peer + place.pair_at()), sum, n);
    }
    return own.stage;
  }
};

// ---- blocks of a task -------------------------------------------------------------------------

inline void zero_padding(const Task& task, int64_t used) {
  for (; used % 8 != 0; ++used) task.payload[used] = 0;
}

template <int b, class T, bool reduce, class Rounding>
void encode_block(const Task& task, int64_t k) {
  const Block place(task, k);
  uint8_t* const x = task.values + place.begin * T::kSize;
  uint8_t* const codes = task.payload + place.codes_at(task);
  const uint8_t* const ahead = x + place.length * T::kSize;
  const uint64_t key = absorb(task.parameter_key, uint64_t(task.first_block) + uint64_t(k));
  constexpr int stride = kGroup * T::kSize;

  Pair pair;
  bool finite;
  if constexpr (reduce) {
    Summed<b, T> source(task, place, x);
    finite = encode_values<b, Rounding>(source, place.length, key, pair, codes, ahead, stride);
  } else if (T::kSize == 4 && task.scale == 1.0f) {
    Direct source{x};
    finite = encode_values<b, Rounding>(source, place.length, key, pair, codes, ahead, stride);
  } else {
    Scaled<T> source(x, task.scale);
    finite = encode_values<b, Rounding>(source, place.length, key, pair, codes, ahead, stride);
  }
  const int64_t bytes = code_bytes(place.length, b);
  if (!finite) {
    const uint32_t nan[2] = {0x7fc00000u, 0x7fc00000u};
    std::memcpy(&pair, nan, sizeof pair);
    std::memset(codes, 0, size_t(bytes));
  }
  std::memcpy(task.payload + place.pair_at(), &pair, sizeof pair);
  if (place.begin + place.length == task.numel) zero_padding(task, codes + bytes - task.payload);
  if (reduce) decode_values<b, T, false>(codes, pair, x, place.length);
}

template <class T, bool reduce>
void encode_raw(const Task& task, int64_t k) {
  const Block place(task, k);
  const int64_t at = place.begin * T::kSize, n = place.length;
  uint8_t *const x = task.values + at, *const out = task.payload + at;
  if constexpr (reduce) {
    Scaled<T> sum(x, task.scale);
    for (int64_t i = 0; i < n; i += kStage) {
      const int64_t m = n - i < kStage ? n - i : kStage;
      sum.values(i, m);
      uint8_t* const stage = reinterpret_cast<uint8_t*>(sum.stage);
      for (int64_t j = 0; j < task.peer_count; ++j) {
        const uint8_t* const peer = static_cast<const uint8_t*>(task.peers[j]) + task.start + at;
        convert<T, Simd::Fp32, true>(peer + i * T::kSize, stage, m, 1.0f);
      }
      convert<Simd::Fp32, T, false>(stage, out + i * T::kSize, m, 1.0f);
    }
    std::memcpy(x, out, size_t(n) * T::kSize);
  } else if (task.scale == 1.0f) {
    std::memcpy(out, x, size_t(n) * T::kSize);
  } else {
    convert<T, T, false>(x, out, n, task.scale);
  }
  if (place.begin + n == task.numel) zero_padding(task, task.numel * T::kSize);
}

template <class T>
void decode_raw(const Task& task, int64_t k) {
  const Block place(task, k);
  const int64_t at = place.begin * T::kSize;
  uint8_t* const y = task.values + at;
  if (task.add) {
    convert<T, T, true>(task.payload + at, y, place.length, 1.0f);
  } else {
    std::memcpy(y, task.payload + at, size_t(place.length) * T::kSize);
  }
}

template <int b, class T, bool add>
void decode_block(const Task& task, int64_t k) {
  const Block place(task, k);
  decode_values<b, T, add>(task.payload + place.codes_at(task), read_pair(task.payload + place.pair_at()),
                           task.values + place.begin * T::kSize, place.length);
}

// ---- from run-time settings to the instance that serves them ----------------------------------

using One = void (*)(const Task&, int64_t);

template <int b, class T, bool reduce>
One encoder(const Task& task) {
  return task.stochastic ? &encode_block<b, T, reduce, Stochastic> : &encode_block<b, T, reduce, Nearest>;
}

template <class T, bool reduce>
void encode_run(const Task& task, int64_t first, int64_t last) {
  One one = &encode_raw<T, reduce>;
  switch (task.bits) {
    case 1: one = encoder<1, T, reduce>(task); break;
    case 2: one = encoder<2, T, reduce>(task); break;
    case 3: one = encoder<3, T, reduce>(task); break;
    case 4: one = encoder<4, T, reduce>(task); break;
    case 5: one = encoder<5, T, reduce>(task); break;
    case 6: one = encoder<6, T, reduce>(task); break;
    case 7: one = encoder<7, T, reduce>(task); break;
    case 8: one = encoder<8, T, reduce>(task); break;
  }
  for (int64_t k = first; k < last; ++k) one(task, k);
}

template <int b, class T>
One decoder(const Task& task) {
  return task.add ? &decode_block<b, T, true> : &decode_block<b, T, false>;
}

template <class T>
void decode_run(const Task& task, int64_t first, int64_t last) {
  One one = &decode_raw<T>;
  switch (task.bits) {
    case 1: one = decoder<1, T>(task); break;
    case 2: one = decoder<2, T>(task); break;
    case 3: one = decoder<3, T>(task); break;
    case 4: one = decoder<4, T>(task); break;
    case 5: one = decoder<5, T>(task); break;
    case 6: one = decoder<6, T>(task); break;
    case 7: one = decoder<7, T>(task); break;
    case 8: one = decoder<8, T>(task); break;
  }
  for (int64_t k = first; k < last; ++k) one(task, k);
}

template <class T>
constexpr trimtab::Kernels kernels_for() {
  return {&encode_run<T, false>, &decode_run<T>, &encode_run<T, true>};
}

}  // namespace
