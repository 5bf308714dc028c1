/* device.cuh - what the kernels share: element types, packs of adjacent channels, the start window
 * of a sequence, dependent launch.
 *
 * Internal to the CUDA backend. Nothing here knows how a kernel splits its work.
 */
#ifndef GDN_VERIFY_DEVICE_CUH
#define GDN_VERIFY_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

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

/* N elements side by side, moved by one instruction (or several of 16 bytes). */
template <typename Element, int N>
struct alignas(sizeof(Element) * N < 16 ? sizeof(Element) * N : 16) Pack {
  Element element[N];
};

template <typename Element, int N>
static __device__ __forceinline__ void load_pack(const Element *from, float (&x)[N]) {
  const Pack<Element, N> pack = *(const Pack<Element, N> *)from;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = to_float(pack.element[i]);
}

template <typename Element, int N>
static __device__ __forceinline__ void store_pack(Element *to, const float (&x)[N]) {
  Pack<Element, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.element[i] = from_float<Element>(x[i]);
  *(Pack<Element, N> *)to = pack;
}

/* ---- where a sequence starts ----------------------------------------------------------------- */

/* Offset, in elements of conv_state's dtype, of channel 0, column 0 of the window that sequence `s`
 * starts from, with the strides that go with it. */
struct StartWindow {
  const void *base;
  int64_t channel_stride, column_stride;
};

template <typename State>
static __device__ __forceinline__ StartWindow start_window(const gdn_verify_problem &p,
                                                           const gdn_verify_sequence &s) {
  StartWindow w;
  if (s.start >= 0) {
    w.base = (const State *)p.snapshots + s.row * p.snapshot_row + s.start * p.snapshot_token;
    w.channel_stride = p.snapshot_channel;
    w.column_stride = p.snapshot_column;
  } else {
    w.base = (const State *)p.state + s.slot * p.state_slot;
    w.channel_stride = p.state_channel;
    w.column_stride = p.state_column;
  }
  return w;
}

/* ---- programmatic dependent launch ----------------------------------------------------------- */

/* Waits until the kernel before this one on the stream has ended and its writes can be seen; does
 * nothing where the launch was not a dependent one. Every block of every grid goes through it before
 * it ends: otherwise a grid could end before its predecessor. */
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
