// The inner loops in plain C++, compiled for each instruction set that has none of its own.
#pragma once

#include <cstring>

#include "quantize.h"

namespace {

inline float value_at(const float* values, const float* column_factor, float row_factor, int64_t i) {
  const float scaled = values[i] * row_factor;
  return column_factor == nullptr ? scaled : scaled * column_factor[i];
}

// The bits of |x|: as integers they order like the numbers, with Inf and then NaN above all.
inline uint32_t size_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffffu;
}

uint32_t loop_magnitude(const float* values, const float* column_factor, float row_factor, int64_t columns) {
  uint32_t most = 0;
  for (int64_t i = 0; i < columns; ++i) {
    const uint32_t size = size_bits(value_at(values, column_factor, row_factor, i));
    most = size > most ? size : most;
  }
  return most;
}

void loop_magnitudes(const float* values, const float* column_factor, float row_factor, uint32_t* magnitudes,
                     int64_t columns) {
  for (int64_t i = 0; i < columns; ++i) {
    const uint32_t size = size_bits(value_at(values, column_factor, row_factor, i));
    magnitudes[i] = size > magnitudes[i] ? size : magnitudes[i];
  }
}

void loop_codes(const float* values, const float* column_factor, float row_factor, const float* inverses,
                float inverse, uint64_t row_key, int64_t first, bool stochastic, int8_t* codes,
                int64_t columns) {
  const uint32_t k0 = uint32_t(row_key), k1 = uint32_t(row_key >> 32);
  constexpr int64_t kChunk = 64;
  float offsets[kChunk], by[kChunk];
  for (float& offset : offsets) offset = 0.5f;
  for (float& one : by) one = inverse;
  for (int64_t start = 0; start < columns; start += kChunk) {
    if (stochastic) {
      const uint32_t pair = uint32_t((first + start) >> 1);
      for (uint32_t j = 0; j < kChunk / 2; ++j) {
        uint32_t x = pair + j + k0;
        x ^= x >> 16;
        x *= 0x7feb352du;
        x ^= x >> 15;
        x ^= k1;
        x *= 0x846ca68bu;
        x ^= x >> 16;
        offsets[2 * j] = float(int32_t(x & 0xffff)) * 0x1p-16f + 0x1p-17f;
        offsets[2 * j + 1] = float(int32_t(x >> 16)) * 0x1p-16f + 0x1p-17f;
      }
    }
    const int64_t count = columns - start < kChunk ? columns - start : kChunk;
    if (inverses != nullptr) std::memcpy(by, inverses + start, size_t(count) * 4);
    const float* const factors = column_factor == nullptr ? nullptr : column_factor + start;
    for (int64_t i = 0; i < count; ++i) {
      // An inverse of 0 stands for zeros or for values that are not numbers: either has codes 0.
      float q = value_at(values + start, factors, row_factor, i) * by[i] + offsets[i];
      q = by[i] == 0 ? 0.0f : q;
      const int32_t towards_zero = int32_t(q);
      const int32_t down = towards_zero - (float(towards_zero) > q);
      codes[start + i] = int8_t(down < -127 ? -127 : down > 127 ? 127 : down);
    }
  }
}

void loop_dequantize(void* sums, float row_scale, const float* column_scale, const float* bias,
                     int64_t columns) {
  // Through char: the same memory is int32 before and fp32 after.
  char* at = static_cast<char*>(sums);
  for (int64_t i = 0; i < columns; ++i, at += 4) {
    int32_t sum;
    std::memcpy(&sum, at, 4);
    const float scale = column_scale == nullptr ? row_scale : row_scale * column_scale[i];
    float value = float(sum) * scale;
    if (bias != nullptr) value += bias[i];
    std::memcpy(at, &value, 4);
  }
}

constexpr trimtab::QuantizeKernels kLoops = {loop_magnitude, loop_magnitudes, loop_codes, loop_dequantize};

}  // namespace
