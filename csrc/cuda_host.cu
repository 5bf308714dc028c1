/* cuda_host.cu - errors of the CUDA runtime, and GDN_VERIFY_CHECK: index tensors read back and
 * checked by the same code as on the CPU. No kernels. */
#include "cuda_host.h"

#include <stdlib.h>

gdn_verify_status gdn_verify_fail_cuda(gdn_verify_error *err, const char *what, cudaError_t error) {
  (void)cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return gdn_verify_fail(err, GDN_VERIFY_UNSUPPORTED,
                           "gdn_verify was built for the architectures %s, but device %d is %d.%d: "
                           "rebuild with TORCH_CUDA_ARCH_LIST=%d.%d",
                           gdn_verify_cuda_archs(), device, major, minor, major, minor);
  }
  return gdn_verify_fail(err, GDN_VERIFY_CUDA_ERROR, "%s failed: %s", what,
                         cudaGetErrorString(error));
}

/* An index tensor on its way to the host. */
typedef struct IndexCopy {
  const int32_t **pointer; /* device pointer before, host pointer after; null pointer: absent */
  int64_t *stride;         /* becomes 1 */
  int64_t count;
} IndexCopy;

/* Copies each tensor into one allocation, which the caller frees. */
static cudaError_t copy_to_host(const IndexCopy *copies, int n, cudaStream_t stream,
                                int32_t **storage) {
  int64_t total = 1;
  for (int i = 0; i < n; ++i) total += copies[i].count;
  int32_t *to = *storage = (int32_t *)malloc((size_t)total * sizeof *to);
  if (!to) return cudaErrorMemoryAllocation;
  for (int i = 0; i < n; ++i) {
    const IndexCopy *copy = &copies[i];
    if (!*copy->pointer) continue;
    for (int64_t j = 0; j < copy->count; ++j) {
      const cudaError_t error = cudaMemcpyAsync(to + j, *copy->pointer + j * *copy->stride,
                                                sizeof *to, cudaMemcpyDeviceToHost, stream);
      if (error != cudaSuccess) return error;
    }
    *copy->pointer = to;
    *copy->stride = 1;
    to += copy->count;
  }
  return cudaStreamSynchronize(stream);
}

static bool capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

gdn_verify_status gdn_verify_check_device_indices(const gdn_verify_problem *problem, void *stream,
                                                  gdn_verify_error *err) {
  if (capturing((cudaStream_t)stream)) return GDN_VERIFY_OK;
  gdn_verify_problem host = *problem;
  const int64_t n = host.n_seq;
  const IndexCopy copies[] = {{&host.slot_index, &host.slot_index_stride, n},
                              {&host.row_index, &host.row_index_stride, n},
                              {&host.accepted, &host.accepted_stride, n},
                              {&host.cu_seqlens, &host.cu_seqlens_stride, n + 1}};
  int32_t *storage = NULL, *parents = NULL;
  cudaError_t error = copy_to_host(copies, 4, (cudaStream_t)stream, &storage);
  if (error == cudaSuccess && host.parent) { /* one row after the other, each of num_tokens */
    parents = (int32_t *)malloc((size_t)(n * host.num_tokens) * sizeof *parents);
    if (!parents) error = cudaErrorMemoryAllocation;
    for (int64_t i = 0; error == cudaSuccess && i < n * host.num_tokens; ++i)
      error = cudaMemcpyAsync(parents + i,
                              host.parent + i / host.num_tokens * host.parent_seq +
                                  i % host.num_tokens * host.parent_token,
                              sizeof *parents, cudaMemcpyDeviceToHost, (cudaStream_t)stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize((cudaStream_t)stream);
    host.parent = parents;
    host.parent_seq = host.num_tokens;
    host.parent_token = 1;
  }
  const gdn_verify_status status = error == cudaSuccess
                                       ? gdn_verify_check_indices(&host, err)
                                       : gdn_verify_fail_cuda(err, "reading the indices", error);
  free(storage);
  free(parents);
  return status;
}

gdn_verify_status gdn_verify_check_device_commit(const gdn_verify_commit_problem *problem,
                                                 void *stream, gdn_verify_error *err) {
  if (capturing((cudaStream_t)stream)) return GDN_VERIFY_OK;
  gdn_verify_commit_problem host = *problem;
  const int64_t n = host.n_seq;
  const IndexCopy copies[] = {{&host.slot_index, &host.slot_index_stride, n},
                              {&host.row_index, &host.row_index_stride, n},
                              {&host.accepted, &host.accepted_stride, n}};
  int32_t *storage = NULL;
  const cudaError_t error = copy_to_host(copies, 3, (cudaStream_t)stream, &storage);
  const gdn_verify_status status = error == cudaSuccess
                                       ? gdn_verify_check_commit_indices(&host, err)
                                       : gdn_verify_fail_cuda(err, "reading the indices", error);
  free(storage);
  return status;
}
