/* no_cuda.c - stands in for the CUDA backend (the .cu files) in a build without it. */
#include "problem.h"

static gdn_verify_status fail_without_cuda(gdn_verify_error *err) {
  return gdn_verify_fail(err, GDN_VERIFY_UNSUPPORTED,
                         "tensors are on a CUDA device, but gdn-verify was built without CUDA");
}

gdn_verify_status gdn_verify_conv_cuda(const gdn_verify_params *params, void *stream,
                                       gdn_verify_error *err) {
  (void)params;
  (void)stream;
  return fail_without_cuda(err);
}

gdn_verify_status gdn_verify_commit_cuda(const gdn_verify_commit_params *params, void *stream,
                                         gdn_verify_error *err) {
  (void)params;
  (void)stream;
  return fail_without_cuda(err);
}

int gdn_verify_has_cuda(void) { return 0; }

const char *gdn_verify_cuda_archs(void) { return ""; }

int gdn_verify_num_configs(void) { return 0; }

const char *gdn_verify_configs(void) { return ""; }

int gdn_verify_chosen_config(const gdn_verify_params *params) {
  (void)params;
  return -1;
}
