// Products of float32 rows with weights of 4 or 8 bits in their stored form. A few columns at a time are dequantized to
// float32 in the processor's cache, and multiplied there.
#include <vector>

#include "products.h"

// The arguments of a call. `_Call` of own_quantization.py has the same fields.
struct Call {
  const float* x;
  const void* weight;
  const void* scale;
  const int8_t* zero;
  float* out;
  int64_t rows, columns, inner, groups, bits, threads;
};

namespace {

constexpr int64_t BLOCK = 24;

template <typename T>
void dequantize(const Call& call, int64_t column, float* to) {
  int64_t size = call.inner / call.groups;
  for (int64_t group = 0; group < call.groups; group++, to += size) {
    int64_t place = column * call.groups + group;
    float scale = one(static_cast<const T*>(call.scale) + place);
    int zero = call.zero ? call.zero[place] : call.bits == 4 ? 8 : 0;
    if (call.bits == 8) {
      const int8_t* numbers = static_cast<const int8_t*>(call.weight) + place * size;
      for (int64_t k = 0; k < size; k++) to[k] = (numbers[k] - zero) * scale;
    } else {
      const uint8_t* pairs = static_cast<const uint8_t*>(call.weight) + place * size / 2;
      for (int64_t k = 0; k < size / 2; k++) {
        to[2 * k] = ((pairs[k] & 15) - zero) * scale;
        to[2 * k + 1] = ((pairs[k] >> 4) - zero) * scale;
      }
    }
  }
}

template <typename T>
void product(const Call& call) {
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
  {
    std::vector<float> block(BLOCK * call.inner);
    std::vector<const float*> from(call.rows);
    std::vector<float*> to(call.rows);
#pragma omp for
    for (int64_t start = 0; start < call.columns; start += BLOCK) {
      int64_t width = call.columns - start < BLOCK ? call.columns - start : BLOCK;
      for (int64_t column = 0; column < width; column++)
        dequantize<T>(call, start + column, &block[column * call.inner]);
      for (int64_t row = 0; row < call.rows; row++) {
        from[row] = call.x + row * call.inner;
        to[row] = call.out + row * call.columns + start;
      }
      multiply(from.data(), call.rows, block.data(), width, call.inner, to.data());
    }
  }
}

}  // namespace

extern "C" void quantized_product(const Call* call, int64_t half) {
  half ? product<Bfloat16>(*call) : product<float>(*call);
}
