// Checks, scales, and the sharing of rows or panels among threads. The inner loops are per instruction set.
#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "hash.h"
#include "threads.h"

namespace {

using trimtab::QuantizeKernels;

// Below this many elements a thread costs more than it brings.
constexpr int64_t kElementsPerThread = 1 << 18;
constexpr int64_t kMostElements = int64_t{1} << 48;
// Columns whose scales are found before their codes are made: a panel of a few thousand rows stays in cache.
constexpr int64_t kPanel = 256;

const QuantizeKernels* kernels_of(int64_t set) {
  const int64_t best = trimtab_best_instruction_set();
  if (set == TRIMTAB_BEST) set = best;
  if (set < TRIMTAB_PORTABLE || set > best) return nullptr;
#if TRIMTAB_X86
  if (set == TRIMTAB_AVX512) return &trimtab::avx512_quantize;
  if (set == TRIMTAB_AVX2) return &trimtab::avx2_quantize;
#endif
  return &trimtab::portable_quantize;
}

// From a largest magnitude: the scale, and by return its inverse (0: every code is 0).
float scale_and_inverse(uint32_t bits, float* scale) {
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  if (!(magnitude < INFINITY)) {
    *scale = NAN;
    return 0;
  }
  if (magnitude < trimtab::kLeastMagnitude) {
    *scale = 0;
    return 0;
  }
  *scale = magnitude * (1.0f / 127.0f);
  return 127.0f / magnitude;
}

struct Matrix {
  const trimtab_quantize_task& t;
  const QuantizeKernels& k;

  const float* row(int64_t r) const { return t.values + r * t.columns; }
  float row_factor(int64_t r) const { return t.row_factor == nullptr ? 1.0f : t.row_factor[r]; }
  uint32_t magnitude(int64_t r) const { return k.magnitude(row(r), t.column_factor, row_factor(r), t.columns); }
  void codes(int64_t r, float inverse) const {
    k.codes(row(r), t.column_factor, row_factor(r), nullptr, inverse, absorb(t.key, uint64_t(r)), 0,
            t.stochastic != 0, t.codes + r * t.columns, t.columns);
  }

  void by_rows(int64_t first, int64_t last) const {
    for (int64_t r = first; r < last; ++r) codes(r, scale_and_inverse(magnitude(r), t.scales + r));
  }

  void by_panels(int64_t first, int64_t last) const {
    float inverses[kPanel];
    uint32_t magnitudes[kPanel];
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t start = panel * kPanel, count = std::min(kPanel, t.columns - start);
      const float* factor = t.column_factor == nullptr ? nullptr : t.column_factor + start;
      std::fill(magnitudes, magnitudes + kPanel, 0u);
      for (int64_t r = 0; r < t.rows; ++r) {
        k.magnitudes(row(r) + start, factor, row_factor(r), magnitudes, count);
      }
      for (int64_t c = 0; c < count; ++c) {
        inverses[c] = scale_and_inverse(magnitudes[c], t.scales + start + c);
      }
      for (int64_t r = 0; r < t.rows; ++r) {
        k.codes(row(r) + start, factor, row_factor(r), inverses, 0, absorb(t.key, uint64_t(r)), start,
                t.stochastic != 0, t.codes + r * t.columns + start, count);
      }
    }
  }
};

}  // namespace

int64_t trimtab_quantize(const trimtab_quantize_task* task) {
  if (task == nullptr || task->rows < 0 || task->columns < 0 || task->threads < 1 ||
      (task->columns > 0 && task->rows > kMostElements / task->columns) || task->axis < TRIMTAB_ROWS ||
      task->axis > TRIMTAB_WHOLE) {
    return TRIMTAB_BAD_CALL;
  }
  const QuantizeKernels* kernels = kernels_of(task->instruction_set);
  if (kernels == nullptr) return TRIMTAB_NO_INSTRUCTION_SET;
  const Matrix matrix{*task, *kernels};
  const int64_t threads = std::min(task->threads, task->rows * task->columns / kElementsPerThread);
  const auto over_rows = [&](const auto& share) {
    share_out(task->rows, threads, share);
  };
  if (task->axis == TRIMTAB_ROWS) {
    over_rows([&](int64_t first, int64_t last) { matrix.by_rows(first, last); });
  } else if (task->axis == TRIMTAB_COLUMNS) {
    const int64_t panels = (task->columns + kPanel - 1) / kPanel;
    share_out(panels, threads, [&](int64_t first, int64_t last) { matrix.by_panels(first, last); });
  } else {
    std::vector<uint32_t> magnitudes(size_t(task->rows));
    over_rows([&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) magnitudes[size_t(r)] = matrix.magnitude(r);
    });
    uint32_t most = 0;
    for (uint32_t magnitude : magnitudes) most = std::max(most, magnitude);
    const float inverse = scale_and_inverse(most, task->scales);
    over_rows([&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) matrix.codes(r, inverse);
    });
  }
  return TRIMTAB_OK;
}

int64_t trimtab_dequantize(void* sums, int64_t rows, int64_t columns, const float* row_scale,
                           const float* column_scale, const float* bias, int64_t instruction_set,
                           int64_t threads) {
  if (rows < 0 || columns < 0 || threads < 1 || (columns > 0 && rows > kMostElements / columns)) {
    return TRIMTAB_BAD_CALL;
  }
  const QuantizeKernels* kernels = kernels_of(instruction_set);
  if (kernels == nullptr) return TRIMTAB_NO_INSTRUCTION_SET;
  share_out(rows, std::min(threads, rows * columns / kElementsPerThread), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      kernels->dequantize(static_cast<char*>(sums) + 4 * r * columns,
                          row_scale == nullptr ? 1.0f : row_scale[r], column_scale, bias, columns);
    }
  });
  return TRIMTAB_OK;
}
