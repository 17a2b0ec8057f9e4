// The C interface: checks every size, chooses the instruction set, shares blocks among threads.
#include <vector>

#include "hash.h"
#include "kernels.h"
#include "threads.h"

#if TRIMTAB_X86
#include <immintrin.h>
#endif

namespace {

using trimtab::Kernels;
using trimtab::Run;
using trimtab::Task;

// Below this many elements a thread costs more than it brings.
constexpr int64_t kElementsPerThread = 1 << 19;
// Bounds every size, so that no product of them overflows.
constexpr int64_t kMostElements = int64_t{1} << 56;

// The spec's arithmetic: round to nearest, subnormals kept, whatever the caller has set.
class DefaultArithmetic {
 public:
#if TRIMTAB_X86
  DefaultArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultArithmetic() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

bool supported(int64_t set) {
  switch (set) {
    case TRIMTAB_PORTABLE: return true;
#if TRIMTAB_X86
    case TRIMTAB_AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case TRIMTAB_AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    default: return false;
  }
}

const Kernels* kernels_of(int64_t set) {
#if TRIMTAB_X86
  if (set == TRIMTAB_AVX512) return trimtab::avx512_kernels;
  if (set == TRIMTAB_AVX2) return trimtab::avx2_kernels;
#endif
  (void)set;
  return trimtab::portable_kernels;
}

int64_t align8(int64_t n) { return (n + 7) / 8 * 8; }

int64_t bytes_of(const trimtab_segment& s, int64_t item) {
  if (s.numel == 0) return 0;
  if (s.bits == 0) return align8(s.numel * item);
  const int64_t blocks = (s.numel - 1) / s.block + 1;
  const int64_t last = s.numel - (blocks - 1) * s.block;
  const int64_t codes = (blocks - 1) * ((s.block * s.bits + 7) / 8) + (last * s.bits + 7) / 8;
  return 8 * blocks + align8(codes);
}

// Fills `tasks` (all but their pointers' meaning is checked here) or says what is wrong.
int64_t prepare(const trimtab_packing* packing, void* flat, int64_t flat_numel, void* payload, int64_t nbytes,
                uint64_t stream, const Task& common, std::vector<Task>& tasks) {
  if (packing == nullptr || packing->count < 0 || (packing->count > 0 && packing->segments == nullptr) ||
      packing->type < TRIMTAB_FP32 || packing->type > TRIMTAB_BF16 || packing->threads < 1) {
    return TRIMTAB_BAD_CALL;
  }
  if (packing->instruction_set != TRIMTAB_BEST && !supported(packing->instruction_set)) {
    return TRIMTAB_NO_INSTRUCTION_SET;
  }
  const int64_t item = packing->type == TRIMTAB_FP32 ? 4 : 2;
  if (flat_numel < 0 || flat_numel > kMostElements || reinterpret_cast<uintptr_t>(flat) % item != 0) {
    return TRIMTAB_BAD_FLAT_SIZE;
  }
  tasks.reserve(size_t(packing->count));
  int64_t start = 0;
  for (int64_t i = 0; i < packing->count; ++i) {
    const trimtab_segment& s = packing->segments[i];
    if (s.bits < 0 || s.bits > 8 || s.block < 8 || s.block >= int64_t{1} << 31 || s.numel < 0 ||
        s.offset < 0 || s.first_block < 0) {
      return TRIMTAB_BAD_CALL;
    }
    if (s.offset > flat_numel || s.numel > flat_numel - s.offset) return TRIMTAB_BAD_FLAT_SIZE;
    const int64_t bytes = bytes_of(s, item);
    if (bytes > nbytes - start) return TRIMTAB_BAD_PAYLOAD_SIZE;
    if (s.numel > 0) {
      Task task = common;
      task.numel = s.numel;
      task.block = s.block;
      task.bits = int(s.bits);
      task.values = static_cast<uint8_t*>(flat) + s.offset * item;
      task.payload = static_cast<uint8_t*>(payload) + start;
      task.start = start;
      task.parameter_key = absorb(stream, s.name_hash);
      task.first_block = s.first_block;
      tasks.push_back(task);
    }
    start += bytes;
  }
  return start == nbytes ? TRIMTAB_OK : TRIMTAB_BAD_PAYLOAD_SIZE;
}

// The blocks whose first element is among elements [first, last) of all tasks laid end to end.
void run_share(const std::vector<Task>& tasks, Run run, int64_t first, int64_t last) {
  const DefaultArithmetic arithmetic;
  for (const Task& task : tasks) {
    if (last <= 0) return;
    const int64_t block = block_elements(task), blocks = blocks_of(task);
    const auto at = [&](int64_t element) {
      if (element <= 0) return int64_t{0};
      return element >= task.numel ? blocks : (element - 1) / block + 1;
    };
    const int64_t from = at(first), to = at(last);
    if (from < to) run(task, from, to);
    first -= task.numel;
    last -= task.numel;
  }
}

void run_all(const trimtab_packing* packing, const std::vector<Task>& tasks, Run Kernels::*operation) {
  const int64_t set =
      packing->instruction_set == TRIMTAB_BEST ? trimtab_best_instruction_set() : packing->instruction_set;
  const Run run = kernels_of(set)[packing->type].*operation;
  int64_t total = 0;
  for (const Task& task : tasks) total += task.numel;
  share_out(total, std::min(packing->threads, total / kElementsPerThread),
            [&](int64_t first, int64_t last) { run_share(tasks, run, first, last); });
}

}  // namespace

int64_t trimtab_version(void) { return TRIMTAB_ABI_VERSION; }

int64_t trimtab_best_instruction_set(void) {
  static const int64_t best = supported(TRIMTAB_AVX512) ? TRIMTAB_AVX512
                              : supported(TRIMTAB_AVX2) ? TRIMTAB_AVX2
                                                        : TRIMTAB_PORTABLE;
  return best;
}

int64_t trimtab_encode(const trimtab_packing* packing, const void* flat, int64_t flat_numel, void* out,
                       int64_t nbytes, uint64_t stream, float scale, int64_t stochastic) {
  Task common{};
  common.scale = scale;
  common.stochastic = stochastic != 0;
  std::vector<Task> tasks;
  const int64_t status =
      prepare(packing, const_cast<void*>(flat), flat_numel, out, nbytes, stream, common, tasks);
  if (status == TRIMTAB_OK) run_all(packing, tasks, &Kernels::encode);
  return status;
}

int64_t trimtab_decode(const trimtab_packing* packing, const void* payload, int64_t nbytes, void* flat,
                       int64_t flat_numel, int64_t add) {
  Task common{};
  common.add = add != 0;
  std::vector<Task> tasks;
  const int64_t status =
      prepare(packing, flat, flat_numel, const_cast<void*>(payload), nbytes, 0, common, tasks);
  if (status == TRIMTAB_OK) run_all(packing, tasks, &Kernels::decode);
  return status;
}

int64_t trimtab_decode_sum(const trimtab_packing* packing, const void* const* payloads, int64_t payload_count,
                           int64_t nbytes, void* flat, int64_t flat_numel) {
  if (payload_count < 1 || payloads == nullptr) return TRIMTAB_BAD_CALL;
  Task common{};
  common.peers = payloads;
  common.peer_count = payload_count;
  std::vector<Task> tasks;
  const int64_t status =
      prepare(packing, flat, flat_numel, const_cast<void*>(payloads[0]), nbytes, 0, common, tasks);
  if (status == TRIMTAB_OK) run_all(packing, tasks, &Kernels::decode);
  return status;
}

int64_t trimtab_reduce_encode(const trimtab_packing* packing, void* flat, int64_t flat_numel,
                              const void* const* payloads, int64_t payload_count, void* out,
                              int64_t nbytes, uint64_t stream, float scale, int64_t stochastic) {
  if (payload_count < 0 || (payload_count > 0 && payloads == nullptr)) return TRIMTAB_BAD_CALL;
  Task common{};
  common.scale = scale;
  common.stochastic = stochastic != 0;
  common.peers = payloads;
  common.peer_count = payload_count;
  std::vector<Task> tasks;
  const int64_t status = prepare(packing, flat, flat_numel, out, nbytes, stream, common, tasks);
  if (status == TRIMTAB_OK) run_all(packing, tasks, &Kernels::reduce_encode);
  return status;
}
