// The C interface of trimtab's CPU kernels. docs/wire-format.md fixes what they compute.
#pragma once

#include <stdint.h>

#if defined(__GNUC__)
#define TRIMTAB_API __attribute__((visibility("default")))
#else
#define TRIMTAB_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a caller built against an older header would be misunderstood.
#define TRIMTAB_ABI_VERSION 2

// One run of a parameter inside the flat buffer.
typedef struct {
  int64_t offset;
  int64_t numel;
  int64_t bits;  // 1 to 8; 0: raw
  int64_t block;
  uint64_t name_hash;
  int64_t first_block;
} trimtab_segment;

typedef struct {
  const trimtab_segment* segments;
  int64_t count;
  int64_t type;             // enum trimtab_type
  int64_t instruction_set;  // enum trimtab_instruction_set
  int64_t threads;          // at most; small work uses fewer
} trimtab_packing;

enum trimtab_type { TRIMTAB_FP32 = 0, TRIMTAB_FP16 = 1, TRIMTAB_BF16 = 2 };

enum trimtab_instruction_set {
  TRIMTAB_BEST = 0,
  TRIMTAB_PORTABLE = 1,
  TRIMTAB_AVX2 = 2,
  TRIMTAB_AVX512 = 3,
};

// Nothing has been read or written when one of these, other than OK, comes back.
enum trimtab_status {
  TRIMTAB_OK = 0,
  TRIMTAB_BAD_CALL = 1,            // a segment, type or thread count out of range
  TRIMTAB_BAD_FLAT_SIZE = 2,       // a segment reaches past the flat buffer
  TRIMTAB_BAD_PAYLOAD_SIZE = 3,    // not the exact size of the segments' encoding
  TRIMTAB_NO_INSTRUCTION_SET = 4,  // this processor, or this build, lacks it
};

TRIMTAB_API int64_t trimtab_version(void);

// The best instruction set of this processor that this build has.
TRIMTAB_API int64_t trimtab_best_instruction_set(void);

TRIMTAB_API int64_t trimtab_encode(const trimtab_packing* packing, const void* flat, int64_t flat_numel,
                                   void* out, int64_t nbytes, uint64_t stream, float scale,
                                   int64_t stochastic);

TRIMTAB_API int64_t trimtab_decode(const trimtab_packing* packing, const void* payload, int64_t nbytes,
                                   void* flat, int64_t flat_numel, int64_t add);

// The sum of the payloads, at least one, each of `nbytes`: as decoding the first and adding the others in order.
TRIMTAB_API int64_t trimtab_decode_sum(const trimtab_packing* packing, const void* const* payloads,
                                       int64_t payload_count, int64_t nbytes, void* flat,
                                       int64_t flat_numel);

// Every payload, and `out`, is of `nbytes`.
TRIMTAB_API int64_t trimtab_reduce_encode(const trimtab_packing* packing, void* flat, int64_t flat_numel,
                                          const void* const* payloads, int64_t payload_count,
                                          void* out, int64_t nbytes, uint64_t stream, float scale,
                                          int64_t stochastic);

#ifdef __cplusplus
}
#endif
