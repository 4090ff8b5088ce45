// One engine: packed weights, KV pages, relay, scratch memory of a step.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "linear.h"
#include "pool.h"

namespace rf {

constexpr int kPage = 16;      // tokens
constexpr int kMaxQueries = 256;  // query rows of an item of attention, so also query heads per KV head
constexpr int kSegment = 256;  // tokens whose attention is computed together; longer contexts are merged segment by segment

// Memory straight from the kernel, on huge pages where it can; used as it is touched.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(size_t bytes);  // throws std::bad_alloc
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  void drop();  // gives its memory back; it reads as zeros then
  uint8_t* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// A part of one mapping after the other, 64 bytes aligned, zeros.
class Arena {
 public:
  template <class T>
  T* take(size_t count) {
    return reinterpret_cast<T*>(bytes(count * sizeof(T)));
  }

 private:
  uint8_t* bytes(size_t count);
  std::vector<Mapping> blocks_;
  size_t used_ = 0;
};

// Grows, never shrinks; content is lost when it grows.
template <class T>
class Scratch {
 public:
  T* fit(size_t count) {
    if (count * sizeof(T) > memory_.size()) {
      memory_ = Mapping();
      memory_ = Mapping(count * sizeof(T) + count * sizeof(T) / 2);
    }
    return data();
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }

 private:
  Mapping memory_;
};

struct Layer {
  int window = 0, rope = 0, plan = 0;
  Matrix qkv, o, gate_up, down;
  float *input_norm = nullptr, *mlp_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;
  float *attention_post_norm = nullptr, *mlp_post_norm = nullptr;
};

// One piece of attention: tokens of one row against segments of its context, for one KV head.
struct AttentionItem {
  int row, token, tokens;     // tokens of the step [token, token + tokens)
  int head;                   // KV head
  int first, last;            // segments [first, last)
  int split;                  // index of the row and head among the split ones, or -1: this item is all of it
};
struct Split {
  int row, token, head, first, last;  // all segments
  int items;                          // pieces it was cut into
  size_t partial;                     // where its partial results begin, in results
};
// All attention of a step in the layers of one window.
struct Plan {
  int window;
  std::vector<AttentionItem> items;
  std::vector<Split> splits;
  std::unique_ptr<std::atomic<int>[]> left;  // items left of each split; who takes the last one merges
  size_t left_size = 0;
};

struct Engine {
  Engine(const rf_model_desc& desc, int threads);

  rf_model_desc d;
  int groups, q_size, kv_size, hp, ip, qp;  // groups: query heads per KV head; hp, ip, qp: padded hidden, intermediate and heads * head_dim
  std::vector<Layer> layers;
  std::vector<float> inv_freq, rope_factor;
  Matrix embedding, head;  // tied: the same memory
  float* final_norm = nullptr;
  Arena weights;
  Pool pool;

  Mapping kv;
  int64_t pages = 0;
  size_t page_bytes = 0;
  std::vector<int32_t> relay;

  // ---- the running step ----
  struct {
    bool pending = false;
    int rows = 0;
    std::vector<int32_t> row, token, position, slot;  // of the sampled rows, in order; position: of the token to draw
  } drawn;
  std::vector<int32_t> ids;        // [T], the relay's tokens in place
  std::vector<Plan> plans;         // one for each window of the model
  bool chunks = false;             // some row has several tokens: K and V are written before any attention
  std::vector<int32_t> pieces;     // [token, tokens] pieces of the step, each within one page
  std::vector<int32_t> row_of;     // [T]
  std::vector<int32_t> place_tokens;  // tokens whose next one has a logprob
  std::vector<int32_t> wanted;     // tokens that go through the last layer to its end, in order: something is made of their hidden state
  std::vector<int32_t> at;         // [T]: where a token's hidden state lies then, -1 where it was left out
  Scratch<float> x, qkv, hidden_f, attention_f, branch, cosines, logits, place_logits, partial;
  Scratch<Act> act, attention, hidden;
  Scratch<int8_t> quant;
  Scratch<Group> quant_groups;
  struct Local {  // of one thread
    Scratch<Act> act, q, p;
    Scratch<int8_t> quant;
    Scratch<bf16> narrowed;
    Scratch<Group> quant_groups;
    Scratch<float> f, scores, out, state;
    std::vector<int32_t> indices;
  };
  std::vector<Local> local;

  bf16* kv_block(int64_t page, int layer, int head) const {  // K [head_dim / 2][16][2], then V [8][head_dim][2]
    size_t block = static_cast<size_t>(2 * kPage) * static_cast<size_t>(d.head_dim);
    return reinterpret_cast<bf16*>(kv.data() + static_cast<size_t>(page) * page_bytes) + (static_cast<size_t>(layer) * static_cast<size_t>(d.kv_heads) + static_cast<size_t>(head)) * block;
  }
};

// attention.cpp
void plan_attention(Engine& e, const rf_step& step);
size_t most_queries(const Engine& e);  // query rows of an item, at most
size_t split_result(const Engine& e);  // floats of one partial result
void write_kv(Engine& e, const rf_step& step, int layer, int token, int tokens, int head, int thread);  // tokens of one page
void attend(Engine& e, const rf_step& step, int layer, Plan& plan, const AttentionItem& item, int thread);

// forward.cpp
int forward(Engine& e, const rf_step& step, const rf_sampling* sampling);
// sample.cpp
void sample_row(Engine& e, const rf_sampling& s, int row, int thread);
// Log-probabilities of one token and of the k most likely ones; false (and zeros) for a row that is not finite, or a token that does not exist. Row lengths are padded(vocab).
bool top_logprobs(float* logits, int vocab, int chosen, int k, float* chosen_out, int32_t* ids, float* values, std::vector<int32_t>& space);

}  // namespace rf
