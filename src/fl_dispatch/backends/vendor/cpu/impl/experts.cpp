// Computes each token's experts and the weighted sum of their outputs, with weights in their stored form.
//
// Rows of tokens and of weights are contiguous along the summed dimension, so nothing is repacked; a few rows of either
// are read together. Sums are in float32, and a result is rounded once. Results do not depend on the number of threads;
// their last bits may depend on the other tokens of the batch.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "products.h"

// The arguments of a call. `_Call` of own_experts.py has the same fields.
struct Call {
  const void *x, *w13, *w2, *bias13, *bias2;
  const float* weights;
  const int32_t *ids, *map;
  void* out;
  int64_t tokens, choices, experts, numbered, hidden, rows, inner, activation, on_input, threads;
};

namespace {

constexpr int64_t PART = 64, BLOCK = 48, PAIRS = 8192;
enum Activation { SILU, GELU, GELU_TANH, SWIGLUOAI, SILU_NO_MUL, GELU_NO_MUL, GELU_TANH_NO_MUL, RELU2_NO_MUL };

inline Floats magnitude(Floats x) {
  Integers bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= 0x7fffffff;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

inline Floats sigmoid(Floats x) {
  Floats small = exponential(-magnitude(x));
  return (x < 0.0f ? small : Floats{} + 1.0f) / (1.0f + small);
}

inline Floats activated(int64_t activation, Floats x) {
  switch (activation) {
    case SILU:
    case SILU_NO_MUL: return x * sigmoid(x);
    case GELU_TANH:
    case GELU_TANH_NO_MUL: return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
    case GELU:
    case GELU_NO_MUL: {
      Floats wide = x * 0.70710678f;
      for (int64_t lane = 0; lane < LANES; lane++) wide[lane] = std::erf(wide[lane]);
      return 0.5f * x * (1.0f + wide);
    }
    default: {
      Floats positive = x < 0.0f ? Floats{} : x;
      return positive * positive;
    }
  }
}

// Rows of one expert: `count` (token, choice) pairs, from index `first` of the sorted pairs on.
struct Part {
  int64_t expert, first, count;
};

template <typename T>
struct Experts : Call {
  const T* of(const void* all, int64_t expert, int64_t row, int64_t rows, int64_t length) const {
    return static_cast<const T*>(all) + (expert * rows + row) * length;
  }

  void activate(const float* values, int64_t width, float* to) const {
    for (int64_t column = 0; column < width; column += LANES) {
      Floats found;
      if (activation == SWIGLUOAI) {
        Floats gate, up;
        for (int64_t lane = 0; lane < LANES; lane++) {
          gate[lane] = values[2 * (column + lane)];
          up[lane] = values[2 * (column + lane) + 1];
        }
        Floats limit = Floats{} + 7.0f;
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        found = gate * sigmoid(1.702f * gate) * (up + 1.0f);
      } else {
        found = activated(activation, load(values + column));
        if (activation < SILU_NO_MUL) found *= load(values + width + column);
      }
      int64_t count = width - column < LANES ? width - column : LANES;
      std::memcpy(to + column, &found, count * sizeof(float));
    }
  }

  // Computes a block of the first product, activated, for some rows; values is scratch, [row][gate and up].
  void first(const Part& part, int64_t start, int64_t width, const float* source, const int64_t* order,
             const float* factors, float* values, float* to) const {
    const float* from[PART];
    float* places[PART];
    for (int64_t row = 0; row < part.count; row++) from[row] = source + order[part.first + row] / choices * hidden;
    for (int64_t half = 0; half < rows / inner; half++) {
      int64_t column = activation == SWIGLUOAI ? 2 * start + half * width : half * inner + start;
      for (int64_t row = 0; row < part.count; row++) places[row] = values + row * 2 * BLOCK + half * width;
      multiply(from, part.count, of(w13, part.expert, column, rows, hidden), width, hidden, places);
      const T* added = bias13 ? of(bias13, part.expert, 0, 1, rows) + column : nullptr;
      for (int64_t row = 0; row < part.count; row++)
        for (int64_t d = 0; d < width; d++) {
          if (on_input) places[row][d] *= factors[order[part.first + row]];
          if (added) places[row][d] += one(added + d);
        }
    }
    for (int64_t row = 0; row < part.count; row++)
      activate(values + row * 2 * BLOCK, width, to + (part.first + row) * inner + start);
  }

  // Computes a block of the second product for some rows.
  void second(const Part& part, int64_t start, int64_t width, const float* between, const int64_t* order,
              float* results) const {
    const float* from[PART];
    float* places[PART];
    for (int64_t row = 0; row < part.count; row++) {
      from[row] = between + (part.first + row) * inner;
      places[row] = results + order[part.first + row] * hidden + start;
    }
    multiply(from, part.count, of(w2, part.expert, start, hidden, inner), width, inner, places);
  }

  // Writes the weighted sum of a token's results, added in the order of its choices.
  void combine(const int64_t* own, const float* factors, const float* results, float* total, T* to) const {
    for (int64_t d = 0; d < hidden; d++) total[d] = 0.0f;
    for (int64_t choice = 0; choice < choices; choice++) {
      if (own[choice] < 0) continue;
      const float* result = results + choice * hidden;
      const T* added = bias2 ? of(bias2, own[choice], 0, 1, hidden) : nullptr;
      float factor = on_input ? 1.0f : factors[choice];
      for (int64_t d = 0; d < hidden; d++) total[d] += (result[d] + (added ? one(added + d) : 0.0f)) * factor;
    }
    for (int64_t d = 0; d < hidden; d++) store(to + d, total[d]);
  }

  // Computes `count` tokens from `begin` on.
  void run(int64_t begin, int64_t count) const {
    int64_t pairs = count * choices;
    const float* factors = weights + begin * choices;
    std::vector<int64_t> ends(experts + 1, 0), own(pairs), order(pairs);
    for (int64_t pair = 0; pair < pairs; pair++) {
      int64_t id = ids[begin * choices + pair];
      own[pair] = id >= 0 && map ? map[id] : id;
      if (own[pair] >= 0) ends[own[pair] + 1]++;
    }
    std::vector<Part> parts;
    for (int64_t expert = 0; expert < experts; expert++) {
      int64_t first = ends[expert], all = ends[expert + 1];
      for (int64_t done = 0; done < all; done += PART)
        parts.push_back({expert, first + done, all - done < PART ? all - done : PART});
      ends[expert + 1] += first;
    }
    for (int64_t pair = 0; pair < pairs; pair++)  // from here on, ends[e] is the end of expert e's placed pairs
      if (own[pair] >= 0) order[ends[own[pair]]++] = pair;
    const T* given = static_cast<const T*>(x) + begin * hidden;
    std::vector<float> wide(count * hidden), between(pairs * inner), results(pairs * hidden);
    int64_t number = parts.size();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      std::vector<float> scratch(PART * 2 * BLOCK + LANES), total(hidden);
#pragma omp for
      for (int64_t place = 0; place < count * hidden; place++) wide[place] = one(given + place);
#pragma omp for collapse(2) schedule(dynamic)
      for (int64_t index = 0; index < number; index++)
        for (int64_t start = 0; start < inner; start += BLOCK)
          first(parts[index], start, inner - start < BLOCK ? inner - start : BLOCK, wide.data(), order.data(), factors,
                scratch.data(), between.data());
#pragma omp for collapse(2) schedule(dynamic)
      for (int64_t index = 0; index < number; index++)
        for (int64_t start = 0; start < hidden; start += BLOCK)
          second(parts[index], start, hidden - start < BLOCK ? hidden - start : BLOCK, between.data(), order.data(),
                 results.data());
#pragma omp for
      for (int64_t token = 0; token < count; token++)
        combine(&own[token * choices], factors + token * choices, &results[token * choices * hidden], total.data(),
                static_cast<T*>(out) + (begin + token) * hidden);
    }
  }

  int64_t run() const {
    for (int64_t pair = 0; pair < tokens * choices; pair++) {
      int64_t id = ids[pair];
      if (id >= (map ? numbered : experts) || (id >= 0 && map && map[id] >= experts)) return OUTSIDE;
    }
    int64_t step = PAIRS / choices > 0 ? PAIRS / choices : 1;
    for (int64_t begin = 0; begin < tokens; begin += step) run(begin, tokens - begin < step ? tokens - begin : step);
    return DONE;
  }
};

}  // namespace

extern "C" int64_t fused_moe(const Call* call, int64_t half) {
  return half ? Experts<Bfloat16>{*call}.run() : Experts<float>{*call}.run();
}
