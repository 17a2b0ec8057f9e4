// 8-bit operands without any instruction set in particular.
#include "quantise_loops.h"

const trimtab::QuantiseKernels trimtab::portable_quantise = kLoops;
