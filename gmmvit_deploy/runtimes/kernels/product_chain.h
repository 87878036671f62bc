/* A chain of int8 products of the same rows, for those who call it. */

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CHAIN_NORM = 0,     /* the LayerNorm of x, quantised: what the next products multiply */
    CHAIN_OUT = 1,      /* a product, stored */
    CHAIN_ADD = 2,      /* a product, added to x */
    CHAIN_GELU = 3,     /* a product, its GELU quantised: what the next product multiplies */
    CHAIN_QUANTISE = 4, /* the first step: `values` quantised */
    CHAIN_SIGMOID = 5,  /* a product, its y sigma(y (slope + cubic y^2)) quantised: SiLU and other forms of GELU */
    CHAIN_HOLD = 6,     /* a product, by which the next step multiplies its activation before it is quantised: SwiGLU */
};

typedef struct {
    int32_t kind;
    const float *scale, *bias; /* norm: (width), divided by the step of its grid; product: (columns) */
    float epsilon;             /* norm */
    const uint8_t *weights;    /* product: (depth, columns), packed as chain_on_vectors.h says */
    const int32_t *start;      /* product: (columns), -zero sum_k w_kn */
    int64_t depth, columns;    /* product: multiples of 16; CHAIN_QUANTISE: the depth of the next product; otherwise 0 */
    float slope, cubic;        /* CHAIN_SIGMOID; positive */
    float steps, zero;         /* CHAIN_GELU, CHAIN_SIGMOID, CHAIN_QUANTISE: those in 1, and the number of 0, of a grid of 0 to 255 */
    float *out;                /* CHAIN_OUT: (rows, columns) */
} ChainStep;

typedef struct {
    const int8_t *bytes;     /* what the first product multiplies, (rows, its depth); NULL where it is computed */
    const float *values;     /* (rows, depth of the first product), of CHAIN_QUANTISE */
    const float *x, *branch; /* (rows, width); branch: what the first norm adds to x, or NULL; x: NULL if nothing reads it */
    float *sum;              /* (rows, width): x after the last sum; NULL where nothing is added */
    int8_t *normed;          /* (rows, width): of a norm that is the last step, otherwise NULL */
    int64_t rows;            /* of all cores */
    int64_t width;           /* a multiple of 16 */
    int64_t widest;          /* of the depths and width; what is held is as wide as the next product's depth */
    const ChainStep *steps;
    int64_t count;
} ProductChain;

/* Returns 1 if this processor multiplies int8 values by AVX-512 VNNI, and not by AMX, which is faster in OpenVINO. */
int product_chain_support(void);

/* Computes the rows from first to last, which is not one of them. Returns 0; 1 for what it does not take; 2 without
   memory. */
int product_chain(const ProductChain *what, int64_t first, int64_t last);

#ifdef __cplusplus
}
#endif
