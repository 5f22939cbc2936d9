// Products of a few float32 rows with weights as PyTorch stores them: a row-major weight is read once, as fast as memory gives
// it, so a packed copy would gain nothing. PyTorch multiplies more rows. The operator is called by PyTorch's dispatcher
// without Python, through PyTorch's stable C interface; its functions arrive as addresses, so no header is compiled.
#include <omp.h>

#include <stdexcept>
#include <vector>

#include "products.h"

namespace {

// The arguments of a call; rows of x are `stride` numbers apart.
struct Call {
  const void* x;
  const void* weight;
  const void* bias;
  void* out;
  int64_t rows, columns, inner, stride, threads;
};

constexpr int64_t DOT = 8, BLOCK = 48, COLUMNS = 8;

// Multiplies up to 8 rows: each sum runs along a row of the weight.
template <int64_t rows>
void dots(const float* const* from, const float* weight, int64_t columns, int64_t length, float* const* out) {
  constexpr int64_t TOGETHER = 24 / rows < MOST ? 24 / rows : MOST;
  float* to[rows];
  std::memcpy(to, out, sizeof to);
  int64_t column = 0;
  for (; column + TOGETHER <= columns; column += TOGETHER) {
    multiply<float, rows, TOGETHER>(from, weight + column * length, length, to);
    for (int64_t row = 0; row < rows; row++) to[row] += TOGETHER;
  }
  for (; column < columns; column++) {
    multiply<float, rows, 1>(from, weight + column * length, length, to);
    for (int64_t row = 0; row < rows; row++) to[row]++;
  }
}

void dots(const float* x, int64_t stride, int64_t rows, const float* weight, int64_t columns, int64_t length, float* out,
          int64_t apart) {
  const float* from[DOT];
  float* to[DOT];
  for (int64_t row = 0; row < rows; row++) from[row] = x + row * stride, to[row] = out + row * apart;
  switch (rows) {
    case 8: return dots<8>(from, weight, columns, length, to);
    case 7: return dots<7>(from, weight, columns, length, to);
    case 6: return dots<6>(from, weight, columns, length, to);
    case 5: return dots<5>(from, weight, columns, length, to);
    case 4: return dots<4>(from, weight, columns, length, to);
    case 3: return dots<3>(from, weight, columns, length, to);
    case 2: return dots<2>(from, weight, columns, length, to);
    case 1: return dots<1>(from, weight, columns, length, to);
  }
}

// Multiplies `vectors * LANES` rows, stored by elements, by some columns: each lane has a row, so no sum crosses lanes.
template <int64_t vectors, int64_t columns>
void spread(const float* x, const float* weight, int64_t length, int64_t rows, float* out, int64_t apart) {
  Floats sums[vectors][columns] = {};
  int64_t k = 0;
  auto add = [&](int64_t at) {
    Floats values[vectors];
    for (int64_t v = 0; v < vectors; v++) values[v] = load(x + (at * vectors + v) * LANES);
    for (int64_t column = 0; column < columns; column++)
      for (int64_t v = 0; v < vectors; v++) sums[v][column] += weight[column * length + at] * values[v];
  };
  for (; k + LANES <= length; k += LANES) {
    for (int64_t column = 0; column < columns; column++) __builtin_prefetch(weight + (columns + column) * length + k, 0, 2);
    for (int64_t at = k; at < k + LANES; at++) add(at);
  }
  for (; k < length; k++) add(k);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t column = 0; column < columns; column++)
      out[row * apart + column] = sums[row / LANES][column][row % LANES];
}

template <int64_t vectors>
void spread(const float* x, const float* weight, int64_t columns, int64_t length, int64_t rows, float* out,
            int64_t apart) {
  int64_t column = 0;
  for (; column + COLUMNS <= columns; column += COLUMNS)
    spread<vectors, COLUMNS>(x, weight + column * length, length, rows, out + column, apart);
  for (; column < columns; column++)
    spread<vectors, 1>(x, weight + column * length, length, rows, out + column, apart);
}

// Returns how many of the rows that are left are multiplied together.
int64_t together(int64_t left) { return left < 2 * LANES ? left : 2 * LANES; }

void product(const Call& call, const float* x, const float* weight, const float* bias, float* out) {
  int64_t length = call.inner, few = call.rows <= DOT;
  std::vector<float> turned(few ? 0 : (call.rows + LANES) * length);
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
  {
    int64_t place = 0, step;
    for (int64_t row = 0; row < call.rows && !few; row += step) {
      step = together(call.rows - row);
      if (step <= DOT) continue;
      int64_t width = (step + LANES - 1) / LANES * LANES;
#pragma omp for nowait
      for (int64_t k = 0; k < length; k++)
        for (int64_t lane = 0; lane < width; lane++)
          turned[place + k * width + lane] = lane < step ? x[(row + lane) * call.stride + k] : 0;
      place += width * length;
    }
#pragma omp barrier
#pragma omp for
    for (int64_t start = 0; start < call.columns; start += BLOCK) {
      int64_t width = call.columns - start < BLOCK ? call.columns - start : BLOCK;
      const float* some = weight + start * length;
      place = 0;
      for (int64_t row = 0; row < call.rows; row += step) {
        step = together(call.rows - row);
        float* to = out + row * call.columns + start;
        if (step <= DOT) {
          dots(x + row * call.stride, call.stride, step, some, width, length, to, call.columns);
        } else if (step <= LANES) {
          spread<1>(&turned[place], some, width, length, step, to, call.columns);
          place += LANES * length;
        } else {
          spread<2>(&turned[place], some, width, length, step, to, call.columns);
          place += 2 * LANES * length;
        }
      }
      for (int64_t row = 0; bias && row < call.rows; row++)
        for (int64_t column = start; column < start + width; column++) out[row * call.columns + column] += bias[column];
    }
  }
}

// PyTorch's functions; each returns 0 if it succeeds. `TORCH` of plain.py has the same order.
using Tensor = void*;
struct Torch {
  int32_t (*delete_tensor)(Tensor);
  int32_t (*dimensions)(Tensor, int64_t*);
  int32_t (*sizes)(Tensor, int64_t**);
  int32_t (*strides)(Tensor, int64_t**);
  int32_t (*dtype)(Tensor, int32_t*);
  int32_t (*bytes)(Tensor, int64_t*);
  int32_t (*offset)(Tensor, int64_t*);
  int32_t (*read)(Tensor, const void**);
  int32_t (*write)(Tensor, void**);
  int32_t (*empty)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor*);
  int32_t (*view)(Tensor, const int64_t*, const int64_t*, Tensor*);
  int32_t (*mm)(Tensor, Tensor, Tensor);
  int32_t (*addmm)(Tensor, Tensor, Tensor, Tensor, double, double);
  int32_t (*threads)(uint32_t*);
  int32_t (*library)(const char*, const char*, const char*, uint32_t, Tensor*);
  int32_t (*implement)(Tensor, const char*, void (*)(uint64_t*, uint64_t, uint64_t));
};
Torch torch;
int64_t calls = 0, most = 0;
constexpr int32_t FLOAT32 = 6;  // PyTorch's number of the dtype

void check(int32_t failed) {
  if (failed) throw std::runtime_error("PyTorch could not compute a product of a plain weight");
}

struct Owned {
  Tensor tensor = nullptr;
  ~Owned() {
    if (tensor) torch.delete_tensor(tensor);
  }
};

// Returns the address of a tensor's first number, if its memory holds `count` numbers from there on.
const void* address(Tensor tensor, int64_t count) {
  int64_t bytes, offset;
  const void* found;
  check(torch.bytes(tensor, &bytes)), check(torch.offset(tensor, &offset));
  if ((offset + count) * 4 > bytes) throw std::runtime_error("a tensor of a product has no data");
  check(torch.read(tensor, &found));
  return found;
}

// Returns whether a tensor is a contiguous float32 vector of so many numbers.
bool is_vector(Tensor tensor, int64_t count) {
  int64_t dimensions, *size, *stride;
  int32_t dtype;
  check(torch.dimensions(tensor, &dimensions)), check(torch.dtype(tensor, &dtype));
  check(torch.sizes(tensor, &size)), check(torch.strides(tensor, &stride));
  return dimensions == 1 && dtype == FLOAT32 && size[0] == count && (stride[0] == 1 || count == 1);
}

// The operator: two-dimensional x and weight, and a bias or none. Rows are multiplied here up to a limit, and by PyTorch
// above it.
void multiply_plain(uint64_t* stack, uint64_t count, uint64_t) {
  Owned x{reinterpret_cast<Tensor>(stack[0])}, weight{reinterpret_cast<Tensor>(stack[1])};
  Owned bias{count > 2 ? reinterpret_cast<Tensor>(stack[2]) : nullptr}, out;
  int64_t *shape, *apart, *size, *stride, ranks[2];
  check(torch.dimensions(x.tensor, &ranks[0])), check(torch.dimensions(weight.tensor, &ranks[1]));
  if (ranks[0] != 2 || ranks[1] != 2) throw std::runtime_error("a product of a plain weight takes two matrices");
  check(torch.sizes(x.tensor, &shape)), check(torch.strides(x.tensor, &apart));
  check(torch.sizes(weight.tensor, &size)), check(torch.strides(weight.tensor, &stride));
  if (shape[1] != size[1]) throw std::runtime_error("the rows of x and of a plain weight have other lengths");
  int32_t dtype, other;
  check(torch.dtype(x.tensor, &dtype)), check(torch.dtype(weight.tensor, &other));
  int64_t whole[2] = {shape[0], size[0]}, steps[2] = {size[0], 1};
  check(torch.empty(2, whole, steps, dtype, 0, -1, &out.tensor));
  bool known = dtype == FLOAT32 && other == FLOAT32 && (!bias.tensor || is_vector(bias.tensor, size[0]));
  Call call{nullptr, nullptr, nullptr, nullptr, shape[0], size[0], shape[1], apart[0], 1};
  bool rows = known && apart[1] == 1 && stride[1] == 1 && stride[0] == size[1] && call.rows && call.inner;
  if (rows) {
    call.x = address(x.tensor, (shape[0] - 1) * apart[0] + shape[1]);
    call.weight = address(weight.tensor, size[0] * size[1]);
    if (bias.tensor) call.bias = address(bias.tensor, size[0]);
  }
  if (rows && call.rows <= most) {
    uint32_t threads = 1;
    check(torch.threads(&threads));
    call.threads = omp_in_parallel() ? 1 : threads;
    check(torch.write(out.tensor, &call.out));
    product(call, static_cast<const float*>(call.x), static_cast<const float*>(call.weight),
            static_cast<const float*>(call.bias), static_cast<float*>(call.out));
    __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
  } else {
    Owned turned;
    int64_t sides[2] = {size[1], size[0]}, swapped[2] = {stride[1], stride[0]};
    check(torch.view(weight.tensor, sides, swapped, &turned.tensor));
    check(bias.tensor ? torch.addmm(out.tensor, bias.tensor, x.tensor, turned.tensor, 1, 1)
                      : torch.mm(out.tensor, x.tensor, turned.tensor));
  }
  stack[0] = reinterpret_cast<uint64_t>(out.tensor);
  out.tensor = nullptr;
}

}  // namespace

// Returns the float32 numbers of a vector of this processor.
extern "C" int64_t lanes(const void*) { return LANES; }

// Returns how many products were computed here, not by PyTorch.
extern "C" int64_t counted(const void*) { return __atomic_load_n(&calls, __ATOMIC_RELAXED); }

// Gives PyTorch's dispatcher the operators; PyTorch multiplies more than `rows` rows.
extern "C" int64_t install(const Torch* functions, int64_t rows) {
  torch = *functions, most = rows;
  Tensor library;
  return torch.library("fl_dispatch_cpu", "CPU", "plain.cpp", 0, &library) ||
         torch.implement(library, "product", multiply_plain) || torch.implement(library, "sum", multiply_plain);
}
