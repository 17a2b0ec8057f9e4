// 8-bit operands without any instruction set in particular.
#include "quantize_loops.h"

const trimtab::QuantizeKernels trimtab::portable_quantize = kLoops;
