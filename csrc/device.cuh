/* device.cuh - what the kernels share: element types, packs of adjacent channels, dependent launch.
 *
 * Internal to the CUDA backend. Nothing here knows how a kernel splits its work.
 */
#ifndef GDN_VERIFY_DEVICE_CUH
#define GDN_VERIFY_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "numerics.h"
#include "problem.h"

/* ---- element types --------------------------------------------------------------------------- */

static __device__ __forceinline__ float to_float(float x) { return x; }
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename Element>
static __device__ __forceinline__ Element from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

/* Element `index` of an array whose dtype is known at run time only. */
static __device__ __forceinline__ float load_element(const void *base, int64_t index,
                                                     int32_t dtype) {
  if (dtype == GDN_VERIFY_BFLOAT16) return to_float(((const __nv_bfloat16 *)base)[index]);
  if (dtype == GDN_VERIFY_FLOAT16) return to_float(((const __half *)base)[index]);
  return ((const float *)base)[index];
}

static __device__ __forceinline__ void store_element(void *base, int64_t index, int32_t dtype,
                                                     float x) {
  if (dtype == GDN_VERIFY_BFLOAT16)
    ((__nv_bfloat16 *)base)[index] = from_float<__nv_bfloat16>(x);
  else if (dtype == GDN_VERIFY_FLOAT16)
    ((__half *)base)[index] = from_float<__half>(x);
  else
    ((float *)base)[index] = x;
}

/* x as conv_state would keep it. */
static __device__ __forceinline__ float round_to(float x, int32_t dtype) {
  if (dtype == GDN_VERIFY_BFLOAT16) return to_float(from_float<__nv_bfloat16>(x));
  if (dtype == GDN_VERIFY_FLOAT16) return to_float(from_float<__half>(x));
  return x;
}

/* What they are given, unknown to the compiler: it does not take apart the sum that a pointer is,
 * to do it again at each use, nor keep in registers what it worked out from a number before. */
template <typename Element>
static __device__ __forceinline__ Element *opaque(Element *global) {
#if defined(__CUDA_ARCH__)
  size_t address = __cvta_generic_to_global(global);
  asm volatile("" : "+l"(address));
  return (Element *)__cvta_global_to_generic(address);
#else
  return global;
#endif
}

static __device__ __forceinline__ int opaque(int x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

/* Whether a pack of so many bytes can lie there; for the launchers. */
static inline bool aligned(const void *pointer, int64_t bytes) {
  return (uintptr_t)pointer % (uint64_t)bytes == 0;
}

/* N elements side by side, moved by one instruction (or several of 16 bytes). */
template <typename Element, int N>
struct alignas(sizeof(Element) * N < 16 ? sizeof(Element) * N : 16) Pack {
  Element element[N];
};

/* N elements as they were loaded, in whole registers. Loading and converting are two steps, so that
 * everything that is loaded before the first conversion is on its way at the same time; a register
 * that holds two elements of its own would be taken apart, and so waited for, at any branch. */
template <typename Element, int N>
struct Raw {
  static constexpr int BYTES = (int)sizeof(Element) * N;
  uint32_t word[(BYTES + 3) / 4];
};

template <typename Element, int N>
static __device__ __forceinline__ Raw<Element, N> load_raw(const Element *from) {
  Raw<Element, N> raw;
  constexpr int BYTES = Raw<Element, N>::BYTES;
  if constexpr (BYTES == 2) {
    raw.word[0] = *(const uint16_t *)from;
  } else if constexpr (BYTES == 4) {
    raw.word[0] = *(const uint32_t *)from;
  } else if constexpr (BYTES == 8) {
    const uint2 x = *(const uint2 *)from;
    raw.word[0] = x.x, raw.word[1] = x.y;
  } else {
    static_assert(BYTES % 16 == 0, "2, 4, 8 or a multiple of 16 bytes");
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 x = ((const uint4 *)from)[i];
      raw.word[4 * i] = x.x, raw.word[4 * i + 1] = x.y;
      raw.word[4 * i + 2] = x.z, raw.word[4 * i + 3] = x.w;
    }
  }
  return raw;
}

template <typename Element, int N>
static __device__ __forceinline__ float raw_to_float(const Raw<Element, N> &raw, int i) {
  if constexpr (sizeof(Element) == 4) {
    return __uint_as_float(raw.word[i]);
  } else if constexpr (std::is_same<Element, __nv_bfloat16>::value) {
    return __uint_as_float(i % 2 ? raw.word[i / 2] & 0xFFFF0000u : raw.word[i / 2] << 16);
  } else {
    const unsigned half = i % 2 ? raw.word[i / 2] >> 16 : raw.word[i / 2] & 0xFFFFu;
    return __half2float(__ushort_as_half((unsigned short)half));
  }
}

/* Keeps the compiler from converting before this point, and so from waiting there. */
template <typename Element, int N>
static __device__ __forceinline__ void pin(Raw<Element, N> &raw) {
#pragma unroll
  for (int i = 0; i < (Raw<Element, N>::BYTES + 3) / 4; ++i) asm volatile("" : "+r"(raw.word[i]));
}

template <typename Element, int N>
static __device__ __forceinline__ void convert(const Raw<Element, N> &raw, float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = raw_to_float(raw, i);
}

template <typename Element, int N>
static __device__ __forceinline__ void store_raw(Element *to, const Raw<Element, N> &raw) {
  constexpr int BYTES = Raw<Element, N>::BYTES;
  if constexpr (BYTES == 2)
    *(uint16_t *)to = (uint16_t)raw.word[0];
  else if constexpr (BYTES == 4)
    *(uint32_t *)to = raw.word[0];
  else
    *(uint2 *)to = make_uint2(raw.word[0], raw.word[1]);
  static_assert(BYTES <= 8, "2, 4 or 8 bytes");
}

/* STREAM: whole 16-byte pieces go out marked as the first to leave the caches. */
template <typename Element, int N, bool STREAM = false>
static __device__ __forceinline__ void store_pack(Element *to, const float (&x)[N]) {
  typedef Pack<Element, N> Packed;
  Packed pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.element[i] = from_float<Element>(x[i]);
  if constexpr (STREAM && sizeof(Packed) % 16 == 0) {
#pragma unroll
    for (size_t i = 0; i < sizeof(Packed) / 16; ++i) {
      uint4 piece;
      memcpy(&piece, (const char *)&pack + 16 * i, 16);
      __stcs((uint4 *)to + i, piece);
    }
  } else {
    *(Packed *)to = pack;
  }
}

/* ---- programmatic dependent launch ----------------------------------------------------------- */

/* Waits until the kernel before this one on the stream has ended and its writes can be seen; does
 * nothing where the launch was not a dependent one. Every block of every grid goes through it
 * before it ends: otherwise a grid could end before its predecessor. */
static __device__ __forceinline__ void wait_for_predecessor(void) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Lets a dependent kernel start. It waits for the end of this grid before it reads anything of it,
 * so that this may come as early as one likes. */
static __device__ __forceinline__ void release_successor(void) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#endif /* GDN_VERIFY_DEVICE_CUH */
