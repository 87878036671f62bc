/* The two matrix products of masked attention, and softmax between them, over one tile of up to 64 queries of a head.
   Included by attention_on_vectors.h, after the vectors of an instruction set. */

#pragma once

enum { TILE = 64, MOST_MIXED = 16, OF_FLOAT32 = sizeof(float), OF_FLOAT16 = 2, OF_BFLOAT16 = 2 };
#define WHOLE 16 /* a macro, because #if compares it with LANES */

/* Where columns of one query are put, and of those below it a row further each; one of the three is not NULL. */
typedef struct {
    float *out;
    uint16_t *rounded; /* bfloat16 */
    int8_t *quantised; /* numbers divided by the step, rounded to even, saturated */
    float steps;
    ptrdiff_t row;
} Place;

/* Whole vectors that hold so many. */
static int vectors_of(int count) { return (count + LANES - 1) / LANES; }

/* Rounded up to what masks and values are padded to, on every processor. */
static ptrdiff_t whole(ptrdiff_t count) { return (count + WHOLE - 1) / WHOLE * WHOLE; }

/* 2^x for x <= 0: 2^floor(x) by scaling, 2^fraction by a polynomial fitted to the least greatest relative error.
   Degree 6: 2e-9, below float32's rounding. Degree 3: 8e-5, below bfloat16's 2e-3. */
INLINE Floats exp2_of(Floats x, int degree) {
    static const float six[] = {2.170225243e-04f, 1.243968871e-03f, 9.678840900e-03f, 5.548334203e-02f,
                                2.402298363e-01f, 6.931469838e-01f, 1.000000002e+00f};
    static const float three[] = {7.802449219e-02f, 2.260671988e-01f, 6.958335256e-01f, 9.999252193e-01f};
    const float *terms = degree == 6 ? six : three;
    const Floats fraction = fraction_of(x);
    Floats sum = repeated(terms[0]);
    UNROLL(6) for (int i = 1; i <= degree; i++) sum = fused(sum, fraction, repeated(terms[i]));
    return times_two_to_whole(sum, x, fraction);
}

/* ---- Q, K and V as the products want them --------------------------------------------------------------------- */

/* (queries, d) -> (whole d, TILE); queries and columns that are not there are zero. */
PHASE void pack_queries_f32(const float *q, ptrdiff_t row, float *packed, int queries, int d) {
    for (int t = 0; t < queries; t += LANES)
        for (int c = 0; c < d; c += LANES) {
            const Part there = part_of(d - c);
            Words r[LANES];
            UNROLL(16) for (int x = 0; x < LANES; x++)
                r[x] = words_of(loaded_part(q + (t + x) * row + c, t + x < queries ? there : part_of(0)));
            transpose(r);
            UNROLL(16) for (int x = 0; x < LANES; x++) store_words((uint32_t *)packed + (c + x) * TILE + t, r[x]);
        }
}

/* (n, d) -> (whole d / 16, n, 16). */
PHASE void pack_values_f32(const float *v, ptrdiff_t row, float *packed, int n, int d) {
    for (int c = 0; c < d; c += WHOLE) {
        Part there[WHOLE / LANES];
        UNROLL(4) for (int x = 0; x < WHOLE / LANES; x++) there[x] = part_of(d - c - x * LANES);
        for (int j = 0; j < n; j++, packed += WHOLE)
            UNROLL(4) for (int x = 0; x < WHOLE / LANES; x++)
                store(packed + x * LANES, loaded_part(v + j * row + c + x * LANES, there[x]));
    }
}

#if HAS_BF16
/* bytes: of a number that is read, float32 or bfloat16; known when compiled. */
INLINE_BF16 Words neighbours(const char *low, Part low_there, const char *high, Part high_there, int bytes) {
    if (bytes == OF_BFLOAT16)
        return neighbours_at((const uint16_t *)(const void *)low, low_there, (const uint16_t *)(const void *)high, high_there);
    const Floats first = loaded_part((const float *)(const void *)low, low_there);
    return neighbours_of(first, loaded_part((const float *)(const void *)high, high_there));
}

#if LANES == WHOLE
/* (queries, d) -> (whole d / 2, TILE) of pairs; 16 columns are 8 pairs, so two groups of 16 queries turn at once. */
INLINE_BF16 void pack_queries(const char *q, ptrdiff_t row, uint32_t *packed, int queries, int d, int bytes) {
    for (int t = 0; t < queries; t += 2 * LANES)
        for (int c = 0; c < d; c += LANES) {
            const Part columns = part_of(d - c);
            Words r[LANES];
            UNROLL(16) for (int x = 0; x < LANES; x++) {
                const int here = t + x, there = here + LANES;
                r[x] = neighbours(q + (here * row + c) * bytes, here < queries ? columns : part_of(0),
                                  q + (there * row + c) * bytes, there < queries ? columns : part_of(0), bytes);
            }
            transpose(r);
            UNROLL(8) for (int x = 0; x < LANES / 2; x++) {
                store_words(packed + (c / 2 + x) * TILE + t, r[x]);
                store_words(packed + (c / 2 + x) * TILE + t + LANES, r[x + LANES / 2]);
            }
        }
}
#else
INLINE_BF16 void pack_queries(const char *q, ptrdiff_t row, uint32_t *packed, int queries, int d, int bytes) {
    for (int t = 0; t < queries; t += LANES)
        for (int c = 0; c < whole(d); c += 2 * LANES) {
            Words r[LANES];
            UNROLL(16) for (int x = 0; x < LANES; x++) {
                const int there = t + x < queries ? d - c : 0;
                const char *at = q + ((t + x) * row + c) * bytes;
                r[x] = neighbours(at, part_of(there), at + LANES * bytes, part_of(there - LANES), bytes);
            }
            transpose(r);
            UNROLL(16) for (int x = 0; x < LANES; x++) store_words(packed + (c / 2 + x) * TILE + t, r[x]);
        }
}
#endif

/* (n, d) -> (n, whole d / 2) of pairs along d, one more where n is odd. */
INLINE_BF16 void pack_keys(const char *k, ptrdiff_t k_row, uint32_t *keys, int n, int d, int bytes) {
    const ptrdiff_t pairs = whole(d) / 2;
#if LANES == WHOLE
    for (int j = 0; j < n; j += 2) {
        const char *one = k + j * k_row * bytes; /* the last may be written twice */
        const char *next = one + (j + 1 < n ? k_row : 0) * bytes;
        for (int c = 0; c < d; c += LANES) {
            const Part columns = part_of(d - c);
            const Words both = neighbours(one + c * bytes, columns, next + c * bytes, columns, bytes);
            store_low(keys + j * pairs + c / 2, both);
            store_high(keys + (j + 1) * pairs + c / 2, both);
        }
    }
#else
    for (int j = 0; j < n; j++)
        for (int c = 0; c < whole(d); c += 2 * LANES) {
            const char *at = k + (j * k_row + c) * bytes;
            store_words(keys + j * pairs + c / 2,
                        neighbours(at, part_of(d - c), at + LANES * bytes, part_of(d - c - LANES), bytes));
        }
#endif
}

/* (n, d) -> (whole d / 16, ceil(n / 2), 16) of pairs along n. */
INLINE_BF16 void pack_values(const char *v, ptrdiff_t v_row, uint32_t *values, int n, int d, int bytes) {
    for (int c = 0; c < d; c += WHOLE)
        for (int j = 0; j < n; j += 2, values += WHOLE)
            UNROLL(4) for (int x = 0; x < WHOLE; x += LANES) {
                const char *at = v + (j * v_row + c + x) * bytes;
                const Part there = part_of(d - c - x);
                store_words(values + x, paired(neighbours(at, there, at + v_row * bytes,
                                                          j + 1 < n ? there : part_of(0), bytes)));
            }
}

#define PACKED_FROM(type, bytes)                                                                                     \
    PHASE_BF16 void pack_queries_##type(const char *q, ptrdiff_t row, uint32_t *packed, int queries, int d) {        \
        pack_queries(q, row, packed, queries, d, bytes);                                                             \
    }                                                                                                                \
    PHASE_BF16 void pack_keys_##type(const char *k, ptrdiff_t k_row, uint32_t *keys, int n, int d) {                 \
        pack_keys(k, k_row, keys, n, d, bytes);                                                                      \
    }                                                                                                                \
    PHASE_BF16 void pack_values_##type(const char *v, ptrdiff_t v_row, uint32_t *values, int n, int d) {             \
        pack_values(v, v_row, values, n, d, bytes);                                                                  \
    }
PACKED_FROM(from_f32, OF_FLOAT32)
PACKED_FROM(from_b16, OF_BFLOAT16)
#undef PACKED_FROM
#endif

/* ---- M o Q K^T, transposed ------------------------------------------------------------------------------------ */

/* Of one head and one tile of queries: (n, pitch), or where `places` says; or NULL, and the scale instead. */
typedef struct {
    const char *at;
    ptrdiff_t pitch;
    const int32_t *places;
    int class_first; /* in the first lane, `of_class` is to be read instead */
    float of_class;
    float scale;
} Mask;

enum { KEYS_AHEAD = 24 };

/* bytes: of a number. */
INLINE Floats numbers_at(const char *at, int bytes) {
#if HAS_BF16
    if (bytes == OF_FLOAT16) return from_halves(at);
#endif
    return (void)bytes, loaded_anywhere((const float *)(const void *)at);
}

/* A tile's queries, `vectors` at once, from t on; or, where a block takes them all, known when compiled: from 0 on. */
enum { ONE_GROUP = MOST_VECTORS * LANES == TILE };
#define FOR_GROUPS(vectors)                                                                                          \
    for (int t = ONE_GROUP ? 0 : begin; t < (ONE_GROUP ? 1 : end); t += (vectors) * LANES)

/* Keys from j on, queries of `vectors` from `first` on; keys * vectors accumulators. */
INLINE void masked_and_stored(int keys, int vectors, const Floats *sums, const Mask *mask, int bytes, int j, int first,
                              float *scores) {
    const Chosen class_lane = first_lane(mask->class_first && !first);
    UNROLL(16) for (int r = 0; r < keys; r++) {
        const ptrdiff_t place = (mask->places ? mask->places[j + r] : (j + r) * mask->pitch) + first;
        UNROLL(4) for (int t = 0; t < vectors; t++) {
            Floats m = repeated(mask->scale);
            if (mask->at) {
                const char *at = mask->at + (place + t * LANES) * bytes;
                m = numbers_at(at, bytes);
                if (t == 0) m = replaced(m, class_lane, mask->of_class);
                /* One that is read in the order in which it lies comes from afar. */
                if (!mask->places) __builtin_prefetch(at + KEYS_AHEAD * mask->pitch * bytes);
            }
            store(scores + (j + r) * TILE + first + LANES * t, sums[r * vectors + t] * m);
        }
    }
}

INLINE void block_f32(int keys, int vectors, const float *queries, const float *k, ptrdiff_t row, int d,
                      const Mask *mask, int j, int first, float *scores) {
    Floats sums[24], q[4];
    UNROLL(24) for (int i = 0; i < keys * vectors; i++) sums[i] = zero();
    for (int c = 0; c < d; c++) {
        UNROLL(4) for (int t = 0; t < vectors; t++) q[t] = loaded(queries + c * TILE + first + LANES * t);
        UNROLL(16) for (int r = 0; r < keys; r++) {
            const Floats key = repeated(k[(j + r) * row + c]);
            UNROLL(4) for (int t = 0; t < vectors; t++)
                sums[r * vectors + t] = fused(key, q[t], sums[r * vectors + t]);
        }
    }
    masked_and_stored(keys, vectors, sums, mask, OF_FLOAT32, j, first, scores);
}

#if HAS_BF16
INLINE_BF16 void block_b16(int keys, int vectors, const uint32_t *queries, const uint32_t *k, ptrdiff_t row, int pairs,
                           const Mask *mask, int j, int first, float *scores) {
    Floats sums[24];
    Words q[4];
    UNROLL(24) for (int i = 0; i < keys * vectors; i++) sums[i] = zero();
    for (int c = 0; c < pairs; c++) {
        UNROLL(4) for (int t = 0; t < vectors; t++) q[t] = loaded_words(queries + c * TILE + first + LANES * t);
        UNROLL(16) for (int r = 0; r < keys; r++) {
            const Words key = repeated_word(k[(j + r) * row + c]);
            UNROLL(4) for (int t = 0; t < vectors; t++)
                sums[r * vectors + t] = dot(sums[r * vectors + t], key, q[t]);
        }
    }
    masked_and_stored(keys, vectors, sums, mask, OF_FLOAT16, j, first, scores);
}
#define SCORES_OF_B16(vectors, keys)                                                                                 \
    PHASE_BF16 void scores_b16_##vectors(int n, int row, int pairs, const uint32_t *queries, const uint32_t *k,      \
                                         const Mask *mask, int begin, int end, float *scores) {                      \
        int j = 0;                                                                                                   \
        for (; j + keys <= n; j += keys)                                                                             \
            FOR_GROUPS(vectors)                                                                                      \
                block_b16(keys, vectors, queries, k, row, pairs, mask, j, t, scores);                                \
        for (; j < n; j++)                                                                                           \
            FOR_GROUPS(vectors)                                                                                      \
                block_b16(1, vectors, queries, k, row, pairs, mask, j, t, scores);                                   \
    }
#else
#define SCORES_OF_B16(vectors, keys)
#endif

/* Blocks of as many keys as the registers hold, then of one; queries from `begin` to `end`. */
#define SCORES_OF(vectors, keys)                                                                                     \
    PHASE void scores_f32_##vectors(int n, ptrdiff_t row, int d, const float *queries, const float *k,               \
                                    const Mask *mask, int begin, int end, float *scores) {                           \
        int j = 0;                                                                                                   \
        for (; j + keys <= n; j += keys)                                                                             \
            FOR_GROUPS(vectors)                                                                                      \
                block_f32(keys, vectors, queries, k, row, d, mask, j, t, scores);                                    \
        for (; j < n; j++)                                                                                           \
            FOR_GROUPS(vectors)                                                                                      \
                block_f32(1, vectors, queries, k, row, d, mask, j, t, scores);                                       \
    }                                                                                                                \
    SCORES_OF_B16(vectors, keys)
SCORE_BLOCKS
#undef SCORES_OF

/* ---- softmax over keys, and the mixing of heads ---------------------------------------------------------------- */

INLINE Floats greatest(const float *scores, int n) {
    Floats one = loaded(scores), other = one;
    int j = 1;
    for (; j + 1 < n; j += 2) {
        one = greater(one, loaded(scores + j * TILE));
        other = greater(other, loaded(scores + (j + 1) * TILE));
    }
    for (; j < n; j++) one = greater(one, loaded(scores + j * TILE));
    return greater(one, other);
}

INLINE void softmax_with(float *scores, float *inverse, int n, int vectors, int degree) {
    for (int t = 0; t < vectors * LANES; t += LANES) {
        Floats top = greatest(scores + t, n), sum = zero();
        for (int j = 0; j < n; j++) {
            const Floats weight = exp2_of(loaded(scores + j * TILE + t) - top, degree);
            sum = sum + weight;
            store(scores + j * TILE + t, weight);
        }
        store(inverse + t, repeated(1) / sum);
    }
}

/* Weights before they are divided by their sum, in place of the scores. */
PHASE void softmax_f32(float *scores, float *inverse, int n, int vectors) {
    softmax_with(scores, inverse, n, vectors, 6);
}

#if HAS_BF16
/* As exact as weights need be that will be rounded to bfloat16. */
PHASE void softmax_rough(float *scores, float *inverse, int n, int vectors) {
    softmax_with(scores, inverse, n, vectors, 3);
}

/* The same into pairs of bfloat16. */
PHASE_BF16 void softmax_b16(const float *scores, uint32_t *pairs, float *inverse, int n, int vectors) {
    for (int t = 0; t < vectors * LANES; t += LANES) {
        Floats top = greatest(scores + t, n), sum = zero(), sum2 = sum;
        for (int j = 0; j < n; j += 2) {
            const Floats weight = exp2_of(loaded(scores + j * TILE + t) - top, 3);
            Floats next = zero();
            if (j + 1 < n) next = exp2_of(loaded(scores + (j + 1) * TILE + t) - top, 3);
            sum = sum + weight;
            sum2 = sum2 + next;
            store_words(pairs + (j / 2) * TILE + t, paired(neighbours_of(weight, next)));
        }
        store(inverse + t, repeated(1) / (sum + sum2));
    }
}

PHASE_BF16 void pack_weights_b16(const float *weights, uint32_t *pairs, int n, int vectors) {
    for (int j = 0; j < n; j += 2)
        for (int t = 0; t < vectors * LANES; t += LANES) {
            const Floats next = j + 1 < n ? loaded(weights + (j + 1) * TILE + t) : zero();
            store_words(pairs + (j / 2) * TILE + t, paired(neighbours_of(loaded(weights + j * TILE + t), next)));
        }
}
#endif

/* Of `vectors` vectors of weights of each head. Known when compiled, 4, 8 and 12 heads stay in registers where all of
   them fit; where they do not, the weights are kept aside, and some of the mixed heads are made at once. */
INLINE void mix_vectors(int heads, int vectors, int at_once, float *at, ptrdiff_t head, const float *mixing,
                        const float *inverse) {
    const int apart = at_once < heads;
    Floats kept[MOST_MIXED * MIXED_VECTORS], sums[MOST_MIXED * MIXED_VECTORS];
    if (apart)
        for (int h = 0; h < heads; h++)
            UNROLL(4) for (int t = 0; t < vectors; t++) {
                Floats one = loaded(at + h * head + t * LANES);
                if (inverse) one = one * loaded(inverse + h * TILE + t * LANES);
                kept[h * vectors + t] = one;
            }
    for (int first = 0; first < heads; first += at_once) {
        const int most = heads - first < at_once ? heads - first : at_once;
        UNROLL(12) for (int h = 0; h < heads; h++)
            UNROLL(4) for (int t = 0; t < vectors; t++) {
                Floats one = apart ? kept[h * vectors + t] : loaded(at + h * head + t * LANES);
                if (inverse && !apart) one = one * loaded(inverse + h * TILE + t * LANES);
                UNROLL(12) for (int g = 0; g < most; g++) {
                    const Floats by = repeated(mixing[h * heads + first + g]);
                    if (h) sums[g * vectors + t] = fused(one, by, sums[g * vectors + t]);
                    else sums[g * vectors + t] = one * by;
                }
            }
        UNROLL(12) for (int g = 0; g < most; g++)
            UNROLL(4) for (int t = 0; t < vectors; t++) store(at + (first + g) * head + t * LANES, sums[g * vectors + t]);
    }
}

INLINE void mix_some(int heads, int vectors, float *at, ptrdiff_t head, const float *mixing, const float *inverse) {
    if (heads == 4) mix_vectors(4, vectors, MIXED_AT_ONCE, at, head, mixing, inverse);
    else if (heads == 8) mix_vectors(8, vectors, MIXED_AT_ONCE, at, head, mixing, inverse);
    else if (heads == 12) mix_vectors(12, vectors, MIXED_AT_ONCE, at, head, mixing, inverse);
    else mix_vectors(heads, vectors, MIXED_AT_ONCE, at, head, mixing, inverse);
}

/* weights[g] = sum_h mixing[h][g] weights[h] (times 1 / the sum of h's weights), in place. */
PHASE void mix_heads(float *weights, const float *mixing, const float *inverse, int heads, int n, int vectors) {
    const ptrdiff_t head = (ptrdiff_t)n * TILE;
    for (int j = 0; j < n; j++) {
        int t = 0;
        for (; t + MIXED_VECTORS <= vectors; t += MIXED_VECTORS)
            mix_some(heads, MIXED_VECTORS, weights + j * TILE + t * LANES, head, mixing,
                     inverse ? inverse + t * LANES : NULL);
        for (; MIXED_VECTORS > 1 && t < vectors; t++)
            mix_some(heads, 1, weights + j * TILE + t * LANES, head, mixing, inverse ? inverse + t * LANES : NULL);
    }
}

/* ---- weights times V ------------------------------------------------------------------------------------------ */

/* sums: of `vectors` of columns of each of `most` queries, of which `queries` are there; columns: that are there. */
INLINE void divided_and_stored(int most, int vectors, const Floats *sums, const float *inverse, const Place *to,
                               int columns, int queries) {
    Part there[4];
    UNROLL(4) for (int x = 0; x < vectors; x++) there[x] = part_of(columns - x * LANES);
    UNROLL(16) for (int r = 0; r < most; r++)
        if (r < queries)
            UNROLL(4) for (int x = 0; x < vectors; x++) {
                const Floats mean = sums[r * vectors + x] * repeated(inverse ? inverse[r] : 1);
                const ptrdiff_t at = r * to->row + x * LANES;
                if (to->out) store_part(to->out + at, mean, there[x]);
                else store_steps(to->quantised + at, mean * repeated(to->steps), there[x]);
            }
}

INLINE void weigh_f32(int most, int vectors, const float *weights, const float *values, const float *inverse,
                      const Place *to, int n, int columns, int queries) {
    Floats sums[24];
    UNROLL(24) for (int i = 0; i < most * vectors; i++) sums[i] = zero();
    for (int j = 0; j < n; j++) {
        Floats value[4];
        UNROLL(4) for (int x = 0; x < vectors; x++) value[x] = loaded(values + WHOLE * j + x * LANES);
        UNROLL(16) for (int r = 0; r < most; r++) {
            const Floats weight = repeated(weights[j * TILE + r]);
            UNROLL(4) for (int x = 0; x < vectors; x++)
                sums[r * vectors + x] = fused(value[x], weight, sums[r * vectors + x]);
        }
    }
    divided_and_stored(most, vectors, sums, inverse, to, columns, queries);
}

#if HAS_BF16
INLINE_BF16 void weigh_b16(int most, int vectors, const uint32_t *weights, const uint32_t *values,
                           const float *inverse, const Place *to, int pairs, int columns, int queries) {
    Floats sums[24];
    UNROLL(24) for (int i = 0; i < most * vectors; i++) sums[i] = zero();
    for (int j = 0; j < pairs; j++) {
        Words value[4];
        UNROLL(4) for (int x = 0; x < vectors; x++) value[x] = loaded_words(values + WHOLE * j + x * LANES);
        UNROLL(16) for (int r = 0; r < most; r++) {
            const Words weight = repeated_word(weights[j * TILE + r]);
            UNROLL(4) for (int x = 0; x < vectors; x++)
                sums[r * vectors + x] = dot(sums[r * vectors + x], value[x], weight);
        }
    }
    if (!to->rounded) {
        divided_and_stored(most, vectors, sums, inverse, to, columns, queries);
        return;
    }
    UNROLL(16) for (int r = 0; r < most; r++)
        if (r < queries)
            UNROLL(4) for (int x = 0; x < vectors; x++)
                store_rounded(to->rounded + r * to->row + x * LANES,
                              sums[r * vectors + x] * repeated(inverse ? inverse[r] : 1), part_of(columns - x * LANES));
}
#define OUTPUT_OF_B16(vectors, most)                                                                                 \
    PHASE_BF16 void weighed_b16_##vectors(const uint32_t *weights, const uint32_t *values, const float *inverse,     \
                                          const Place *to, int pairs, int columns, int queries) {                    \
        weigh_b16(most, vectors, weights, values, inverse, to, pairs, columns, queries);                             \
    }
#else
#define OUTPUT_OF_B16(vectors, most)
#endif

/* `most` queries (those beyond `queries` are computed and dropped) times some vectors of columns of V. */
#define OUTPUT_OF(vectors, most)                                                                                     \
    enum { QUERIES_WITH_##vectors = most };                                                                          \
    PHASE void weighed_f32_##vectors(const float *weights, const float *values, const float *inverse,                \
                                     const Place *to, int n, int columns, int queries) {                             \
        weigh_f32(most, vectors, weights, values, inverse, to, n, columns, queries);                                 \
    }                                                                                                                \
    OUTPUT_OF_B16(vectors, most)
OUTPUT_BLOCKS
#undef OUTPUT_OF

/* The last columns of a head dim, of which there are few: a vector holds queries of one column, so that only columns
   that are there cost time. Some keys at once, so that no sum waits for the one before. */
enum { FEW_COLUMNS = LANES / 2, MOST_AT_ONCE = FEW_COLUMNS < 4 ? FEW_COLUMNS : 4 };

/* As store_rounded, of a single number. */
static uint16_t rounded_number(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* sums: of `count` columns, a vector of queries each. */
INLINE void few_stored(const Floats *sums, int count, const float *inverse, const Place *to, int first, int columns,
                       int queries) {
    for (int c = 0; c < count && first + c < columns; c++) {
        float means[LANES];
        int8_t steps[LANES];
        Floats mean = sums[c];
        if (inverse) mean = mean * loaded_anywhere(inverse);
        store_anywhere(means, mean);
        store_steps(steps, mean * repeated(to->steps), part_of(LANES));
        for (int r = 0; r < queries && r < LANES; r++)
            if (to->out) to->out[r * to->row + first + c] = means[r];
            else if (to->rounded) to->rounded[r * to->row + first + c] = rounded_number(means[r]);
            else to->quantised[r * to->row + first + c] = steps[r];
    }
}

INLINE void few_f32(int count, const float *weights, const float *values, const float *inverse, const Place *to, int n,
                    int first, int columns, int queries) {
    Floats sums[FEW_KEYS * MOST_AT_ONCE];
    UNROLL(16) for (int i = 0; i < FEW_KEYS * count; i++) sums[i] = zero();
    int j = 0;
    for (; j + FEW_KEYS <= n; j += FEW_KEYS)
        UNROLL(4) for (int r = 0; r < FEW_KEYS; r++) {
            const Floats weight = loaded(weights + (j + r) * TILE);
            UNROLL(4) for (int c = 0; c < count; c++)
                sums[r * count + c] = fused(weight, repeated(values[(j + r) * WHOLE + first + c]), sums[r * count + c]);
        }
    for (; j < n; j++)
        UNROLL(4) for (int c = 0; c < count; c++)
            sums[c] = fused(loaded(weights + j * TILE), repeated(values[j * WHOLE + first + c]), sums[c]);
    UNROLL(16) for (int i = count; i < FEW_KEYS * count; i++) sums[i % count] = sums[i % count] + sums[i];
    few_stored(sums, count, inverse, to, first, columns, queries);
}

/* As weighed_f32 and weighed_b16; columns beyond the last are zero in `values`, computed and dropped. */
PHASE void weighed_few_f32(const float *weights, const float *values, const float *inverse, const Place *to, int n,
                           int columns, int queries) {
    if (columns == 1) few_f32(1, weights, values, inverse, to, n, 0, columns, queries);
    else
        for (int first = 0; first < columns; first += MOST_AT_ONCE)
            few_f32(MOST_AT_ONCE, weights, values, inverse, to, n, first, columns, queries);
}

#if HAS_BF16
INLINE_BF16 void few_b16(int count, const uint32_t *weights, const uint32_t *values, const float *inverse,
                         const Place *to, int pairs, int first, int columns, int queries) {
    Floats sums[FEW_KEYS * MOST_AT_ONCE];
    UNROLL(16) for (int i = 0; i < FEW_KEYS * count; i++) sums[i] = zero();
    int j = 0;
    for (; j + FEW_KEYS <= pairs; j += FEW_KEYS)
        UNROLL(4) for (int r = 0; r < FEW_KEYS; r++) {
            const Words weight = loaded_words(weights + (j + r) * TILE);
            UNROLL(4) for (int c = 0; c < count; c++) {
                const Words value = repeated_word(values[(j + r) * WHOLE + first + c]);
                sums[r * count + c] = dot(sums[r * count + c], weight, value);
            }
        }
    for (; j < pairs; j++)
        UNROLL(4) for (int c = 0; c < count; c++)
            sums[c] = dot(sums[c], loaded_words(weights + j * TILE), repeated_word(values[j * WHOLE + first + c]));
    UNROLL(16) for (int i = count; i < FEW_KEYS * count; i++) sums[i % count] = sums[i % count] + sums[i];
    few_stored(sums, count, inverse, to, first, columns, queries);
}

PHASE_BF16 void weighed_few_b16(const uint32_t *weights, const uint32_t *values, const float *inverse, const Place *to,
                                int pairs, int columns, int queries) {
    if (columns == 1) few_b16(1, weights, values, inverse, to, pairs, 0, columns, queries);
    else
        for (int first = 0; first < columns; first += MOST_AT_ONCE)
            few_b16(MOST_AT_ONCE, weights, values, inverse, to, pairs, first, columns, queries);
}
#endif
