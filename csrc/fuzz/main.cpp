// Random and hostile calls of the C interface, to be built with sanitizers:
//   main ROUNDS SEED
// Every buffer ends where its allocation ends, so that one byte too far is caught. Sound calls
// must succeed and give the same bytes under every instruction set; unsound ones must be refused.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "../trimtab.h"

namespace {

std::mt19937_64 generator;

int64_t pick(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

[[noreturn]] void fail(const char* what, int64_t status) {
  std::fprintf(stderr, "fuzz: %s (status %lld)\n", what, static_cast<long long>(status));
  std::exit(1);
}

// `size` bytes, `shift` bytes into an allocation that ends with them.
class Buffer {
 public:
  Buffer(int64_t size, int64_t shift) : size_(size), shift_(shift), bytes_(new uint8_t[size_t(size + shift)]) {}

  uint8_t* data() const { return bytes_.get() + shift_; }
  int64_t size() const { return size_; }
  void fill_randomly() const {
    for (int64_t i = 0; i < size_; ++i) data()[i] = uint8_t(generator());
  }
  // Numbers of all kinds: any bytes at all, or ordinary ones.
  void fill_with_values(int64_t type) const {
    fill_randomly();
    if (pick(0, 3) == 0) return;
    const int64_t item = type == TRIMTAB_FP32 ? 4 : 2;
    for (int64_t i = item - 1; i < size_; i += item) data()[i] = uint8_t((data()[i] & 0x80) | 0x3c);
  }
  bool same(const Buffer& other) const { return std::memcmp(data(), other.data(), size_t(size_)) == 0; }
  void copy(const Buffer& other) const { std::memcpy(data(), other.data(), size_t(size_)); }

 private:
  int64_t size_, shift_;
  std::unique_ptr<uint8_t[]> bytes_;
};

int64_t segment_bytes(const trimtab_segment& s, int64_t item) {
  if (s.numel == 0) return 0;
  if (s.bits == 0) return (s.numel * item + 7) / 8 * 8;
  const int64_t blocks = (s.numel + s.block - 1) / s.block;
  const int64_t last = s.numel - (blocks - 1) * s.block;
  return 8 * blocks + ((blocks - 1) * ((s.block * s.bits + 7) / 8) + (last * s.bits + 7) / 8 + 7) / 8 * 8;
}

struct Case {
  std::vector<trimtab_segment> segments;
  int64_t type, item, numel = 0, nbytes = 0;

  Case() : type(pick(0, 2)), item(type == TRIMTAB_FP32 ? 4 : 2) {
    const bool large = pick(0, 99) == 0;
    for (int64_t i = pick(0, 5); i > 0; --i) {
      numel += pick(0, 3);  // a gap
      trimtab_segment s{};
      s.offset = numel;
      s.numel = large ? pick(0, 1 << 20) : pick(0, pick(0, 1) != 0 ? 70 : 6000);
      s.bits = pick(0, 8);
      s.block = pick(0, 2) == 0 ? 1024 : pick(8, pick(0, 1) != 0 ? 40 : 9000);
      s.name_hash = generator();
      s.first_block = pick(0, 1) != 0 ? 0 : pick(0, INT64_MAX);
      segments.push_back(s);
      numel += s.numel;
      nbytes += segment_bytes(s, item);
    }
  }

  trimtab_packing packing(int64_t set) const {
    return {segments.data(), int64_t(segments.size()), type, set, pick(1, 3)};
  }
};

// The same sound calls under every instruction set this machine has.
void sound() {
  const Case c;
  const int64_t peers = pick(0, 3), stochastic = pick(0, 1), add = pick(0, 1);
  const uint64_t stream = generator();
  const float scale = pick(0, 1) != 0 ? 1.0f : 0.3f;
  const int64_t shift = pick(0, 3) * c.item;
  const Buffer values(c.numel * c.item, shift);
  values.fill_with_values(c.type);
  std::vector<Buffer> payloads;
  std::vector<const void*> pointers;
  for (int64_t i = 0; i < peers; ++i) {
    payloads.emplace_back(c.nbytes, pick(0, 7));
    payloads.back().fill_randomly();
    pointers.push_back(payloads.back().data());
  }

  std::unique_ptr<Buffer> expected;
  for (int64_t set = TRIMTAB_PORTABLE; set <= trimtab_best_instruction_set(); ++set) {
    const trimtab_packing packing = c.packing(set);
    const Buffer flat(values.size(), shift), out(c.nbytes, pick(0, 7)), sum(c.nbytes, pick(0, 7));
    flat.copy(values);
    int64_t status = trimtab_encode(&packing, flat.data(), c.numel, out.data(), c.nbytes, stream, scale, stochastic);
    if (status != TRIMTAB_OK) fail("a sound encode was refused", status);
    if (!flat.same(values)) fail("encode changed its input", 0);
    status = trimtab_reduce_encode(&packing, flat.data(), c.numel, pointers.data(), peers, sum.data(), c.nbytes,
                                   stream, scale, stochastic);
    if (status != TRIMTAB_OK) fail("a sound reduce_encode was refused", status);
    status = trimtab_decode(&packing, sum.data(), c.nbytes, flat.data(), c.numel, add);
    if (status != TRIMTAB_OK) fail("a sound decode was refused", status);
    for (const Buffer& payload : payloads) {
      status = trimtab_decode(&packing, payload.data(), c.nbytes, flat.data(), c.numel, 1 - add);
      if (status != TRIMTAB_OK) fail("a decode of random bytes was refused", status);
    }
    const Buffer one_by_one(values.size(), shift);
    one_by_one.copy(flat);
    for (int64_t i = 0; i < peers; ++i) {
      status = trimtab_decode(&packing, pointers[size_t(i)], c.nbytes, one_by_one.data(), c.numel, i > 0);
      if (status != TRIMTAB_OK) fail("a decode of random bytes was refused", status);
    }
    if (peers > 0) {
      status = trimtab_decode_sum(&packing, pointers.data(), peers, c.nbytes, flat.data(), c.numel);
      if (status != TRIMTAB_OK) fail("a sound decode_sum was refused", status);
      if (!flat.same(one_by_one)) fail("decode_sum is not the sum one by one", set);
    }
    if (expected == nullptr) {
      expected = std::make_unique<Buffer>(c.nbytes, 0);
      expected->copy(out);
    } else if (!expected->same(out)) {
      fail("two instruction sets encode differently", set);
    }
  }
}

int64_t hostile_number() {
  const int64_t numbers[] = {-1, 0, 1, 7, 9, 1 << 20, INT64_C(1) << 31, INT64_C(1) << 61, INT64_MAX, INT64_MIN};
  return numbers[pick(0, 9)];
}

// One thing that is wrong: nothing may be touched, whatever it is.
void unsound() {
  Case c;
  const Buffer flat(c.numel * c.item, 0), out(c.nbytes, 0);
  int64_t numel = c.numel, nbytes = c.nbytes;
  trimtab_packing packing = c.packing(TRIMTAB_BEST);
  const int64_t way = c.segments.empty() ? 0 : pick(0, 5);
  bool must_fail = true;
  if (way == 0) {
    nbytes += pick(0, 1) != 0 ? 8 : -1;
  } else if (way == 1) {
    packing.type = pick(0, 1) != 0 ? 3 : -1;
  } else if (way == 2) {
    packing.threads = -pick(0, 1);
  } else if (way == 3) {
    packing.instruction_set = pick(0, 1) != 0 ? 4 : -1;
  } else {
    // Perhaps harmless after all, so the outcome is open: only a fault is wrong.
    must_fail = false;
    trimtab_segment& s = c.segments[size_t(pick(0, int64_t(c.segments.size()) - 1))];
    int64_t* const fields[] = {&s.offset, &s.numel, &s.bits, &s.block, &s.first_block};
    *fields[pick(0, 4)] = hostile_number();
    if (pick(0, 3) == 0) nbytes = pick(0, nbytes);
    if (pick(0, 3) == 0) numel = pick(0, numel);
  }
  std::memset(flat.data(), 0, size_t(flat.size()));
  std::memset(out.data(), 0, size_t(out.size()));
  const void* const payload = out.data();
  const Buffer other(c.nbytes, 0);
  const int64_t statuses[] = {
      trimtab_encode(&packing, flat.data(), numel, out.data(), nbytes, 1, 1.0f, 1),
      trimtab_decode(&packing, out.data(), nbytes, flat.data(), numel, 0),
      trimtab_decode_sum(&packing, &payload, 1, nbytes, flat.data(), numel),
      trimtab_reduce_encode(&packing, flat.data(), numel, &payload, 1, other.data(), nbytes, 1, 1.0f, 1),
  };
  for (const int64_t status : statuses) {
    if (must_fail && status == TRIMTAB_OK) fail("an unsound call was accepted", way);
    if (status != statuses[0]) fail("the calls disagree about a packing", way);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s ROUNDS SEED\n", argv[0]);
    return 2;
  }
  generator.seed(std::strtoull(argv[2], nullptr, 10));
  const long rounds = std::strtol(argv[1], nullptr, 10);
  for (long i = 0; i < rounds; ++i) {
    sound();
    for (int j = 0; j < 4; ++j) unsound();
  }
  std::printf("%ld rounds up to instruction set %lld\n", rounds,
              static_cast<long long>(trimtab_best_instruction_set()));
  return 0;
}
