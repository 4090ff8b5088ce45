// Matrix products with weights that were packed once.
//
// A matrix of n outputs and k inputs lies in panels of 32 outputs, so that one load gives one pair (bfloat16) or quad (int8) of inputs for 16 outputs:
//   bfloat16  [n / 32][k / 2][32][2]        int8  [n / 32][k / 4][32][4], a scale per output
// A register tile is up to kMaxRows rows by 32 outputs; each output of a row is one chain of sums over k from first to last. So a result does
// not depend on how many rows are computed together.
#pragma once
#include "rows.h"

namespace rf {

constexpr int kPanel = 32;
constexpr int kGroup = 64;  // inputs that share one activation scale (int8)

struct Matrix {
  int n = 0, k = 0;            // as in the checkpoint
  int panels = 0, kp = 0;      // padded: panels * 32 outputs, kp inputs
  bool int8 = false;
  uint8_t* data = nullptr;     // packed
  float* scale = nullptr;      // [panels * 32], int8 only
  int32_t* correction = nullptr;  // [groups][panels * 32], int8 only: what vpdpbusd adds too much
  float* bias = nullptr;       // [panels * 32] or none
  size_t panel_bytes() const { return static_cast<size_t>(kp) * kPanel * (int8 ? 1 : 2); }
  int groups() const { return (kp + kGroup - 1) / kGroup; }
};

// What a matrix is multiplied with: rows of Act, or of int8 in groups.
struct Rows {
  const Act* act = nullptr;
  const int8_t* q = nullptr;
  const Group* group = nullptr;   // [rows][groups]
  size_t ld = 0;                  // numbers from row to row
  int groups = 0;
};

// What a tile fetches into the second cache beside its work: Each lines, `step` bytes on, each pair of inputs. The processor does not find the next
// panel by itself while it walks the rows of this one.
struct Ahead {
  const char* from;
  size_t step;
};

using TileBf16 = void (*)(const bf16* w, size_t panel, const Act* x, size_t ld, int k, float* out, Ahead ahead);

template <int M, int NB, int Each>
void tile_bf16(const bf16* w, size_t panel, const Act* x, size_t ld, int k, float* out, Ahead ahead) {
  V acc[M][NB * 2];
  RF_UNROLL
  for (int m = 0; m < M; m++)
    RF_UNROLL
    for (int c = 0; c < NB * 2; c++) acc[m][c] = vzero();
  for (int i = 0; i < k; i += 2) {
    Weights v[NB * 2];
    RF_UNROLL
    for (int c = 0; c < NB * 2; c++) v[c] = wload(w + static_cast<size_t>(c / 2) * panel + static_cast<size_t>(i) * 32 + static_cast<size_t>(c % 2) * 32);
    if constexpr (Each > 0) {
      for (int e = 0; e < Each; e++) _mm_prefetch(ahead.from + 64 * e, _MM_HINT_T1);
      ahead.from += ahead.step;
    }
    RF_UNROLL
    for (int m = 0; m < M; m++) {
      Pair p = pair(x + static_cast<size_t>(m) * ld + i);
      RF_UNROLL
      for (int c = 0; c < NB * 2; c++) acc[m][c] = dot2(acc[m][c], v[c], p);
    }
  }
  RF_UNROLL
  for (int m = 0; m < M; m++)
    RF_UNROLL
    for (int c = 0; c < NB * 2; c++) vstore(out + m * NB * 32 + c * 16, acc[m][c]);
}

using TileInt8 = void (*)(const Matrix& w, int panel, const Rows& x, int row, float* out);

template <int M, int NB>
void tile_int8(const Matrix& w, int panel, const Rows& x, int row, float* out) {
  V sum[M][NB * 2];
  RF_UNROLL
  for (int m = 0; m < M; m++)
    RF_UNROLL
    for (int c = 0; c < NB * 2; c++) sum[m][c] = vzero();
  const size_t stride = w.panel_bytes();
  const uint8_t* data = w.data + static_cast<size_t>(panel) * stride;
  const int8_t* q = x.q + static_cast<size_t>(row) * x.ld;
  const Group* group = x.group + static_cast<size_t>(row) * static_cast<size_t>(x.groups);
  for (int g = 0; g < x.groups; g++) {
    I acc[M][NB * 2];
    RF_UNROLL
    for (int m = 0; m < M; m++)
      RF_UNROLL
      for (int c = 0; c < NB * 2; c++) acc[m][c] = iset(group[m * x.groups + g].bias);
    int end = (g + 1) * kGroup < w.kp ? (g + 1) * kGroup : w.kp;
    for (int i = g * kGroup; i < end; i += 4) {
      RF_UNROLL
      for (int m = 0; m < M; m++) {
        Quad v = quad(q + static_cast<size_t>(m) * x.ld + i);
        RF_UNROLL
        for (int c = 0; c < NB * 2; c++)
          acc[m][c] = dot4(acc[m][c], data + static_cast<size_t>(c / 2) * stride + static_cast<size_t>(i) * 32 + static_cast<size_t>(c % 2) * 64, v);
      }
    }
    RF_UNROLL
    for (int m = 0; m < M; m++) {
      V s = vset(group[m * x.groups + g].scale);
      RF_UNROLL
      for (int c = 0; c < NB * 2; c++) sum[m][c] = vfma(ifloat(acc[m][c]), s, sum[m][c]);
    }
  }
  RF_UNROLL
  for (int m = 0; m < M; m++)
    RF_UNROLL
    for (int c = 0; c < NB * 2; c++) vstore(out + m * NB * 32 + c * 16, vmul(sum[m][c], vload(w.scale + static_cast<size_t>(panel) * 32 + c * 16)));
}

#if defined(__AVX512F__)
constexpr int kMaxRowsInt8 = 6;  // each output has an integer and a float sum
#else
constexpr int kMaxRowsInt8 = 1;
#endif

// By rows - 1; the wide ones take 2 and 4 panels at once for one row, whose chains alone would not fill the pipeline.
struct Tiles {
  TileBf16 bf16[kMaxRows][3];  // by lines fetched ahead each time
  TileInt8 int8[kMaxRowsInt8];
  TileBf16 wide_bf16[2];
  TileInt8 wide_int8[2];
};
extern const Tiles kTiles;
constexpr int kManyTiles = 16;  // of rows: from so many on, what one of them fetches ahead is too little to be spread over its work

// One row: several panels at once as long as there are so many. Returns the first panel that is left.
template <class Done>
int multiply_one(const Matrix& w, int begin, int end, const Rows& x, const Done& done) {
  alignas(64) float tile[4 * kPanel];
  const size_t stride = static_cast<size_t>(w.kp) * kPanel;
  for (int size = 1; size >= 0; size--) {
    const int wide = size == 1 ? 4 : 2;
    for (; begin + wide <= end; begin += wide) {
      if (w.int8)
        kTiles.wide_int8[size](w, begin, x, 0, tile);
      else
        kTiles.wide_bf16[size](reinterpret_cast<const bf16*>(w.data) + static_cast<size_t>(begin) * stride, stride, x.act, x.ld, w.kp, tile, {});
      for (int b = 0; b < wide; b++) done(tile + b * kPanel, 1, 0, begin + b);
    }
  }
  return begin;
}

// Computes panels [begin, end) for `rows` rows; `done(tile, rows, row, panel)` takes a tile [rows][32] of sums.
template <class Done>
void multiply(const Matrix& w, int begin, int end, const Rows& x, int rows, const Done& done) {
  alignas(64) float tile[kMaxRows * kPanel];
  const int most = w.int8 ? kMaxRowsInt8 : kMaxRows, tiles = (rows + most - 1) / most;
  const size_t bytes = w.panel_bytes(), part = (bytes / static_cast<size_t>(tiles) + 63) / 64 * 64;
  const int each = tiles == 1 ? 2 : tiles < kManyTiles ? 1 : 0;
  for (int p = rows == 1 ? multiply_one(w, begin, end, x, done) : begin; p < end; p++) {
    const uint8_t* panel = w.data + static_cast<size_t>(p) * bytes;
    for (int t = 0; t < tiles; t++) {
      int row = static_cast<int>(static_cast<int64_t>(rows) * t / tiles), count = static_cast<int>(static_cast<int64_t>(rows) * (t + 1) / tiles) - row;
      const char* next = reinterpret_cast<const char*>(panel + bytes) + static_cast<size_t>(t) * part;  // each tile fetches its share of the next panel
      if (w.int8 || each == 0)
        for (size_t i = 0; i < part; i += 64) _mm_prefetch(next + i, _MM_HINT_T1);
      if (w.int8)
        kTiles.int8[count - 1](w, p, x, row, tile);
      else
        kTiles.bf16[count - 1][each](reinterpret_cast<const bf16*>(panel), 0, x.act + static_cast<size_t>(row) * x.ld, x.ld, w.kp, tile, {next, 128 / static_cast<size_t>(tiles)});
      done(tile, count, row, p);
    }
  }
}

}  // namespace rf
