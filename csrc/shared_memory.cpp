// Collectives over shared memory: places for the data, a counter of arrivals for each rank, no lock.
#include "shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>

#include "hash.h"

namespace {

using Clock = std::chrono::steady_clock;

// A rank's state, read by the others: alone on its cache lines (processors fetch them in pairs).
struct alignas(128) Line {
  std::atomic<uint32_t> arrived;  // barriers it has reached, modulo 2^32; a futex
  uint64_t tags[2];               // of the last two; nobody is more than one barrier ahead of another
};
static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is four bytes");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "atomics must work between processes");

constexpr int64_t kMostRanks = 4096;
constexpr int64_t kMostRoom = int64_t{1} << 32;
constexpr int kSpins = 100;   // a few microseconds: longer only helps when every rank has a core
constexpr int kYields = 4;    // then let a rank on the same core run
constexpr auto kCheck = std::chrono::milliseconds(50);  // how often to check whether the other is alive

Line* lines(const trimtab_channel* c) { return static_cast<Line*>(c->base); }

char* place(const trimtab_channel* c, int64_t turn, int64_t from, int64_t to) {
  return static_cast<char*>(c->base) + trimtab_shared_place(c, turn, from, to);
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value, Clock::duration most) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(most).count();
  timespec limit{time_t(ns / 1000000000), long(ns % 1000000000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Whether a rank still holds its lock; if that cannot be determined, it counts as alive.
bool is_alive(const trimtab_channel* c, int64_t rank) {
  struct flock query {};
  query.l_type = F_WRLCK;
  query.l_whence = SEEK_SET;
  query.l_start = rank;
  query.l_len = 1;
  return fcntl(int(c->fd), F_GETLK, &query) != 0 || query.l_type != F_UNLCK;
}

bool reached(std::atomic<uint32_t>& word, uint32_t target, uint32_t& seen) {
  seen = word.load(std::memory_order_acquire);
  return int32_t(seen - target) >= 0;
}

int64_t wait_for(trimtab_channel* c, int64_t rank, uint32_t target) {
  std::atomic<uint32_t>& word = lines(c)[rank].arrived;
  uint32_t seen;
  for (int i = 0; i < kSpins; ++i) {
    if (reached(word, target, seen)) return TRIMTAB_SHARED_OK;
    pause();
  }
  for (int i = 0; i < kYields; ++i) {
    sched_yield();
    if (reached(word, target, seen)) return TRIMTAB_SHARED_OK;
  }
  const auto deadline = Clock::now() + std::chrono::milliseconds(c->timeout_ms);
  while (!reached(word, target, seen)) {
    const auto now = Clock::now();
    const bool alive = is_alive(c, rank);
    // Check again: it may have arrived, and exited, since.
    if (!alive && !reached(word, target, seen)) {
      c->culprit = rank;
      return TRIMTAB_SHARED_DEAD;
    }
    if (now >= deadline) {
      c->culprit = rank;
      return TRIMTAB_SHARED_TIMEOUT;
    }
    sleep_while(word, seen, std::min<Clock::duration>(kCheck, deadline - now));
  }
  return TRIMTAB_SHARED_OK;
}

int64_t barrier(trimtab_channel* c, uint64_t tag) {
  const uint32_t target = uint32_t(++c->barriers);
  Line& own = lines(c)[c->rank];
  own.tags[target % 2] = tag;
  own.arrived.store(target, std::memory_order_release);
  wake_all(own.arrived);
  for (int64_t r = 0; r < c->world; ++r) {
    if (r == c->rank) continue;
    const int64_t status = wait_for(c, r, target);
    if (status != TRIMTAB_SHARED_OK) return status;
    if (lines(c)[r].tags[target % 2] != tag) {
      c->culprit = r;
      return TRIMTAB_SHARED_MISMATCH;
    }
  }
  return TRIMTAB_SHARED_OK;
}

// ---- types: how an element is stored, and what it is added up in -----------------------------------

template <class T>
struct Same {
  using Stored = T;
  using Sum = T;
  static T load(T x) { return x; }
  static T store(T x) { return x; }
};
using Fp32 = Same<float>;
using Fp64 = Same<double>;

uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

struct Bf16 {
  using Stored = uint16_t;
  using Sum = float;
  static float load(uint16_t x) { return float_of(uint32_t(x) << 16); }
  static uint16_t store(float x) {
    const uint32_t u = bits_of(x);
    if (x != x) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);  // to nearest, ties to even
  }
};

struct Fp16 {
  using Stored = uint16_t;
  using Sum = float;
  static float load(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return float_of(sign | ((rest << 13) + (112u << 23)));
    const float small = float(rest) * 0x1p-24f;  // subnormal: exact
    return float_of(sign | bits_of(small));
  }
  static uint16_t store(float x) {
    const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds past 65504
    if (rest >= 0x38800000) {
      const uint32_t rebased = rest - (112u << 23);
      return uint16_t(sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13);
    }
    // Subnormal: adding 1/2 makes the hardware round at the bit of 2^-24, to nearest even.
    return uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
  }
};

// ---- the rounds -------------------------------------------------------------------------------------

template <class Type>
void copy_scaled(typename Type::Stored* out, const typename Type::Stored* in, int64_t n, double scale) {
  using Sum = typename Type::Sum;
  if (scale == 1.0) {
    std::memcpy(out, in, size_t(n) * sizeof(*in));
    return;
  }
  for (int64_t i = 0; i < n; ++i) out[i] = Type::store(Type::load(in[i]) * Sum(scale));
}

// out[i] = sum over ranks of what is theirs, in rank order; `own` (not scaled yet) may be `out`.
template <class Type>
void sum(const trimtab_channel* c, int64_t turn, const typename Type::Stored* own,
         typename Type::Stored* out, int64_t n, double scale) {
  using Stored = typename Type::Stored;
  using Sum = typename Type::Sum;
  constexpr int64_t kPart = 1024;  // of the sums, kept in the first cache
  Sum total[kPart];
  for (int64_t at = 0; at < n; at += kPart) {
    const int64_t part = std::min(kPart, n - at);
    for (int64_t r = 0; r < c->world; ++r) {
      const bool mine = r == c->rank;
      const Stored* x =
          mine ? own + at : reinterpret_cast<const Stored*>(place(c, turn, r, c->rank)) + at;
      if (mine && r == 0) {
        for (int64_t i = 0; i < part; ++i) total[i] = Type::load(Type::store(Type::load(x[i]) * Sum(scale)));
      } else if (mine) {
        for (int64_t i = 0; i < part; ++i) total[i] += Type::load(Type::store(Type::load(x[i]) * Sum(scale)));
      } else if (r == 0) {
        for (int64_t i = 0; i < part; ++i) total[i] = Type::load(x[i]);
      } else {
        for (int64_t i = 0; i < part; ++i) total[i] += Type::load(x[i]);
      }
    }
    for (int64_t i = 0; i < part; ++i) out[at + i] = Type::store(total[i]);
  }
}

template <class Type>
int64_t exchange(trimtab_channel* c, int64_t what, void* values, const int64_t* cuts, double scale,
                 uint64_t tag) {
  using Stored = typename Type::Stored;
  constexpr int64_t kItem = sizeof(Stored);
  Stored* flat = static_cast<Stored*>(values);
  // A gather alone has each rank's whole row of places for what it shows to all: fewer rounds, fewer waits.
  const bool whole_row = what == TRIMTAB_ALL_GATHER;
  const int64_t most = (whole_row ? c->world : 1) * c->room / kItem;
  int64_t longest = 0;
  for (int64_t r = 0; r < c->world; ++r) longest = std::max(longest, cuts[r + 1] - cuts[r]);
  for (int64_t done = 0; done < longest; done += most) {
    const int64_t turn = c->rounds++ % 2;
    const auto from = [&](int64_t r) { return std::min(cuts[r] + done, cuts[r + 1]); };
    const auto count = [&](int64_t r) { return std::min(most, cuts[r + 1] - from(r)); };
    Stored* own = flat + from(c->rank);
    Stored* shown = reinterpret_cast<Stored*>(place(c, turn, c->rank, whole_row ? 0 : c->rank));
    tag = absorb(tag, uint64_t(done));
    if (what & TRIMTAB_REDUCE_SCATTER) {
      for (int64_t r = 0; r < c->world; ++r) {
        if (r == c->rank) continue;
        Stored* theirs = reinterpret_cast<Stored*>(place(c, turn, c->rank, r));
        copy_scaled<Type>(theirs, flat + from(r), count(r), scale);
      }
      const int64_t status = barrier(c, tag);
      if (status != TRIMTAB_SHARED_OK) return status;
      sum<Type>(c, turn, own, own, count(c->rank), scale);
    }
    if (what & TRIMTAB_ALL_GATHER) {
      std::memcpy(shown, own, size_t(count(c->rank) * kItem));
      const int64_t status = barrier(c, tag);
      if (status != TRIMTAB_SHARED_OK) return status;
      for (int64_t r = 0; r < c->world; ++r) {
        if (r == c->rank) continue;
        std::memcpy(flat + from(r), place(c, turn, r, whole_row ? 0 : r), size_t(count(r) * kItem));
      }
    }
  }
  return TRIMTAB_SHARED_OK;
}

bool sound(const trimtab_channel* c) {
  return c != nullptr && c->base != nullptr && c->world >= 1 && c->world <= kMostRanks && c->rank >= 0 &&
         c->rank < c->world && c->room >= 64 && c->room <= kMostRoom && c->room % 64 == 0 &&
         c->timeout_ms >= 0 && c->nbytes >= trimtab_shared_bytes(c->world, c->room);
}

}  // namespace

extern "C" {

int64_t trimtab_shared_bytes(int64_t world, int64_t room) {
  return world * int64_t(sizeof(Line)) + 2 * world * world * room;
}

int64_t trimtab_shared_place(const trimtab_channel* c, int64_t turn, int64_t from, int64_t to) {
  return c->world * int64_t(sizeof(Line)) + ((turn * c->world + from) * c->world + to) * c->room;
}

int64_t trimtab_shared_barrier(trimtab_channel* c, uint64_t tag) {
  return sound(c) ? barrier(c, tag) : int64_t(TRIMTAB_SHARED_BAD_CALL);
}

int64_t trimtab_shared_exchange(trimtab_channel* c, int64_t what, int64_t type, void* values,
                                const int64_t* cuts, double scale) {
  if (!sound(c) || what < TRIMTAB_REDUCE_SCATTER || what > TRIMTAB_ALL_REDUCE || cuts == nullptr ||
      cuts[0] < 0 || (values == nullptr && cuts[c->world] > 0)) {
    return TRIMTAB_SHARED_BAD_CALL;
  }
  uint64_t tag = absorb(uint64_t(what), uint64_t(type));
  for (int64_t r = 0; r < c->world; ++r) {
    if (cuts[r + 1] < cuts[r]) return TRIMTAB_SHARED_BAD_CALL;
    tag = absorb(tag, uint64_t(cuts[r + 1] - cuts[r]));
  }
  switch (type) {
    case TRIMTAB_SHARED_FP32: return exchange<Fp32>(c, what, values, cuts, scale, tag);
    case TRIMTAB_SHARED_FP16: return exchange<Fp16>(c, what, values, cuts, scale, tag);
    case TRIMTAB_SHARED_BF16: return exchange<Bf16>(c, what, values, cuts, scale, tag);
    case TRIMTAB_SHARED_FP64: return exchange<Fp64>(c, what, values, cuts, scale, tag);
    default: return TRIMTAB_SHARED_BAD_CALL;
  }
}

}  // extern "C"
