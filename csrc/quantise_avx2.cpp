// 8-bit operands for AVX2: the plain loops, which the compiler turns into vectors.
#include "quantise_loops.h"

const trimtab::QuantiseKernels trimtab::avx2_quantise = kLoops;
