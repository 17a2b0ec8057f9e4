// Collectives between the processes of one host, over a segment of memory that all of them have mapped.
#pragma once

#include "trimtab.h"

#ifdef __cplusplus
extern "C" {
#endif

// A segment: a header of one line for each rank, then 2 x world x world places of `room` bytes. Place
// (turn, from, to) holds what rank `from` has for rank `to` (in an all-gather alone, all places of `from` what it has
// for all); the two turns alternate, so that one round is written while the other is read. A new segment is all zeros.
//
// Every rank makes the same calls in the same order. A rank holds a lock (POSIX, exclusive) on the byte of
// `fd` at its index for as long as it takes part: that tells those who wait for it whether it is alive.
typedef struct {
  void* base;
  int64_t nbytes;
  int64_t fd;
  int64_t rank;
  int64_t world;
  int64_t room;        // a multiple of 64
  int64_t timeout_ms;  // how long to wait for a rank that is alive
  int64_t barriers;    // kept here between calls; 0 at first
  int64_t rounds;      // likewise
  int64_t culprit;     // out: the rank that did not arrive, or made a different call
} trimtab_channel;

enum trimtab_shared_type {  // the first three as in trimtab_type
  TRIMTAB_SHARED_FP32 = 0,
  TRIMTAB_SHARED_FP16 = 1,
  TRIMTAB_SHARED_BF16 = 2,
  TRIMTAB_SHARED_FP64 = 3,
};

enum trimtab_exchange {
  TRIMTAB_REDUCE_SCATTER = 1,
  TRIMTAB_ALL_GATHER = 2,
  TRIMTAB_ALL_REDUCE = 3,
};

enum trimtab_shared_status {
  TRIMTAB_SHARED_OK = 0,
  TRIMTAB_SHARED_BAD_CALL = 1,    // sizes that no segment or call may have; nothing was touched
  TRIMTAB_SHARED_DEAD = 2,        // `culprit` ended, or left the segment
  TRIMTAB_SHARED_TIMEOUT = 3,     // `culprit` is alive but did not arrive in time
  TRIMTAB_SHARED_MISMATCH = 4,    // `culprit` made a different call
};

// Bytes that a segment must have.
TRIMTAB_API int64_t trimtab_shared_bytes(int64_t world, int64_t room);

// Byte at which place (turn, from, to) begins.
TRIMTAB_API int64_t trimtab_shared_place(const trimtab_channel* channel, int64_t turn, int64_t from,
                                         int64_t to);

// Returns when every rank has called it, with the same tag.
TRIMTAB_API int64_t trimtab_shared_barrier(trimtab_channel* channel, uint64_t tag);

// Rank r owns elements cuts[r] to cuts[r + 1] of `values`. Reduce-scatter leaves each owner with the sum
// over ranks, in rank order, in fp32 (fp64 for fp64), of `scale` x the values, rounded once to the type before and
// once after the sum; what others own is left as it was. All-gather copies what each rank owns to all. All-reduce
// is one after the other, round by round.
TRIMTAB_API int64_t trimtab_shared_exchange(trimtab_channel* channel, int64_t exchange, int64_t type,
                                            void* values, const int64_t* cuts, double scale);

#ifdef __cplusplus
}
#endif
