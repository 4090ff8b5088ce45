// The next token of a row, from its logits. Order of application and definitions: fleet_runtime.engine.sampler, whose tokens these are.
#include <algorithm>
#include <cmath>

#include "model.h"
#include "select.h"

namespace rf {

namespace {

constexpr float kGreedyBelow = 1e-6f;
constexpr float kLowestLogprob = -9999.0f;  // JSON has no infinity
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

uint64_t mix64(uint64_t x) {  // the finalizer of SplitMix64
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint32_t mix32(uint32_t x) {  // the finalizer of MurmurHash3
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

uint32_t noise(uint64_t key, uint32_t id) { return mix32(mix32(id ^ static_cast<uint32_t>(key)) ^ static_cast<uint32_t>(key >> 32)); }

void change(float* logits, int vocab, const rf_sampling& s, int row) {
  if (s.bias_starts != nullptr)
    for (int i = s.bias_starts[row]; i < s.bias_starts[row + 1]; i++)
      if (s.bias_ids[i] >= 0 && s.bias_ids[i] < vocab) logits[s.bias_ids[i]] += s.bias_values[i];
  if (s.count_starts != nullptr) {
    float repetition = s.repetition != nullptr ? s.repetition[row] : 1.0f;
    float frequency = s.frequency != nullptr ? s.frequency[row] : 0.0f, presence = s.presence != nullptr ? s.presence[row] : 0.0f;
    for (int i = s.count_starts[row]; i < s.count_starts[row + 1]; i++) {
      if (s.count_ids[i] < 0 || s.count_ids[i] >= vocab) continue;
      float v = logits[s.count_ids[i]];
      if (repetition != 1.0f) v = v > 0.0f ? v / repetition : v * repetition;
      if (s.counts[i] > 0) {
        v -= frequency * static_cast<float>(s.counts[i]);
        v -= presence;
      }
      logits[s.count_ids[i]] = v;
    }
  }
  if (s.mask_rows != nullptr && s.mask_rows[row] >= 0) {
    const uint32_t* words = s.masks + static_cast<size_t>(s.mask_rows[row]) * static_cast<size_t>(s.mask_words);
    const V never = vset(-INFINITY);
    for (int i = 0; i < vocab; i += 16)
      vstore(logits + i, vselect(bits(i / 32 < s.mask_words ? (words[i / 32] >> (i % 32)) & 0xffffu : 0), vload(logits + i), never));
  }
}

// The greatest logit; NaN where one is NaN.
float greatest(const float* logits, int n) {
  V top = vset(-INFINITY);
  uint32_t ordered = 0xffffu;
  for (int i = 0; i < n; i += 16) {
    V v = vload(logits + i);
    ordered &= tobits(vge(v, v));
    top = vmax(top, v);
  }
  return ordered == 0xffffu ? vhighest(top) : NAN;
}

int first_of(const float* logits, int n, float value) {
  V t = vset(value);
  for (int i = 0; i < n; i += 16)
    if (uint32_t hit = tobits(vge(vload(logits + i), t))) return i + __builtin_ctz(hit);
  return 0;
}

// weights[i] = exp((logits[i] - highest) / temperature) above the cut, else 0; returns their sum.
double weigh(const float* logits, int n, float highest, float temperature, Cut cut, float* weights) {
  double sum = 0;
  const V h = vset(highest), t = vset(temperature), least = vset(cut.value);
  for (int i = 0; i < n;) {
    V part = vzero();
    for (int end = std::min(n, i + 256); i < end; i += 16) {
      V v = vload(logits + i);
      uint32_t in = tobits(vge(v, least));
      V w = in == 0 ? vzero() : vselect(bits(in), vexp(vdiv(vsub(v, h), t)), vzero());
      vstore(weights + i, w);
      if (in != 0 && cut.id != INT32_MAX && i + 15 > cut.id) {  // equal to the last one kept, with a greater id
        for (int j = 0; j < 16; j++)
          if (!cut.has(logits[i + j], i + j)) weights[i + j] = 0.0f;
        w = vload(weights + i);
      }
      part = vadd(part, w);
    }
    sum += static_cast<double>(vsum(part));
  }
  return sum;
}

// argmax of logit / temperature + gumbel over the tokens above the cut. A race: the least E / weight with E = -log(u) wins, and E >= 1 - u, which
// costs no logarithm; few tokens pass that test, and only theirs are taken.
int draw(const float* logits, int n, float highest, float temperature, double least_score, Cut cut, uint64_t seed, int position) {
  const uint64_t key = mix64(mix64(seed + kGolden) ^ (static_cast<uint64_t>(position) * kGolden));
  int best = -1;
  double best_score = -INFINITY;
  float limit = INFINITY;  // the winner's E / weight so far, and a little more
  auto consider = [&](int i) {
    if (!cut.has(logits[i], i)) return;
    double score = (static_cast<double>(logits[i]) - static_cast<double>(highest)) / static_cast<double>(temperature);
    if (score < least_score) return;
    double u = (static_cast<double>(noise(key, static_cast<uint32_t>(i))) + 0.5) * 0x1p-32;
    score -= std::log(-std::log(u));
    if (score > best_score || (score == best_score && i < best)) {
      best = i;
      best_score = score;
      limit = static_cast<float>(std::exp(-score)) * 1.0001f;
    }
  };
  consider(first_of(logits, n, highest));
  const V h = vset(highest), t = vset(temperature), least = vset(cut.value);
  alignas(64) uint32_t hash[16];
  alignas(64) float rest[16];
  for (int i = 0; i < n; i += 16) {
    V v = vload(logits + i);
    uint32_t in = tobits(vge(v, least));
    if (in == 0) continue;
    for (uint32_t j = 0; j < 16; j++) hash[j] = noise(key, static_cast<uint32_t>(i) + j);
    for (int j = 0; j < 16; j++) rest[j] = (static_cast<float>(~hash[j]) + 0.5f) * 0x1p-32f;
    V w = vexp(vdiv(vsub(v, h), t));
    in &= tobits(vlt(vload(rest), vmul(w, vset(limit))));
    for (; in != 0; in &= in - 1) consider(i + __builtin_ctz(in));
  }
  return best;
}

}  // namespace

double log_sum(const float* logits, int n, float highest) {
  double sum = 0;
  const V h = vset(highest), never = vset(-3.4028235e38f);
  for (int i = 0; i < n;) {
    V part = vzero();
    for (int end = std::min(n, i + 256); i < end; i += 16) {
      V v = vload(logits + i);
      part = vadd(part, vselect(vge(v, never), vexp(vsub(v, h)), vzero()));
    }
    sum += static_cast<double>(vsum(part));
  }
  return static_cast<double>(highest) + std::log(sum);
}

void close_row(float* logits, int vocab) {
  for (int i = vocab; i < padded(vocab); i++) logits[i] = -INFINITY;
}

bool top_logprobs(float* logits, int vocab, int chosen, int k, float* chosen_out, int32_t* ids, float* values, std::vector<int32_t>& space) {
  close_row(logits, vocab);
  const int n = padded(vocab);
  float highest = greatest(logits, n);
  if (!std::isfinite(highest) || chosen < 0 || chosen >= vocab) {
    *chosen_out = 0.0f;
    std::fill(ids, ids + k, 0);
    std::fill(values, values + k, 0.0f);
    return false;
  }
  double total = log_sum(logits, n, highest);
  *chosen_out = std::max(static_cast<float>(static_cast<double>(logits[chosen]) - total), kLowestLogprob);
  if (k == 0) return true;
  Cut cut = cut_at(CountOf{logits, n}, k, highest, space);
  space.clear();
  V least = vset(cut.value);
  for (int i = 0; i < n; i += 16)
    for (uint32_t in = tobits(vge(vload(logits + i), least)); in != 0; in &= in - 1)
      if (int id = i + __builtin_ctz(in); cut.has(logits[id], id)) space.push_back(id);
  std::sort(space.begin(), space.end(), [logits](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  int found = static_cast<int>(space.size());
  for (int id = 0; found < k && id < vocab; id++)  // fewer than k can be drawn: the others follow, in the order of their ids
    if (!(logits[id] >= -3.4028235e38f)) {
      space.push_back(id);
      found++;
    }
  for (int i = 0; i < k; i++) {
    ids[i] = space[static_cast<size_t>(i)];
    values[i] = std::max(static_cast<float>(static_cast<double>(logits[ids[i]]) - total), kLowestLogprob);
  }
  return true;
}

void sample_row(Engine& e, const rf_sampling& s, int row, int thread) {
  Engine::Local& mine = e.local[static_cast<size_t>(thread)];
  const size_t at = static_cast<size_t>(row);
  const int vocab = e.d.vocab, n = padded(vocab), step_row = e.drawn.row[at];
  float* logits = e.logits.data() + at * static_cast<size_t>(n);
  int k = s.logprobs != nullptr ? s.logprobs[row] : -1;
  int token = 0;
  close_row(logits, vocab);
  if (!(greatest(logits, n) < INFINITY)) __atomic_store_n(s.failed + step_row, 1, __ATOMIC_RELAXED);  // before a mask can hide it
  if (!s.failed[step_row]) {
    change(logits, vocab, s, row);
    close_row(logits, vocab);
    float highest = greatest(logits, n), temperature = s.temperature[row];
    if (!std::isfinite(highest)) {
      __atomic_store_n(s.failed + step_row, 1, __ATOMIC_RELAXED);
    } else if (!(temperature >= kGreedyBelow)) {  // NaN, too
      token = first_of(logits, n, highest);
    } else {
      Cut cut{-3.4028235e38f, INT32_MAX};
      if (s.top_k[row] > 0 && s.top_k[row] < vocab) cut = cut_at(CountOf{logits, n}, s.top_k[row], highest, mine.indices);
      if (s.top_p[row] < 1.0f) {
        float* weights = mine.scores.fit(static_cast<size_t>(n));
        double sum = weigh(logits, n, highest, temperature, cut, weights);
        cut = tighter(cut, cut_at(WeightOf{logits, n, weights}, static_cast<double>(s.top_p[row]) * sum, highest, mine.indices));
      }
      double least = s.min_p[row] > 0.0f ? std::log(std::min(static_cast<double>(s.min_p[row]), 1.0)) : -INFINITY;
      token = draw(logits, n, highest, temperature, least, cut, s.seed[row], e.drawn.position[at]);
    }
  }
  const bool failed = s.failed[step_row] != 0;
  s.tokens[step_row] = failed ? 0 : token;
  e.relay[static_cast<size_t>(e.drawn.slot[at])] = failed ? INT32_MIN : token;
  if (k >= 0 && !failed) top_logprobs(logits, vocab, token, k, s.chosen + row, s.top_ids + s.top_starts[row], s.top_values + s.top_starts[row], mine.indices);
}

}  // namespace rf
