// The plain C interface of the library, called through ctypes (fleet_runtime.engine.native.library mirrors these structs field by field).
#pragma once
#include <cstdint>

extern "C" {

// Fields as in fleet_runtime.models.spec.ModelSpec.
struct rf_model_desc {
  int32_t vocab, hidden, inter, heads, kv_heads, head_dim, layers, ropes;
  int32_t tied, qk_norm, post_norms, gelu, int8, slots;
  float norm_eps, attention_scale, embedding_scale, attention_softcap, logit_softcap;
  const int32_t* windows;      // [layers]
  const int32_t* layer_ropes;  // [layers]
  const float* inv_freq;       // [ropes][head_dim / 2]
  const float* rope_factors;   // [ropes]
};

// One step; see fleet_runtime.engine.base.StepInput. Pointers may be null where a field is optional.
struct rf_step {
  int32_t rows, tokens, table_width, places;  // places: of prompt logprobs, over all rows
  const int32_t *token_ids, *positions, *row_starts, *context_lens, *page_tables;
  const uint8_t* sample;
  const int32_t *slots, *prompt_logprobs, *next_ids;
  const int8_t* pool;
  const int64_t* place_starts;  // [rows + 1]: the places of each row
  const int64_t* top_starts;    // [rows + 1]: where the top ids of each row's places begin in top_ids, k a place
  uint8_t* failed;              // out [rows]
  float* pooled;                // out [rows with pool][hidden]
  float* chosen;                // out [places]
  int32_t* top_ids;             // out
  float* top_values;            // out
};

// How the rows with `sample` draw; see fleet_runtime.engine.base.Sampling.
struct rf_sampling {
  int32_t rows, mask_words;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const uint64_t* seed;
  const int32_t* logprobs;
  const int32_t *bias_starts, *bias_ids;
  const float* bias_values;
  const int32_t *count_starts, *count_ids, *counts;
  const float *repetition, *frequency, *presence;
  const uint32_t* masks;
  const int32_t* mask_rows;
  const int64_t* top_starts;  // [rows + 1]
  int32_t* tokens;            // out [rows of the step]
  uint8_t* failed;            // in and out [rows of the step]
  float* chosen;              // out [rows]
  int32_t* top_ids;           // out
  float* top_values;          // out
};

enum { RF_F32 = 0, RF_BF16 = 1 };
enum { RF_OK = 0, RF_BAD_PAGE = 1, RF_NO_MEMORY = 2, RF_NO_FORWARD = 3 };
enum { RF_POOL_NONE = 0, RF_POOL_LAST = 1, RF_POOL_SUM = 2 };
// Weights, by the number their name has in fleet_runtime.models.spec: MODEL_WEIGHTS with layer -1, else LAYER_WEIGHTS.
enum { RF_EMBEDDING, RF_FINAL_NORM, RF_HEAD };
enum {
  RF_INPUT_NORM, RF_Q, RF_K, RF_V, RF_O, RF_Q_BIAS, RF_K_BIAS, RF_V_BIAS, RF_O_BIAS, RF_Q_NORM, RF_K_NORM, RF_ATTENTION_POST_NORM,
  RF_MLP_NORM, RF_GATE, RF_UP, RF_DOWN, RF_GATE_BIAS, RF_UP_BIAS, RF_DOWN_BIAS, RF_MLP_POST_NORM
};
}
