// 8-bit operands of matrix products: docs/precision.md fixes what these compute.
#pragma once

#include "trimtab.h"

#ifdef __cplusplus
extern "C" {
#endif

enum trimtab_axis {
  TRIMTAB_ROWS = 0,     // one scale for each row
  TRIMTAB_COLUMNS = 1,  // one scale for each column
  TRIMTAB_WHOLE = 2,    // one scale in all
};

// A row-major matrix of fp32 and the 8-bit codes made of it.
typedef struct {
  const float* values;
  int64_t rows;
  int64_t columns;
  const float* row_factor;     // `rows` numbers that multiply the values first; may be null
  const float* column_factor;  // `columns` numbers, likewise
  int8_t* codes;
  float* scales;  // as many as `axis` asks for
  int64_t axis;   // enum trimtab_axis
  uint64_t key;   // of the random stream; a row's own key is absorb(key, row)
  int64_t stochastic;
  int64_t instruction_set;  // enum trimtab_instruction_set
  int64_t threads;          // at most; small work uses fewer
} trimtab_quantize_task;

// Reads the values for their scales, then (mostly from cache) again for the codes.
TRIMTAB_API int64_t trimtab_quantize(const trimtab_quantize_task* task);

// Overwrites a row-major matrix of int32 sums by fp32: sum · (row scale · column scale) + bias. A null
// row_scale or column_scale counts as ones, a null bias as zeros.
TRIMTAB_API int64_t trimtab_dequantize(void* sums, int64_t rows, int64_t columns, const float* row_scale,
                                       const float* column_scale, const float* bias,
                                       int64_t instruction_set, int64_t threads);

#ifdef __cplusplus
}

namespace trimtab {

// Below this magnitude a row counts as zeros: its reciprocal would leave fp32's range.
constexpr float kLeastMagnitude = 0x1p-100f;

// The inner loops, for one instruction set.
struct QuantizeKernels {
  // Largest |value · row factor · column factor| of a row, as the bits of an fp32: those of Inf and NaN
  // are above every finite number's.
  uint32_t (*magnitude)(const float* values, const float* column_factor, float row_factor, int64_t columns);
  // The same kept column by column: magnitudes[c] = max(magnitudes[c], …).
  void (*magnitudes)(const float* values, const float* column_factor, float row_factor, uint32_t* magnitudes,
                     int64_t columns);
  // Codes of a row's elements from `first` (a multiple of 32) on. One of the two inverses: `inverses`
  // holds one for each column, or is null and `inverse` serves all.
  void (*codes)(const float* values, const float* column_factor, float row_factor, const float* inverses,
                float inverse, uint64_t row_key, int64_t first, bool stochastic, int8_t* codes,
                int64_t columns);
  void (*dequantize)(void* sums, float row_scale, const float* column_scale, const float* bias,
                     int64_t columns);
};

extern const QuantizeKernels portable_quantize;
extern const QuantizeKernels avx2_quantize;
extern const QuantizeKernels avx512_quantize;

}  // namespace trimtab
#endif
