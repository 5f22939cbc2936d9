// A stand-in for FlagCX on host memory: the functions of flagcx.h that the plugin calls, over one file of shared memory.
// Compiled with -DLACKS_ALL_REDUCE it lacks one of them; with -DID_BY_POINTER it hands its identity out as older versions do.
// With -DASCEND it is for the emulated Ascend NPU, whose memory is host memory, too: every call needs a stream, for which
// the device's runtime waits first, so a handle that is no stream of the device is an error.
// While the file that FLAGCX_STANDIN_WRONG names is there, sums lack the last rank's part.
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {
constexpr int kRanks = 4;
constexpr size_t kSlot = 1 << 20;
enum Code { kSuccess = 0, kUnhandledDeviceError = 1, kSystemError = 2, kInvalidArgument = 4 };

// As in FlagCX's adaptors: a stream of the device's own runtime.
struct Stream {
  void *base;
};
void *last_stream = nullptr;

int wait_for(const Stream *stream) {
#ifdef ASCEND
  if (!stream || !stream->base) return kInvalidArgument;
  void *runtime = dlopen("libascendcl.so", RTLD_LAZY | RTLD_NOLOAD);
  auto synchronize = runtime ? reinterpret_cast<int (*)(void *)>(dlsym(runtime, "aclrtSynchronizeStream")) : nullptr;
  if (!synchronize || synchronize(stream->base) != 0) return kUnhandledDeviceError;
  last_stream = stream->base;
#endif
  return kSuccess;
}

// Numbers of 16 bits, which are added in float and rounded once.
struct BFloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  BFloat16 &operator+=(float other) {
    const float sum = *this + other;
    uint32_t wide;
    std::memcpy(&wide, &sum, sizeof wide);
    bits = uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    return *this;
  }
};

struct Float16 {
  uint16_t bits;
  operator float() const {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? std::ldexp(float(1024 + fraction), exponent - 25)
                                      : std::ldexp(float(fraction), -24);
    return bits & 0x8000 ? -size : size;
  }
  Float16 &operator+=(float other) {
    const float sum = *this + other, size = std::fabs(sum);
    int exponent = 0;
    std::frexp(size, &exponent);
    const bool normal = exponent > -14;
    const int digits = int(std::nearbyint(std::ldexp(std::isfinite(size) ? size : 0.0f, normal ? 11 - exponent : 24)));
    uint16_t made = uint16_t(normal ? ((exponent + 14) << 10) + digits - 1024 : digits);
    if (std::isnan(size)) made = 0x7e00;
    else if (size >= 65520.0f) made = 0x7c00;
    bits = uint16_t(made | (std::signbit(sum) ? 0x8000 : 0));
    return *this;
  }
};

struct Identity {
  uint64_t magic;
  char name[248];
};

struct Shared {
  std::atomic<int> arrived;
  std::atomic<int> round;
  char slots[kRanks][kSlot];
};

struct Communicator {
  Shared *shared;
  int rank, ranks;
  char name[248];
};

void meet(Communicator *c) {
  const int round = c->shared->round;
  if (++c->shared->arrived == c->ranks) {
    c->shared->arrived = 0;
    c->shared->round++;
  } else {
    while (c->shared->round == round) usleep(20);
  }
}

size_t width(int type) {
  switch (type) {
  case 6: case 9: return 2;
  case 2: case 7: return 4;
  case 4: case 8: return 8;
  default: return 0;
  }
}

template <typename T> void add(void *sum, const void *other, size_t count) {
  for (size_t i = 0; i < count; i++) static_cast<T *>(sum)[i] += static_cast<const T *>(other)[i];
}

void add_typed(void *sum, const void *other, size_t count, int type) {
  switch (type) {
  case 2: return add<int32_t>(sum, other, count);
  case 4: return add<int64_t>(sum, other, count);
  case 6: return add<Float16>(sum, other, count);
  case 7: return add<float>(sum, other, count);
  case 8: return add<double>(sum, other, count);
  case 9: return add<BFloat16>(sum, other, count);
  }
}

// Every rank shows `bytes` of its own; `read` then takes what it needs from all of them.
template <typename Read>
int exchange(Communicator *c, const void *mine, size_t bytes, int type, const Stream *stream, Read read) {
  if (width(type) == 0 || bytes > kSlot) return kInvalidArgument;
  if (const int code = wait_for(stream)) return code;
  if (mine) std::memcpy(c->shared->slots[c->rank], mine, bytes);
  meet(c);
  read();
  meet(c);
  return kSuccess;
}

int sum_of(Communicator *c, void *to, size_t offset, size_t count, int type) {
  const size_t bytes = count * width(type);
  std::memcpy(to, c->shared->slots[0] + offset, bytes);
  const char *wrong = std::getenv("FLAGCX_STANDIN_WRONG");
  const int ranks = c->ranks - (wrong && access(wrong, F_OK) == 0);
  for (int rank = 1; rank < ranks; rank++) add_typed(to, c->shared->slots[rank] + offset, count, type);
  return kSuccess;
}
} // namespace

extern "C" {
// For tests: the device's stream of the last call.
void *standinLastStream() { return last_stream; }

int flagcxGetVersion(int *version) {
  *version = 12345;
  return kSuccess;
}

const char *flagcxGetErrorString(int code) { return code == kInvalidArgument ? "invalid argument" : "failed"; }

#ifdef ID_BY_POINTER
int flagcxGetUniqueId(Identity **id) {
  *id = new Identity();
  Identity *made = *id;
#else
int flagcxGetUniqueId(Identity *made) {
#endif
  made->magic = 7;
  std::snprintf(made->name, sizeof(made->name), "/dev/shm/flagcx-standin-%d", getpid());
  return kSuccess;
}

int flagcxCommInitRank(void **comm, int ranks, Identity *id, int rank) {
  if (ranks > kRanks || id->magic != 7) return kInvalidArgument;
  const int file = open(id->name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return kSystemError;
  void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return kSystemError;
  auto *made = new Communicator{static_cast<Shared *>(memory), rank, ranks, {}};
  std::strcpy(made->name, id->name);
  *comm = made;
  meet(made);
  return kSuccess;
}

int flagcxCommDestroy(Communicator *c) {
  unlink(c->name);
  munmap(c->shared, sizeof(Shared));
  delete c;
  return kSuccess;
}

#ifndef LACKS_ALL_REDUCE
int flagcxAllReduce(const void *from, void *to, size_t count, int type, int, Communicator *c, const Stream *s) {
  return exchange(c, from, count * width(type), type, s, [&] { sum_of(c, to, 0, count, type); });
}
#endif

int flagcxReduceScatter(const void *from, void *to, size_t count, int type, int, Communicator *c, const Stream *s) {
  const size_t bytes = count * width(type);
  return exchange(c, from, c->ranks * bytes, type, s, [&] { sum_of(c, to, c->rank * bytes, count, type); });
}

int flagcxAllGather(const void *from, void *to, size_t count, int type, Communicator *c, const Stream *s) {
  const size_t bytes = count * width(type);
  return exchange(c, from, bytes, type, s, [&] {
    for (int rank = 0; rank < c->ranks; rank++)
      std::memcpy(static_cast<char *>(to) + rank * bytes, c->shared->slots[rank], bytes);
  });
}

int flagcxBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *c, const Stream *s) {
  const size_t bytes = count * width(type);
  return exchange(c, from, bytes, type, s, [&] { std::memcpy(to, c->shared->slots[root], bytes); });
}

// One message at a time, and every rank of the group takes part: enough for a group of two.
int flagcxSend(const void *from, size_t count, int type, int, Communicator *c, const Stream *s) {
  return exchange(c, from, count * width(type), type, s, [] {});
}

int flagcxRecv(void *to, size_t count, int type, int peer, Communicator *c, const Stream *s) {
  const size_t bytes = count * width(type);
  return exchange(c, nullptr, bytes, type, s, [&] { std::memcpy(to, c->shared->slots[peer], bytes); });
}
}
