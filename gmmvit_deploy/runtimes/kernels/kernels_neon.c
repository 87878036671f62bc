/* The kernels for 64-bit ARM. */

#if defined(__aarch64__) && defined(__GNUC__)

#include "vectors_neon.h"

#define MASKED_ATTENTION masked_attention_neon
#include "attention_on_vectors.h"
#define RESIDUAL_NORM residual_norm_neon
#include "norm_on_vectors.h"

#endif
