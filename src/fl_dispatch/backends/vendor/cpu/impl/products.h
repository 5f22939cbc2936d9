// Products of float32 rows with the columns of a weight; both are contiguous along the summed dimension.
#pragma once

#include "vectors.h"

namespace {

constexpr int64_t TOKENS = 4, SUMS = 12, MOST = 6;

// Multiplies some rows by some columns of a weight, and prefetches the next columns, which no processor predicts.
template <typename T, int64_t tokens, int64_t columns>
inline void multiply(const float* const* rows, const T* weight, int64_t length, float* const* out) {
  Floats sums[tokens][columns] = {};
  int64_t k = 0;
  for (; k + LANES <= length; k += LANES) {
    Floats w[columns];
    for (int64_t column = 0; column < columns; column++) {
      w[column] = load(weight + column * length + k);
      __builtin_prefetch(weight + (columns + column) * length + k);
    }
    for (int64_t token = 0; token < tokens; token++) {
      Floats x = load(rows[token] + k);
      for (int64_t column = 0; column < columns; column++) sums[token][column] += x * w[column];
    }
  }
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t column = 0; column < columns; column++) {
      float total = sum(sums[token][column]);
      for (int64_t rest = k; rest < length; rest++) total += rows[token][rest] * one(weight + column * length + rest);
      out[token][column] = total;
    }
}

// Multiplies `tokens` rows by all columns, a few at a time; `out` has the address of each row's first result.
template <typename T, int64_t tokens>
void multiply(const float* const* rows, const T* weight, int64_t columns, int64_t length, float* const* out) {
  constexpr int64_t TOGETHER = SUMS / tokens < MOST ? SUMS / tokens : MOST;
  float* to[tokens];
  std::memcpy(to, out, sizeof to);
  int64_t column = 0;
  for (; column + TOGETHER <= columns; column += TOGETHER) {
    multiply<T, tokens, TOGETHER>(rows, weight + column * length, length, to);
    for (int64_t token = 0; token < tokens; token++) to[token] += TOGETHER;
  }
  for (; column < columns; column++) {
    multiply<T, tokens, 1>(rows, weight + column * length, length, to);
    for (int64_t token = 0; token < tokens; token++) to[token]++;
  }
}

template <typename T>
void multiply(const float* const* rows, int64_t count, const T* weight, int64_t columns, int64_t length,
              float* const* out) {
  int64_t row = 0;
  for (; row + TOKENS <= count; row += TOKENS) multiply<T, TOKENS>(rows + row, weight, columns, length, out + row);
  switch (count - row) {
    case 3: return multiply<T, 3>(rows + row, weight, columns, length, out + row);
    case 2: return multiply<T, 2>(rows + row, weight, columns, length, out + row);
    case 1: return multiply<T, 1>(rows + row, weight, columns, length, out + row);
  }
}

}  // namespace
