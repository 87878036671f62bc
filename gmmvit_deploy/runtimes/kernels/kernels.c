/* The kernels with the instruction set of this processor; attention_on_vectors.h, norm_on_vectors.h and
   chain_on_vectors.h compute them. */

#include "masked_attention.h"
#include "product_chain.h"
#include "residual_norm.h"

#include "instruction_sets.h"

enum { TILE = 64, MOST_MIXED = 16, WHOLE = 16 };

int masked_attention_avx512(const MaskedAttention *of, int64_t first, int64_t last);
int masked_attention_avx2(const MaskedAttention *of, int64_t first, int64_t last);
int masked_attention_neon(const MaskedAttention *of, int64_t first, int64_t last);
int residual_norm_avx512(const ResidualNorm *of, int64_t first, int64_t last);
int residual_norm_avx2(const ResidualNorm *of, int64_t first, int64_t last);
int residual_norm_neon(const ResidualNorm *of, int64_t first, int64_t last);
int product_chain_avx512(const ProductChain *of, int64_t first, int64_t last);

/* ---- masked attention ------------------------------------------------------------------------------------------- */

int masked_attention_support(void) {
    switch (gmmvit_instruction_set()) {
    case AVX512_BF16:
    case NEON_BF16: return MASKED_ATTENTION_BFLOAT16;
    case NO_INSTRUCTION_SET: return 0;
    default: return MASKED_ATTENTION_FLOAT32;
    }
}

static int takes_rotation(const MaskedAttention *of, const Rotation *by) {
    return !by->tables || (!of->after && of->d % 2 == 0 && (by->heads == 1 || by->heads == of->heads));
}

static int takes_attention(const MaskedAttention *of) {
    if (of->batch <= 0 || of->heads <= 0 || of->queries <= 0 || of->n <= 0 || of->d <= 0) return 0;
    if (!of->out == !of->quantised) return 0;
    if (of->grid && of->queries != of->n) return 0;
    if (of->mask && of->mask_heads != 1 && of->mask_heads != of->heads) return 0;
    if (of->bias && of->bias_heads != 1 && of->bias_heads != of->heads) return 0;
    if (of->grid && (of->grid < 0 || (of->n != of->grid * of->grid && of->n != of->grid * of->grid + 1))) return 0;
    if ((of->before && !of->after) || (of->after && (of->heads > MOST_MIXED || of->bias))) return 0;
    if (of->bias && of->windows <= 0) return 0;
    if (!takes_rotation(of, &of->of_queries) || !takes_rotation(of, &of->of_keys)) return 0;
    if (of->rounded && of->arithmetic != MASKED_ATTENTION_BFLOAT16) return 0;
    return of->arithmetic >= MASKED_ATTENTION_FLOAT32 && of->arithmetic <= masked_attention_support();
}

int masked_attention_tiles(const MaskedAttention *of) { return (of->queries + TILE - 1) / TILE; }

/* Few for a single image, so that no core is without any. */
int masked_attention_mixed_at_once(const MaskedAttention *of) { return of->batch > 1 ? TILE : TILE / 2; }

/* Of each head its tiles of queries; its queries, some at once, where heads are mixed. */
int masked_attention_pieces_of_an_image(const MaskedAttention *of) {
    const int at_once = masked_attention_mixed_at_once(of);
    return of->after ? (of->queries + at_once - 1) / at_once : of->heads * masked_attention_tiles(of);
}

int64_t masked_attention_pieces(const MaskedAttention *of) {
    return (int64_t)of->batch * masked_attention_pieces_of_an_image(of);
}

int masked_attention(const MaskedAttention *of, int64_t first, int64_t last) {
    if (!takes_attention(of) || first < 0 || last > masked_attention_pieces(of)) return 1;
    switch (gmmvit_instruction_set()) {
#if defined(__x86_64__) && defined(__GNUC__)
    case AVX512_BF16:
    case AVX512: return masked_attention_avx512(of, first, last);
    case AVX2: return masked_attention_avx2(of, first, last);
#elif defined(__aarch64__) && defined(__GNUC__)
    case NEON_BF16:
    case NEON: return masked_attention_neon(of, first, last);
#endif
    default: return 1;
    }
}

/* ---- residual norms --------------------------------------------------------------------------------------------- */

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

/* ---- chains of products ----------------------------------------------------------------------------------------- */

int product_chain_support(void) { return gmmvit_multiplies_bytes(); }

static int takes_chain(const ProductChain *of) {
    if (of->width % WHOLE) return 0;
    for (int64_t i = 0; i < of->count; i++) {
        const ChainStep *step = &of->steps[i];
        if (step->depth % WHOLE || step->columns % WHOLE) return 0;
    }
    return product_chain_support();
}

int product_chain(const ProductChain *of, int64_t first, int64_t last) {
    if (!takes_chain(of)) return 1;
#if defined(__x86_64__) && defined(__GNUC__)
    return product_chain_avx512(of, first, last);
#else
    return (void)first, (void)last, 1;
#endif
}
