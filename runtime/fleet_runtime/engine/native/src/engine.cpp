// Making and ending an engine, packing weights, pages; the exported functions.
#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "model.h"

namespace rf {

Mapping::Mapping(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  if (bytes >= (4u << 20)) madvise(p, bytes, MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(p);
}
Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, bytes_);
}
Mapping::Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}
void Mapping::drop() {
  if (data_ != nullptr) madvise(data_, bytes_, MADV_DONTNEED);
}

uint8_t* Arena::bytes(size_t count) {
  constexpr size_t kBlock = size_t{32} << 20;
  count = (count + 63) / 64 * 64;
  if (blocks_.empty() || used_ + count > blocks_.back().size()) {
    blocks_.emplace_back(std::max(kBlock, count));
    used_ = 0;
  }
  uint8_t* p = blocks_.back().data() + used_;
  used_ += count;
  return p;
}

namespace {

Matrix make_matrix(Arena& arena, int n, int k, bool int8) {
  Matrix m;
  m.n = n;
  m.k = k;
  m.panels = padded(n) / kPanel;
  m.kp = padded(k);
  m.int8 = int8;
  m.data = arena.take<uint8_t>(m.panel_bytes() * static_cast<size_t>(m.panels));
  if (int8) m.scale = arena.take<float>(static_cast<size_t>(m.panels) * kPanel);
  return m;
}

float number(const void* source, int dtype, size_t i) {
  return dtype == RF_BF16 ? widen(static_cast<const bf16*>(source)[i]) : static_cast<const float*>(source)[i];
}

// Puts one checkpoint row at output `n` of a matrix.
void pack_row(Matrix& m, int n, const void* source, int dtype, size_t begin) {
  uint8_t* panel = m.data + static_cast<size_t>(n / kPanel) * m.panel_bytes();
  const size_t lane = static_cast<size_t>(n % kPanel), width = static_cast<size_t>(m.k);
  if (!m.int8) {
    bf16* w = reinterpret_cast<bf16*>(panel) + lane * 2;
    if (dtype == RF_BF16) {
      const bf16* from = static_cast<const bf16*>(source) + begin;
      for (size_t k = 0; k < width; k++) w[k / 2 * 64 + k % 2] = from[k];
    } else {
      const float* from = static_cast<const float*>(source) + begin;
      for (size_t k = 0; k < width; k++) w[k / 2 * 64 + k % 2] = narrow(from[k]);
    }
    return;
  }
  float top = 0.0f;
  for (size_t k = 0; k < width; k++) top = std::max(top, std::fabs(number(source, dtype, begin + k)));
  float inverse = top > 0.0f ? 127.0f / top : 0.0f;
  m.scale[n] = top / 127.0f;
  uint8_t* w = panel + lane * 4;
  for (size_t k = 0; k < width; k++) w[k / 4 * 128 + k % 4] = static_cast<uint8_t>(std::lrintf(number(source, dtype, begin + k) * inverse) + kWeightBias);
}

// `place(row)`: the output that row of the checkpoint becomes.
template <class Place>
void pack(Engine& e, Matrix& m, const void* source, int dtype, int rows, const Place& place) {
  constexpr int kRows = 64;
  e.pool.run(1, [&](int thread) {
    Turn(e.pool, thread).share(kOther, rows, kRows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) pack_row(m, place(static_cast<int>(r)), source, dtype, static_cast<size_t>(r) * static_cast<size_t>(m.k));
    });
  });
}

int gate_place(int r) { return r / 16 * 32 + r % 16; }
int up_place(int r) { return r / 16 * 32 + 16 + r % 16; }

float* vector_of(Engine& e, const void* source, int dtype, int n) {
  float* out = e.weights.take<float>(static_cast<size_t>(padded(n)));
  for (int i = 0; i < n; i++) out[i] = number(source, dtype, static_cast<size_t>(i));
  return out;
}

template <class Place>
void put_bias(Engine& e, Matrix& m, const void* source, int dtype, int n, const Place& place) {
  if (m.bias == nullptr) m.bias = e.weights.take<float>(static_cast<size_t>(m.panels) * kPanel);
  for (int i = 0; i < n; i++) m.bias[place(i)] = number(source, dtype, static_cast<size_t>(i));
}

}  // namespace

Engine::Engine(const rf_model_desc& desc, int threads) : d(desc), pool(threads) {
  groups = d.heads / d.kv_heads;
  q_size = d.heads * d.head_dim;
  kv_size = d.kv_heads * d.head_dim;
  hp = padded(d.hidden);
  ip = padded(d.inter);
  qp = padded(q_size);
  inv_freq.assign(d.inv_freq, d.inv_freq + static_cast<size_t>(d.ropes) * static_cast<size_t>(d.head_dim / 2));
  rope_factor.assign(d.rope_factors, d.rope_factors + d.ropes);
  relay.assign(static_cast<size_t>(d.slots), INT32_MIN);
  local.resize(static_cast<size_t>(pool.threads()));
  bool int8 = d.int8 != 0;
  for (int l = 0; l < d.layers; l++) {
    Layer layer;
    layer.window = d.windows[l];
    layer.rope = d.layer_ropes[l];
    size_t plan = 0;
    while (plan < plans.size() && plans[plan].window != layer.window) plan++;
    if (plan == plans.size()) {
      plans.emplace_back();
      plans.back().window = layer.window;
    }
    layer.plan = static_cast<int>(plan);
    layer.qkv = make_matrix(weights, q_size + 2 * kv_size, d.hidden, int8);
    layer.o = make_matrix(weights, d.hidden, q_size, int8);
    layer.gate_up = make_matrix(weights, 2 * ip, d.hidden, int8);
    layer.down = make_matrix(weights, d.hidden, d.inter, int8);
    layers.push_back(layer);
  }
  embedding = make_matrix(weights, d.vocab, d.hidden, int8);
  head = d.tied ? embedding : make_matrix(weights, d.vocab, d.hidden, int8);
  d.windows = d.layer_ropes = nullptr;  // the caller's
  d.inv_freq = d.rope_factors = nullptr;
  page_bytes = static_cast<size_t>(d.layers) * static_cast<size_t>(d.kv_heads) * static_cast<size_t>(2 * kPage * d.head_dim) * sizeof(bf16);
}

namespace {

void put_layer(Engine& e, Layer& w, int name, const void* source, int dtype) {
  const int hidden = e.d.hidden, inter = e.d.inter, q = e.q_size, kv = e.kv_size;
  auto from = [](int first) { return [first](int r) { return first + r; }; };
  switch (name) {
    case RF_INPUT_NORM: w.input_norm = vector_of(e, source, dtype, hidden); break;
    case RF_MLP_NORM: w.mlp_norm = vector_of(e, source, dtype, hidden); break;
    case RF_ATTENTION_POST_NORM: w.attention_post_norm = vector_of(e, source, dtype, hidden); break;
    case RF_MLP_POST_NORM: w.mlp_post_norm = vector_of(e, source, dtype, hidden); break;
    case RF_Q_NORM: w.q_norm = vector_of(e, source, dtype, e.d.head_dim); break;
    case RF_K_NORM: w.k_norm = vector_of(e, source, dtype, e.d.head_dim); break;
    case RF_Q: pack(e, w.qkv, source, dtype, q, from(0)); break;
    case RF_K: pack(e, w.qkv, source, dtype, kv, from(q)); break;
    case RF_V: pack(e, w.qkv, source, dtype, kv, from(q + kv)); break;
    case RF_O: pack(e, w.o, source, dtype, hidden, from(0)); break;
    case RF_GATE: pack(e, w.gate_up, source, dtype, inter, gate_place); break;
    case RF_UP: pack(e, w.gate_up, source, dtype, inter, up_place); break;
    case RF_DOWN: pack(e, w.down, source, dtype, hidden, from(0)); break;
    case RF_Q_BIAS: put_bias(e, w.qkv, source, dtype, q, from(0)); break;
    case RF_K_BIAS: put_bias(e, w.qkv, source, dtype, kv, from(q)); break;
    case RF_V_BIAS: put_bias(e, w.qkv, source, dtype, kv, from(q + kv)); break;
    case RF_O_BIAS: put_bias(e, w.o, source, dtype, hidden, from(0)); break;
    case RF_GATE_BIAS: put_bias(e, w.gate_up, source, dtype, inter, gate_place); break;
    case RF_UP_BIAS: put_bias(e, w.gate_up, source, dtype, inter, up_place); break;
    case RF_DOWN_BIAS: put_bias(e, w.down, source, dtype, hidden, from(0)); break;
    default: break;
  }
}

}  // namespace
}  // namespace rf

extern "C" {

int32_t rf_abi() { return 2; }

// Null: no memory, or no threads.
void* rf_create(const rf_model_desc* desc, int32_t threads) {
  try {
    return new rf::Engine(*desc, threads);
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const std::system_error&) {
    return nullptr;
  }
}

void rf_destroy(void* engine) { delete static_cast<rf::Engine*>(engine); }

// Takes one weight of the checkpoint in: row-major, layer -1 for the model's own.
int32_t rf_put(void* engine, int32_t layer, int32_t name, const void* source, int32_t dtype) {
  rf::Engine& e = *static_cast<rf::Engine*>(engine);
  try {
    if (layer >= 0) {
      rf::put_layer(e, e.layers[static_cast<size_t>(layer)], name, source, dtype);
    } else if (name == RF_FINAL_NORM) {
      e.final_norm = rf::vector_of(e, source, dtype, e.d.hidden);
    } else {
      rf::pack(e, name == RF_HEAD ? e.head : e.embedding, source, dtype, e.d.vocab, [](int r) { return r; });
      if (e.d.tied) e.head = e.embedding;
    }
  } catch (const std::bad_alloc&) {
    return RF_NO_MEMORY;
  }
  return RF_OK;
}

int64_t rf_page_bytes(void* engine) { return static_cast<int64_t>(static_cast<rf::Engine*>(engine)->page_bytes); }

// Reserves the pages; they take memory when they are written.
int32_t rf_reserve(void* engine, int64_t pages) {
  rf::Engine& e = *static_cast<rf::Engine*>(engine);
  try {
    e.kv = rf::Mapping(static_cast<size_t>(pages) * e.page_bytes);
  } catch (const std::bad_alloc&) {
    return RF_NO_MEMORY;
  }
  e.pages = pages;
  return RF_OK;
}

void* rf_pages(void* engine) { return static_cast<rf::Engine*>(engine)->kv.data(); }

// All pages read as zeros again and take no memory; the relay forgets.
void rf_forget(void* engine) {
  rf::Engine& e = *static_cast<rf::Engine*>(engine);
  e.kv.drop();
  std::fill(e.relay.begin(), e.relay.end(), INT32_MIN);
}

int32_t rf_forward(void* engine, const rf_step* step) {
  try {
    return rf::forward(*static_cast<rf::Engine*>(engine), *step, nullptr);
  } catch (const std::bad_alloc&) {
    return RF_NO_MEMORY;
  }
}

int32_t rf_step_and_sample(void* engine, const rf_step* step, const rf_sampling* sampling) {
  try {
    return rf::forward(*static_cast<rf::Engine*>(engine), *step, sampling);
  } catch (const std::bad_alloc&) {
    return RF_NO_MEMORY;
  }
}

int32_t rf_sample(void* engine, const rf_sampling* sampling) {
  rf::Engine& e = *static_cast<rf::Engine*>(engine);
  if (!e.drawn.pending) return RF_NO_FORWARD;
  e.drawn.pending = false;
  try {
    e.pool.run(1, [&](int thread) {
      rf::Turn(e.pool, thread).share(rf::kSample, sampling->rows, 1, [&](int64_t row, int64_t) { rf::sample_row(e, *sampling, static_cast<int>(row), thread); });
    });
  } catch (const std::bad_alloc&) {
    return RF_NO_MEMORY;
  }
  return RF_OK;
}

// Starts (1) or ends (0) counting where cycles go, and gives out what was counted: for each thread and kind, cycles at work and waiting.
void rf_profile(void* engine, int32_t on, uint64_t* out) {
  rf::Engine& e = *static_cast<rf::Engine*>(engine);
  e.pool.timed = on != 0;
  for (auto& times : e.pool.times()) {
    for (int i = 0; i < rf::kKinds; i++) {
      *out++ = times.work[i];
      *out++ = times.wait[i];
    }
    times = {};
  }
}

// The logits of the last forward's sampled rows: row i begins at i * stride.
const float* rf_logits(void* engine, int64_t* stride) {
  rf::Engine& e = *static_cast<rf::Engine*>(engine);
  *stride = rf::padded(e.d.vocab);
  return e.logits.data();
}
}
