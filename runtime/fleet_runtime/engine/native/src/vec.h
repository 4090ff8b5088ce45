// Vectors of 16 floats, and dot products of pairs of bfloat16, at the three levels this library is compiled for.
//
//   level        flags                          V            activations (Act)   pair product
//   avx2         -mavx2 -mfma                   2 x __m256   float               two fused multiply-adds
//   avx512       -mavx512{f,bw,dq,vl,vnni}      __m512       float               two fused multiply-adds
//   avx512bf16   the above and -mavx512bf16     __m512       bfloat16            vdpbf16ps
//
// Everything is compiled with -ffp-contract=off: a sum has the order and the roundings that are written here, wherever it is inlined.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Before a loop over registers of a tile: unrolled early, they never lie in memory. (Clang does so without being told.)
#if defined(__clang__)
#define RF_UNROLL
#else
#define RF_UNROLL _Pragma("GCC unroll 16")
#endif

namespace rf {

using bf16 = uint16_t;

inline float widen(bf16 b) {
  uint32_t u = static_cast<uint32_t>(b) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// Round to nearest, ties to even; a NaN stays one.
inline bf16 narrow(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<bf16>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)

using V = __m512;
using Mask = __mmask16;
constexpr int kMaxRows = 8;  // rows of a register tile: 8 x 2 accumulators of 32 registers (12 were slower)

inline V vzero() { return _mm512_setzero_ps(); }
inline V vset(float f) { return _mm512_set1_ps(f); }
inline V vload(const float* p) { return _mm512_loadu_ps(p); }
inline void vstore(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V vadd(V a, V b) { return _mm512_add_ps(a, b); }
inline V vsub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V vmul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V vdiv(V a, V b) { return _mm512_div_ps(a, b); }
inline V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V vmax(V a, V b) { return _mm512_max_ps(a, b); }  // b where one of them is NaN
inline V vmin(V a, V b) { return _mm512_min_ps(a, b); }
inline V vround(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V vscale2(V p, V n) { return _mm512_scalef_ps(p, n); }  // p * 2^n, n whole
inline V vabs(V a) { return _mm512_abs_ps(a); }
inline Mask first(int n) { return static_cast<Mask>(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u); }
inline Mask bits(uint32_t b) { return static_cast<Mask>(b); }
inline uint32_t tobits(Mask m) { return m; }
inline V vselect(Mask m, V yes, V no) { return _mm512_mask_blend_ps(m, no, yes); }
inline Mask vge(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask vlt(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline float vsum(V v) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline V vwiden(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

#else

struct V {
  __m256 a, b;
};
struct Mask {
  __m256 a, b;
};
constexpr int kMaxRows = 3;

inline V vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V vset(float f) { return {_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
inline V vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void vstore(float* p, V v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
inline V vadd(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V vsub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V vmul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V vdiv(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V vfma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V vmax(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V vmin(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline __m256 round8(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V vround(V x) { return {round8(x.a), round8(x.b)}; }
inline __m256 scale8(__m256 p, __m256 n) {  // n in [-126, 127]
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
}
inline V vscale2(V p, V n) { return {scale8(p.a, n.a), scale8(p.b, n.b)}; }
inline __m256 abs8(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline V vabs(V x) { return {abs8(x.a), abs8(x.b)}; }
inline __m256 bits8(uint32_t b) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(b)), each), each));
}
inline Mask bits(uint32_t b) { return {bits8(b & 255u), bits8((b >> 8) & 255u)}; }
inline Mask first(int n) { return bits(n >= 16 ? 0xffffu : n <= 0 ? 0u : (1u << n) - 1u); }
inline uint32_t tobits(Mask m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) | static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8;
}
inline V vselect(Mask m, V yes, V no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }
inline Mask vge(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)}; }
inline Mask vlt(V x, V y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
inline float vsum(V v) {
  __m256 h = _mm256_add_ps(v.a, v.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline V vwiden(const bf16* p) {
  auto half = [](const bf16* q) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))), 16));
  };
  return {half(p), half(p + 8)};
}

#endif

inline float vfirst(V v) {
#if defined(__AVX512F__)
  return _mm512_cvtss_f32(v);
#else
  return _mm256_cvtss_f32(v.a);
#endif
}

inline float vhighest(V v) {  // of ordered numbers
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  __m256 h = _mm256_max_ps(v.a, v.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
#endif
}

// ---- activations and pair products ----
#if defined(__AVX512BF16__)

using Act = bf16;
struct Pair {
  __m512i v;
};
inline Pair pair(const Act* p) {
  int32_t two;
  std::memcpy(&two, p, 4);
  return {_mm512_set1_epi32(two)};
}
struct Weights {
  __m512i v;
};
inline Weights wload(const bf16* p) { return {_mm512_loadu_si512(p)}; }  // 16 outputs x 2 inputs
inline V dot2(V acc, const Weights& w, const Pair& x) { return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w.v), reinterpret_cast<__m512bh>(x.v)); }
inline void astore(Act* p, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v))); }
inline Act toact(float f) { return narrow(f); }

#else

using Act = float;
struct Pair {
  const float* p;
};
inline Pair pair(const Act* p) { return {p}; }
#if defined(__AVX512F__)
struct Weights {
  V lo, hi;
};
inline Weights wload(const bf16* p) {
  __m512i raw = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(raw, 16)), _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline V dot2(V acc, const Weights& w, const Pair& x) { return vfma(w.hi, vset(x.p[1]), vfma(w.lo, vset(x.p[0]), acc)); }
#else
struct Weights {
  __m256i a, b;
};
inline Weights wload(const bf16* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
inline __m256 dot8(__m256 acc, __m256i raw, const float* x) {
  __m256 lo = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
  __m256 hi = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  return _mm256_fmadd_ps(hi, _mm256_broadcast_ss(x + 1), _mm256_fmadd_ps(lo, _mm256_broadcast_ss(x), acc));
}
inline V dot2(V acc, const Weights& w, const Pair& x) { return {dot8(acc.a, w.a, x.p), dot8(acc.b, w.b, x.p)}; }
#endif
inline void astore(Act* p, V v) { vstore(p, v); }
inline Act toact(float f) { return f; }

#endif

// ---- int8 ----
// Exact integers at every level, so all levels agree. Inputs are in [-127, 127]; weights lie as bytes, kWeightBias added. `quantise16` gives 16 of the
// inputs and adds them to `sum`, from which `bias_of` makes what a sum of products begins with.
#if defined(__AVX512F__)
using I = __m512i;
// vpdpbusd takes unsigned x signed: a sum of products begins with -128 * sum(inputs).
constexpr int kWeightBias = 128;
inline I iset(int32_t n) { return _mm512_set1_epi32(n); }
inline I izero() { return _mm512_setzero_si512(); }
inline int32_t isum(I v) { return _mm512_reduce_add_epi32(v); }
struct Quad {
  __m512i v;
};
inline Quad quad(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return {_mm512_set1_epi32(four)};
}
inline I dot4(I acc, const uint8_t* w, const Quad& x) { return _mm512_dpbusd_epi32(acc, _mm512_loadu_si512(w), x.v); }
inline V ifloat(I a) { return _mm512_cvtepi32_ps(a); }
inline I quantise16(V v, I sum, int8_t* out) {
  const __m512i most = _mm512_set1_epi32(127), least = _mm512_set1_epi32(-127);
  __m512i q = _mm512_max_epi32(_mm512_min_epi32(_mm512_cvtps_epi32(v), most), least);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(q));
  return _mm512_add_epi32(sum, q);
}
#else
struct I {
  __m256i a, b;
};
constexpr int kWeightBias = 0;
inline I iset(int32_t n) { return {_mm256_set1_epi32(n), _mm256_set1_epi32(n)}; }
inline I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline int32_t isum(I) { return 0; }  // nobody needs it where weights have no bias
struct Quad {
  __m256i v, magnitude;
};
inline Quad quad(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  __m256i v = _mm256_set1_epi32(four);
  return {v, _mm256_abs_epi8(v)};
}
// |x| * sign(w, x): no pair exceeds 2 * 127 * 127, which 16 bits hold.
inline __m256i quad8(__m256i acc, const uint8_t* w, const Quad& x) {
  __m256i signedw = _mm256_sign_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)), x.v);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(x.magnitude, signedw), _mm256_set1_epi16(1)));
}
inline I dot4(I acc, const uint8_t* w, const Quad& x) { return {quad8(acc.a, w, x), quad8(acc.b, w + 32, x)}; }
inline V ifloat(I v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
inline I quantise16(V v, I sum, int8_t* out) {
  const __m128i most = _mm_set1_epi8(127), least = _mm_set1_epi8(-127);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));  // saturated to [-128, 127]
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_max_epi8(_mm_min_epi8(bytes, most), least));
  return sum;
}
#endif
inline int32_t bias_of(I sum) { return -kWeightBias * isum(sum); }

// exp(x) for x <= 0 or moderate; exactly 1 at 0, NaN at NaN. Below -87 it is exp(-87). Range reduction to [-ln2/2, ln2/2], degree 6: error < 2 ulp.
inline V vexp(V x) {
  x = vmin(vset(88.0f), vmax(vset(-87.0f), x));
  V n = vround(vmul(x, vset(1.44269504088896341f)));
  V f = vfma(n, vset(-0.693145751953125f), x);
  f = vfma(n, vset(-1.42860682030941723212e-6f), f);
  V p = vset(1.0f / 720);
  p = vfma(p, f, vset(1.0f / 120));
  p = vfma(p, f, vset(1.0f / 24));
  p = vfma(p, f, vset(1.0f / 6));
  p = vfma(p, f, vset(0.5f));
  p = vfma(p, f, vset(1.0f));
  p = vfma(p, f, vset(1.0f));
  return vscale2(p, n);
}
// 2^x for x <= 126; exactly 1 at 0, NaN at NaN. Below -126 it is 2^-126. Degree 5 on [-1/2, 1/2]: error < 2 ulp.
inline V vexp2(V x) {
  x = vmax(vset(-126.0f), x);
  V n = vround(x), f = vsub(x, n);
  V p = vset(0.0013264727f);
  p = vfma(p, f, vset(0.009671513f));
  p = vfma(p, f, vset(0.055507336f));
  p = vfma(p, f, vset(0.24022242f));
  p = vfma(p, f, vset(0.693147f));
  p = vfma(p, f, vset(1.0f));
  return vscale2(p, n);
}
constexpr float kLog2E = 1.44269504088896341f;
// tanh(x) = sign(x) * (1 - e) / (1 + e) with e = exp(-2|x|).
inline V vtanh(V x) {
  V e = vexp(vmul(vset(-2.0f), vabs(x)));
  V t = vdiv(vsub(vset(1.0f), e), vadd(vset(1.0f), e));
  return vselect(vlt(x, vzero()), vsub(vzero(), t), t);
}
inline V vsilu(V x) {  // x / (1 + exp(-x))
  return vdiv(x, vadd(vset(1.0f), vexp2(vmin(vset(126.0f), vmul(x, vset(-kLog2E))))));
}
inline V vgelu(V x) {  // the tanh form, Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2
  V cube = vmul(vmul(x, x), x);
  V inner = vmul(vset(0.7978845608028654f), vfma(vset(0.044715f), cube, x));
  return vmul(vmul(vset(0.5f), x), vadd(vset(1.0f), vtanh(inner)));
}

}  // namespace rf
