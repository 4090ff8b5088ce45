// Attention over pages, for tokens that decode and for chunks of prompts alike.
//
// The context is cut at fixed multiples of kSegment tokens. Within a segment a row has scores, their maximum, exponentials, their sum and the weighted
// values; segments are merged in order by their maxima and sums (Dao, "FlashAttention-2", section 3.1). Cuts and order are those of the row's own
// context: whether one thread walks all segments or several threads share them, and whatever other rows are in the tile, the bits are the same.
#include "attention.h"

#include <algorithm>

namespace rf {

#define RF_ROW(R) {{score_tile<R, 1, false>, score_tile<R, 1, true>}, {score_tile<R, 2, false>, score_tile<R, 2, true>}}
#define RF_VALUE(R) value_tile<R, wide_values<R>()>
#define RF_WIDTH(R) wide_values<R>()
#define RF_VALUE1(R) value_tile<R, 1>
#if defined(__AVX512F__)
#define RF_ALL(F) F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8)
#else
#define RF_ALL(F) F(1), F(2), F(3)
#endif
const AttentionTiles kAttentionTiles = {{RF_ALL(RF_ROW)}, {RF_ALL(RF_VALUE)}, {RF_ALL(RF_VALUE1)}, {RF_ALL(RF_WIDTH)}};

namespace {

constexpr int kAhead = 4;      // pages whose keys are fetched ahead, into the second cache: more of them are under way at once there
constexpr int kTileRows = 48;  // query rows that share the loads of a segment

int first_segment(int window, int position) {
  return window > 0 && position >= window ? (position - window + 1) / kSegment : 0;
}

// RMSNorm of one head, head_dim a multiple of 16.
void norm_head(float* v, const float* weight, int n, float eps) {
  V r = vset(norm_factor(v, n, eps));
  for (int i = 0; i < n; i += 16) vstore(v + i, vmul(vmul(vload(v + i), r), vload(weight + i)));
}

// What attention of a row and head has summed so far. Maxima are in units of log2, as scores are.
struct State {
  float highest, sum;
  float* values;  // [head_dim]
  bool any;
};

// Takes in one segment: (highest, sum, values).
void merge(State& s, float highest, float sum, const float* values, int head_dim) {
  if (!s.any) {
    s.highest = highest;
    s.sum = sum;
    std::memcpy(s.values, values, static_cast<size_t>(head_dim) * sizeof(float));
    s.any = true;
    return;
  }
  const V top = vset(highest > s.highest ? highest : s.highest);
  const V a = vexp2(vsub(vset(s.highest), top)), b = vexp2(vsub(vset(highest), top));
  for (int i = 0; i < head_dim; i += 16) vstore(s.values + i, vadd(vmul(vload(s.values + i), a), vmul(vload(values + i), b)));
  s.sum = vfirst(vadd(vmul(vset(s.sum), a), vmul(vset(sum), b)));
  s.highest = vfirst(top);
}

void finish(Engine& e, int token, int head, const State& s) {
  V r = vset(1.0f / s.sum);
  size_t at = static_cast<size_t>(token) * static_cast<size_t>(e.qp) + static_cast<size_t>(head) * static_cast<size_t>(e.d.head_dim);
  for (int i = 0; i < e.d.head_dim; i += 16) {
    V v = vmul(vload(s.values + i), r);
    if (e.d.int8)
      vstore(e.attention_f.data() + at + static_cast<size_t>(i), v);
    else
      astore(e.attention.data() + at + i, v);
  }
}

// Powers of a row's scores, less their maximum, in [low, high] of the segment's tokens from `base`; 0 elsewhere. Scores are in units of log2, so
// that a power of 2 is an exponential; with a cap (`softcap`) they are not yet. Returns (maximum, sum).
void soften(float* scores, Act* p, int pages, int base, int low, int high, float softcap, float* highest, float* sum) {
  const V nothing = vset(-3e38f);
  const auto hidden = [&](int i) { return base + i * kPage < low || base + i * kPage + kPage - 1 > high; };
  const auto visible = [&](int i) { return bits(tobits(first(high - base - i * kPage + 1)) & ~tobits(first(low - base - i * kPage))); };
  V top = nothing;
  for (int i = 0; i < pages; i++) {
    V s = vload(scores + i * kPage);
    if (softcap > 0.0f) s = vmul(vtanh(vdiv(s, vset(softcap))), vset(softcap * kLog2E));
    if (hidden(i)) s = vselect(visible(i), s, nothing);
    if (softcap > 0.0f) vstore(scores + i * kPage, s);
    top = vmax(top, s);
  }
  float m = vhighest(top);
  V mv = vset(m), total = vzero();
  for (int i = 0; i < pages; i++) {
    V x = vexp2(vsub(vload(scores + i * kPage), mv));
    if (hidden(i)) x = vselect(visible(i), x, vzero());
    total = vadd(total, x);
    astore(p + i * kPage, x);
  }
  *highest = m;
  *sum = vsum(total);
}

// The outputs of a segment: rows x head_dim.
void weigh(const Act* p, const bf16* const* values, int rows, int pages, int head_dim, float* out) {
  const bf16* shifted[kSegment / kPage];
  int tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int t = 0; t < tiles; t++) {
    int row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
    const Act* pr = p + row * kSegment;
    float* o = out + static_cast<size_t>(row) * static_cast<size_t>(head_dim);
    int d = 0, width = kAttentionTiles.width[count - 1] * 16;
    for (; d + width <= head_dim; d += width) {
      for (int i = 0; i < pages; i++) shifted[i] = values[i] + d * 2;
      kAttentionTiles.value[count - 1](pr, shifted, pages, head_dim, o + d);
    }
    for (; d < head_dim; d += 16) {
      for (int i = 0; i < pages; i++) shifted[i] = values[i] + d * 2;
      kAttentionTiles.value1[count - 1](pr, shifted, pages, head_dim, o + d);
    }
  }
}

// soon(i): keys of the page that is i pages after the first of these.
template <class Soon>
void score(const Act* q, const bf16* const* keys, const bf16* const* values, const Soon& soon, int rows, int pages, int head_dim, float* scores) {
  int tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (int t = 0; t < tiles; t++) {
    int row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
    const Act* qr = q + static_cast<size_t>(row) * static_cast<size_t>(head_dim);
    for (int i = 0; i < pages; i += 2) {
      const int more = pages - i > 1;
      const bf16* fetch[4];
      for (int c = 0; c <= more && t == 0; c++) {
        fetch[c] = soon(i + kAhead + c);
        fetch[1 + more + c] = values[i + c];
      }
      kAttentionTiles.score[count - 1][more][t == 0](qr, keys + i, fetch, head_dim, scores + row * kSegment + i * kPage);
    }
  }
}

// Normalised, rotated, scaled queries of an item's tokens: row t * groups + g is query head (head * groups + g) of token t.
void load_queries(Engine& e, const Layer& layer, const AttentionItem& item, float* one, Act* q) {
  int dim = e.d.head_dim;
  size_t ld = static_cast<size_t>(layer.qkv.panels) * kPanel;
  const V scale = vset(e.d.attention_softcap > 0.0f ? e.d.attention_scale : e.d.attention_scale * kLog2E);
  for (int t = 0; t < item.tokens; t++) {
    size_t token = static_cast<size_t>(item.token + t);
    const float* cosines = e.cosines.data() + (token * static_cast<size_t>(e.d.ropes) + static_cast<size_t>(layer.rope)) * static_cast<size_t>(dim);
    for (int g = 0; g < e.groups; g++) {
      std::memcpy(one, e.qkv.data() + token * ld + static_cast<size_t>(item.head * e.groups + g) * static_cast<size_t>(dim), static_cast<size_t>(dim) * sizeof(float));
      if (layer.q_norm != nullptr) norm_head(one, layer.q_norm, dim, e.d.norm_eps);
      rotate(one, dim, cosines, cosines + dim / 2);
      Act* to = q + static_cast<size_t>(t * e.groups + g) * static_cast<size_t>(dim);
      for (int i = 0; i < dim; i += 16) astore(to + i, vmul(vload(one + i), scale));
    }
  }
}

// Returns how many partial results there will be.
size_t plan_items(const Engine& e, const rf_step& step, Plan& plan) {
  const int window = plan.window;
  plan.items.clear();
  plan.splits.clear();
  const int tile = static_cast<int>(most_queries(e)) / e.groups;
  int64_t total = 0;
  for (int r = 0; r < step.rows; r++)
    if (step.row_starts[r + 1] - step.row_starts[r] == 1)
      total += step.context_lens[r] / kSegment + 1 - first_segment(window, step.context_lens[r] - 1);
  // Enough pieces that threads end together; results are the same for any cut.
  int64_t piece = std::max<int64_t>(1, total * e.d.kv_heads / (e.pool.threads() * 6));
  size_t results = 0;
  for (int r = 0; r < step.rows; r++) {
    int begin = step.row_starts[r], end = step.row_starts[r + 1];
    if (end - begin > 1) {
      int tiles = (end - begin + tile - 1) / tile;
      for (int i = tiles - 1; i >= 0; i--) {  // the longest contexts first
        int t = begin + i * tile, count = std::min(tile, end - t);
        int first = first_segment(window, step.positions[t]), last = step.positions[t + count - 1] / kSegment + 1;
        for (int h = 0; h < e.d.kv_heads; h++) plan.items.push_back({r, t, count, h, first, last, -1});
      }
      continue;
    }
    if (begin == end) continue;
    int position = step.positions[begin], first = first_segment(window, position), last = position / kSegment + 1;
    for (int h = 0; h < e.d.kv_heads; h++) {
      if (e.pool.threads() == 1 || last - first <= piece) {
        plan.items.push_back({r, begin, 1, h, first, last, -1});
        continue;
      }
      int split = static_cast<int>(plan.splits.size());
      int cuts = static_cast<int>((last - first + piece - 1) / piece);
      plan.splits.push_back({r, begin, h, first, last, cuts, results});
      results += static_cast<size_t>(last - first);
      for (int s = first; s < last; s += static_cast<int>(piece)) plan.items.push_back({r, begin, 1, h, s, std::min(last, s + static_cast<int>(piece)), split});
    }
  }
  if (plan.left_size < plan.splits.size()) {
    plan.left = std::make_unique<std::atomic<int>[]>(plan.splits.size() * 2);
    plan.left_size = plan.splits.size() * 2;
  }
  for (size_t i = 0; i < plan.splits.size(); i++) plan.left[i].store(plan.splits[i].items, std::memory_order_relaxed);
  return results;
}

}  // namespace

size_t most_queries(const Engine& e) { return static_cast<size_t>(std::max(1, kTileRows / e.groups) * e.groups); }

size_t split_result(const Engine& e) { return static_cast<size_t>(e.groups) * static_cast<size_t>(2 + e.d.head_dim); }

void plan_attention(Engine& e, const rf_step& step) {
  e.pieces.clear();
  e.chunks = false;
  for (int r = 0; r < step.rows; r++) {
    int begin = step.row_starts[r], end = step.row_starts[r + 1];
    if (end - begin > 1) e.chunks = true;
    for (int t = begin; t < end;) {
      int count = std::min(end - t, kPage - step.positions[t] % kPage);
      e.pieces.push_back(t);
      e.pieces.push_back(count);
      t += count;
    }
  }
  size_t results = 0;
  for (Plan& plan : e.plans) results = std::max(results, plan_items(e, step, plan));
  e.partial.fit(results * split_result(e));
}

void write_kv(Engine& e, const rf_step& step, int layer_index, int token, int tokens, int head, int thread) {
  const Layer& layer = e.layers[static_cast<size_t>(layer_index)];
  int dim = e.d.head_dim, row = e.row_of[static_cast<size_t>(token)];
  size_t ld = static_cast<size_t>(layer.qkv.panels) * kPanel;
  Engine::Local& mine = e.local[static_cast<size_t>(thread)];
  float* k = mine.f.fit(static_cast<size_t>(dim));
  bf16* narrowed = mine.narrowed.fit(static_cast<size_t>(dim));
  int slot = step.positions[token] % kPage;
  int page = step.page_tables[static_cast<size_t>(row) * static_cast<size_t>(step.table_width) + static_cast<size_t>(step.positions[token] / kPage)];
  bf16* block = e.kv_block(page, layer_index, head);
  // A page is cleared when it is begun: what is masked must be finite, for 0 * NaN is NaN.
  if (slot == 0) std::memset(block, 0, static_cast<size_t>(2 * kPage * dim) * sizeof(bf16));
  for (int i = 0; i < tokens; i++, slot++) {
    size_t t = static_cast<size_t>(token + i);
    const float* source = e.qkv.data() + t * ld + static_cast<size_t>(e.q_size);
    const float* cosines = e.cosines.data() + (t * static_cast<size_t>(e.d.ropes) + static_cast<size_t>(layer.rope)) * static_cast<size_t>(dim);
    std::memcpy(k, source + static_cast<size_t>(head) * static_cast<size_t>(dim), static_cast<size_t>(dim) * sizeof(float));
    if (layer.k_norm != nullptr) norm_head(k, layer.k_norm, dim, e.d.norm_eps);
    rotate(k, dim, cosines, cosines + dim / 2);
    const float* v = source + static_cast<size_t>(e.kv_size) + static_cast<size_t>(head) * static_cast<size_t>(dim);
    bf16* values = block + kPage * dim + static_cast<size_t>(slot / 2) * static_cast<size_t>(dim) * 2 + slot % 2;
    bf16* keys = block + slot * 2;
    for (int d = 0; d < dim; d++) narrowed[d] = narrow(k[d]);
    for (int d = 0; d < dim; d += 2) std::memcpy(keys + d * kPage, narrowed + d, 2 * sizeof(bf16));
    for (int d = 0; d < dim; d++) narrowed[d] = narrow(v[d]);
    for (int d = 0; d < dim; d++) values[d * 2] = narrowed[d];
  }
}

void attend(Engine& e, const rf_step& step, int layer_index, Plan& plan, const AttentionItem& item, int thread) {
  const Layer& layer = e.layers[static_cast<size_t>(layer_index)];
  Engine::Local& mine = e.local[static_cast<size_t>(thread)];
  const int dim = e.d.head_dim, rows = item.tokens * e.groups;
  const size_t size = static_cast<size_t>(rows) * static_cast<size_t>(dim);
  if (!e.chunks && item.last == step.positions[item.token] / kSegment + 1) write_kv(e, step, layer_index, item.token, 1, item.head, thread);
  Act* q = mine.q.fit(size);
  Act* p = mine.p.fit(static_cast<size_t>(rows) * kSegment);
  float* scores = mine.scores.fit(static_cast<size_t>(rows) * kSegment);
  float* out = mine.out.fit(size);
  float* sums = mine.state.fit(size + static_cast<size_t>(rows) * 2);
  State states[kMaxQueries];
  load_queries(e, layer, item, mine.f.fit(static_cast<size_t>(dim)), q);
  for (int r = 0; r < rows; r++) states[r] = {0, 0, sums + static_cast<size_t>(r) * static_cast<size_t>(dim), false};
  float* highest = sums + size;
  float* sum = highest + rows;

  const int* table = step.page_tables + static_cast<size_t>(item.row) * static_cast<size_t>(step.table_width);
  const int lowest = step.positions[item.token], top = lowest + item.tokens - 1;
  const int beyond = std::min(item.last * kSegment, top + 1 + kPage - 1) / kPage;  // the first page that is not this item's
  for (int s = item.first; s < item.last; s++) {
    int begin = s * kSegment, end = std::min(begin + kSegment, top + 1);
    if (layer.window > 0) begin = std::max(begin, lowest - layer.window + 1);
    int base = begin / kPage * kPage, pages = (end - base + kPage - 1) / kPage;
    const bf16 *keys[kSegment / kPage], *values[kSegment / kPage];
    for (int i = 0; i < pages; i++) {
      keys[i] = e.kv_block(table[base / kPage + i], layer_index, item.head);
      values[i] = keys[i] + kPage * dim;
    }
    const int from = base / kPage;
    auto soon = [&](int i) {  // beyond this item's pages: those of the head that follows, which is most often the next item
      int page = from + i;
      if (page < beyond) return static_cast<const bf16*>(e.kv_block(table[page], layer_index, item.head));
      page = std::min(beyond - 1, item.first * (kSegment / kPage) + page - beyond);
      return static_cast<const bf16*>(e.kv_block(table[page], layer_index, std::min(item.head + 1, e.d.kv_heads - 1)));
    };
    score(q, keys, values, soon, rows, pages, dim, scores);
    for (int r = 0; r < rows; r++) {
      int position = lowest + r / e.groups, low = layer.window > 0 ? std::max(0, position - layer.window + 1) : 0;
      soften(scores + r * kSegment, p + r * kSegment, pages, base, low, position, e.d.attention_softcap, highest + r, sum + r);
    }
    weigh(p, values, rows, pages, dim, out);
    for (int r = 0; r < rows; r++) {
      int position = lowest + r / e.groups;
      bool sees = position >= s * kSegment && (layer.window <= 0 || position - layer.window + 1 < (s + 1) * kSegment);
      const float* o = out + static_cast<size_t>(r) * static_cast<size_t>(dim);
      if (item.split >= 0) {
        const Split& split = plan.splits[static_cast<size_t>(item.split)];
        float* to = e.partial.data() + (split.partial + static_cast<size_t>(s - split.first)) * split_result(e) + static_cast<size_t>(r) * static_cast<size_t>(2 + dim);
        to[0] = highest[r];
        to[1] = sum[r];
        std::memcpy(to + 2, o, static_cast<size_t>(dim) * sizeof(float));
      } else if (sees) {
        merge(states[r], highest[r], sum[r], o, dim);
      }
    }
  }
  if (item.split >= 0) {
    std::atomic<int>& left = plan.left[static_cast<size_t>(item.split)];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;  // others are not done yet
    const Split& split = plan.splits[static_cast<size_t>(item.split)];
    left.store(split.items, std::memory_order_relaxed);  // for the next layer
    for (int s = split.first; s < split.last; s++)
      for (int r = 0; r < rows; r++) {
        const float* from = e.partial.data() + (split.partial + static_cast<size_t>(s - split.first)) * split_result(e) + static_cast<size_t>(r) * static_cast<size_t>(2 + dim);
        merge(states[r], from[0], from[1], from + 2, dim);
      }
  }
  for (int r = 0; r < rows; r++) finish(e, item.token + r / e.groups, item.head * e.groups + r % e.groups, states[r]);
}

}  // namespace rf
