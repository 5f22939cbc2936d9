// Products of int8 rows with int8 columns, with exact sums: numbers are widened to int16, and one AVX2 instruction
// multiplies pairs and adds them in int32.
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// The arguments of a call. `_Call` of own_integers.py has the same fields.
struct Call {
  const int8_t* x;
  const float* x_scale;
  const int8_t* weight;
  const float* weight_scale;
  float* out;
  int64_t rows, columns, inner, threads;
};

namespace {

#if defined(__AVX2__)

// The sums of TOGETHER rows and PAIR columns fit into registers. A thread takes CHUNK rows and BLOCK columns, DEPTH
// elements at a time, which fit into its caches.
constexpr int64_t STEP = 16, TOGETHER = 6, PAIR = 2, CHUNK = 96, BLOCK = 24, DEPTH = 768;

typedef int32_t Sums __attribute__((vector_size(32)));

// Rows of int16 that begin at cache lines, with an unused line between them: rows at a distance of a power of two would
// share the same cache sets.
struct Wide {
  static constexpr int64_t LINE = 64, NUMBERS = LINE / 2;

  int64_t step;
  std::unique_ptr<int16_t[], void (*)(int16_t*)> numbers;

  Wide(int64_t rows, int64_t inner)
      : step((inner + 2 * NUMBERS - 1) / NUMBERS * NUMBERS),
        numbers(new (std::align_val_t(LINE)) int16_t[rows * step],
                [](int16_t* from) { operator delete[](from, std::align_val_t(LINE)); }) {}

  int16_t* row(int64_t row) { return &numbers[row * step]; }
};

// The empty instruction keeps a vector in its register; otherwise the compiler loads it again for each product.
inline __m256i kept(__m256i numbers) {
  asm("" : "+x"(numbers));
  return numbers;
}

inline __m256i load(const int16_t* from) { return kept(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }

inline __m256i load(const int8_t* from) {
  return kept(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

inline int32_t total(Sums sums) {
  __m256i all = reinterpret_cast<__m256i>(sums);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// Adds the products of `length` elements to sums with rows BLOCK apart, and prefetches the next columns.
template <int64_t rows, int64_t columns>
inline void multiply(const int16_t* x, int64_t step, const int8_t* weight, int64_t inner, int64_t length, int32_t* to) {
  Sums sums[rows][columns] = {};
  int64_t k = 0;
  for (; k + STEP <= length; k += STEP) {
    __m256i w[columns];
#pragma GCC unroll 8
    for (int64_t column = 0; column < columns; column++) {
      w[column] = load(weight + column * inner + k);
      __builtin_prefetch(weight + (columns + column) * inner + k);
    }
#pragma GCC unroll 8
    for (int64_t row = 0; row < rows; row++) {
      __m256i numbers = load(x + row * step + k);
#pragma GCC unroll 8
      for (int64_t column = 0; column < columns; column++)
        sums[row][column] += reinterpret_cast<Sums>(_mm256_madd_epi16(numbers, w[column]));
    }
  }
#pragma GCC unroll 8
  for (int64_t row = 0; row < rows; row++)
#pragma GCC unroll 8
    for (int64_t column = 0; column < columns; column++) {
      int32_t all = total(sums[row][column]);
      for (int64_t rest = k; rest < length; rest++) all += x[row * step + rest] * weight[column * inner + rest];
      to[row * BLOCK + column] += all;
    }
}

template <int64_t rows>
void multiply(const int16_t* x, int64_t step, const int8_t* weight, int64_t columns, int64_t inner, int64_t length,
              int32_t* to) {
  int64_t column = 0;
  for (; column + PAIR <= columns; column += PAIR)
    multiply<rows, PAIR>(x, step, weight + column * inner, inner, length, to + column);
  if (column < columns) multiply<rows, 1>(x, step, weight + column * inner, inner, length, to + column);
}

void multiply(const int16_t* x, int64_t step, int64_t rows, const int8_t* weight, int64_t columns, int64_t inner,
              int64_t length, int32_t* to) {
  for (; rows >= TOGETHER; rows -= TOGETHER, x += TOGETHER * step, to += TOGETHER * BLOCK)
    multiply<TOGETHER>(x, step, weight, columns, inner, length, to);
  switch (rows) {
    case 5: return multiply<5>(x, step, weight, columns, inner, length, to);
    case 4: return multiply<4>(x, step, weight, columns, inner, length, to);
    case 3: return multiply<3>(x, step, weight, columns, inner, length, to);
    case 2: return multiply<2>(x, step, weight, columns, inner, length, to);
    case 1: return multiply<1>(x, step, weight, columns, inner, length, to);
  }
}

inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

void product(const Call& call) {
  int64_t inner = call.inner, chunks = (call.rows + CHUNK - 1) / CHUNK, blocks = (call.columns + BLOCK - 1) / BLOCK;
  Wide x(call.rows, inner);
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
  {
    int32_t sums[CHUNK * BLOCK];
#pragma omp for
    for (int64_t row = 0; row < call.rows; row++) {
      int16_t* to = x.row(row);
      for (int64_t k = 0; k < inner; k++) to[k] = call.x[row * inner + k];
    }
#pragma omp for collapse(2)
    for (int64_t chunk = 0; chunk < chunks; chunk++)
      for (int64_t block = 0; block < blocks; block++) {
        int64_t top = chunk * CHUNK, rows = least(CHUNK, call.rows - top);
        int64_t left = block * BLOCK, columns = least(BLOCK, call.columns - left);
        const int8_t* weight = call.weight + left * inner;
        std::memset(sums, 0, sizeof *sums * rows * BLOCK);
        for (int64_t k = 0; k < inner; k += DEPTH)
          multiply(x.row(top) + k, x.step, rows, weight + k, columns, inner, least(DEPTH, inner - k), sums);
        for (int64_t row = 0; row < rows; row++) {
          float* to = call.out + (top + row) * call.columns + left;
          for (int64_t column = 0; column < columns; column++)
            to[column] = sums[row * BLOCK + column] * call.x_scale[top + row] * call.weight_scale[left + column];
        }
      }
  }
}

#endif

}  // namespace

// Returns 1, or 0 if this was compiled without AVX2.
extern "C" int64_t integer_product(const Call* call) {
#if defined(__AVX2__)
  product(*call);
  return 1;
#else
  return 0;
#endif
}
