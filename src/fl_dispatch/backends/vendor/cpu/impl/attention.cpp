// Attention of new tokens over a paged cache, and the write of their keys and values.
//
// A query reads its request's keys and values once, in the cache's own order, with a running softmax (Milakov and
// Gimelshein, arXiv 1805.02867); the heads that share a key read it together. Sums are in float32, and the result is
// rounded once. A block stores keys as [token][dim] or [dim][token], and values as [token][dim]. Unused slots may be
// read, but their contents affect no result.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t TILE = 32, HEADS = 4, STRIP = 16, VECTORS = STRIP / LANES;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

}  // namespace

// The arguments of a call: addresses, strides in elements, sizes and factors. `_Call` of own_attention.py has the same
// fields.
struct Call {
  const void *query, *keys, *values;
  const int32_t *table, *starts, *lengths;
  void* out;
  const float *slopes, *sinks;
  int64_t query_token, query_head, key_block, key_token, key_head, key_dim, value_block, value_token, value_head, table_row;
  int64_t rows, requests, blocks, block_size, heads, kv_heads, dim, columns, causal, window, threads;
  float scale, softcap;
};

struct Write {
  const void *key, *value;
  void *keys, *values;
  const int64_t* slots;
  int64_t from_key[2], from_value[2], to_key[4], to_value[4];
  int64_t tokens, blocks, block_size, heads, key_dim, value_dim;
};

namespace {

template <typename T>
struct Attention : Call {
  // Writes scores of `count` tokens of a block, from `first` on, for a group of heads; q is [group][dim].
  template <int64_t group>
  void score(const T* block, const float* q, int64_t first, int64_t count, float (*scores)[TILE]) const {
    if (key_dim == 1) {
      for (int64_t token = 0; token < count; token++) {
        const T* key = block + (first + token) * key_token;
        Floats sums[group] = {};
        for (int64_t d = 0; d < dim; d += LANES) {
          Floats k = load(key + d);
          for (int64_t head = 0; head < group; head++) sums[head] += k * load(q + head * dim + d);
        }
        for (int64_t head = 0; head < group; head++) scores[head][token] = sum(sums[head]);
      }
      return;
    }
    for (int64_t token = 0; token < count; token += STRIP) {
      Floats sums[group][VECTORS] = {};
      for (int64_t d = 0; d < dim; d++) {
        const T* key = block + d * key_dim + first + token;
        Floats k[VECTORS];
        for (int64_t part = 0; part < VECTORS; part++) k[part] = load(key + part * LANES);
        for (int64_t head = 0; head < group; head++)
          for (int64_t part = 0; part < VECTORS; part++) sums[head][part] += k[part] * q[head * dim + d];
      }
      for (int64_t head = 0; head < group; head++) std::memcpy(scores[head] + token, sums[head], sizeof sums[head]);
    }
  }

  // Adds a tile to the running softmax of a group of heads; acc is [group][dim]. The first `skipped` tokens are masked;
  // `distance` is the query's position less that of the tile's first token.
  template <int64_t group>
  void absorb(const T* block, int64_t first, int64_t skipped, int64_t count, int64_t distance, int64_t first_head,
              float (*scores)[TILE], float* largest, float* total, float* acc) const {
    for (int64_t head = 0; head < group; head++) {
      float* own = scores[head];
      float peak = largest[head];
      for (int64_t token = 0; token < TILE; token++) {
        if (token < skipped || token >= count) {
          own[token] = NOTHING;
          continue;
        }
        if (softcap > 0.0f) own[token] = softcap * std::tanh(own[token] / softcap);
        if (slopes) own[token] -= slopes[first_head + head] * std::abs(static_cast<float>(distance - token));
        peak = own[token] > peak ? own[token] : peak;
      }
      float base = peak == NOTHING ? 0.0f : peak;  // NaN stays NaN
      float shrink = largest[head] == NOTHING ? 0.0f : std::exp(largest[head] - base);
      Floats sums = {};
      for (int64_t token = 0; token < TILE; token += LANES) {
        Floats weights = exponential(load(own + token) - base);
        std::memcpy(own + token, &weights, sizeof weights);
        sums += weights;
      }
      total[head] = total[head] * shrink + sum(sums);
      if (shrink != 1.0f)
        for (int64_t d = 0; d < dim; d += LANES) {
          Floats shrunk = load(acc + head * dim + d) * shrink;
          std::memcpy(acc + head * dim + d, &shrunk, sizeof shrunk);
        }
      largest[head] = peak;
    }
    for (int64_t d = 0; d < dim; d += STRIP) {
      Floats sums[group][VECTORS];
      for (int64_t head = 0; head < group; head++) std::memcpy(sums[head], acc + head * dim + d, sizeof sums[head]);
      for (int64_t token = skipped; token < count; token++) {
        const T* value = block + (first + token) * value_token + d;
        Floats v[VECTORS];
        for (int64_t part = 0; part < VECTORS; part++) v[part] = load(value + part * LANES);
        for (int64_t head = 0; head < group; head++)
          for (int64_t part = 0; part < VECTORS; part++) sums[head][part] += v[part] * scores[head][token];
      }
      for (int64_t head = 0; head < group; head++) std::memcpy(acc + head * dim + d, sums[head], sizeof sums[head]);
    }
  }

  // Attends with one query of a group of heads that share keys and values.
  template <int64_t group>
  bool attend(int64_t number, int64_t row, int64_t position, int64_t length, int64_t kv_head, int64_t head,
              float* scratch) const {
    float *q = scratch, *acc = scratch + group * dim;
    const T* from = static_cast<const T*>(query) + row * query_token + head * query_head;
    T* to = static_cast<T*>(out) + (row * heads + head) * dim;
    bool sees = false;
    alignas(64) float scores[group][TILE];
    float largest[group], total[group];
    for (int64_t own = 0; own < group; own++) {
      largest[own] = sinks ? sinks[head + own] : NOTHING;
      total[own] = sinks ? 1.0f : 0.0f;
      for (int64_t d = 0; d < dim; d++) {
        q[own * dim + d] = one(from + own * query_head + d) * scale;
        acc[own * dim + d] = 0.0f;
      }
    }
    int64_t last = causal ? position : length - 1;
    if (!causal && window > 0 && position + window <= last) last = position + window - 1;
    for (int64_t token = window > 0 && position >= window ? position - window + 1 : 0; token <= last;) {
      int64_t block = token / block_size, skipped = token % block_size % STRIP;
      // a tile begins at a multiple of STRIP tokens of a block, so no strip crosses a block's end
      int64_t first = token % block_size - skipped, begin = token - skipped, count = block_size - first;
      if (count > TILE) count = TILE;
      if (count > last - begin + 1) count = last - begin + 1;
      if (block >= columns) return false;
      int64_t page = table[number * table_row + block];
      if (page < 0 || page >= blocks) return false;
      const T* key = static_cast<const T*>(keys) + page * key_block + kv_head * key_head;
      const T* value = static_cast<const T*>(values) + page * value_block + kv_head * value_head;
      score<group>(key, q, first, count, scores);
      absorb<group>(value, first, skipped, count, position - begin, head, scores, largest, total, acc);
      sees = true;
      token = begin + count;
    }
    for (int64_t own = 0; own < group; own++)
      for (int64_t d = 0; d < dim; d++)
        store(to + own * dim + d, sees ? acc[own * dim + d] / total[own] : 0.0f);
    return true;
  }

  // Attends with one query of a request for all heads that share keys and values.
  bool attend(int64_t number, int64_t row, int64_t kv_head, float* scratch) const {
    int64_t shared = heads / kv_heads, length = lengths[number], position = length - (starts[number + 1] - row);
    bool fine = true;
    for (int64_t base = 0; base < shared && fine; base += HEADS) {
      int64_t head = kv_head * shared + base;
      switch (shared - base) {
        case 1: fine = attend<1>(number, row, position, length, kv_head, head, scratch); break;
        case 2: fine = attend<2>(number, row, position, length, kv_head, head, scratch); break;
        case 3: fine = attend<3>(number, row, position, length, kv_head, head, scratch); break;
        default: fine = attend<HEADS>(number, row, position, length, kv_head, head, scratch);
      }
    }
    return fine;
  }

  int64_t run() const {
    std::vector<int64_t> owners(rows, -1);
    for (int64_t number = 0; number < requests; number++) {
      int64_t begin = starts[number], end = starts[number + 1];
      if (begin < 0 || end < begin || end > rows) return OUTSIDE;
      for (int64_t row = begin; row < end; row++) owners[row] = number;
    }
    if (rows == 0) return DONE;
    int64_t found = DONE, used = threads < rows * kv_heads ? threads : rows * kv_heads;
#pragma omp parallel num_threads(used) if (used > 1)
    {
      std::vector<float> scratch(2 * HEADS * dim);
#pragma omp for collapse(2) schedule(dynamic)
      for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
        for (int64_t row = 0; row < rows; row++)
          if (owners[row] >= 0 && !attend(owners[row], row, kv_head, scratch.data()))
#pragma omp atomic write
            found = OUTSIDE;
    }
    return found;
  }
};

template <typename T>
int64_t write(const Write& call) {
  for (int64_t token = 0; token < call.tokens; token++) {
    int64_t slot = call.slots[token], block = slot / call.block_size, place = slot % call.block_size;
    if (slot < 0) continue;
    if (block >= call.blocks) return OUTSIDE;
    for (int64_t head = 0; head < call.heads; head++) {
      const T* key = static_cast<const T*>(call.key) + token * call.from_key[0] + head * call.from_key[1];
      const T* value = static_cast<const T*>(call.value) + token * call.from_value[0] + head * call.from_value[1];
      T* keys = static_cast<T*>(call.keys) + block * call.to_key[0] + place * call.to_key[1] + head * call.to_key[2];
      T* values =
          static_cast<T*>(call.values) + block * call.to_value[0] + place * call.to_value[1] + head * call.to_value[2];
      for (int64_t d = 0; d < call.key_dim; d++) keys[d * call.to_key[3]] = key[d];
      for (int64_t d = 0; d < call.value_dim; d++) values[d * call.to_value[3]] = value[d];
    }
  }
  return DONE;
}

}  // namespace

extern "C" {

int64_t paged_attention(const Call* call, int64_t half) {
  return half ? Attention<Bfloat16>{*call}.run() : Attention<float>{*call}.run();
}

int64_t kv_cache_write(const Write* call, int64_t half) {
  return half ? write<uint16_t>(*call) : write<uint32_t>(*call);
}

}  // extern "C"
