/* The kernels for AVX2 and FMA. */

#if defined(__x86_64__) && defined(__GNUC__)

#include "vectors_avx2.h"

#define MASKED_ATTENTION masked_attention_avx2
#include "attention_on_vectors.h"
#define RESIDUAL_NORM residual_norm_avx2
#include "norm_on_vectors.h"

#endif
