/* A part of a transformer's block whose rows, the tokens, do not need each other, on a core's own rows:

       y = s_n sum_k (q_k - zero) w_kn + b_n        a product of int8 values; then one of
           out = y                                  stored,
           x = x + y                                added to the residual stream, or
           h = y                                    held, or
           q = round(steps f(y)) + zero             quantised for the next product; f is GELU or y sigma(a y + b y^3),
                                                    times h if there is one
       q = norm(x) on the grid of int8              norm_on_vectors.h

   As separate operators, each writes its output to memory, and all cores wait for each other. Here some rows pass all
   steps while their values lie in the nearest caches, and cores meet once a chain.

   q is stored as numbers of 0 to 255 (an int8 value + 128), because the instruction multiplies these by int8 weights.
   s_n is the step of the values times that of the weights of column n. The sums start at -zero sum_k w_kn and are exact
   in 32 bits.

   The weights are packed into panels of PANEL columns, the last of fewer: 4 values of k of each column, then the next
   4 of k. */

#pragma once

#include "product_chain.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { PANEL = 3 * LANES, MOST_TILE_ROWS = 8, BLOCK_ROWS = 32 };

/* The sums of a panel of some rows: 24 of the 32 registers. */
INLINE_VNNI void tile_of(int rows, int vectors, const uint8_t *q, ptrdiff_t row, const uint8_t *weights, const int32_t *start,
                         int64_t depth, int32_t *sums) {
    Words all[MOST_TILE_ROWS * 3];
    UNROLL(24) for (int i = 0; i < rows * vectors; i++) all[i] = words_anywhere(start + i % vectors * LANES);
    for (int64_t k = 0; k < depth; k += 4, weights += vectors * 4 * LANES) {
        Words w[3];
        UNROLL(3) for (int v = 0; v < vectors; v++) {
            w[v] = words_anywhere(weights + v * 4 * LANES);
            __builtin_prefetch(weights + v * 4 * LANES + depth * PANEL); /* the next panel */
        }
        UNROLL(8) for (int i = 0; i < rows; i++) {
            const Words four = repeated_bytes(q + i * row + k);
            UNROLL(3) for (int v = 0; v < vectors; v++) all[i * vectors + v] = dot_bytes(all[i * vectors + v], four, w[v]);
        }
    }
    UNROLL(24) for (int i = 0; i < rows * vectors; i++)
        store_words((uint32_t *)sums + (i / vectors) * PANEL + (i % vectors) * LANES, all[i]);
}

#define TILE_OF(rows, vectors)                                                                                         \
    case 4 * rows + vectors: tile_of(rows, vectors, q, row, weights, start, depth, sums); break;
#define TILES_OF(rows) TILE_OF(rows, 1) TILE_OF(rows, 2) TILE_OF(rows, 3)

SIMD_VNNI static void tile(int rows, int vectors, const uint8_t *q, ptrdiff_t row, const uint8_t *weights,
                           const int32_t *start, int64_t depth, int32_t *sums) {
    switch (4 * rows + vectors) {
        TILES_OF(1) TILES_OF(2) TILES_OF(3) TILES_OF(4) TILES_OF(5) TILES_OF(6) TILES_OF(7) TILES_OF(8)
    }
}

/* x/2 (1 + erf(x / sqrt 2)) = max(x, 0) - |x|/2 erfc(|x| / sqrt 2), with a polynomial for the logarithm of erfc that was
   fitted to the least greatest error of GELU: 6e-7, absolute. */
INLINE Floats gelu(Floats x) {
    static const float terms[] = {-4.88101883e-04f, 7.198716896e-03f, -5.214662869e-02f, -4.59595847e-01f,
                                  -1.151000542e+00f};
    const Floats size = greater(x, zero() - x);
    Floats log2_erfc = repeated(terms[0]);
    UNROLL(4) for (int i = 1; i < 5; i++) log2_erfc = fused(log2_erfc, size, repeated(terms[i]));
    return fused(size * repeated(-0.5f), exp2_of(log2_erfc * size, 6), greater(x, zero()));
}

/* x sigma(z), z = slope x + cubic x^3: max(x, 0) - |x| t / (1 + t), where t = e^-|z|. */
INLINE Floats times_sigmoid(Floats x, float slope, float cubic) {
    const float log2_e = 1.44269504f;
    const Floats size = greater(x, zero() - x);
    const Floats z = size * fused(size * size, repeated(-log2_e * cubic), repeated(-log2_e * slope));
    const Floats t = exp2_of(z, 6);
    return greater(x, zero()) - size * t / (repeated(1) + t);
}

typedef struct {
    const float *from; /* x before the sum */
    float *to;         /* x after the sum, the output, or what is held */
    uint8_t *bytes;    /* for the next product */
    const float *held; /* what the activation is multiplied by, or NULL */
} Ends;

/* What follows the sums of a tile whose first element is `at` of a row-major (rows, columns). */
INLINE void finish_as(int kind, int gated, const ChainStep *step, const int32_t *sums, int rows, int vectors,
                      int64_t column, ptrdiff_t at, const Ends *ends) {
    for (int v = 0; v < vectors; v++) {
        const Floats scale = loaded_anywhere(step->scale + column + v * LANES);
        const Floats bias = loaded_anywhere(step->bias + column + v * LANES);
        for (int i = 0; i < rows; i++) {
            const ptrdiff_t to = at + i * step->columns + v * LANES;
            const Floats y = fused(floats_of(loaded_words((const uint32_t *)sums + i * PANEL + v * LANES)), scale, bias);
            if (kind == CHAIN_GELU || kind == CHAIN_SIGMOID) {
                Floats active = kind == CHAIN_GELU ? gelu(y) : times_sigmoid(y, step->slope, step->cubic);
                if (gated) active = active * loaded_anywhere(ends->held + to);
                store_bytes(ends->bytes + to, fused(active, repeated(step->steps), repeated(step->zero)));
            }
            else if (kind == CHAIN_ADD) store_anywhere(ends->to + to, y + loaded_anywhere(ends->from + to));
            else store_anywhere(ends->to + to, y);
        }
    }
}

SIMD static void finish(const ChainStep *step, const int32_t *sums, int rows, int vectors, int64_t column, ptrdiff_t at,
                        const Ends *ends) {
#define FINISH(kind, gated) finish_as(kind, gated, step, sums, rows, vectors, column, at, ends)
    switch (step->kind) {
    case CHAIN_ADD: FINISH(CHAIN_ADD, 0); break;
    case CHAIN_GELU: ends->held ? FINISH(CHAIN_GELU, 1) : FINISH(CHAIN_GELU, 0); break;
    case CHAIN_SIGMOID: ends->held ? FINISH(CHAIN_SIGMOID, 1) : FINISH(CHAIN_SIGMOID, 0); break;
    default: FINISH(CHAIN_OUT, 0);
    }
#undef FINISH
}

/* turn: from 0 to 1, the place of this core's rows among all rows. Each core starts at another panel, so that a panel that
   is in no cache is read from memory by one core, and by the others from the cache that they share. */
static void multiplied(const ChainStep *step, const uint8_t *q, int rows, double turn, const Ends *ends) {
    _Alignas(64) int32_t sums[MOST_TILE_ROWS * PANEL];
    const int tiles = (rows + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS;
    const int64_t panels = (step->columns + PANEL - 1) / PANEL, first = (int64_t)((double)panels * turn);
    for (int64_t p = 0; p < panels; p++) {
        const int64_t column = (first + p) % panels * PANEL, left = step->columns - column;
        const int vectors = (int)((left < PANEL ? left : PANEL) / LANES);
        for (int t = 0; t < tiles; t++) { /* of nearly the same number of rows: a tile of a single row is slow */
            const int top = rows * t / tiles, count = rows * (t + 1) / tiles - top;
            tile(count, vectors, q + top * step->depth, step->depth, step->weights + column * step->depth,
                 step->start + column, step->depth, sums);
            finish(step, sums, count, vectors, column, top * step->columns + column, ends);
        }
    }
}

/* int8 values as numbers of 0 to 255: 128 more. */
static void from_signed(const int8_t *from, uint8_t *to, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) {
        uint64_t eight;
        memcpy(&eight, from + i, sizeof eight);
        eight ^= 0x8080808080808080u;
        memcpy(to + i, &eight, sizeof eight);
    }
}

SIMD static void quantised(const ChainStep *step, const float *from, uint8_t *to, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store_bytes(to + i, fused(loaded_anywhere(from + i), repeated(step->steps), repeated(step->zero)));
}

static void block_of(const ProductChain *of, int64_t first, int rows, double turn, uint8_t *q, uint8_t *next, float *hold) {
    const ptrdiff_t x_at = first * of->width;
    const float *x = of->x ? of->x + x_at : NULL;
    float *sum = of->sum ? of->sum + x_at : NULL;
    const float *held = NULL;
    if (of->bytes) from_signed(of->bytes + first * of->steps->depth, q, rows * of->steps->depth);
    for (int64_t i = 0; i < of->count; i++) {
        const ChainStep *step = &of->steps[i];
        if (step->kind == CHAIN_QUANTISE) {
            quantised(step, of->values + first * step->depth, q, rows * step->depth);
            continue;
        }
        if (step->kind == CHAIN_NORM) {
            const float *branch = i || !of->branch ? NULL : of->branch + x_at;
            int8_t *to = of->normed && i == of->count - 1 ? of->normed + x_at : (int8_t *)q;
            const ResidualNorm norm = {x, branch, step->scale, step->bias, sum, to, of->width, step->epsilon};
            RESIDUAL_NORM(&norm, 0, rows);
            if (to == (int8_t *)q) from_signed(to, q, rows * of->width);
            if (branch) x = sum;
            continue;
        }
        float *out = step->kind == CHAIN_OUT ? step->out + first * step->columns : step->kind == CHAIN_HOLD ? hold : sum;
        multiplied(step, q, rows, turn, &(Ends){x, out, next, held});
        if (step->kind == CHAIN_ADD) x = sum;
        held = step->kind == CHAIN_HOLD ? hold : NULL;
        if (step->kind == CHAIN_GELU || step->kind == CHAIN_SIGMOID) {
            uint8_t *free_now = q;
            q = next, next = free_now;
        }
    }
}

int PRODUCT_CHAIN(const ProductChain *of, int64_t first, int64_t last) {
    const size_t each = (size_t)of->widest * BLOCK_ROWS; /* a multiple of 64 bytes */
    uint8_t *memory = aligned_alloc(64, (2 + sizeof(float)) * each);
    if (!memory) return 2;
    const int64_t blocks = (last - first + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t from = first + (last - first) * b / blocks, to = first + (last - first) * (b + 1) / blocks;
        block_of(of, from, (int)(to - from), (double)first / (double)of->rows, memory, memory + each,
                 (float *)(memory + 2 * each));
    }
    free(memory);
    return 0;
}
