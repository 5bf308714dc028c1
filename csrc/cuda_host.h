/* cuda_host.h - what the launchers share on the host: errors and GDN_VERIFY_CHECK. Internal. */
#ifndef GDN_VERIFY_CUDA_HOST_H
#define GDN_VERIFY_CUDA_HOST_H

#include <cuda_runtime.h>

#include "problem.h"

extern "C" {

/* Fills `err` for `error` of the CUDA runtime and clears it there, so that it does not surface in a
 * later, unrelated call. */
gdn_verify_status gdn_verify_fail_cuda(gdn_verify_error *err, const char *what, cudaError_t error);

/* For gdn_verify_launch. */
cudaError_t gdn_verify_launch_kernel(const void *kernel, dim3 grid, dim3 block, size_t shared,
                                     bool pdl, void *stream, const void *argument);

/* Synchronises the stream, reads the index tensors and reports a bad value as the CPU path does.
 * Does nothing while the stream is being captured. */
gdn_verify_status gdn_verify_check_device_indices(const gdn_verify_problem *problem, void *stream,
                                                  gdn_verify_error *err);
gdn_verify_status gdn_verify_check_device_commit(const gdn_verify_commit_problem *problem,
                                                 void *stream, gdn_verify_error *err);

} /* extern "C" */

/* Launches `kernel` with its one argument. `pdl`: as a programmatic dependent, where the code that the
 * device runs waits for its predecessor (compute capability 9.0 and later, and compiled for it). */
template <typename Argument>
cudaError_t gdn_verify_launch(void (*kernel)(const Argument), dim3 grid, dim3 block, size_t shared,
                              bool pdl, void *stream, const Argument &argument) {
  return gdn_verify_launch_kernel((const void *)kernel, grid, block, shared, pdl, stream,
                                  &argument);
}

#endif /* GDN_VERIFY_CUDA_HOST_H */
