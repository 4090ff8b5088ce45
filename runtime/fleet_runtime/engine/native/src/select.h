// The most likely tokens of a row without sorting it: a cut such that what lies above it is a wanted number, or a wanted share, of the row.
//
// Tokens are ordered by logit, equal ones by id. A cut is a place in that order; the set above it is never written down.
#pragma once
#include <algorithm>
#include <vector>

#include "vec.h"

namespace rf {

struct Cut {
  float value = -INFINITY;
  int32_t id = INT32_MAX;
  bool has(float logit, int32_t i) const { return logit > value || (logit == value && i <= id); }
};

// Of two cuts the one that leaves less.
inline Cut tighter(Cut a, Cut b) { return a.value > b.value || (a.value == b.value && a.id < b.id) ? a : b; }

// Floats in an order of unsigned numbers, so that halving an interval ends after 32 steps whatever the values.
inline uint32_t order_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return (u >> 31) ? ~u : u | 0x80000000u;
}
inline float value_of(uint32_t o) {
  uint32_t u = (o >> 31) ? o & 0x7fffffffu : ~o;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// How much of a row is at or above `least`: tokens, or weight.
struct CountOf {
  const float* logits;
  int n;  // padded to 16; what is padded is -inf
  double operator()(float least) const {
    int64_t count = 0;
    V t = vset(least);
    for (int i = 0; i < n; i += 16) count += __builtin_popcount(tobits(vge(vload(logits + i), t)));
    return static_cast<double>(count);
  }
  double of(int) const { return 1.0; }
};
struct WeightOf {
  const float* logits;
  int n;
  const float* weights;
  double operator()(float least) const {
    double sum = 0;
    V t = vset(least);
    for (int i = 0; i < n;) {
      V part = vzero();
      for (int end = std::min(n, i + 256); i < end; i += 16) part = vadd(part, vselect(vge(vload(logits + i), t), vload(weights + i), vzero()));
      sum += static_cast<double>(vsum(part));
    }
    return sum;
  }
  double of(int i) const { return static_cast<double>(weights[i]); }
};

constexpr int kFew = 256;  // tokens that are sorted

// The least set of the most likely tokens whose measure reaches `wanted`. highest: the row's greatest logit. space: for ids, reused.
template <class Measure>
Cut cut_at(const Measure& measure, double wanted, float highest, std::vector<int32_t>& space) {
  const float* logits = measure.logits;
  uint32_t above = order_of(highest) + 1, below = order_of(-3.4028235e38f);  // what is at least `above` is too little, what is at least `below` enough
  double before = 0;
  if (measure(value_of(below)) < wanted) return Cut{-3.4028235e38f, INT32_MAX};  // all that can be drawn
  CountOf count{logits, measure.n};
  while (above - below > 1 && count(value_of(below)) - (above > order_of(highest) ? 0 : count(value_of(above))) > kFew) {
    uint32_t middle = below + (above - below) / 2;
    double reached = measure(value_of(middle));
    if (reached >= wanted) {
      below = middle;
    } else {
      above = middle;
      before = reached;
    }
  }
  float low = value_of(below), high = above > order_of(highest) ? INFINITY : value_of(above);
  space.clear();
  V lowv = vset(low), highv = vset(high);
  for (int i = 0; i < measure.n; i += 16) {
    V v = vload(logits + i);
    uint32_t in = tobits(vge(v, lowv)) & tobits(vlt(v, highv));
    for (; in != 0; in &= in - 1) space.push_back(i + __builtin_ctz(in));
  }
  if (above - below > 1)  // else all are equal, and in the order of their ids
    std::sort(space.begin(), space.end(), [logits](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  for (int32_t i : space) {
    before += measure.of(i);
    if (before >= wanted) return Cut{logits[i], i};
  }
  return space.empty() ? Cut{low, INT32_MAX} : Cut{logits[space.back()], space.back()};  // rounding left the sum just under `wanted`
}

}  // namespace rf
