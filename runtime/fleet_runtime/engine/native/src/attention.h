// Register tiles of attention. Both are matrix products whose inner order never changes: scores sum over pairs of dimensions, outputs over pairs of
// tokens, first to last. A masked token has weight 0, which adds exactly nothing, so further pages in a tile change no bit of a row.
#pragma once
#include "model.h"

namespace rf {

// Scores of R rows against the 16 tokens of each of C pages. keys: [head_dim / 2][16][2] each. soon: keys and values that will be read next, fetched
// beside the work; pages lie anywhere, so the processor does not find them by itself.
using ScoreTile = void (*)(const Act* q, const bf16* const* keys, const bf16* const* soon, int head_dim, float* scores);
template <int R, int C, bool Soon>
void score_tile(const Act* q, const bf16* const* keys, const bf16* const* soon, int head_dim, float* scores) {
  V acc[R][C];
  RF_UNROLL
  for (int r = 0; r < R; r++)
    RF_UNROLL
    for (int c = 0; c < C; c++) acc[r][c] = vzero();
  for (int i = 0; i < head_dim; i += 2) {
    Weights k[C];
    RF_UNROLL
    for (int c = 0; c < C; c++) k[c] = wload(keys[c] + static_cast<size_t>(i) * kPage);
    if constexpr (Soon) {
      RF_UNROLL
      for (int c = 0; c < 2 * C; c++) _mm_prefetch(soon[c] + static_cast<size_t>(i) * kPage, _MM_HINT_T1);
    }
    RF_UNROLL
    for (int r = 0; r < R; r++) {
      Pair x = pair(q + static_cast<size_t>(r) * static_cast<size_t>(head_dim) + i);
      RF_UNROLL
      for (int c = 0; c < C; c++) acc[r][c] = dot2(acc[r][c], k[c], x);
    }
  }
  RF_UNROLL
  for (int r = 0; r < R; r++)
    RF_UNROLL
    for (int c = 0; c < C; c++) vstore(scores + r * kSegment + c * kPage, acc[r][c]);
}

// Outputs of R rows, C * 16 dimensions from where `values` point. values: [8][head_dim][2] each.
using ValueTile = void (*)(const Act* p, const bf16* const* values, int pages, int head_dim, float* out);
template <int R, int C>
void value_tile(const Act* p, const bf16* const* values, int pages, int head_dim, float* out) {
  V acc[R][C];
  RF_UNROLL
  for (int r = 0; r < R; r++)
    RF_UNROLL
    for (int c = 0; c < C; c++) acc[r][c] = vzero();
  for (int page = 0; page < pages; page++) {
    const bf16* v = values[page];
    for (int t = 0; t < kPage / 2; t++) {
      Weights w[C];
      RF_UNROLL
      for (int c = 0; c < C; c++) w[c] = wload(v + static_cast<size_t>(t * 2) * static_cast<size_t>(head_dim) + static_cast<size_t>(c) * 32);
      RF_UNROLL
      for (int r = 0; r < R; r++) {
        Pair x = pair(p + r * kSegment + page * kPage + t * 2);
        RF_UNROLL
        for (int c = 0; c < C; c++) acc[r][c] = dot2(acc[r][c], w[c], x);
      }
    }
  }
  RF_UNROLL
  for (int r = 0; r < R; r++)
    RF_UNROLL
    for (int c = 0; c < C; c++) vstore(out + static_cast<size_t>(r) * static_cast<size_t>(head_dim) + c * 16, acc[r][c]);
}

template <int R>
constexpr int wide_values() {  // vectors of dimensions at once that leave registers for R rows
  return R * 4 <= 2 * kMaxRows ? 4 : 2;
}

struct AttentionTiles {
  ScoreTile score[kMaxRows][2][2];  // by rows - 1, pages - 1, whether it fetches
  ValueTile value[kMaxRows], value1[kMaxRows];  // value1: 16 dimensions
  int width[kMaxRows];                          // vectors of `value`
};
extern const AttentionTiles kAttentionTiles;

}  // namespace rf
