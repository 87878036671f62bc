/* The kernels for AVX-512. */

#if defined(__x86_64__) && defined(__GNUC__)

#include "vectors_avx512.h"

#define MASKED_ATTENTION masked_attention_avx512
#include "attention_on_vectors.h"
#define RESIDUAL_NORM residual_norm_avx512
#include "norm_on_vectors.h"

#endif
