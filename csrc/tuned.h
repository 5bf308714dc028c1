/* tuned.h - the tuned table, as the launcher of the CUDA backend asks it. Internal to the core. */
#ifndef GDN_VERIFY_TUNED_H
#define GDN_VERIFY_TUNED_H

#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 1 where the table has entries: without any, there is no need to ask for the device. */
int gdn_verify_has_tuned(void);

/* The configuration of this problem on CUDA device `device`, -1 where the table has none. */
int gdn_verify_find_tuned(const gdn_verify_problem *problem, int device, int pdl);

#ifdef __cplusplus
}
#endif

#endif /* GDN_VERIFY_TUNED_H */
