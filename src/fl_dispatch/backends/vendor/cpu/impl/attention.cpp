// Attention of new tokens over a paged cache, and the write of their keys and values.
//
// A query reads its request's keys and values once, in the cache's own order, with a running softmax (Milakov and
// Gimelshein, arXiv 1805.02867); the heads that share a key read it together. Sums are in float32, and the result is
// rounded once. Keys of a block lie token by token, or dimension by dimension; values lie token by token. What unused
// slots hold may be read, but reaches no result.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
constexpr int64_t TILE = 32, HEADS = 4, STRIP = 16, VECTORS = STRIP / LANES;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int64_t DONE = 0, OUTSIDE = 1;

typedef float Floats __attribute__((vector_size(LANES * 4)));
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

inline void store(Bfloat16* to, float value) {  // to the nearest, and to the even one of two
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to->bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float sum(Floats values) {
  float total = 0.0f;
  for (int64_t lane = 0; lane < LANES; lane++) total += values[lane];
  return total;
}

// exp of numbers that are not positive; 0 below -87. A polynomial on half a unit of the exponent, within 2 units in the
// last place.
inline Floats exponential(Floats x) {
  Floats power = x * 1.44269504f;
  Integers whole = __builtin_convertvector(power - 0.5f, Integers);  // towards zero, which is to the nearest here
  Floats n = __builtin_convertvector(whole, Floats);
  Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
              1.6666665459e-1f) * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  Integers exponent = (whole + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  Integers real = x > -87.0f;
  Floats found = y * scale;
  Integers bits;
  std::memcpy(&bits, &found, sizeof bits);
  bits &= real;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

template <typename T>
struct Attention {
  const T *query, *keys, *values;
  const int32_t *table, *starts, *lengths;
  T* out;
  const float *slopes, *sinks;
  int64_t query_token, query_head, key_block, key_token, key_head, key_dim, value_block, value_token, value_head;
  int64_t table_row, blocks, block_size, heads, kv_heads, dim, columns, causal, window;
  float scale, softcap;

  // Scores of `count` tokens of a block, from `first` on, for a group of heads: q is [group][dim].
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

  // A tile's scores into the running softmax of a group of heads: acc is [group][dim]. The first `skipped` tokens are
  // hidden; `distance` is how far the tile's first token lies before the query.
  template <int64_t group>
  void absorb(const T* block, int64_t first, int64_t skipped, int64_t count, int64_t distance, int64_t first_head,
              float (*scores)[TILE], float* largest, float* total, float* acc) const {
    for (int64_t head = 0; head < group; head++) {
      float* own = scores[head];
      float peak = largest[head];
      for (int64_t token = 0; token < TILE; token++) {
        if (token < skipped || token >= count) own[token] = NOTHING;
        else if (softcap > 0.0f) own[token] = softcap * std::tanh(own[token] / softcap);
        if (slopes) own[token] -= slopes[first_head + head] * std::abs(static_cast<float>(distance - token));
        peak = own[token] > peak ? own[token] : peak;
      }
      float shrink = largest[head] == NOTHING ? 0.0f : std::exp(largest[head] - peak);
      Floats sums = {};
      for (int64_t token = 0; token < TILE; token += LANES) {
        Floats weights = exponential(load(own + token) - peak);
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

  // One query for a group of heads that share a key.
  template <int64_t group>
  bool attend(int64_t number, int64_t row, int64_t position, int64_t length, int64_t kv_head, int64_t head,
              float* scratch) const {
    float *q = scratch, *acc = scratch + group * dim;
    alignas(64) float scores[group][TILE];
    float largest[group], total[group];
    for (int64_t own = 0; own < group; own++) {
      largest[own] = sinks ? sinks[head + own] : NOTHING;
      total[own] = sinks ? 1.0f : 0.0f;
      for (int64_t d = 0; d < dim; d++) {
        q[own * dim + d] = one(query + row * query_token + (head + own) * query_head + d) * scale;
        acc[own * dim + d] = 0.0f;
      }
    }
    int64_t last = causal ? position : length - 1;
    if (!causal && window > 0 && position + window <= last) last = position + window - 1;
    for (int64_t token = window > 0 && position >= window ? position - window + 1 : 0; token <= last;) {
      int64_t block = token / block_size, skipped = token % block_size % STRIP;
      // a tile begins where a strip of tokens does, so that no strip crosses the end of a block
      int64_t first = token % block_size - skipped, begin = token - skipped, count = block_size - first;
      if (count > TILE) count = TILE;
      if (count > last - begin + 1) count = last - begin + 1;
      if (block >= columns) return false;
      int64_t page = table[number * table_row + block];
      if (page < 0 || page >= blocks) return false;
      score<group>(keys + page * key_block + kv_head * key_head, q, first, count, scores);
      absorb<group>(values + page * value_block + kv_head * value_head, first, skipped, count, position - begin, head,
                    scores, largest, total, acc);
      token = begin + count;
    }
    for (int64_t own = 0; own < group; own++)
      for (int64_t d = 0; d < dim; d++)
        store(out + (row * heads + head + own) * dim + d, total[own] == 0.0f ? 0.0f : acc[own * dim + d] / total[own]);
    return true;
  }

  // Queries of one request for the heads of one key-value head.
  bool request(int64_t number, int64_t kv_head, float* scratch) const {
    int64_t end = starts[number + 1], shared = heads / kv_heads;
    bool fine = true;
    for (int64_t row = starts[number]; row < end && fine; row++)
      for (int64_t base = 0; base < shared && fine; base += HEADS) {
        int64_t length = lengths[number], position = length - (end - row), head = kv_head * shared + base;
        switch (shared - base) {
          case 1: fine = attend<1>(number, row, position, length, kv_head, head, scratch); break;
          case 2: fine = attend<2>(number, row, position, length, kv_head, head, scratch); break;
          case 3: fine = attend<3>(number, row, position, length, kv_head, head, scratch); break;
          default: fine = attend<HEADS>(number, row, position, length, kv_head, head, scratch);
        }
      }
    return fine;
  }
};

template <typename T>
int64_t attend(const Attention<T>& attention, int64_t requests, int64_t threads) {
  int64_t found = DONE;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> scratch(2 * HEADS * attention.dim);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t number = 0; number < requests; number++)
      for (int64_t kv_head = 0; kv_head < attention.kv_heads; kv_head++)
        if (!attention.request(number, kv_head, scratch.data()))
#pragma omp atomic write
          found = OUTSIDE;
  }
  return found;
}

template <typename T>
int64_t write(const T* key, const T* value, T* keys, T* values, const int64_t* slots, const int64_t* s) {
  int64_t tokens = s[0], blocks = s[1], block_size = s[2], kv_heads = s[3], dim = s[4], value_dim = s[5];
  const int64_t *from_key = s + 6, *from_value = s + 8, *to_key = s + 10, *to_value = s + 14;
  for (int64_t token = 0; token < tokens; token++) {
    if (slots[token] < 0) continue;
    int64_t block = slots[token] / block_size, place = slots[token] % block_size;
    if (block >= blocks) return OUTSIDE;
    for (int64_t head = 0; head < kv_heads; head++) {
      const T* k = key + token * from_key[0] + head * from_key[1];
      const T* v = value + token * from_value[0] + head * from_value[1];
      T* to_k = keys + block * to_key[0] + place * to_key[1] + head * to_key[2];
      T* to_v = values + block * to_value[0] + place * to_value[1] + head * to_value[2];
      for (int64_t d = 0; d < dim; d++) to_k[d * to_key[3]] = k[d];
      for (int64_t d = 0; d < value_dim; d++) to_v[d * to_value[3]] = v[d];
    }
  }
  return DONE;
}

}  // namespace

extern "C" {

// `s` has the numbers of Attention in their order; strides are in elements.
int64_t paged_attention(int64_t half, const void* query, const void* keys, const void* values, const int32_t* table,
                        const int32_t* starts, const int32_t* lengths, void* out, const float* slopes,
                        const float* sinks, const int64_t* s, double scale, double softcap, int64_t requests,
                        int64_t threads) {
  auto run = [&](auto kind) {
    using T = decltype(kind);
    Attention<T> attention{
        static_cast<const T*>(query), static_cast<const T*>(keys), static_cast<const T*>(values), table, starts, lengths,
        static_cast<T*>(out), slopes, sinks, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11],
        s[12], s[13], s[14], s[15], s[16], s[17], static_cast<float>(scale), static_cast<float>(softcap)};
    return attend(attention, requests, threads);
  };
  return half ? run(Bfloat16{}) : run(float{});
}

// `s`: tokens, blocks, block size, heads, elements of a key and of a value; strides of a token and a head of the new
// keys, and values; the four strides of the cache of keys, and of values.
int64_t kv_cache_write(int64_t half, const void* key, const void* value, void* keys, void* values, const int64_t* slots,
                       const int64_t* s) {
  auto run = [&](auto kind) {
    using T = decltype(kind);
    return write(static_cast<const T*>(key), static_cast<const T*>(value), static_cast<T*>(keys),
                 static_cast<T*>(values), slots, s);
  };
  return half ? run(uint16_t{}) : run(uint32_t{});
}

}  // extern "C"
