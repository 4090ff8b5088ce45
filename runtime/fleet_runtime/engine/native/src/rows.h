// Arithmetic on one row: norm, rotation, conversion to what a matrix takes. A row's result depends on that row alone.
//
// All rows are padded with zeros to a multiple of 32 numbers.
#pragma once
#include "vec.h"

namespace rf {

inline int padded(int n) { return (n + 31) / 32 * 32; }

// RMSNorm (Zhang and Sennrich, "Root Mean Square Layer Normalization"). n: numbers, without padding. weight: padded with zeros.
inline float norm_factor(const float* x, int n, float eps) {
  V s = vzero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    V v = vload(x + i);
    s = vfma(v, v, s);
  }
  if (i < n) {
    V v = vselect(first(n - i), vload(x + i), vzero());
    s = vfma(v, v, s);
  }
  return 1.0f / std::sqrt(vsum(s) / static_cast<float>(n) + eps);
}

inline void norm_row(const float* x, const float* weight, int n, float eps, float* out) {
  V r = vset(norm_factor(x, n, eps));
  for (int i = 0; i < padded(n); i += 16) vstore(out + i, vmul(vmul(vload(x + i), r), vload(weight + i)));
}

inline void norm_row_act(const float* x, const float* weight, int n, float eps, Act* out) {
  V r = vset(norm_factor(x, n, eps));
  for (int i = 0; i < padded(n); i += 16) astore(out + i, vmul(vmul(vload(x + i), r), vload(weight + i)));
}

inline void act_row(const float* x, int n, Act* out) {
  for (int i = 0; i < padded(n); i += 16) astore(out + i, vload(x + i));
}

// What belongs to a group of quantised inputs: x ~ q * scale, and what each sum of its products begins with (vec.h).
struct Group {
  float scale;
  int32_t bias;
};

// q in [-127, 127], one scale for each group of `group` numbers (a multiple of 32): one large number spoils its group only.
// A group that is not finite gets a scale that is not.
inline void quantise_row(const float* x, int n, int group, int8_t* q, Group* groups) {
  for (int begin = 0, g = 0; begin < padded(n); begin += group, g++) {
    int end = begin + group < padded(n) ? begin + group : padded(n);
    V high = vzero(), check = vzero();
    for (int i = begin; i < end; i += 16) {
      V v = vload(x + i);
      high = vmax(high, vabs(v));
      check = vadd(check, vsub(v, v));
    }
    float top = vhighest(high);
    V inverse = vset(top > 0.0f ? 127.0f / top : 0.0f);
    I sum = izero();
    for (int i = begin; i < end; i += 16) sum = quantise16(vmul(vload(x + i), inverse), sum, q + i);
    groups[g] = {top / 127.0f + vsum(check), bias_of(sum)};
  }
}

// Rotary embedding, halves convention: number d pairs with d + head_dim / 2. cosines, sines: [head_dim / 2] (Su et al., "RoFormer").
inline void rotate(float* v, int head_dim, const float* cosines, const float* sines) {
  int half = head_dim / 2;
  for (int d = 0; d < half; d++) {
    float a = v[d], b = v[d + half];
    v[d] = a * cosines[d] - b * sines[d];
    v[d + half] = b * cosines[d] + a * sines[d];
  }
}

// NaN where one of the numbers is not finite, else 0.
inline float not_finite(const float* x, int n) {
  V check = vzero();
  for (int i = 0; i < padded(n); i += 16) {
    V v = vload(x + i);
    check = vadd(check, vsub(v, v));
  }
  return vsum(check);
}

}  // namespace rf
