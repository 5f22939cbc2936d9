// The kernels of each decoding step of vLLM's V2 model runner, on tensors in main memory.
//
// A tensor of integers is passed as an address and a bit of `wide`, in the order of the arguments: set for int64, clear
// for int32. A negative element of `idx_mapping` means no request. A function returns 0, or 1 if a row or a token is
// outside its table; earlier writes stay.
#include <algorithm>
#include <cstdint>

namespace {

// Beyond any table or text; larger numbers are clamped to it, so that sums do not overflow.
constexpr int64_t FAR = int64_t{1} << 40;

struct Integers {
  int64_t address;
  int64_t wide;
  int64_t operator[](int64_t place) const {
    if (!wide) return reinterpret_cast<int32_t*>(address)[place];
    int64_t value = reinterpret_cast<int64_t*>(address)[place];
    return value > FAR ? FAR : value < -FAR ? -FAR : value;
  }
  void set(int64_t place, int64_t value) const {
    if (wide) reinterpret_cast<int64_t*>(address)[place] = value;
    else reinterpret_cast<int32_t*>(address)[place] = static_cast<int32_t>(value);
  }
};

bool outside(int64_t place, int64_t size) { return place < 0 || place >= size; }

constexpr int64_t DONE = 0, OUTSIDE = 1, NOT_GREEDY = 2;

}  // namespace

extern "C" {

// Writes each token's position and each request's length; lengths after the batch become 0.
int64_t prepare_pos_seq_lens(int64_t wide, int64_t a0, int64_t a1, int64_t a2, int64_t a3, int64_t a4, int64_t requests,
                             int64_t most, int64_t tokens, int64_t states) {
  Integers positions{a0, wide & 1}, lengths{a1, wide & 2}, idx{a2, wide & 4}, starts{a3, wide & 8}, computed{a4, wide & 16};
  for (int64_t request = 0; request < requests; request++) {
    int64_t state = idx[request], begin = starts[request], end = starts[request + 1];
    if (outside(state, states) || outside(begin, tokens + 1) || outside(end, tokens + 1)) return OUTSIDE;
    int64_t first = computed[state];
    lengths.set(request, first + end - begin);
    for (int64_t token = begin; token < end; token++) positions.set(token, first + token - begin);
  }
  for (int64_t request = requests; request < most; request++) lengths.set(request, 0);
  return DONE;
}

// Writes the indices of the logits, and the last sampled or drafted tokens as inputs.
int64_t combine_sampled_and_draft_tokens(int64_t wide, int64_t a0, int64_t a1, int64_t a2, int64_t a3, int64_t a4,
                                         int64_t a5, int64_t a6, int64_t a7, int64_t a8, int64_t draft_stride,
                                         int64_t new_tokens, int64_t requests, int64_t tokens, int64_t states,
                                         int64_t rows) {
  Integers ids{a0, wide & 1}, idx{a1, wide & 2}, last{a2, wide & 4}, starts{a3, wide & 8}, lengths{a4, wide & 16};
  Integers prompts{a5, wide & 32}, drafts{a6, wide & 64}, logits{a7, wide & 128}, indices{a8, wide & 256};
  for (int64_t request = 0; request < requests; request++) {
    int64_t state = idx[request], row = logits[request], count = logits[request + 1] - row, end = starts[request + 1];
    int64_t drafted = count - new_tokens, first = end - count;
    if (outside(state, states) || outside(row, rows + 1) || outside(row + count, rows + 1)) return OUTSIDE;
    if (outside(first, tokens + 1) || outside(end, tokens + 1) || drafted > draft_stride) return OUTSIDE;
    for (int64_t place = 0; place < count; place++) indices.set(row + place, first + place);
    int64_t length = lengths[request], prompt = prompts[state];
    if (length <= prompt) continue;
    if (new_tokens > 0 && count > 0 && length - count >= prompt) ids.set(first, last[state]);
    for (int64_t place = 0; place < drafted; place++) ids.set(end - drafted + place, drafts[state * draft_stride + place]);
  }
  return DONE;
}

// Writes each request's number of new tokens, 0 while it reads its prompt, and its number of logits that gave no token.
int64_t get_num_sampled_and_rejected(int64_t wide, int64_t a0, int64_t a1, int64_t a2, int64_t a3, int64_t a4, int64_t a5,
                                     int64_t requests, int64_t states) {
  Integers sampled{a0, wide & 1}, rejected{a1, wide & 2}, lengths{a2, wide & 4}, logits{a3, wide & 8};
  Integers idx{a4, wide & 16}, prompts{a5, wide & 32};
  for (int64_t request = 0; request < requests; request++) {
    if (outside(idx[request], states)) return OUTSIDE;
    bool reading = lengths[request] < prompts[idx[request]];
    int64_t count = reading ? 0 : sampled[request];
    sampled.set(request, count);
    rejected.set(request, reading ? 0 : logits[request + 1] - logits[request] - count);
  }
  return DONE;
}

// Stores a step's tokens in the requests' states.
int64_t post_update(int64_t wide, int64_t a0, int64_t a1, int64_t a2, int64_t a3, int64_t a4, int64_t a5, int64_t a6,
                    int64_t a7, int64_t a8, int64_t a9, int64_t count_stride, int64_t token_stride, int64_t row_stride,
                    int64_t requests, int64_t states) {
  Integers idx{a0, wide & 1}, computed{a1, wide & 2}, last{a2, wide & 4}, tokens{a3, wide & 8}, sampled{a4, wide & 16};
  Integers rejected{a5, wide & 32}, rows{a6, wide & 64}, total{a7, wide & 128}, starts{a8, wide & 256};
  Integers counts{a9, wide & 512};
  for (int64_t request = 0; request < requests; request++) {
    int64_t state = idx[request];
    if (state < 0) continue;
    if (state >= states) return OUTSIDE;
    int64_t length = total[state], count = sampled[request];
    if (count > token_stride || outside(length, row_stride + 1) || outside(length + count, row_stride + 1)) return OUTSIDE;
    for (int64_t place = 0; place < count; place++) {
      int64_t token = tokens[request * token_stride + place];
      rows.set(state * row_stride + length + place, token);
      if (!counts.address) continue;
      if (outside(token, count_stride)) return OUTSIDE;
      counts.set(state * count_stride + token, counts[state * count_stride + token] + 1);
    }
    if (count > 0) {
      last.set(state, tokens[request * token_stride + count - 1]);
      total.set(state, length + count);
    }
    int64_t queried = starts.address ? starts[request + 1] - starts[request] : 0;
    computed.set(state, computed[state] + queried - rejected[request]);
  }
  return DONE;
}

// Copies the requests' rows of the block tables into the tables of the forward pass, and clears the rows after them.
int64_t gather_block_tables(int64_t wide, int64_t a0, int64_t a1, int64_t a2, int64_t a3, int64_t a4, int64_t a5,
                            int64_t sources, int64_t targets, int64_t masked, int64_t requests, int64_t states,
                            int64_t groups, int64_t rows) {
  Integers idx{a0, wide & 1}, strides{a1, wide & 2}, counts{a2, wide & 4};
  Integers computed{a3, wide & 8}, reaches{a4, wide & 16}, sizes{a5, wide & 32};
  if (outside(requests, rows + 1)) return OUTSIDE;
  for (int64_t group = 0; group < groups; group++) {
    const int32_t* source = reinterpret_cast<int32_t**>(sources)[group];
    int32_t* target = reinterpret_cast<int32_t**>(targets)[group];
    int64_t stride = strides[group];
    for (int64_t request = 0; request < requests; request++) {
      int64_t state = idx[request];
      if (outside(state, states)) return OUTSIDE;
      int64_t count = counts[group * states + state], unread = 0;
      if (outside(count, stride + 1)) return OUTSIDE;
      if (masked && sizes[group] <= 0) return OUTSIDE;
      if (masked && reaches[group] > 0 && computed[state] > reaches[group])
        unread = (computed[state] - reaches[group]) / sizes[group];
      if (unread > count) unread = count;
      std::fill_n(target + request * stride, unread, 0);
      std::copy_n(source + state * stride + unread, count - unread, target + request * stride + unread);
    }
    std::fill_n(target + requests * stride, (rows - requests) * stride, 0);
  }
  return DONE;
}

// Writes the slot of each token's key and value, by group.
int64_t compute_slot_mappings(int64_t wide, int64_t a0, int64_t a1, int64_t a2, int64_t a3, int64_t a4, int64_t a5,
                              int64_t addresses, int64_t enabled, int64_t slot_stride, int64_t nowhere, int64_t requests,
                              int64_t states, int64_t groups, int64_t tokens, int64_t most) {
  Integers idx{a0, wide & 1}, starts{a1, wide & 2}, positions{a2, wide & 4}, strides{a3, wide & 8}, sizes{a4, wide & 16};
  Integers slots{a5, wide & 32};
  for (int64_t group = 0; group < groups; group++) {
    const int32_t* table = reinterpret_cast<int32_t**>(addresses)[group];
    bool used = reinterpret_cast<uint8_t*>(enabled)[group];
    int64_t stride = strides[group], size = sizes[group], first = group * slot_stride;
    if ((used && (size <= 0 || size > INT32_MAX)) || outside(starts[requests], tokens + 1)) return OUTSIDE;
    for (int64_t request = 0; request < requests; request++) {
      int64_t state = idx[request], end = starts[request + 1];
      if (state >= states || outside(starts[request], tokens + 1) || outside(end, tokens + 1)) return OUTSIDE;
      for (int64_t token = starts[request]; token < end; token++) {
        int64_t slot = nowhere;
        if (used && state >= 0) {
          int64_t block = positions[token] / size;
          if (outside(block, stride)) return OUTSIDE;
          slot = table[state * stride + block] * size + positions[token] % size;
        }
        slots.set(first + token, slot);
      }
    }
    for (int64_t token = starts[requests]; token < most; token++) slots.set(first + token, nowhere);
  }
  return DONE;
}

// Writes the largest logit of each block of the vocabulary, and its token; NaN is never the largest. Returns 2 and
// writes nothing if a request has a temperature.
int64_t gumbel_sample(int64_t wide, int64_t a0, int64_t a1, int64_t logits, int64_t maxima, int64_t temperatures,
                      int64_t row_stride, int64_t rows, int64_t states, int64_t columns, int64_t block, int64_t blocks) {
  constexpr int64_t LANES = 16;
  Integers argmax{a0, wide & 1}, idx{a1, wide & 2};
  for (int64_t row = 0; row < rows; row++) {
    if (idx[row] >= states) return OUTSIDE;
    if (idx[row] >= 0 && reinterpret_cast<float*>(temperatures)[idx[row]] != 0.0f) return NOT_GREEDY;
  }
  for (int64_t row = 0; row < rows; row++) {
    const float* values = reinterpret_cast<float*>(logits) + row * row_stride;
    for (int64_t number = 0; number < blocks; number++) {
      int64_t begin = number * block, end = begin + block < columns ? begin + block : columns, column = begin;
      float lanes[LANES], best = -__builtin_inff();
      for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] = best;
      for (; column + LANES <= end; column += LANES)
        for (int64_t lane = 0; lane < LANES; lane++)
          lanes[lane] = values[column + lane] > lanes[lane] ? values[column + lane] : lanes[lane];
      for (; column < end; column++) best = values[column] > best ? values[column] : best;
      for (int64_t lane = 0; lane < LANES; lane++) best = lanes[lane] > best ? lanes[lane] : best;
      for (column = begin; column < end - 1 && values[column] != best; column++) {
      }
      if (values[column] != best) column = begin;
      argmax.set(row * blocks + number, column);
      reinterpret_cast<float*>(maxima)[row * blocks + number] = best;
    }
  }
  return DONE;
}

}  // extern "C"
