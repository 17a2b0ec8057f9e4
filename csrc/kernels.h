// What each instruction set implements for api.cpp: encode, decode or reduce a run of blocks.
#pragma once

#include "trimtab.h"

namespace trimtab {

// One segment of a call. Pointers are to the segment's own first byte; none need be aligned
// beyond one element (values) or one byte (payloads).
struct Task {
  int64_t numel;
  int64_t block;
  int bits;
  uint8_t* values;
  uint8_t* payload;  // only read by decode
  const void* const* peers;  // payloads to add, each holding the segment at byte `start`; null: none
  int64_t peer_count;
  int64_t start;
  float scale;
  bool stochastic;
  bool add;
  uint64_t parameter_key;
  int64_t first_block;
};

using Run = void (*)(const Task&, int64_t first, int64_t last);

// Blocks [first, last) of a task, for one type of values.
struct Kernels {
  Run encode;
  Run decode;
  Run reduce_encode;
};

// Raw segments are cut into blocks of this many elements, so that threads can share them.
constexpr int64_t kRawBlock = 1 << 14;

// Static: these are compiled for each instruction set, and must not be shared.
static inline int64_t block_elements(const Task& task) { return task.bits == 0 ? kRawBlock : task.block; }
static inline int64_t blocks_of(const Task& task) {
  const int64_t block = block_elements(task);
  return task.numel / block + (task.numel % block != 0);
}

// Indexed by trimtab_type.
extern const Kernels portable_kernels[3];
extern const Kernels avx2_kernels[3];
extern const Kernels avx512_kernels[3];

}  // namespace trimtab
