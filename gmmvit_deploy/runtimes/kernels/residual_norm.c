/* A residual sum, its LayerNorm and quantisation with the instruction set of this processor; norm_on_vectors.h computes
   it. */

#include "residual_norm.h"

#include "instruction_sets.h"

enum { WHOLE = 16 };

int residual_norm_avx512(const ResidualNorm *of, int64_t first, int64_t last);
int residual_norm_avx2(const ResidualNorm *of, int64_t first, int64_t last);
int residual_norm_neon(const ResidualNorm *of, int64_t first, int64_t last);

int residual_norm(const ResidualNorm *of, int64_t first, int64_t last) {
    if (of->width <= 0 || of->width % WHOLE) return 1;
    switch (gmmvit_instruction_set()) {
#if defined(__x86_64__) && defined(__GNUC__)
    case AVX512_BF16:
    case AVX512: return residual_norm_avx512(of, first, last);
    case AVX2: return residual_norm_avx2(of, first, last);
#elif defined(__aarch64__) && defined(__GNUC__)
    case NEON_BF16:
    case NEON: return residual_norm_neon(of, first, last);
#endif
    default: return 1;
    }
}
