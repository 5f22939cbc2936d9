// Vectors of float32 as wide as the processor's registers, loaded from float32 or bfloat16; and the values that a call
// returns.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
constexpr int64_t DONE = 0, OUTSIDE = 1;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

struct Bfloat16 {
  uint16_t bits;
};

inline Floats load(const float* from) {
  Floats found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline Floats load(const Bfloat16* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  Integers wide = __builtin_convertvector(bits, Integers) << 16;
  Floats found;
  std::memcpy(&found, &wide, sizeof found);
  return found;
}

inline float one(const float* from) { return *from; }

inline float one(const Bfloat16* from) {
  uint32_t wide = static_cast<uint32_t>(from->bits) << 16;
  float found;
  std::memcpy(&found, &wide, sizeof found);
  return found;
}

inline void store(float* to, float value) { *to = value; }

inline void store(Bfloat16* to, float value) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float sum(Floats values) {
  Four parts[LANES / 4];
  std::memcpy(parts, &values, sizeof parts);
  for (int64_t part = 1; part < LANES / 4; part++) parts[0] += parts[part];
  return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

// Returns exp(x) for x <= 0: 0 below -87, and NaN for NaN. The coefficients are those of expf in Cephes (Moshier).
inline Floats exponential(Floats x) {
  Floats power = x * 1.44269504f;
  Integers whole = __builtin_convertvector(power - 0.5f, Integers);  // rounds to the nearest, as power <= 0
  Floats n = __builtin_convertvector(whole, Floats);
  Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
              1.6666665459e-1f) * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  Integers exponent = (whole + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  Integers low = x <= -87.0f;
  Floats found = y * scale;
  Integers bits;
  std::memcpy(&bits, &found, sizeof bits);
  bits &= ~low;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

}  // namespace
