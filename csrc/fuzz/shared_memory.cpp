// Collectives over shared memory between forked processes, of random sizes, against sums made by each alone; and calls
// that must be refused. For the sanitizers: buffers are exactly as long as they are said to be.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

#include "../shared_memory.h"

namespace {

float value(int64_t rank, int64_t i) { return float((rank * 31 + i * 7) % 101) - 50.0f; }

void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
  }
}

void refused(trimtab_channel channel) {
  const int64_t world = channel.world;
  std::vector<int64_t> cuts(size_t(world + 1), 0);
  std::vector<float> none(1);
  const auto call = [&](trimtab_channel c, int64_t what, int64_t type) {
    return trimtab_shared_exchange(&c, what, type, none.data(), cuts.data(), 1.0);
  };
  require(call(channel, 0, 0) == TRIMTAB_SHARED_BAD_CALL, "no such exchange");
  require(call(channel, 3, 9) == TRIMTAB_SHARED_BAD_CALL, "no such type");
  cuts[0] = 1;
  require(call(channel, 3, 0) == TRIMTAB_SHARED_BAD_CALL, "cuts that descend");
  cuts[0] = 0;
  trimtab_channel small = channel;
  small.nbytes -= 1;
  require(call(small, 3, 0) == TRIMTAB_SHARED_BAD_CALL, "a segment that is too small");
  trimtab_channel odd = channel;
  odd.room += 4;
  require(call(odd, 3, 0) == TRIMTAB_SHARED_BAD_CALL, "a room that is not aligned");
  trimtab_channel stranger = channel;
  stranger.rank = world;
  require(call(stranger, 3, 0) == TRIMTAB_SHARED_BAD_CALL, "a rank that there is not");
}

void rank_main(void* base, int64_t nbytes, const char* path, std::atomic<int64_t>* ready, int64_t rank,
               int64_t world, int64_t room, int rounds, unsigned seed) {
  const int fd = open(path, O_RDWR);
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  require(fd >= 0 && fcntl(fd, F_SETLK, &lock) == 0, "the lock");
  trimtab_channel channel{base, nbytes, fd, rank, world, room, 60000, 0, 0, -1};
  refused(channel);
  // All must hold their locks before anybody waits.
  ready->fetch_add(1);
  while (ready->load() < world) usleep(1000);
  std::mt19937 random(seed);  // the same on every rank
  for (int round = 0; round < rounds; ++round) {
    std::vector<int64_t> cuts{int64_t(random() % 3)};
    for (int64_t r = 0; r < world; ++r) cuts.push_back(cuts.back() + int64_t(random() % (3 * room / 4)));
    std::vector<float> flat(size_t(cuts.back()));
    for (int64_t i = 0; i < cuts.back(); ++i) flat[size_t(i)] = value(rank, i);
    const int64_t what = 1 + int64_t(random() % 3);
    require(trimtab_shared_exchange(&channel, what, 0, flat.data(), cuts.data(), 0.5) == 0, "an exchange");
    const bool sums = what & TRIMTAB_REDUCE_SCATTER, all = what & TRIMTAB_ALL_GATHER;
    for (int64_t r = 0; r < world; ++r) {
      if (!all && r != rank) continue;
      for (int64_t i = cuts[size_t(r)]; i < cuts[size_t(r + 1)]; ++i) {
        float due = value(r, i);
        if (sums) {
          due = 0.0f;
          for (int64_t s = 0; s < world; ++s) due += 0.5f * value(s, i);
        }
        require(flat[size_t(i)] == due, "a sum");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 50;
  const unsigned seed = argc > 2 ? unsigned(std::atoi(argv[2])) : 0;
  const int64_t world = 2 + seed % 3, room = 64 * (1 + seed % 5);
  char path[] = "/tmp/trimtab-fuzz-XXXXXX";
  const int fd = mkstemp(path);
  const int64_t nbytes = trimtab_shared_bytes(world, room);
  require(fd >= 0 && ftruncate(fd, nbytes) == 0, "a file");
  void* base = mmap(nullptr, size_t(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(base != MAP_FAILED && page != MAP_FAILED, "a mapping");
  auto* ready = new (page) std::atomic<int64_t>(0);
  std::vector<pid_t> ranks;
  for (int64_t rank = 0; rank < world; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      rank_main(base, nbytes, path, ready, rank, world, room, rounds, seed);
      return 0;
    }
    ranks.push_back(pid);
  }
  int failed = 0;
  for (const pid_t pid : ranks) {
    int status = 0;
    waitpid(pid, &status, 0);
    failed |= status;
  }
  unlink(path);
  if (failed == 0) std::printf("%d rounds of %d ranks\n", rounds, int(world));
  return failed != 0;
}
