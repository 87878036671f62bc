/* Masked attention, for those who call it. */

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MASKED_ATTENTION_FLOAT32 = 1, MASKED_ATTENTION_BFLOAT16 = 2 };

/* Layouts of a mask, whose numbers are M^T[key][query]. Each head's begin at a multiple of 16.

   grid = 0: any mask. By tiles of 64 queries: (n, 64), (n, 64), ..., and the rest, padded to a multiple of 16.
   Of other layouts there are as many queries as keys.

   grid = g: of g x g tokens, with a class token before them if n = g * g + 1, where M depends on how many rows and
   columns apart two tokens are, and nothing else; wherever the class token is concerned it is one number:

       T[row of query - row of key + g - 1][column of query - column of key + g - 1]

   (2g - 1, 2g - 1), then the class token's number, then at least 15 that are not used. */

/* What is done to the rows of Q, or of K, before they are multiplied: see rotated_rows.h. */
typedef struct {
    const float *tables; /* (2, or 3 if `shifts`; `heads`; queries or n; d): C, S and D; or NULL */
    int32_t heads;       /* heads; or 1 where all heads share the tables */
    int32_t halves;      /* column c belongs to column c + d / 2, not to its neighbour */
    int32_t normed, shifts;
    float epsilon;
} Rotation;

typedef struct {
    const void *q, *k, *v;         /* (batch, queries, heads * d), and (batch, n, heads * d) of k and v, within rows of
                                      q_row, k_row and v_row numbers; float32, or bfloat16 if `rounded` */
    void *out;                     /* (batch, queries, heads * d), without gaps, of the type of q; or NULL */
    const void *mask;              /* M^T log2(e) of each of `mask_heads` heads, as above; float32, or float16 where the
                                      arithmetic is bfloat16; or NULL */
    const float *bias;             /* B^T log2(e) of each of `bias_heads` heads of each of `windows` windows, float32,
                                      as a mask of grid 0; or NULL. Image i is window i mod `windows`. Not where heads
                                      are mixed */
    const float *before, *after;   /* (heads, heads), [h][g] what h gives to g, before and after softmax;
                                      both NULL, or before NULL where heads are mixed only after softmax */
    Rotation of_queries, of_keys;  /* not where heads are mixed */
    int64_t q_row, k_row, v_row;
    int32_t batch, heads, queries, n, d; /* n: of the keys */
    int32_t mask_heads, bias_heads; /* heads; or 1 where all heads share the mask, or the bias */
    int32_t windows;
    int32_t arithmetic;
    int32_t rounded;               /* q, k, v and out are bfloat16, if 1; only where the arithmetic is, too */
    int32_t grid;                  /* of the mask's layout */
    float scale;                   /* times log2(e); where mask is NULL */
    float steps;                   /* 1 / the step of the grid of int8 that `quantised` is on */
    int8_t *quantised;             /* as out, which is NULL then; or NULL */
} MaskedAttention;

/* The best arithmetic of the chosen instruction set, which can do the lesser too; 0 for none. */
int masked_attention_support(void);

/* How many pieces of work there are; each may be computed by another thread. */
int64_t masked_attention_pieces(const MaskedAttention *what);

/* Computes the pieces from first to last, which is not one of them.
   Returns 0; 1 for what it does not take, 2 when there is no memory. */
int masked_attention(const MaskedAttention *what, int64_t first, int64_t last);

/* How the work is divided, for those who compute it: tiles of a head, queries of a piece where heads are mixed, pieces
   of an image. */
int masked_attention_tiles(const MaskedAttention *what);
int masked_attention_mixed_at_once(const MaskedAttention *what);
int masked_attention_pieces_of_an_image(const MaskedAttention *what);

#ifdef __cplusplus
}
#endif
