// The keys of trimtab-lb32's random streams.
#pragma once

#include <cstdint>

namespace {

inline uint64_t absorb(uint64_t h, uint64_t value) {
  uint64_t z = (h ^ value) + 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

}  // namespace
