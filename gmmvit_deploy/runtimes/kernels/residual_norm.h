/* A residual sum, its LayerNorm and quantisation, for those who call them. */

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const float *x, *branch;    /* (rows, width); no branch: NULL */
    const float *weight, *bias; /* (width), divided by the step of the grid */
    float *sum;                 /* (rows, width): x + branch; not written where there is no branch */
    int8_t *normed;             /* (rows, width), in steps of the grid */
    int64_t width;              /* a multiple of 16 */
    float epsilon;
} ResidualNorm;

/* Computes the rows from first to last, which is not one of them. Returns 0; 1 for what it does not take. */
int residual_norm(const ResidualNorm *what, int64_t first, int64_t last);

#ifdef __cplusplus
}
#endif
