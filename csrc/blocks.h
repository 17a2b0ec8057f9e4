// The codec, block by block, for every type and width: what api.cpp calls. Included, after a file
// has defined its `Simd`, once for each instruction set.
#pragma once

#include "hash.h"
#include "kernels.h"
#include "values.h"

namespace {

using trimtab::Task;

// Values are staged in fp32 this many at a time, which leaves room for them in the first cache.
constexpr int64_t kStage = 4096;

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

// The sum of several payloads, block by block: what is added to is still in the first cache.
template <int b, class T>
void decode_sum_block(const Task& task, int64_t k) {
  const Block place(task, k);
  uint8_t* const y = task.values + place.begin * T::kSize;
  for (int64_t i = 0; i < task.peer_count; ++i) {
    const uint8_t* const payload = static_cast<const uint8_t*>(task.peers[i]) + task.start;
    const Pair pair = read_pair(payload + place.pair_at());
    if (i == 0) {
      decode_values<b, T, false>(payload + place.codes_at(task), pair, y, place.length);
    } else {
      decode_values<b, T, true>(payload + place.codes_at(task), pair, y, place.length);
    }
  }
}

template <class T>
void decode_sum_raw(const Task& task, int64_t k) {
  const Block place(task, k);
  const int64_t at = place.begin * T::kSize;
  uint8_t* const y = task.values + at;
  for (int64_t i = 0; i < task.peer_count; ++i) {
    const uint8_t* const payload = static_cast<const uint8_t*>(task.peers[i]) + task.start + at;
    if (i == 0) {
      std::memcpy(y, payload, size_t(place.length) * T::kSize);
    } else {
      convert<T, T, true>(payload, y, place.length, 1.0f);
    }
  }
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
  if (task.peers != nullptr) return &decode_sum_block<b, T>;
  return task.add ? &decode_block<b, T, true> : &decode_block<b, T, false>;
}

template <class T>
void decode_run(const Task& task, int64_t first, int64_t last) {
  One one = task.peers != nullptr ? &decode_sum_raw<T> : &decode_raw<T>;
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
