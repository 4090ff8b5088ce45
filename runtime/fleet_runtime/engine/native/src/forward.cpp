// A step: one parallel region from token ids to drawn tokens.
#include <algorithm>

#include "model.h"

namespace rf {

namespace {

constexpr int kAlone = 8;          // rows up to which each thread prepares a matrix's input for itself, which saves a meeting
constexpr int kPlacesAtOnce = 32;  // prompt logprobs: rows of logits in memory

// The step's tokens with the relay's in place, and what is asked of which row. False: a page, a relay slot or a row's last token is not there.
bool take_in(Engine& e, const rf_step& s) {
  e.ids.resize(static_cast<size_t>(s.tokens));
  e.row_of.resize(static_cast<size_t>(s.tokens));
  e.drawn.row.clear();
  for (int r = 0; r < s.rows; r++) {
    int begin = s.row_starts[r], end = s.row_starts[r + 1];
    s.failed[r] = 0;
    for (int t = begin; t < end; t++) {
      int id = s.token_ids[t];
      if (id < 0) id = -1 - id < static_cast<int>(e.relay.size()) && id != INT32_MIN ? e.relay[static_cast<size_t>(-1 - id)] : INT32_MIN;
      e.ids[static_cast<size_t>(t)] = id;
      e.row_of[static_cast<size_t>(t)] = r;
      if (s.positions[t] < 0 || s.positions[t] >= s.context_lens[r]) return false;
    }
    int pages = (s.context_lens[r] + kPage - 1) / kPage;
    if (pages > s.table_width) return false;
    const int32_t* table = s.page_tables + static_cast<size_t>(r) * static_cast<size_t>(s.table_width);
    for (int i = 0; i < pages; i++)
      if (table[i] < 0 || table[i] >= e.pages) return false;
    if (!s.sample[r]) continue;
    if (begin >= end || s.slots[r] < 0 || s.slots[r] >= e.d.slots) return false;
    e.drawn.row.push_back(r);
  }
  e.drawn.token.clear();
  e.drawn.position.clear();
  e.drawn.slot.clear();
  for (int r : e.drawn.row) {
    e.drawn.token.push_back(s.row_starts[r + 1] - 1);
    e.drawn.position.push_back(s.context_lens[r]);
    e.drawn.slot.push_back(s.slots[r]);
  }
  return true;
}

// One row of the packed embedding. An id outside the vocabulary is NaN: its row fails, and whatever reads its keys and values.
void embed(const Engine& e, int id, float* out) {
  const Matrix& m = e.embedding;
  if (id < 0 || id >= e.d.vocab) {
    for (int k = 0; k < e.d.hidden; k++) out[k] = NAN;
    return;
  }
  const uint8_t* panel = m.data + static_cast<size_t>(id / kPanel) * m.panel_bytes();
  size_t lane = static_cast<size_t>(id % kPanel);
  if (m.int8) {
    float scale = m.scale[id] * e.d.embedding_scale;
    for (int k = 0; k < e.d.hidden; k++) {
      int8_t w = static_cast<int8_t>(panel[static_cast<size_t>(k / 4) * 128 + lane * 4 + static_cast<size_t>(k % 4)] - kWeightBias);
      out[k] = static_cast<float>(w) * scale;
    }
  } else {
    const bf16* w = reinterpret_cast<const bf16*>(panel);
    for (int k = 0; k < e.d.hidden; k++) out[k] = widen(w[static_cast<size_t>(k / 2) * 64 + lane * 2 + static_cast<size_t>(k % 2)]) * e.d.embedding_scale;
  }
}

void begin_token(Engine& e, const rf_step& s, int t) {
  float* x = e.x.data() + static_cast<size_t>(t) * static_cast<size_t>(e.hp);
  embed(e, e.ids[static_cast<size_t>(t)], x);
  std::fill(x + e.d.hidden, x + e.hp, 0.0f);  // a row of an earlier step that was not finite left its NaN here, too
  int half = e.d.head_dim / 2;
  for (int r = 0; r < e.d.ropes; r++) {
    float* to = e.cosines.data() + (static_cast<size_t>(t) * static_cast<size_t>(e.d.ropes) + static_cast<size_t>(r)) * static_cast<size_t>(e.d.head_dim);
    for (int d = 0; d < half; d++) {
      float angle = static_cast<float>(s.positions[t]) * e.inv_freq[static_cast<size_t>(r * half + d)];
      to[d] = std::cos(angle) * e.rope_factor[static_cast<size_t>(r)];
      to[half + d] = std::sin(angle) * e.rope_factor[static_cast<size_t>(r)];
    }
  }
}

// One thread's way through a step.
class Step {
 public:
  Step(Engine& e, const rf_step& s, const rf_sampling* sampling, int thread) : e_(e), s_(s), sampling_(sampling), turn_(e.pool, thread), mine_(e.local[static_cast<size_t>(thread)]) {}

  void run() {
    turn_.share(kEmbed, s_.tokens, 4, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) begin_token(e_, s_, static_cast<int>(t));
    });
    for (int l = 0; l < e_.d.layers; l++) layer(l);
    check(e_.x.data(), static_cast<size_t>(e_.hp), live_, [&](int64_t i) { return e_.wanted[static_cast<size_t>(i)]; });
    pool_hidden();
    prompt_logprobs();
    head(e_.drawn.token.data(), static_cast<int>(e_.drawn.token.size()), e_.logits.data());
    if (sampling_ != nullptr)
      turn_.share(kSample, static_cast<int64_t>(e_.drawn.row.size()), 1, [&](int64_t begin, int64_t) { sample_row(e_, *sampling_, static_cast<int>(begin), turn_.thread()); });
  }

 private:
  // Rows in the form that a matrix takes. make(row, Act*, int8*, Group*) fills one of them.
  template <class Make>
  struct Input {
    Step& step;
    int rows, ld;
    const Make& make;
    Rows out;
    bool ready = false;

    const Rows& get() {  // lazily: only a thread that got a piece of the work knows that the source is still there
      if (!ready) fill(0, rows);
      ready = true;
      return out;
    }
    void fill(int begin, int end) {
      for (int r = begin; r < end; r++) {
        size_t at = static_cast<size_t>(r) * static_cast<size_t>(ld);
        make(r, const_cast<Act*>(out.act) + at, const_cast<int8_t*>(out.q) + at, const_cast<Group*>(out.group) + static_cast<size_t>(r) * static_cast<size_t>(out.groups));
      }
    }
  };

  // Multiplies rows with w; `done` as in multiply().
  template <class Make, class Done>
  void linear(Kind kind, const Matrix& w, int rows, const Make& make, const Done& done) {
    if (rows == 0) return;
    Input<Make> input{*this, rows, w.kp, make, {}};
    size_t size = static_cast<size_t>(rows) * static_cast<size_t>(w.kp), groups = static_cast<size_t>(w.groups());
    bool alone = rows <= kAlone || e_.pool.threads() == 1;
    input.out.ld = static_cast<size_t>(w.kp);
    input.out.groups = static_cast<int>(groups);
    if (w.int8) {
      input.out.q = alone ? mine_.quant.fit(size) : e_.quant.data();
      input.out.group = alone ? mine_.quant_groups.fit(static_cast<size_t>(rows) * groups) : e_.quant_groups.data();
    } else {
      input.out.act = alone ? mine_.act.fit(size) : e_.act.data();
    }
    if (!alone) {
      turn_.share(kInput, rows, 4, [&](int64_t begin, int64_t end) { input.fill(static_cast<int>(begin), static_cast<int>(end)); });
      input.ready = true;
    }
    multiply_shared(kind, w, rows, [&]() -> const Rows& { return input.get(); }, done);
  }

  template <class Get, class Done>
  void multiply_shared(Kind kind, const Matrix& w, int rows, const Get& get, const Done& done) {
    int piece = std::max(1, w.panels / (e_.pool.threads() * 12));
    if (rows == 1) piece = (piece + 1) / 2 * 2;
    turn_.share(kind, w.panels, piece, [&](int64_t begin, int64_t end) { multiply(w, static_cast<int>(begin), static_cast<int>(end), get(), rows, done); });
  }

  auto normed(const float* source, const float* weight) {
    return [this, source, weight](int r, Act* act, int8_t* q, Group* groups) {
      const float* x = source + static_cast<size_t>(r) * static_cast<size_t>(e_.hp);
      make_normed(x, weight, act, q, groups);
    };
  }

  void make_normed(const float* x, const float* weight, Act* act, int8_t* q, Group* groups) {
    if (!e_.d.int8) {
      norm_row_act(x, weight, e_.d.hidden, e_.d.norm_eps, act);
      return;
    }
    float* f = mine_.f.fit(static_cast<size_t>(e_.hp));
    norm_row(x, weight, e_.d.hidden, e_.d.norm_eps, f);
    quantise_row(f, e_.d.hidden, kGroup, q, groups);
  }

  // A branch's matrix (o or down), whose input is already Act, or float to be quantised; its result is added to the residual stream.
  void branch(Kind kind, const Matrix& w, const Act* act, const float* f, const float* post_norm) {
    const int rows = live_;
    float* to = post_norm != nullptr ? e_.branch.data() : e_.x.data();
    const size_t ld = static_cast<size_t>(e_.hp);
    auto done = [&](const float* tile, int count, int row, int panel) {
      for (int m = 0; m < count; m++)
        for (int c = 0; c < 2; c++) {
          V v = vload(tile + m * 32 + c * 16);
          if (w.bias != nullptr) v = vadd(v, vload(w.bias + panel * 32 + c * 16));
          float* y = to + static_cast<size_t>(row + m) * ld + static_cast<size_t>(panel * 32 + c * 16);
          vstore(y, post_norm != nullptr ? v : vadd(vload(y), v));
        }
    };
    if (w.int8) {
      linear(kind, w, rows, [&](int r, Act*, int8_t* q, Group* groups) { quantise_row(f + static_cast<size_t>(r) * static_cast<size_t>(w.kp), w.k, kGroup, q, groups); }, done);
    } else {
      Rows x;
      x.act = act;
      x.ld = static_cast<size_t>(w.kp);
      multiply_shared(kind, w, rows, [&]() -> const Rows& { return x; }, done);
    }
    if (post_norm == nullptr) return;
    turn_.share(kNorm, rows, 4, [&](int64_t begin, int64_t end) {
      float* n = mine_.f.fit(ld);
      for (int64_t r = begin; r < end; r++) {
        norm_row(e_.branch.data() + static_cast<size_t>(r) * ld, post_norm, e_.d.hidden, e_.d.norm_eps, n);
        float* y = e_.x.data() + static_cast<size_t>(r) * ld;
        for (int i = 0; i < e_.hp; i += 16) vstore(y + i, vadd(vload(y + i), vload(n + i)));
      }
    });
  }

  void layer(int l) {
    Layer& w = e_.layers[static_cast<size_t>(l)];
    const int rows = s_.tokens;
    const size_t ld = static_cast<size_t>(w.qkv.panels) * kPanel;
    linear(kQkv, w.qkv, rows, normed(e_.x.data(), w.input_norm), [&](const float* tile, int count, int row, int panel) {
      for (int m = 0; m < count; m++)
        for (int c = 0; c < 2; c++) {
          V v = vload(tile + m * 32 + c * 16);
          if (w.qkv.bias != nullptr) v = vadd(v, vload(w.qkv.bias + panel * 32 + c * 16));
          vstore(e_.qkv.data() + static_cast<size_t>(row + m) * ld + static_cast<size_t>(panel * 32 + c * 16), v);
        }
    });
    if (e_.chunks) {
      const int64_t pieces = static_cast<int64_t>(e_.pieces.size()) / 2;
      turn_.share(kWriteKv, pieces * e_.d.kv_heads, 1, [&](int64_t i, int64_t) {
        const int32_t* piece = e_.pieces.data() + i / e_.d.kv_heads * 2;
        write_kv(e_, s_, l, piece[0], piece[1], static_cast<int>(i % e_.d.kv_heads), turn_.thread());
      });
    }
    const bool fewer = l == e_.d.layers - 1 && e_.wanted.size() < static_cast<size_t>(rows);
    Plan& plan = e_.plans[static_cast<size_t>(w.plan)];
    turn_.share(kAttention, static_cast<int64_t>(plan.items.size()), 1, [&](int64_t i, int64_t) {
      const AttentionItem& item = plan.items[static_cast<size_t>(i)];
      const int32_t* at = e_.at.data() + item.token;
      if (!fewer || std::any_of(at, at + item.tokens, [](int32_t place) { return place >= 0; })) attend(e_, s_, l, plan, item, turn_.thread());
    });
    if (fewer) leave_out(ld);
    if (live_ == 0) return;
    branch(kOut, w.o, e_.attention.data(), e_.attention_f.data(), w.attention_post_norm);
    mlp(w, live_);
    branch(kDown, w.down, e_.hidden.data(), e_.hidden_f.data(), w.mlp_post_norm);
  }

  void mlp(const Layer& w, int rows) {
    linear(kGateUp, w.gate_up, rows, normed(e_.x.data(), w.mlp_norm), [&](const float* tile, int count, int row, int panel) {
      for (int m = 0; m < count; m++) {
        V gate = vload(tile + m * 32), up = vload(tile + m * 32 + 16);
        if (w.gate_up.bias != nullptr) {
          gate = vadd(gate, vload(w.gate_up.bias + panel * 32));
          up = vadd(up, vload(w.gate_up.bias + panel * 32 + 16));
        }
        V v = vmul(e_.d.gelu ? vgelu(gate) : vsilu(gate), up);
        size_t at = static_cast<size_t>(row + m) * static_cast<size_t>(e_.ip) + static_cast<size_t>(panel) * 16;
        if (e_.d.int8)
          vstore(e_.hidden_f.data() + at, v);
        else
          astore(e_.hidden.data() + at, v);
      }
    });
  }

  // In the last layer, when keys and values are written: only the tokens that something is made of go on. Whoever reads what the others wrote
  // must not find a number that is not finite and a row that has not failed.
  void leave_out(size_t qkv_ld) {
    const auto all = [](int64_t t) { return t; };
    check(e_.x.data(), static_cast<size_t>(e_.hp), s_.tokens, all);
    check(e_.qkv.data(), qkv_ld, s_.tokens, all);
    turn_.share(kOther, 1, 1, [&](int64_t, int64_t) {
      const auto move = [&](auto* rows, int width) {
        for (size_t i = 0; i < e_.wanted.size(); i++)
          std::memmove(rows + i * static_cast<size_t>(width), rows + static_cast<size_t>(e_.wanted[i]) * static_cast<size_t>(width), static_cast<size_t>(width) * sizeof(*rows));
      };
      move(e_.x.data(), e_.hp);
      if (e_.d.int8)
        move(e_.attention_f.data(), e_.qp);
      else
        move(e_.attention.data(), e_.qp);
    });
    live_ = static_cast<int>(e_.wanted.size());
  }

  // Tokens token(i) that computed a row that is not finite have failed.
  template <class Token>
  void check(const float* data, size_t ld, int count, const Token& token) {
    turn_.share(kOther, count, 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        if (!(not_finite(data + static_cast<size_t>(i) * ld, static_cast<int>(ld)) == 0.0f))
          __atomic_store_n(s_.failed + e_.row_of[static_cast<size_t>(token(i))], 1, __ATOMIC_RELAXED);
    });
  }

  void pool_hidden() {
    if (s_.pool == nullptr) return;
    turn_.share(kOther, s_.rows, 1, [&](int64_t r, int64_t) {
      if (s_.pool[r] == RF_POOL_NONE) return;
      int before = 0;
      for (int64_t i = 0; i < r; i++) before += s_.pool[i] != RF_POOL_NONE;
      float* out = s_.pooled + static_cast<size_t>(before) * static_cast<size_t>(e_.d.hidden);
      float* f = mine_.f.fit(static_cast<size_t>(e_.hp));
      int end = s_.row_starts[r + 1], begin = s_.pool[r] == RF_POOL_LAST ? std::max(s_.row_starts[r], end - 1) : s_.row_starts[r];
      std::memset(out, 0, static_cast<size_t>(e_.d.hidden) * sizeof(float));
      for (int t = begin; t < end; t++) {
        norm_row(hidden_of(t), e_.final_norm, e_.d.hidden, e_.d.norm_eps, f);
        for (int i = 0; i < e_.d.hidden; i++) out[i] += f[i];
      }
      for (int i = 0; i < e_.d.hidden; i++)
        if (!std::isfinite(out[i])) __atomic_store_n(s_.failed + r, 1, __ATOMIC_RELAXED);
    });
  }

  // A token's row of the residual stream after all layers.
  const float* hidden_of(int token) const { return e_.x.data() + static_cast<size_t>(e_.at[static_cast<size_t>(token)]) * static_cast<size_t>(e_.hp); }

  // Logits of the given tokens of the step: [rows][padded vocabulary].
  void head(const int32_t* tokens, int rows, float* logits) {
    const size_t ld = static_cast<size_t>(e_.head.panels) * kPanel;
    const float cap = e_.d.logit_softcap;
    auto make = [&](int r, Act* act, int8_t* q, Group* groups) {
      make_normed(hidden_of(tokens[r]), e_.final_norm, act, q, groups);
    };
    linear(kHead, e_.head, rows, make, [&](const float* tile, int count, int row, int panel) {
      for (int m = 0; m < count; m++)
        for (int c = 0; c < 2; c++) {
          V v = vload(tile + m * 32 + c * 16);
          if (cap > 0.0f) v = vmul(vtanh(vdiv(v, vset(cap))), vset(cap));
          vstore(logits + static_cast<size_t>(row + m) * ld + static_cast<size_t>(panel * 32 + c * 16), v);
        }
    });
  }

  void prompt_logprobs() {
    if (s_.places == 0) return;
    const size_t ld = static_cast<size_t>(e_.head.panels) * kPanel;
    for (int begin = 0; begin < s_.places; begin += kPlacesAtOnce) {
      int count = std::min(kPlacesAtOnce, s_.places - begin);
      head(e_.place_tokens.data() + begin, count, e_.place_logits.data());
      turn_.share(kSample, count, 1, [&](int64_t i, int64_t) {
        int place = begin + static_cast<int>(i), token = e_.place_tokens[static_cast<size_t>(place)], row = e_.row_of[static_cast<size_t>(token)], k = s_.prompt_logprobs[row];
        int64_t top = s_.top_starts[row] + (place - s_.place_starts[row]) * k;
        bool good = top_logprobs(e_.place_logits.data() + static_cast<size_t>(i) * ld, e_.d.vocab, s_.next_ids[token], k, s_.chosen + place, s_.top_ids + top, s_.top_values + top, mine_.indices);
        if (!good) __atomic_store_n(s_.failed + row, 1, __ATOMIC_RELAXED);
      });
    }
  }

  Engine& e_;
  const rf_step& s_;
  const rf_sampling* sampling_;
  Turn turn_;
  Engine::Local& mine_;
  int live_ = s_.tokens;  // rows of the residual stream that are still computed
};

// Which tokens go through the last layer to its end. All of them, where tokens write their own keys and values in attention.
void choose_wanted(Engine& e, const rf_step& s) {
  e.at.assign(static_cast<size_t>(s.tokens), e.chunks ? -1 : 0);
  for (int32_t t : e.drawn.token) e.at[static_cast<size_t>(t)] = 0;
  for (int32_t t : e.place_tokens) e.at[static_cast<size_t>(t)] = 0;
  for (int r = 0; s.pool != nullptr && r < s.rows; r++) {
    int end = s.row_starts[r + 1], begin = s.pool[r] == RF_POOL_SUM ? s.row_starts[r] : std::max(s.row_starts[r], end - 1);
    for (int t = begin; s.pool[r] != RF_POOL_NONE && t < end; t++) e.at[static_cast<size_t>(t)] = 0;
  }
  e.wanted.clear();
  for (int t = 0; t < s.tokens; t++) {
    if (e.at[static_cast<size_t>(t)] < 0) continue;
    e.at[static_cast<size_t>(t)] = static_cast<int32_t>(e.wanted.size());
    e.wanted.push_back(t);
  }
}

void fit(Engine& e, const rf_step& s) {
  size_t tokens = static_cast<size_t>(s.tokens), hp = static_cast<size_t>(e.hp), qp = static_cast<size_t>(e.qp), ip = static_cast<size_t>(e.ip);
  size_t vocab = static_cast<size_t>(e.head.panels) * kPanel, widest = std::max(hp, std::max(qp, ip));
  size_t rows = std::max(tokens, static_cast<size_t>(kPlacesAtOnce));
  e.x.fit(tokens * hp);
  e.qkv.fit(tokens * static_cast<size_t>(e.layers[0].qkv.panels) * kPanel);
  e.cosines.fit(tokens * static_cast<size_t>(e.d.ropes) * static_cast<size_t>(e.d.head_dim));
  if (e.d.post_norms) e.branch.fit(tokens * hp);
  if (e.d.int8) {
    e.attention_f.fit(tokens * qp);
    e.hidden_f.fit(tokens * ip);
    e.quant.fit(rows * widest);
    e.quant_groups.fit(rows * (widest / kGroup + 1));
  } else {
    e.attention.fit(tokens * qp);
    e.hidden.fit(tokens * ip);
    e.act.fit(rows * hp);
  }
  e.logits.fit(e.drawn.row.size() * vocab);
  e.place_tokens.clear();
  if (s.places > 0) {
    e.place_logits.fit(static_cast<size_t>(kPlacesAtOnce) * vocab);
    for (int r = 0; r < s.rows; r++)
      for (int t = s.row_starts[r]; s.prompt_logprobs[r] >= 0 && t < s.row_starts[r + 1]; t++)
        if (s.next_ids[t] >= 0) e.place_tokens.push_back(t);
  }
}

// What each thread needs for itself, so that none allocates inside the region: an exception there would end the process.
void fit_local(Engine& e, const rf_step& s) {
  size_t hp = static_cast<size_t>(e.hp), dim = static_cast<size_t>(e.d.head_dim), queries = most_queries(e);
  size_t vocab = static_cast<size_t>(e.head.panels) * kPanel, widest = std::max({hp, static_cast<size_t>(e.qp), static_cast<size_t>(e.ip)});
  size_t rows = std::max(static_cast<size_t>(s.tokens), static_cast<size_t>(kPlacesAtOnce));
  if (e.pool.threads() > 1) rows = std::min(rows, static_cast<size_t>(kAlone));
  for (Engine::Local& mine : e.local) {
    if (e.d.int8) {
      mine.quant.fit(rows * widest);
      mine.quant_groups.fit(rows * (widest / kGroup + 1));
    } else {
      mine.act.fit(rows * hp);
    }
    mine.f.fit(std::max(hp, dim));
    mine.narrowed.fit(dim);
    mine.q.fit(queries * dim);
    mine.p.fit(queries * kSegment);
    mine.scores.fit(std::max(queries * kSegment, vocab));
    mine.out.fit(queries * dim);
    mine.state.fit(queries * (dim + 2));
    mine.indices.reserve(vocab);
  }
}

}  // namespace

int forward(Engine& e, const rf_step& step, const rf_sampling* sampling) {
  e.drawn.pending = false;
  if (!take_in(e, step)) return RF_BAD_PAGE;
  fit(e, step);
  fit_local(e, step);
  plan_attention(e, step);
  choose_wanted(e, step);
  size_t phases = 16 + static_cast<size_t>(e.d.layers) * 12 + static_cast<size_t>(step.places / kPlacesAtOnce + 1) * 3;
  e.pool.run(phases, [&](int thread) { Step(e, step, sampling, thread).run(); });
  e.drawn.pending = sampling == nullptr;
  return RF_OK;
}

}  // namespace rf
