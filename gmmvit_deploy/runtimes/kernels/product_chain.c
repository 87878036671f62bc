/* A chain of int8 products of the same rows with the instruction set of this processor; chain_on_vectors.h computes
   it. */

#include "product_chain.h"

#include "instruction_sets.h"

enum { WHOLE = 16 };

int product_chain_avx512(const ProductChain *of, int64_t first, int64_t last);

int product_chain_support(void) { return gmmvit_multiplies_bytes(); }

static int takes(const ProductChain *of) {
    if (of->width % WHOLE) return 0;
    for (int64_t i = 0; i < of->count; i++) {
        const ChainStep *step = &of->steps[i];
        if (step->depth % WHOLE || step->columns % WHOLE) return 0;
    }
    return product_chain_support();
}

int product_chain(const ProductChain *of, int64_t first, int64_t last) {
    if (!takes(of)) return 1;
#if defined(__x86_64__) && defined(__GNUC__)
    return product_chain_avx512(of, first, last);
#else
    return (void)first, (void)last, 1;
#endif
}
