/* numerics.h - the one definition of the arithmetic, for C11, C++ and CUDA.
 *
 * Everything is IEEE float32, rounded to nearest even, denormals kept, in the order written here.
 * No compiler may contract a product and a sum (-ffp-contract=off, --fmad=false): where a fused
 * multiply-add is wanted it stands as gdn_verify_fma. That makes the bits a property of the data
 * alone: gdn_verify/reference.py states the same operations in NumPy.
 *
 *   acc  = bias or +0; for k = 0 .. W-1: acc = acc + window[k] * weight[k]
 *   y    = acc * (1 / (1 + exp(-acc)))                                gdn_verify_silu
 *   per head: squares; groups of 32 as a halving tree, groups left to right;
 *   inv  = 1 / sqrt(total + l2_eps); y = y * inv                      gdn_verify_l2_scale
 */
#ifndef GDN_VERIFY_NUMERICS_H
#define GDN_VERIFY_NUMERICS_H

#include <stdint.h>

#if defined(__CUDACC__)
#define GDN_VERIFY_INLINE static __host__ __device__ __forceinline__
#else
#define GDN_VERIFY_INLINE static inline __attribute__((always_inline, unused))
#endif

/* Channels of one summation group of the L2 norm. */
#define GDN_VERIFY_GROUP 32

GDN_VERIFY_INLINE float gdn_verify_fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

GDN_VERIFY_INLINE float gdn_verify_from_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

GDN_VERIFY_INLINE uint32_t gdn_verify_to_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

/* ---- exp ------------------------------------------------------------------------------------- */

/* 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits. */
#define GDN_VERIFY_ROUND 12582912.0f
#define GDN_VERIFY_LOG2E 0x1.715476p+0f
/* ln 2 = HI + LO, HI the nearest float32. */
#define GDN_VERIFY_LN2_HI 0x1.62e430p-1f
#define GDN_VERIFY_LN2_LO -0x1.05c610p-29f
/* 1 + r + C2 r^2 + .. + C6 r^6 is exp(r) within 2^-28.2 (relative) for |r| <= ln2 / 2: the minimax
 * polynomial under the constraint that the first two coefficients are 1, each further coefficient
 * rounded to float32 in turn and the rest fitted again. */
#define GDN_VERIFY_C2 0x1.fffffap-2f
#define GDN_VERIFY_C3 0x1.555496p-3f
#define GDN_VERIFY_C4 0x1.555a04p-5f
#define GDN_VERIFY_C5 0x1.12372ep-7f
#define GDN_VERIFY_C6 0x1.69737ep-10f

/* x in [-104, 89]: returns p = exp(r), where x = n * ln 2 + r, so that exp(x) = p * 2^n, and
 * *rounded = round + n. `round` is GDN_VERIFY_ROUND, or that plus a small integer: x * log2(e) lies
 * nowhere midway between two integers (the odd factor of the product is at least that of the
 * constant's 24 bits), so that n is the same. */
GDN_VERIFY_INLINE float gdn_verify_exp_reduced(float x, float round, float *rounded) {
  const float t = gdn_verify_fma(x, GDN_VERIFY_LOG2E, round);
  const float n = t - round;
  float r = gdn_verify_fma(n, -GDN_VERIFY_LN2_HI, x);
  r = gdn_verify_fma(n, -GDN_VERIFY_LN2_LO, r);
  float p = gdn_verify_fma(GDN_VERIFY_C6, r, GDN_VERIFY_C5);
  p = gdn_verify_fma(p, r, GDN_VERIFY_C4);
  p = gdn_verify_fma(p, r, GDN_VERIFY_C3);
  p = gdn_verify_fma(p, r, GDN_VERIFY_C2);
  p = gdn_verify_fma(p, r, 1.0f);
  p = gdn_verify_fma(p, r, 1.0f);
  *rounded = t;
  return p;
}

/* 2^n for n in [-126, 127]. */
GDN_VERIFY_INLINE float gdn_verify_pow2(int32_t n) {
  return gdn_verify_from_bits((uint32_t)(n + 127) << 23);
}

/* exp(x), at most 1 ulp from the true value over all float32; +inf above the range, gradual
 * underflow to 0 below it, NaN for NaN. Scaled in two steps, the first exact, so that a denormal
 * result is rounded once. */
GDN_VERIFY_INLINE float gdn_verify_exp(float x) {
  float clamped = x < -104.0f ? -104.0f : x;
  clamped = clamped > 89.0f ? 89.0f : clamped;
  float rounded;
  const float p = gdn_verify_exp_reduced(clamped, GDN_VERIFY_ROUND, &rounded);
  const int32_t n = (int32_t)(gdn_verify_to_bits(rounded) - gdn_verify_to_bits(GDN_VERIFY_ROUND));
  const float scaled = p * gdn_verify_pow2(n >> 1) * gdn_verify_pow2(n - (n >> 1));
  return x != x ? x : scaled;
}

/* 1 + exp(z) for z in [-80, 89], in a quick form with the bits of the plain one (the tests go
 * through all of them), from what gdn_verify_exp_reduced says of z and round = ROUND - 1:
 *   - exp(z) / 2 is a normal number there, and its exponent a sum: (n - 1) << 23 is what the bits of
 *     round + n become when shifted, the rest being shifted out;
 *   - 2 * half is exact, so that fma(half, 2, 1) is 1 + exp(z) rounded, and overflows as it does. */
#define GDN_VERIFY_ROUND_HALF (GDN_VERIFY_ROUND - 1.0f)

GDN_VERIFY_INLINE float gdn_verify_one_plus_reduced(float p, float rounded) {
  const float half =
      gdn_verify_from_bits(gdn_verify_to_bits(p) + (gdn_verify_to_bits(rounded) << 23));
  return gdn_verify_fma(half, 2.0f, 1.0f);
}

GDN_VERIFY_INLINE float gdn_verify_one_plus_exp(float z) {
  float rounded;
  const float p = gdn_verify_exp_reduced(z, GDN_VERIFY_ROUND_HALF, &rounded);
  return gdn_verify_one_plus_reduced(p, rounded);
}

/* 1 / x and sqrt(x), correctly rounded. */
GDN_VERIFY_INLINE float gdn_verify_rcp(float x) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(x);
#else
  return 1.0f / x;
#endif
}

GDN_VERIFY_INLINE float gdn_verify_sqrt(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

/* The z whose exponential a silu takes: -x between -80 and 89. Below exp(-80) the sum is 1 whatever
 * the exponential's exact value, so that a tighter clamp than exp's changes no bit. For NaN z is any
 * number, and the product is NaN. `most` is GDN_VERIFY_SILU_MOST: where the compiler does not know
 * that, it makes a minimum and a maximum of the two clamps instead of nested branches. */
#define GDN_VERIFY_SILU_MOST 80.0f

GDN_VERIFY_INLINE float gdn_verify_silu_exponent(float x, float most) {
  x = x > most ? most : x;
  x = x < -89.0f ? -89.0f : x;
  return -x;
}

/* x * (1 / (1 + exp(-x))), each operation rounded. */
GDN_VERIFY_INLINE float gdn_verify_silu(float x) {
  const float z = gdn_verify_silu_exponent(x, GDN_VERIFY_SILU_MOST);
  return x * gdn_verify_rcp(gdn_verify_one_plus_exp(z));
}

/* The factor of an L2 group whose squares sum to `total`. */
GDN_VERIFY_INLINE float gdn_verify_l2_scale(float total, float l2_eps) {
  return gdn_verify_rcp(gdn_verify_sqrt(total + l2_eps));
}

/* ---- 16-bit types: conversions to float32 (exact) and back (nearest even) --------------------- */

GDN_VERIFY_INLINE float gdn_verify_from_bfloat16(uint16_t h) {
  return gdn_verify_from_bits((uint32_t)h << 16);
}

GDN_VERIFY_INLINE uint16_t gdn_verify_to_bfloat16(float x) {
  const uint32_t bits = gdn_verify_to_bits(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(x != x ? 0x7FC0u : rounded);
}

GDN_VERIFY_INLINE float gdn_verify_from_float16(uint16_t h) {
  const uint32_t magnitude = (uint32_t)(h & 0x7FFFu) << 13;
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
  /* moves the exponent's bias from 15 to 127; exact, denormals too */
  const float finite = gdn_verify_from_bits(magnitude) * 0x1p+112f;
  const uint32_t bits =
      magnitude >= 0x0F800000u ? (magnitude | 0x7F800000u) : gdn_verify_to_bits(finite);
  return gdn_verify_from_bits(bits | sign);
}

GDN_VERIFY_INLINE uint16_t gdn_verify_to_float16(float x) {
  const uint32_t bits = gdn_verify_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  /* below 2^-14: one unit of the result is 2^-24, the last place of numbers in [0.5, 1) */
  const uint32_t denormal =
      gdn_verify_to_bits(gdn_verify_from_bits(magnitude) + 0.5f) - 0x3F000000u;
  const uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
  uint32_t result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x47800000u ? special : result;
  return (uint16_t)(result | sign);
}

#endif /* GDN_VERIFY_NUMERICS_H */
