// Eight codes of b bits, as the bytes of a word or packed into its low 8·b bits: for any b, by
// doubling the width of what is joined three times. Word is uint64_t or a vector of them.
#pragma once

#include <cstdint>
#include <cstring>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is written in place");

namespace {

template <int b, class Word>
inline __attribute__((always_inline)) Word join_codes(Word x) {
  x = (x & 0x00ff00ff00ff00ffu) | ((x >> 8 & 0x00ff00ff00ff00ffu) << b);
  x = (x & 0x0000ffff0000ffffu) | ((x >> 16 & 0x0000ffff0000ffffu) << 2 * b);
  return (x & 0x00000000ffffffffu) | (x >> 32) << 4 * b;
}

template <int b, class Word>
inline __attribute__((always_inline)) Word split_codes(Word x) {
  constexpr uint64_t four = (uint64_t{1} << 4 * b) - 1;
  constexpr uint64_t two = ((uint64_t{1} << 2 * b) - 1) * 0x0000000100000001u;
  constexpr uint64_t one = ((uint64_t{1} << b) - 1) * 0x0001000100010001u;
  x = (x & four) | (x >> 4 * b & four) << 32;
  x = (x & two) | (x >> 2 * b & two) << 16;
  return (x & one) | (x >> b & one) << 8;
}

// 32 codes, one a byte, to 4·b bytes; and back.
template <int b>
inline void pack_words(const uint64_t (&codes)[4], uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    const uint64_t word = join_codes<b>(codes[i]);
    std::memcpy(out + i * b, &word, b);
  }
}

template <int b>
inline void unpack_words(const uint8_t* in, uint64_t (&codes)[4]) {
  for (int i = 0; i < 4; ++i) {
    uint64_t word = 0;
    for (int j = 0; j < b; ++j) word |= uint64_t{in[i * b + j]} << 8 * j;
    codes[i] = split_codes<b>(word);
  }
}

}  // namespace
