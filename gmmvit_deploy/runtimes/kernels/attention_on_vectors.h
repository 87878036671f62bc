/* Masked attention on a CPU in one pass over each head:

       O = softmax(M o Q K^T) V            and, where heads are mixed (CaiT's talking heads),
       O_g = (sum_h A_hg softmax(sum_f B_fh (M_f o Q_f K_f^T))) V_g,    or, of windows (Swin's),
       O = softmax(M o Q K^T + bias) V

   DeepViT mixes heads only after softmax: the sum over f is S_h = M_h o Q_h K_h^T there. Rows of Q and K may be
   normalised and rotated by their position first (rotated_rows.h).

   OpenVINO and ONNX Runtime run this as matrix products with softmax and copies between. Here nothing leaves the
   cache: for one image, one head and up to 64 queries, scores are made, masked, exponentiated and spent on V.

   Scores lie transposed, a vector of lanes holding as many queries of one key. So the greatest score and the sum over
   keys are taken lane by lane, and a weight is a scalar in memory that the product with V broadcasts for nothing.

   The mask comes prepared: M^T times log2(e), so that 2^x does for e^x, laid out as masked_attention.h says.
   Two arithmetics: float32 throughout; or Q, K, V and weights rounded to bfloat16, the mask to float16 (for one image
   its way from memory is all that it costs; an eighth of their error), sums and softmax in float32.

   Written once, on vectors whose width and functions a kernels_*.c defines, which includes this file and
   names the function in MASKED_ATTENTION. */

#pragma once

#include "masked_attention.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "attention_products.h"
#include "rotated_rows.h"

enum { FLOAT32 = MASKED_ATTENTION_FLOAT32, BFLOAT16 = MASKED_ATTENTION_BFLOAT16 };

typedef struct {
    float *scores;   /* (heads or 1, n, TILE) of one tile of queries; then weights */
    uint32_t *pairs; /* (ceil(n / 2), TILE): weights of two keys as two bfloat16 */
    float *queries;  /* (whole d, TILE), or (whole d / 2, TILE) of pairs; whole d: d rounded up to a multiple of 16 */
    uint32_t *keys;  /* (n, whole d / 2) pairs along d; one more where n is odd */
    float *values;   /* (whole d / 16, n, 16); or (whole d / 16, ceil(n / 2), 16) of pairs along n */
    float *inverse;  /* (heads or 1, TILE): 1 / the sum of a query's weights */
    char *mask;      /* (mask_heads) of a mask on a grid: W, below */
    int32_t *spread; /* (mask_heads): is it there yet? */
    int32_t *places; /* (n): where each key's first query is in W */
    float *rotated_queries, *rotated_keys; /* (TILE, whole d) and (n, whole d) */
    float *row;      /* (whole d) */
} Scratch;

/* Of one image. */
typedef struct {
    const MaskedAttention *of;
    const char *q, *k, *v;
    const float *bias; /* its window's; or NULL */
    ptrdiff_t first;   /* of its numbers in the output */
} Image;

/* In bfloat16? A processor without it never is asked to. */
static int rounds(const MaskedAttention *of) { return HAS_BF16 && of->arithmetic == BFLOAT16; }

/* Bytes of a number of Q, K and V. */
static ptrdiff_t bytes_read(const MaskedAttention *of) { return of->rounded ? OF_BFLOAT16 : OF_FLOAT32; }

/* Numbers from one key to the next, in the tile that `first` is in, of what lies by tiles. */
static ptrdiff_t pitch_of(const MaskedAttention *of, int first) {
    const ptrdiff_t left = whole(of->queries) - first / TILE * TILE;
    return left < TILE ? left : TILE;
}

/* ---- a mask on a grid ------------------------------------------------------------------------------------------- */

/* A mask on a grid as it is multiplied by: all queries of a key follow each other in each head's

       W[column of key][row of query - row of key + g - 1][column of query]

   the first at W[column of key][g - 1 - row of key][0]. One number that is never used goes before W if there is a class
   token; from `class_numbers` on there is the class token's number, n times. What comes from memory, T, is g times
   smaller: for one image a mask's way is all that it costs. */

static ptrdiff_t class_numbers(const MaskedAttention *of) {
    const ptrdiff_t g = of->grid;
    return whole(g * g * (2 * g - 1) + WHOLE);
}

static int has_class(const MaskedAttention *of) { return of->n > of->grid * of->grid; }

static void place_keys(const MaskedAttention *of, int32_t *places) {
    const int32_t g = of->grid, first = has_class(of);
    if (first) places[0] = (int32_t)class_numbers(of);
    for (int32_t row = 0; row < g; row++)
        for (int32_t column = 0; column < g; column++)
            places[first + row * g + column] = column * (2 * g - 1) * g + (g - 1 - row) * g;
}

static ptrdiff_t numbers_of_w(const MaskedAttention *of) {
    return of->mask && of->grid ? class_numbers(of) + whole(of->n) : 0;
}

static int bytes_of_a_number(const MaskedAttention *of) { return rounds(of) ? OF_FLOAT16 : OF_FLOAT32; }

/* T and the class token's number, of one head. */
static ptrdiff_t bytes_of_a_head(const MaskedAttention *of) {
    const ptrdiff_t apart = 2 * of->grid - 1;
    return whole(apart * apart + WHOLE) * bytes_of_a_number(of);
}

typedef char Bytes16 __attribute__((vector_size(16), aligned(1), may_alias));
typedef char Bytes32 __attribute__((vector_size(32), aligned(1), may_alias));
typedef char Bytes64 __attribute__((vector_size(64), aligned(1), may_alias));

/* step: bytes at once; where they are more than a row's, what is written too far is written over. */
INLINE void spread_numbers(const MaskedAttention *of, const char *from, char *to, ptrdiff_t bytes, int step) {
    const ptrdiff_t g = of->grid, apart = 2 * g - 1, row = g * bytes;
    for (ptrdiff_t column = 0; column < g; column++)
        for (ptrdiff_t rows = 0; rows < apart; rows++, to += row) {
            const char *start = from + (rows * apart + g - 1 - column) * bytes;
            for (ptrdiff_t at = 0; at < row; at += step)
                if (step == 16) *(Bytes16 *)(to + at) = *(const Bytes16 *)(start + at);
                else if (step == 32) *(Bytes32 *)(to + at) = *(const Bytes32 *)(start + at);
                else *(Bytes64 *)(to + at) = *(const Bytes64 *)(start + at);
        }
}

static void repeat_number(const char *from, char *to, ptrdiff_t bytes, ptrdiff_t times) {
    for (ptrdiff_t at = 0; at < times * bytes; at += bytes) memcpy(to + at, from, (size_t)bytes);
}

/* The mask, or the bias, of a head, out of `heads` that there are: all heads share a single one. */
static int own_or_shared(int head, int heads) { return heads == 1 ? 0 : head; }

/* T of a head -> W, once; and T of the next is sent for. */
PHASE void spread_mask(const MaskedAttention *of, const Scratch *to, int head) {
    head = own_or_shared(head, of->mask_heads);
    if (!of->mask || !of->grid || to->spread[head]) return;
    to->spread[head] = 1;
    const ptrdiff_t bytes = bytes_of_a_number(of), row = of->grid * bytes, apart = 2 * of->grid - 1;
    const char *from = (const char *)of->mask + head * bytes_of_a_head(of);
    char *w = to->mask + head * numbers_of_w(of) * bytes, *first = w + has_class(of) * bytes;
    if (row <= 16) spread_numbers(of, from, first, bytes, 16);
    else if (row <= 32) spread_numbers(of, from, first, bytes, 32);
    else spread_numbers(of, from, first, bytes, 64);
    if (has_class(of)) repeat_number(from + apart * apart * bytes, w + class_numbers(of) * bytes, bytes, whole(of->n));
    if (head + 1 == of->mask_heads) return;
    for (ptrdiff_t at = 0; at < bytes_of_a_head(of); at += 64)
        __builtin_prefetch(from + bytes_of_a_head(of) + at);
}

/* Of a head, for the queries from `first` on. */
SIMD static Mask mask_of(const MaskedAttention *of, const Scratch *to, int head, int first) {
    const int bytes = bytes_of_a_number(of);
    Mask mask = {.at = of->mask, .scale = of->scale};
    if (!of->mask) return mask;
    head = own_or_shared(head, of->mask_heads);
    if (!of->grid) {
        const ptrdiff_t n = of->n, lanes = whole(of->queries), tile = first / TILE * TILE;
        mask.pitch = pitch_of(of, first);
        mask.at += ((head * lanes + tile) * n + first - tile) * bytes;
        return mask;
    }
    mask.at = to->mask + head * numbers_of_w(of) * bytes;
    mask.places = to->places;
    if (has_class(of) && !first) {
        float numbers[LANES];
        store_anywhere(numbers, numbers_at(mask.at + class_numbers(of) * bytes, bytes));
        mask.class_first = 1;
        mask.of_class = numbers[0];
    }
    mask.at += first * bytes;
    return mask;
}

/* ---- one tile of queries ---------------------------------------------------------------------------------------- */

/* bias: (n, pitch), of one head and one tile of queries. */
PHASE void add_bias(const float *bias, ptrdiff_t pitch, float *scores, int n, int vectors) {
    for (int j = 0; j < n; j++)
        for (int t = 0; t < vectors * LANES; t += LANES) {
            float *at = scores + j * TILE + t;
            store(at, loaded(at) + loaded_anywhere(bias + j * pitch + t));
        }
}

/* Rows of Q or K of a head, `row` numbers of `bytes` apart. */
typedef struct {
    const char *at;
    ptrdiff_t row;
    int bytes;
} Rows;

/* Rows `first` to `first + count` of the `all` rows of a head. If Q or K is rotated, they are rotated into `to`. */
static Rows rotated(const MaskedAttention *of, const Rotation *by, Rows rows, int head, int first, int count, int all,
                    float *to, float *x) {
    if (!by->tables) return rows;
    const ptrdiff_t d = of->d, plane = (ptrdiff_t)by->heads * all * d;
    const float *tables = by->tables + ((ptrdiff_t)own_or_shared(head, by->heads) * all + first) * d;
#if HAS_BF16
    if (rows.bytes == OF_BFLOAT16) rotate_rows_b16(by, tables, plane, rows.at, rows.row, to, x, count, of->d);
    else
#endif
        rotate_rows_f32(by, tables, plane, rows.at, rows.row, to, x, count, of->d);
    return (Rows){(const char *)to, whole(d), OF_FLOAT32};
}

/* The keys of a head; `pack_head` rotates them. */
static Rows keys_of(const Image *im, const Scratch *to, int head) {
    const MaskedAttention *of = im->of;
    if (of->of_keys.tables) return (Rows){(const char *)to->rotated_keys, whole(of->d), OF_FLOAT32};
    return (Rows){im->k + head * of->d * bytes_read(of), of->k_row, (int)bytes_read(of)};
}

typedef struct {
    const Image *im;
    const Scratch *to;
    Rows keys;
    const Mask *mask;
    float *scores;
} Head;

/* Queries from `begin` to `end`, a multiple of so many vectors. */
static void scores_of(const Head *head, int vectors, int begin, int end) {
    const MaskedAttention *of = head->im->of;
#if HAS_BF16
    const uint32_t *packed = (const uint32_t *)(const void *)head->to->queries;
    const int row = (int)whole(of->d) / 2, pairs = (of->d + 1) / 2;
#define SCORES_OF(count, at_once)                                                                                    \
    if (rounds(of) && vectors == (count))                                                                            \
        scores_b16_##count(of->n, row, pairs, packed, head->to->keys, head->mask, begin, end, head->scores);         \
    else SCORES_OF_F32(count)
#else
#define SCORES_OF(count, at_once) SCORES_OF_F32(count)
#endif
#define SCORES_OF_F32(count)                                                                                         \
    if (vectors == (count))                                                                                          \
        scores_f32_##count(of->n, head->keys.row, of->d, head->to->queries,                                          \
                           (const float *)(const void *)head->keys.at, head->mask, begin, end, head->scores);
    SCORE_BLOCKS
#undef SCORES_OF
#undef SCORES_OF_F32
}

static void head_scores(const Image *im, const Scratch *to, int head, int first, int queries, float *scores) {
    const MaskedAttention *of = im->of;
    const Rows lying = {im->q + ((ptrdiff_t)first * of->q_row + head * of->d) * bytes_read(of), of->q_row,
                        (int)bytes_read(of)};
    const Rows q = rotated(of, &of->of_queries, lying, head, first, queries, of->queries, to->rotated_queries, to->row);
    const Mask mask = mask_of(of, to, head, first);
    const Head all = {im, to, keys_of(im, to, head), &mask, scores};
    const int vectors = vectors_of(queries), left = vectors % MOST_VECTORS, end = vectors * LANES;
#if HAS_BF16
    uint32_t *packed = (uint32_t *)(void *)to->queries;
    if (q.bytes == OF_BFLOAT16) pack_queries_from_b16(q.at, q.row, packed, queries, of->d);
    else if (rounds(of)) pack_queries_from_f32(q.at, q.row, packed, queries, of->d);
    else
#endif
        pack_queries_f32((const float *)(const void *)q.at, q.row, to->queries, queries, of->d);
    if (vectors >= MOST_VECTORS) scores_of(&all, MOST_VECTORS, 0, end - left * LANES);
    if (left) scores_of(&all, left, end - left * LANES, end);
}

static void pack_head(const Image *im, const Scratch *to, int head) {
    const MaskedAttention *of = im->of;
    const ptrdiff_t at = head * of->d * bytes_read(of);
    const char *v = im->v + at;
    const Rows lying = {im->k + at, of->k_row, (int)bytes_read(of)};
    const Rows k = rotated(of, &of->of_keys, lying, head, 0, of->n, of->n, to->rotated_keys, to->row);
#if HAS_BF16
    uint32_t *values = (uint32_t *)(void *)to->values;
    if (rounds(of)) {
        if (k.bytes == OF_BFLOAT16) pack_keys_from_b16(k.at, k.row, to->keys, of->n, of->d);
        else pack_keys_from_f32(k.at, k.row, to->keys, of->n, of->d);
        if (of->rounded) pack_values_from_b16(v, of->v_row, values, of->n, of->d);
        else pack_values_from_f32(v, of->v_row, values, of->n, of->d);
        return;
    }
#endif
    (void)k;
    pack_values_f32((const float *)(const void *)v, of->v_row, to->values, of->n, of->d);
}

/* Of one tile of queries: weights of one head, float32; those of bfloat16 are in to->pairs. */
typedef struct {
    const Image *im;
    const Scratch *to;
    const float *weights;
    const float *inverse; /* NULL where they are divided already */
    ptrdiff_t at;         /* of the first query in the output */
    int queries;
} Output;

/* Number `at` of the output. */
static Place place_of(const MaskedAttention *of, ptrdiff_t at, ptrdiff_t row) {
    Place place = {NULL, NULL, NULL, of->steps, row};
    if (of->quantised) place.quantised = of->quantised + at;
    else if (of->rounded) place.rounded = (uint16_t *)of->out + at;
    else place.out = (float *)of->out + at;
    return place;
}

/* Columns of the head from c on, `vectors` of them; or, where that is 0, fewer than are worth a vector. */
static void output_columns(const Output *of, int c, int columns, int vectors) {
    const Image *im = of->im;
    const ptrdiff_t row = (ptrdiff_t)im->of->heads * im->of->d;
    const int n = im->of->n, within = c % WHOLE;
#if HAS_BF16
    const int half = (n + 1) / 2;
    const uint32_t *pairs = (const uint32_t *)(const void *)of->to->values + (ptrdiff_t)(c - within) * half + within;
#endif
    const float *values = of->to->values + (ptrdiff_t)(c - within) * n + within;
    for (int t = 0, step = LANES; t < of->queries; t += step) {
        const ptrdiff_t at = of->at + t * row + c;
        const Place place = place_of(im->of, at, row);
        const float *by = of->inverse ? of->inverse + t : NULL;
        const int left = of->queries - t;
#if HAS_BF16
        if (rounds(im->of) && !vectors) weighed_few_b16(of->to->pairs + t, pairs, by, &place, half, columns, left);
        else
#endif
        if (!vectors) weighed_few_f32(of->weights + t, values, by, &place, n, columns, left);
#if HAS_BF16
#define OUTPUT_OF(count, most)                                                                                       \
    else if (rounds(im->of) && vectors == (count)) {                                                                 \
        step = most;                                                                                                 \
        weighed_b16_##count(of->to->pairs + t, pairs, by, &place, half, columns, left);                              \
    }                                                                                                                \
    OUTPUT_OF_F32(count, most)
#else
#define OUTPUT_OF(count, most) OUTPUT_OF_F32(count, most)
#endif
#define OUTPUT_OF_F32(count, most)                                                                                   \
    else if (vectors == (count)) {                                                                                   \
        step = most;                                                                                                 \
        weighed_f32_##count(of->weights + t, values, by, &place, n, columns, left);                                  \
    }
        OUTPUT_BLOCKS
#undef OUTPUT_OF
#undef OUTPUT_OF_F32
    }
}

static void head_output(const Image *im, const Scratch *to, int head, int first, int queries, const float *weights,
                        const float *inverse) {
    const ptrdiff_t row = (ptrdiff_t)im->of->heads * im->of->d;
    const Output output = {im, to, weights, inverse, im->first + first * row + head * im->of->d, queries};
    for (int c = 0; c < im->of->d; c += WHOLE) {
        const int columns = im->of->d - c < WHOLE ? im->of->d - c : WHOLE;
        const int few = columns % LANES <= FEW_COLUMNS ? columns % LANES : 0, vectors = vectors_of(columns - few);
        if (vectors) output_columns(&output, c, columns - few, vectors);
        if (few) output_columns(&output, c + columns - few, few, 0);
    }
}

/* What one tile of queries takes from one head, which is packed. */
static void attend(const Image *im, const Scratch *to, int head, int first) {
    const int n = im->of->n, left = im->of->queries - first, queries = left < TILE ? left : TILE;
    const int vectors = vectors_of(queries);
    head_scores(im, to, head, first, queries, to->scores);
    if (im->bias) {
        const ptrdiff_t tiles = own_or_shared(head, im->of->bias_heads) * whole(im->of->queries) + first;
        add_bias(im->bias + tiles * n, pitch_of(im->of, first), to->scores, n, vectors);
    }
#if HAS_BF16
    if (rounds(im->of)) softmax_b16(to->scores, to->pairs, to->inverse, n, vectors);
    else
#endif
        softmax_f32(to->scores, to->inverse, n, vectors);
    head_output(im, to, head, first, queries, to->scores, to->inverse);
}

/* What some queries take from all heads, which are mixed after softmax, and where `before` is given also before it. */
static void attend_mixed(const Image *im, const Scratch *to, int first) {
    int heads = im->of->heads, n = im->of->n, most = masked_attention_mixed_at_once(im->of);
    int left = im->of->queries - first, queries = left < most ? left : most, vectors = vectors_of(queries);
    ptrdiff_t scores_of_a_head = (ptrdiff_t)n * TILE;
    for (int head = 0; head < heads; head++) {
        spread_mask(im->of, to, head);
        if (rounds(im->of)) pack_head(im, to, head); /* its keys; float32 reads them as they are */
        head_scores(im, to, head, first, queries, to->scores + head * scores_of_a_head);
    }
    if (im->of->before) mix_heads(to->scores, im->of->before, NULL, heads, n, vectors);
    for (int head = 0; head < heads; head++) {
        float *scores = to->scores + head * scores_of_a_head, *inverse = to->inverse + head * TILE;
#if HAS_BF16
        if (rounds(im->of)) softmax_rough(scores, inverse, n, vectors);
        else
#endif
            softmax_f32(scores, inverse, n, vectors);
    }
    mix_heads(to->scores, im->of->after, to->inverse, heads, n, vectors);
    for (int head = 0; head < heads; head++) {
        const float *weights = to->scores + head * scores_of_a_head;
        pack_head(im, to, head);
#if HAS_BF16
        if (rounds(im->of)) pack_weights_b16(weights, to->pairs, n, vectors);
#endif
        head_output(im, to, head, first, queries, weights, NULL);
    }
}

/* ---- what kernels.c calls --------------------------------------------------------------------------------------- */

int MASKED_ATTENTION(const MaskedAttention *of, int64_t first, int64_t last) {
    size_t n = (size_t)of->n, d = (size_t)whole(of->d), kept = of->after ? (size_t)of->heads : 1, even = (n + 1) / 2 * 2;
    size_t heads = (size_t)of->heads, w = (size_t)(of->mask_heads * numbers_of_w(of)), total = 0;
    /* Weights of queries beyond a tile are read, computed with and dropped. */
    size_t sizes[] = {kept * n * TILE + WHOLE, even / 2 * TILE + WHOLE, d * TILE, even * d / 2, even * d, kept * TILE,
                      w, heads, n, of->of_queries.tables ? TILE * d : 0, of->of_keys.tables ? n * d : 0, d};
    enum { PARTS = sizeof sizes / sizeof *sizes };
    for (int i = 0; i < PARTS; i++) total += sizes[i] = (size_t)whole((ptrdiff_t)sizes[i]);
    float *memory = aligned_alloc(64, total * sizeof(float)), *at = memory, *parts[PARTS];
    if (!memory) return 2;
    for (int i = 0; i < PARTS; at += sizes[i++]) parts[i] = at;
    Scratch to = {parts[0], (uint32_t *)(void *)parts[1], parts[2], (uint32_t *)(void *)parts[3], parts[4], parts[5],
                  (char *)parts[6], (int32_t *)(void *)parts[7], (int32_t *)(void *)parts[8],
                  parts[9], parts[10], parts[11]};
    memset(to.spread, 0, heads * sizeof *to.spread);
    if (of->grid) place_keys(of, to.places);
    const int tiles = masked_attention_tiles(of), pieces = masked_attention_pieces_of_an_image(of);
    for (int64_t piece = first; piece < last; piece++) {
        int64_t image = piece / pieces, rows = image * of->n, q_rows = image * of->queries;
        ptrdiff_t window = of->bias ? image % of->windows : 0;
        Image im = {.of = of, .q = (const char *)of->q + q_rows * of->q_row * bytes_read(of),
                    .k = (const char *)of->k + rows * of->k_row * bytes_read(of),
                    .v = (const char *)of->v + rows * of->v_row * bytes_read(of),
                    .bias = of->bias ? of->bias + window * of->bias_heads * whole(of->queries) * of->n : NULL,
                    .first = (ptrdiff_t)q_rows * of->heads * of->d};
        if (of->after) {
            attend_mixed(&im, &to, (int)(piece % pieces) * masked_attention_mixed_at_once(of));
            continue;
        }
        const int head = (int)(piece % pieces) / tiles, tile = (int)(piece % tiles);
        if (!tile || piece == first) { /* a head's tiles follow each other */
            spread_mask(of, &to, head);
            pack_head(&im, &to, head);
        }
        attend(&im, &to, head, tile * TILE);
    }
    free(memory);
    return 0;
}
