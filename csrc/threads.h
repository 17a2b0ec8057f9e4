// Sharing one call among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// Runs `share(first, last)` over [0, count), cut among at most `threads` threads. They live for this call only:
// none is left for a fork to lose.
template <typename Share>
void share_out(int64_t count, int64_t threads, const Share& share) {
  constexpr int64_t kMostThreads = 256;
  threads = std::max<int64_t>(1, std::min({threads, count, kMostThreads}));
  std::vector<std::thread> others;
  const int64_t part = count / threads;
  int64_t done = 0;
  try {
    others.reserve(size_t(threads));
    for (; done < threads - 1; ++done) others.emplace_back(share, done * part, (done + 1) * part);
  } catch (const std::system_error&) {
    // No more threads can be started: this one does the rest.
  }
  share(done * part, count);
  for (std::thread& other : others) other.join();
}

}  // namespace
