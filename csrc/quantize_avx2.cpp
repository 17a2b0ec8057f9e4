// 8-bit operands for AVX2: the plain loops, which the compiler turns into vectors.
#include "quantize_loops.h"

const trimtab::QuantizeKernels trimtab::avx2_quantize = kLoops;
