/* Masked attention on a CPU in one pass over each head:

       O = softmax(M o Q K^T) V            and, where heads are mixed (CaiT's talking heads),
       O_g = (sum_h A_hg softmax(sum_f B_fh (M_f o Q_f K_f^T))) V_g,    or, of windows (Swin's),
       O = softmax(M o Q K^T + bias) V

   DeepViT mixes heads only after softmax: the sum over f is S_h = M_h o Q_h K_h^T there.

   OpenVINO and ONNX Runtime run this as matrix products with softmax and copies between. Here nothing leaves the
   cache: for one image, one head and up to 64 queries, scores are made, masked, exponentiated and spent on V.

   Scores lie transposed, a vector of 16 lanes holding 16 queries of one key. So the greatest score and the sum over
   keys are taken lane by lane, and a weight is a scalar in memory that the product with V broadcasts for nothing.

   The mask comes prepared: M^T times log2(e), so that 2^x does for e^x, laid out as masked_attention.h says.
   Two arithmetics: float32 throughout; or Q, K, V and weights rounded to bfloat16, the mask to float16 (for one image
   its way from memory is all that it costs; an eighth of their error), sums and softmax in float32.
   Needs AVX-512, and its BF16 part for the second; elsewhere masked_attention_support() says so. */

#include "masked_attention.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = 0, FLOAT32 = MASKED_ATTENTION_FLOAT32, BFLOAT16 = MASKED_ATTENTION_BFLOAT16 };

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512bf16")))
#define PRAGMA(x) _Pragma(#x)
#define UNROLL(n) PRAGMA(GCC unroll n)
/* Inlined with constant arguments, so that accumulators stay in registers. */
#define INLINE AVX512 static inline __attribute__((always_inline))
#define INLINE_BF16 AVX512_BF16 static inline __attribute__((always_inline))
/* A phase of its own: one after another inlined, they would crowd each other's registers out. */
#define PHASE AVX512 static __attribute__((noinline))
#define PHASE_BF16 AVX512_BF16 static __attribute__((noinline))

enum { LANES = 16, TILE = 4 * LANES, MOST_MIXED = 16 };

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
} Scratch;

/* Of one image. */
typedef struct {
    const MaskedAttention *of;
    const float *q, *k, *v;
    const float *bias; /* its window's; or NULL */
    ptrdiff_t first;   /* of its numbers in the output */
} Image;

/* Where 16 columns of one query are put, and of those below it a row further each. */
typedef struct {
    float *out;        /* or NULL, and */
    int8_t *quantised; /* numbers divided by the step, rounded to even, saturated */
    float steps;
    ptrdiff_t row;
    __mmask16 columns; /* that are there: fewer than 16 at the end of a head dim that is no multiple of 16 */
} Place;

enum { ALL_COLUMNS = 0xffff };

/* Of the 16 columns from the first of `left` columns on, those that are there. */
static __mmask16 columns_of(int left) { return left < LANES ? (__mmask16)((1u << left) - 1) : ALL_COLUMNS; }

static int whole_d(const MaskedAttention *of) { return (of->d + LANES - 1) / LANES * LANES; }

INLINE __m512i interleaved(__m512i two_halves) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, two_halves);
}

/* 2^x for x <= 0: 2^floor(x) by scaling, 2^fraction by a polynomial fitted to the least greatest relative error.
   Degree 6: 2e-9, below float32's rounding. Degree 3: 8e-5, below bfloat16's 2e-3. */
INLINE __m512 exp2_of(__m512 x, int degree) {
    static const float six[] = {2.170225243e-04f, 1.243968871e-03f, 9.678840900e-03f, 5.548334203e-02f,
                                2.402298363e-01f, 6.931469838e-01f, 1.000000002e+00f};
    static const float three[] = {7.802449219e-02f, 2.260671988e-01f, 6.958335256e-01f, 9.999252193e-01f};
    const float *terms = degree == 6 ? six : three;
    __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 sum = _mm512_set1_ps(terms[0]);
    UNROLL(6) for (int i = 1; i <= degree; i++) sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(terms[i]));
    return _mm512_scalef_ps(sum, x);
}

INLINE void transpose_16x16(__m512i r[16]) {
    __m512i t[16];
    UNROLL(8) for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL(4) for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL(4) for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL(4) for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* ---- Q, K and V as the products want them --------------------------------------------------------------------- */

/* (queries, d) -> (whole d, TILE); queries and columns that are not there are zero. */
PHASE void pack_queries_f32(const float *q, ptrdiff_t row, float *packed, int queries, int d) {
    for (int t = 0; t < queries; t += LANES)
        for (int c = 0; c < d; c += LANES) {
            const __mmask16 columns = columns_of(d - c);
            __m512i r[16];
            UNROLL(16) for (int x = 0; x < 16; x++)
                r[x] = _mm512_maskz_loadu_epi32(t + x < queries ? columns : 0, q + (t + x) * row + c);
            transpose_16x16(r);
            UNROLL(16) for (int x = 0; x < 16; x++) _mm512_store_si512(packed + (c + x) * TILE + t, r[x]);
        }
}

/* (queries, d) -> (whole d / 2, TILE) of pairs; 16 columns are 8 pairs, so two groups of 16 queries turn at once. */
PHASE_BF16 void pack_queries_b16(const float *q, ptrdiff_t row, uint32_t *packed, int queries, int d) {
    for (int t = 0; t < queries; t += 2 * LANES)
        for (int c = 0; c < d; c += LANES) {
            const __mmask16 columns = columns_of(d - c);
            __m512i r[16];
            UNROLL(16) for (int x = 0; x < 16; x++) {
                const int here = t + x, there = here + LANES;
                __m512 low = _mm512_maskz_loadu_ps(here < queries ? columns : 0, q + here * row + c);
                __m512 high = _mm512_maskz_loadu_ps(there < queries ? columns : 0, q + there * row + c);
                r[x] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            }
            transpose_16x16(r);
            UNROLL(8) for (int x = 0; x < 8; x++) {
                _mm512_store_si512(packed + (c / 2 + x) * TILE + t, r[x]);
                _mm512_store_si512(packed + (c / 2 + x) * TILE + t + LANES, r[x + 8]);
            }
        }
}

PHASE void pack_values_f32(const float *v, ptrdiff_t row, float *packed, int n, int d) {
    for (int c = 0; c < d; c += LANES) {
        const __mmask16 columns = columns_of(d - c);
        for (int j = 0; j < n; j++, packed += LANES)
            _mm512_store_ps(packed, _mm512_maskz_loadu_ps(columns, v + j * row + c));
    }
}

PHASE_BF16 void pack_keys_and_values_b16(const float *k, ptrdiff_t k_row, const float *v, ptrdiff_t v_row,
                                         uint32_t *keys, uint32_t *values, int n, int d, int whole) {
    for (int j = 0; j < n; j += 2) {
        const float *one = k + j * k_row, *next = one + (j + 1 < n ? k_row : 0); /* the last may be written twice */
        for (int c = 0; c < d; c += LANES) {
            const __mmask16 columns = columns_of(d - c);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(columns, next + c),
                                                        _mm512_maskz_loadu_ps(columns, one + c));
            _mm256_store_si256((__m256i *)(keys + (j * whole + c) / 2), _mm512_castsi512_si256(both));
            _mm256_store_si256((__m256i *)(keys + ((j + 1) * whole + c) / 2), _mm512_extracti64x4_epi64(both, 1));
        }
    }
    for (int c = 0; c < d; c += LANES) {
        const __mmask16 columns = columns_of(d - c);
        for (int j = 0; j < n; j += 2, values += LANES) {
            __m512 second = _mm512_maskz_loadu_ps(j + 1 < n ? columns : 0, v + (j + 1) * v_row + c);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, _mm512_maskz_loadu_ps(columns, v + j * v_row + c));
            _mm512_store_si512(values, interleaved(both));
        }
    }
}

/* ---- M o Q K^T, transposed ------------------------------------------------------------------------------------ */

/* Of one head and one tile of queries: (n, pitch), or where `places` says; or NULL, and the scale instead. */
typedef struct {
    const char *at;
    ptrdiff_t pitch;
    const int32_t *places;
    __mmask16 class_lane; /* in the first vector, where `of_class` is to be read instead */
    float of_class;
    float scale;
} Mask;

enum { KEYS_AHEAD = 24, OF_FLOAT32 = sizeof(float), OF_FLOAT16 = sizeof(uint16_t) };

/* bytes: of a number. */
INLINE __m512 numbers_at(const char *at, int bytes) {
    return bytes == OF_FLOAT32 ? _mm512_loadu_ps(at) : _mm512_cvtph_ps(_mm256_loadu_si256((const void *)at));
}

INLINE void masked_and_stored(int keys, int vectors, __m512 sums[24], const Mask *mask, int bytes, int j,
                              float *scores) {
    UNROLL(16) for (int r = 0; r < keys; r++) {
        const ptrdiff_t place = mask->places ? mask->places[j + r] : (j + r) * mask->pitch;
        UNROLL(4) for (int t = 0; t < vectors; t++) {
            __m512 m = _mm512_set1_ps(mask->scale);
            if (mask->at) {
                const char *at = mask->at + (place + t * LANES) * bytes;
                m = numbers_at(at, bytes);
                if (t == 0) m = _mm512_mask_mov_ps(m, mask->class_lane, _mm512_set1_ps(mask->of_class));
                /* One that is read in the order in which it lies comes from afar. */
                if (!mask->places) _mm_prefetch(at + KEYS_AHEAD * mask->pitch * bytes, _MM_HINT_T0);
            }
            _mm512_store_ps(scores + (j + r) * TILE + LANES * t, _mm512_mul_ps(sums[r * vectors + t], m));
        }
    }
}

/* Keys from j on; keys * vectors <= 24 accumulators, out of 32 registers. */
INLINE void block_f32(int keys, int vectors, const float *queries, const float *k, ptrdiff_t row, int d,
                      const Mask *mask, int j, float *scores) {
    __m512 sums[24], q[4];
    UNROLL(24) for (int i = 0; i < keys * vectors; i++) sums[i] = _mm512_setzero_ps();
    for (int c = 0; c < d; c++) {
        UNROLL(4) for (int t = 0; t < vectors; t++) q[t] = _mm512_load_ps(queries + c * TILE + LANES * t);
        UNROLL(16) for (int r = 0; r < keys; r++) {
            __m512 key = _mm512_set1_ps(k[(j + r) * row + c]);
            UNROLL(4) for (int t = 0; t < vectors; t++)
                sums[r * vectors + t] = _mm512_fmadd_ps(key, q[t], sums[r * vectors + t]);
        }
    }
    masked_and_stored(keys, vectors, sums, mask, OF_FLOAT32, j, scores);
}

INLINE_BF16 void block_b16(int keys, int vectors, const uint32_t *queries, const uint32_t *k, ptrdiff_t row, int pairs,
                           const Mask *mask, int j, float *scores) {
    __m512 sums[24];
    __m512i q[4];
    UNROLL(24) for (int i = 0; i < keys * vectors; i++) sums[i] = _mm512_setzero_ps();
    for (int c = 0; c < pairs; c++) {
        UNROLL(4) for (int t = 0; t < vectors; t++) q[t] = _mm512_load_si512(queries + c * TILE + LANES * t);
        UNROLL(16) for (int r = 0; r < keys; r++) {
            __m512bh key = (__m512bh)_mm512_set1_epi32((int)k[(j + r) * row + c]);
            UNROLL(4) for (int t = 0; t < vectors; t++)
                sums[r * vectors + t] = _mm512_dpbf16_ps(sums[r * vectors + t], key, (__m512bh)q[t]);
        }
    }
    masked_and_stored(keys, vectors, sums, mask, OF_FLOAT16, j, scores);
}

/* Blocks of as many keys as the registers hold, then of one. */
#define SCORES_OF(vectors, keys)                                                                                     \
    PHASE void scores_f32_##vectors(const MaskedAttention *of, const float *queries, const float *k,                 \
                                    const Mask *mask, float *scores) {                                               \
        int j = 0;                                                                                                   \
        for (; j + keys <= of->n; j += keys)                                                                         \
            block_f32(keys, vectors, queries, k, of->k_row, of->d, mask, j, scores);                                 \
        for (; j < of->n; j++) block_f32(1, vectors, queries, k, of->k_row, of->d, mask, j, scores);                 \
    }                                                                                                                \
    PHASE_BF16 void scores_b16_##vectors(const MaskedAttention *of, const uint32_t *queries, const uint32_t *k,      \
                                         const Mask *mask, float *scores) {                                          \
        const int row = whole_d(of) / 2, pairs = (of->d + 1) / 2;                                                    \
        int j = 0;                                                                                                   \
        for (; j + keys <= of->n; j += keys) block_b16(keys, vectors, queries, k, row, pairs, mask, j, scores);      \
        for (; j < of->n; j++) block_b16(1, vectors, queries, k, row, pairs, mask, j, scores);                       \
    }
SCORES_OF(1, 16)
SCORES_OF(2, 12)
SCORES_OF(3, 8)
SCORES_OF(4, 6)

/* ---- softmax over keys, and the mixing of heads ---------------------------------------------------------------- */

INLINE __m512 greatest(const float *scores, int n) {
    __m512 one = _mm512_load_ps(scores), other = one;
    int j = 1;
    for (; j + 1 < n; j += 2) {
        one = _mm512_max_ps(one, _mm512_load_ps(scores + j * TILE));
        other = _mm512_max_ps(other, _mm512_load_ps(scores + (j + 1) * TILE));
    }
    for (; j < n; j++) one = _mm512_max_ps(one, _mm512_load_ps(scores + j * TILE));
    return _mm512_max_ps(one, other);
}

INLINE void softmax_with(float *scores, float *inverse, int n, int vectors, int degree) {
    for (int t = 0; t < vectors * LANES; t += LANES) {
        __m512 top = greatest(scores + t, n), sum = _mm512_setzero_ps();
        for (int j = 0; j < n; j++) {
            __m512 weight = exp2_of(_mm512_sub_ps(_mm512_load_ps(scores + j * TILE + t), top), degree);
            sum = _mm512_add_ps(sum, weight);
            _mm512_store_ps(scores + j * TILE + t, weight);
        }
        _mm512_store_ps(inverse + t, _mm512_div_ps(_mm512_set1_ps(1), sum));
    }
}

/* Weights before they are divided by their sum, in place of the scores. */
PHASE void softmax_f32(float *scores, float *inverse, int n, int vectors) {
    softmax_with(scores, inverse, n, vectors, 6);
}

/* As exact as weights need be that will be rounded to bfloat16. */
PHASE void softmax_rough(float *scores, float *inverse, int n, int vectors) {
    softmax_with(scores, inverse, n, vectors, 3);
}

/* The same into pairs of bfloat16. */
PHASE_BF16 void softmax_b16(const float *scores, uint32_t *pairs, float *inverse, int n, int vectors) {
    for (int t = 0; t < vectors * LANES; t += LANES) {
        __m512 top = greatest(scores + t, n), sum = _mm512_setzero_ps(), sum2 = sum;
        for (int j = 0; j < n; j += 2) {
            __m512 weight = exp2_of(_mm512_sub_ps(_mm512_load_ps(scores + j * TILE + t), top), 3);
            __m512 next = _mm512_setzero_ps();
            if (j + 1 < n) next = exp2_of(_mm512_sub_ps(_mm512_load_ps(scores + (j + 1) * TILE + t), top), 3);
            sum = _mm512_add_ps(sum, weight);
            sum2 = _mm512_add_ps(sum2, next);
            _mm512_store_si512(pairs + (j / 2) * TILE + t, interleaved((__m512i)_mm512_cvtne2ps_pbh(next, weight)));
        }
        _mm512_store_ps(inverse + t, _mm512_div_ps(_mm512_set1_ps(1), _mm512_add_ps(sum, sum2)));
    }
}

PHASE_BF16 void pack_weights_b16(const float *weights, uint32_t *pairs, int n, int vectors) {
    for (int j = 0; j < n; j += 2)
        for (int t = 0; t < vectors * LANES; t += LANES) {
            __m512 next = j + 1 < n ? _mm512_load_ps(weights + (j + 1) * TILE + t) : _mm512_setzero_ps();
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(next, _mm512_load_ps(weights + j * TILE + t));
            _mm512_store_si512(pairs + (j / 2) * TILE + t, interleaved(both));
        }
}

/* Of one vector of weights of each head. Known when compiled, 4, 8 and 12 heads stay in registers. */
INLINE void mix_vector(int heads, float *at, ptrdiff_t head, const float *mixing, const float *inverse) {
    __m512 sums[MOST_MIXED];
    UNROLL(12) for (int h = 0; h < heads; h++) {
        __m512 one = _mm512_load_ps(at + h * head);
        if (inverse) one = _mm512_mul_ps(one, _mm512_load_ps(inverse + h * TILE));
        UNROLL(12) for (int g = 0; g < heads; g++) {
            __m512 by = _mm512_set1_ps(mixing[h * heads + g]);
            sums[g] = h ? _mm512_fmadd_ps(one, by, sums[g]) : _mm512_mul_ps(one, by);
        }
    }
    UNROLL(12) for (int g = 0; g < heads; g++) _mm512_store_ps(at + g * head, sums[g]);
}

/* weights[g] = sum_h mixing[h][g] weights[h] (times 1 / the sum of h's weights), in place. */
PHASE void mix_heads(float *weights, const float *mixing, const float *inverse, int heads, int n, int vectors) {
    ptrdiff_t head = (ptrdiff_t)n * TILE;
    for (int j = 0; j < n; j++)
        for (int t = 0; t < vectors * LANES; t += LANES) {
            float *at = weights + j * TILE + t;
            const float *by = inverse ? inverse + t : NULL;
            if (heads == 4) mix_vector(4, at, head, mixing, by);
            else if (heads == 8) mix_vector(8, at, head, mixing, by);
            else if (heads == 12) mix_vector(12, at, head, mixing, by);
            else mix_vector(heads, at, head, mixing, by);
        }
}

/* ---- weights times V ------------------------------------------------------------------------------------------ */

INLINE void divided_and_stored(__m512 sums[LANES], const float *inverse, const Place *to, int queries) {
    UNROLL(16) for (int r = 0; r < LANES; r++)
        if (r < queries) {
            __m512 mean = _mm512_mul_ps(sums[r], _mm512_set1_ps(inverse ? inverse[r] : 1));
            if (to->out && to->columns == ALL_COLUMNS) {
                _mm512_storeu_ps(to->out + r * to->row, mean);
            } else if (to->out) {
                _mm512_mask_storeu_ps(to->out + r * to->row, to->columns, mean);
            } else {
                __m512i steps = _mm512_cvtps_epi32(_mm512_mul_ps(mean, _mm512_set1_ps(to->steps)));
                _mm_mask_storeu_epi8(to->quantised + r * to->row, to->columns, _mm512_cvtsepi32_epi8(steps));
            }
        }
}

/* 16 queries (those beyond `queries` are computed and dropped) times 16 columns of V. */
PHASE void weighed_f32(const float *weights, const float *values, const float *inverse, const Place *to, int n,
                       int queries) {
    __m512 sums[LANES];
    UNROLL(16) for (int r = 0; r < LANES; r++) sums[r] = _mm512_setzero_ps();
    for (int j = 0; j < n; j++) {
        __m512 value = _mm512_load_ps(values + LANES * j);
        UNROLL(16) for (int r = 0; r < LANES; r++)
            sums[r] = _mm512_fmadd_ps(value, _mm512_set1_ps(weights[j * TILE + r]), sums[r]);
    }
    divided_and_stored(sums, inverse, to, queries);
}

PHASE_BF16 void weighed_b16(const uint32_t *weights, const uint32_t *values, const float *inverse, const Place *to,
                            int pairs, int queries) {
    __m512 sums[LANES];
    UNROLL(16) for (int r = 0; r < LANES; r++) sums[r] = _mm512_setzero_ps();
    for (int j = 0; j < pairs; j++) {
        __m512bh value = (__m512bh)_mm512_load_si512(values + LANES * j);
        UNROLL(16) for (int r = 0; r < LANES; r++)
            sums[r] = _mm512_dpbf16_ps(sums[r], value, (__m512bh)_mm512_set1_epi32((int)weights[j * TILE + r]));
    }
    divided_and_stored(sums, inverse, to, queries);
}

/* The last columns of a head dim, of which there are few: a vector holds 16 queries of one column, so that only columns
   that are there cost time. Four keys at once, so that no sum waits for the one before. */
enum { FEW_COLUMNS = 8, KEYS_AT_ONCE = 4, MOST_AT_ONCE = 4 };

/* sums: of `count` columns, 16 queries each. */
INLINE void few_stored(const __m512 *sums, int count, const float *inverse, const Place *to, int first, int queries) {
    const int left = __builtin_popcount(to->columns) - first, columns = left < count ? left : count;
    for (int c = 0; c < columns; c++) {
        float means[LANES];
        int8_t steps[LANES];
        __m512 mean = inverse ? _mm512_mul_ps(sums[c], _mm512_loadu_ps(inverse)) : sums[c];
        _mm512_storeu_ps(means, mean);
        __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(mean, _mm512_set1_ps(to->steps)));
        _mm_storeu_si128((__m128i *)steps, _mm512_cvtsepi32_epi8(rounded));
        for (int r = 0; r < queries && r < LANES; r++)
            if (to->out) to->out[r * to->row + first + c] = means[r];
            else to->quantised[r * to->row + first + c] = steps[r];
    }
}

INLINE void few_f32(int count, const float *weights, const float *values, const float *inverse, const Place *to, int n,
                    int first, int queries) {
    __m512 sums[KEYS_AT_ONCE * MOST_AT_ONCE];
    UNROLL(16) for (int i = 0; i < KEYS_AT_ONCE * count; i++) sums[i] = _mm512_setzero_ps();
    int j = 0;
    for (; j + KEYS_AT_ONCE <= n; j += KEYS_AT_ONCE)
        UNROLL(4) for (int r = 0; r < KEYS_AT_ONCE; r++) {
            __m512 weight = _mm512_load_ps(weights + (j + r) * TILE);
            UNROLL(4) for (int c = 0; c < count; c++)
                sums[r * count + c] = _mm512_fmadd_ps(weight, _mm512_set1_ps(values[(j + r) * LANES + first + c]),
                                                      sums[r * count + c]);
        }
    for (; j < n; j++)
        UNROLL(4) for (int c = 0; c < count; c++)
            sums[c] = _mm512_fmadd_ps(_mm512_load_ps(weights + j * TILE), _mm512_set1_ps(values[j * LANES + first + c]),
                                      sums[c]);
    UNROLL(16) for (int i = count; i < KEYS_AT_ONCE * count; i++)
        sums[i % count] = _mm512_add_ps(sums[i % count], sums[i]);
    few_stored(sums, count, inverse, to, first, queries);
}

INLINE_BF16 void few_b16(int count, const uint32_t *weights, const uint32_t *values, const float *inverse,
                         const Place *to, int pairs, int first, int queries) {
    __m512 sums[KEYS_AT_ONCE * MOST_AT_ONCE];
    UNROLL(16) for (int i = 0; i < KEYS_AT_ONCE * count; i++) sums[i] = _mm512_setzero_ps();
    int j = 0;
    for (; j + KEYS_AT_ONCE <= pairs; j += KEYS_AT_ONCE)
        UNROLL(4) for (int r = 0; r < KEYS_AT_ONCE; r++) {
            __m512bh weight = (__m512bh)_mm512_load_si512(weights + (j + r) * TILE);
            UNROLL(4) for (int c = 0; c < count; c++) {
                __m512bh value = (__m512bh)_mm512_set1_epi32((int)values[(j + r) * LANES + first + c]);
                sums[r * count + c] = _mm512_dpbf16_ps(sums[r * count + c], weight, value);
            }
        }
    for (; j < pairs; j++)
        UNROLL(4) for (int c = 0; c < count; c++)
            sums[c] = _mm512_dpbf16_ps(sums[c], (__m512bh)_mm512_load_si512(weights + j * TILE),
                                       (__m512bh)_mm512_set1_epi32((int)values[j * LANES + first + c]));
    UNROLL(16) for (int i = count; i < KEYS_AT_ONCE * count; i++)
        sums[i % count] = _mm512_add_ps(sums[i % count], sums[i]);
    few_stored(sums, count, inverse, to, first, queries);
}

/* As weighed_f32 and weighed_b16; columns beyond the last are zero in `values`, computed and dropped. */
PHASE void weighed_few_f32(const float *weights, const float *values, const float *inverse, const Place *to, int n,
                           int queries) {
    const int columns = __builtin_popcount(to->columns);
    if (columns == 1) few_f32(1, weights, values, inverse, to, n, 0, queries);
    else
        for (int first = 0; first < columns; first += MOST_AT_ONCE)
            few_f32(MOST_AT_ONCE, weights, values, inverse, to, n, first, queries);
}

PHASE_BF16 void weighed_few_b16(const uint32_t *weights, const uint32_t *values, const float *inverse, const Place *to,
                                int pairs, int queries) {
    const int columns = __builtin_popcount(to->columns);
    if (columns == 1) few_b16(1, weights, values, inverse, to, pairs, 0, queries);
    else
        for (int first = 0; first < columns; first += MOST_AT_ONCE)
            few_b16(MOST_AT_ONCE, weights, values, inverse, to, pairs, first, queries);
}

/* ---- one image -------------------------------------------------------------------------------------------------- */

/* That hold so many queries. */
static int vectors_of(int queries) { return (queries + LANES - 1) / LANES; }

static ptrdiff_t lanes_of_queries(const MaskedAttention *of) { return vectors_of(of->queries) * LANES; }

/* Numbers from one key to the next, in the tile that `first` is in, of what lies by tiles. */
static ptrdiff_t pitch_of(const MaskedAttention *of, int first) {
    const ptrdiff_t left = lanes_of_queries(of) - first / TILE * TILE;
    return left < TILE ? left : TILE;
}

/* A mask on a grid as it is multiplied by: all queries of a key follow each other in each head's

       W[column of key][row of query - row of key + g - 1][column of query]

   the first at W[column of key][g - 1 - row of key][0]. One number that is never used goes before W if there is a class
   token; from `class_numbers` on there is the class token's number, n times. What comes from memory, T, is g times
   smaller: for one image a mask's way is all that it costs. */

static ptrdiff_t class_numbers(const MaskedAttention *of) {
    const ptrdiff_t g = of->grid;
    return (g * g * (2 * g - 1) + 2 * LANES - 1) / LANES * LANES;
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
    return of->mask && of->grid ? class_numbers(of) + vectors_of(of->n) * LANES : 0;
}

static int bytes_of_a_number(const MaskedAttention *of) {
    return of->arithmetic == BFLOAT16 ? OF_FLOAT16 : OF_FLOAT32;
}

/* T and the class token's number, of one head. */
static ptrdiff_t bytes_of_a_head(const MaskedAttention *of) {
    const ptrdiff_t apart = 2 * of->grid - 1;
    return (apart * apart + 2 * LANES - 1) / LANES * LANES * bytes_of_a_number(of);
}

/* step: bytes at once; where they are more than a row's, what is written too far is written over. */
INLINE void spread_numbers(const MaskedAttention *of, const char *from, char *to, ptrdiff_t bytes, int step) {
    const ptrdiff_t g = of->grid, apart = 2 * g - 1, row = g * bytes;
    for (ptrdiff_t column = 0; column < g; column++)
        for (ptrdiff_t rows = 0; rows < apart; rows++, to += row) {
            const char *start = from + (rows * apart + g - 1 - column) * bytes;
            for (ptrdiff_t at = 0; at < row; at += step)
                if (step == 16) _mm_storeu_si128((__m128i *)(to + at), _mm_loadu_si128((const __m128i *)(start + at)));
                else if (step == 32)
                    _mm256_storeu_si256((__m256i *)(to + at), _mm256_loadu_si256((const __m256i *)(start + at)));
                else _mm512_storeu_si512(to + at, _mm512_loadu_si512(start + at));
        }
}

/* In whole vectors. */
INLINE void repeat_number(const char *from, char *to, ptrdiff_t bytes, int times) {
    for (ptrdiff_t at = 0; at < times; at += LANES)
        if (bytes == OF_FLOAT32) _mm512_storeu_si512(to + at * bytes, _mm512_set1_epi32(*(const int32_t *)from));
        else _mm256_storeu_si256((__m256i *)(to + at * bytes), _mm256_set1_epi16(*(const int16_t *)from));
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
    if (has_class(of)) repeat_number(from + apart * apart * bytes, w + class_numbers(of) * bytes, bytes, of->n);
    if (head + 1 == of->mask_heads) return;
    for (ptrdiff_t at = 0; at < bytes_of_a_head(of); at += 64)
        _mm_prefetch(from + bytes_of_a_head(of) + at, _MM_HINT_T0);
}

/* Of a head, for the queries from `first` on. */
AVX512 static Mask mask_of(const MaskedAttention *of, const Scratch *to, int head, int first) {
    const int bytes = bytes_of_a_number(of);
    Mask mask = {.at = of->mask, .scale = of->scale};
    if (!of->mask) return mask;
    head = own_or_shared(head, of->mask_heads);
    if (!of->grid) {
        const ptrdiff_t n = of->n, lanes = lanes_of_queries(of), tile = first / TILE * TILE;
        mask.pitch = pitch_of(of, first);
        mask.at += ((head * lanes + tile) * n + first - tile) * bytes;
        return mask;
    }
    mask.at = to->mask + head * numbers_of_w(of) * bytes;
    mask.places = to->places;
    if (has_class(of) && !first) {
        mask.class_lane = 1;
        mask.of_class = _mm512_cvtss_f32(numbers_at(mask.at + class_numbers(of) * bytes, bytes));
    }
    mask.at += first * bytes;
    return mask;
}

/* bias: (n, pitch), of one head and one tile of queries. */
PHASE void add_bias(const float *bias, ptrdiff_t pitch, float *scores, int n, int vectors) {
    for (int j = 0; j < n; j++)
        for (int t = 0; t < vectors * LANES; t += LANES) {
            float *at = scores + j * TILE + t;
            _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), _mm512_loadu_ps(bias + j * pitch + t)));
        }
}

static void head_scores(const Image *im, const Scratch *to, int head, int first, int queries, float *scores) {
    const float *q = im->q + (ptrdiff_t)first * im->of->q_row + head * im->of->d, *k = im->k + head * im->of->d;
    const Mask mask = mask_of(im->of, to, head, first);
    int vectors = vectors_of(queries);
    if (im->of->arithmetic == BFLOAT16) {
        uint32_t *packed = (uint32_t *)to->queries;
        pack_queries_b16(q, im->of->q_row, packed, queries, im->of->d);
        if (vectors == 4) scores_b16_4(im->of, packed, to->keys, &mask, scores);
        else if (vectors == 3) scores_b16_3(im->of, packed, to->keys, &mask, scores);
        else if (vectors == 2) scores_b16_2(im->of, packed, to->keys, &mask, scores);
        else scores_b16_1(im->of, packed, to->keys, &mask, scores);
    } else {
        pack_queries_f32(q, im->of->q_row, to->queries, queries, im->of->d);
        if (vectors == 4) scores_f32_4(im->of, to->queries, k, &mask, scores);
        else if (vectors == 3) scores_f32_3(im->of, to->queries, k, &mask, scores);
        else if (vectors == 2) scores_f32_2(im->of, to->queries, k, &mask, scores);
        else scores_f32_1(im->of, to->queries, k, &mask, scores);
    }
}

static void pack_head(const Image *im, const Scratch *to, int head) {
    const float *k = im->k + head * im->of->d, *v = im->v + head * im->of->d;
    if (im->of->arithmetic == BFLOAT16)
        pack_keys_and_values_b16(k, im->of->k_row, v, im->of->v_row, to->keys, (uint32_t *)to->values, im->of->n,
                                 im->of->d, whole_d(im->of));
    else
        pack_values_f32(v, im->of->v_row, to->values, im->of->n, im->of->d);
}

/* weights: of one head, float32; those of bfloat16 are in to->pairs. inverse: NULL where they are divided already. */
static void head_output(const Image *im, const Scratch *to, int head, int first, int queries,
                        const float *weights, const float *inverse) {
    const ptrdiff_t row = (ptrdiff_t)im->of->heads * im->of->d;
    int half = (im->of->n + 1) / 2;
    for (int c = 0; c < im->of->d; c += LANES)
        for (int t = 0; t < queries; t += LANES) {
            const ptrdiff_t at = im->first + (first + t) * row + head * im->of->d + c;
            const Place place = {im->of->out ? im->of->out + at : NULL,
                                 im->of->quantised ? im->of->quantised + at : NULL, im->of->steps, row,
                                 columns_of(im->of->d - c)};
            const float *by = inverse ? inverse + t : NULL;
            const int few = im->of->d - c <= FEW_COLUMNS, left = queries - t;
            const uint32_t *value_pairs = (uint32_t *)to->values + (ptrdiff_t)c * half;
            const float *values = to->values + (ptrdiff_t)c * im->of->n;
            if (im->of->arithmetic == BFLOAT16 && few)
                weighed_few_b16(to->pairs + t, value_pairs, by, &place, half, left);
            else if (im->of->arithmetic == BFLOAT16) weighed_b16(to->pairs + t, value_pairs, by, &place, half, left);
            else if (few) weighed_few_f32(weights + t, values, by, &place, im->of->n, left);
            else weighed_f32(weights + t, values, by, &place, im->of->n, left);
        }
}

/* What one tile of queries takes from one head, which is packed. */
static void attend(const Image *im, const Scratch *to, int head, int first) {
    const int n = im->of->n, left = im->of->queries - first, queries = left < TILE ? left : TILE;
    const int vectors = vectors_of(queries);
    head_scores(im, to, head, first, queries, to->scores);
    if (im->bias) {
        const ptrdiff_t tiles = own_or_shared(head, im->of->bias_heads) * lanes_of_queries(im->of) + first;
        add_bias(im->bias + tiles * n, pitch_of(im->of, first), to->scores, n, vectors);
    }
    if (im->of->arithmetic == BFLOAT16) softmax_b16(to->scores, to->pairs, to->inverse, n, vectors);
    else softmax_f32(to->scores, to->inverse, n, vectors);
    head_output(im, to, head, first, queries, to->scores, to->inverse);
}

/* Queries of a piece of work where heads are mixed: few for a single image, so that no core is without any. */
static int mixed_at_once(const MaskedAttention *of) { return of->batch > 1 ? TILE : TILE / 2; }

/* What some queries take from all heads, which are mixed after softmax, and where `before` is given also before it. */
static void attend_mixed(const Image *im, const Scratch *to, int first) {
    int heads = im->of->heads, n = im->of->n, most = mixed_at_once(im->of);
    int left = im->of->queries - first, queries = left < most ? left : most, vectors = vectors_of(queries);
    ptrdiff_t scores_of_a_head = (ptrdiff_t)n * TILE;
    for (int head = 0; head < heads; head++) {
        spread_mask(im->of, to, head);
        if (im->of->arithmetic == BFLOAT16) pack_head(im, to, head); /* its keys; float32 reads them as they are */
        head_scores(im, to, head, first, queries, to->scores + head * scores_of_a_head);
    }
    if (im->of->before) mix_heads(to->scores, im->of->before, NULL, heads, n, vectors);
    for (int head = 0; head < heads; head++) {
        float *scores = to->scores + head * scores_of_a_head, *inverse = to->inverse + head * TILE;
        if (im->of->arithmetic == BFLOAT16) softmax_rough(scores, inverse, n, vectors);
        else softmax_f32(scores, inverse, n, vectors);
    }
    mix_heads(to->scores, im->of->after, to->inverse, heads, n, vectors);
    for (int head = 0; head < heads; head++) {
        const float *weights = to->scores + head * scores_of_a_head;
        pack_head(im, to, head);
        if (im->of->arithmetic == BFLOAT16) pack_weights_b16(weights, to->pairs, n, vectors);
        head_output(im, to, head, first, queries, weights, NULL);
    }
}

/* ---- what is called from outside ---------------------------------------------------------------------------------- */

int masked_attention_support(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("fma"))
        return NONE;
    return __builtin_cpu_supports("avx512bf16") ? BFLOAT16 : FLOAT32;
}

static int takes(const MaskedAttention *of) {
    if (of->batch <= 0 || of->heads <= 0 || of->queries <= 0 || of->n <= 0 || of->d <= 0) return 0;
    if (!of->out == !of->quantised) return 0;
    if (of->grid && of->queries != of->n) return 0;
    if (of->mask && of->mask_heads != 1 && of->mask_heads != of->heads) return 0;
    if (of->bias && of->bias_heads != 1 && of->bias_heads != of->heads) return 0;
    if (of->grid && (of->grid < 0 || (of->n != of->grid * of->grid && of->n != of->grid * of->grid + 1))) return 0;
    if ((of->before && !of->after) || (of->after && (of->heads > MOST_MIXED || of->bias))) return 0;
    if (of->bias && of->windows <= 0) return 0;
    return of->arithmetic >= FLOAT32 && of->arithmetic <= masked_attention_support();
}

static int tiles_of(const MaskedAttention *of) { return (of->queries + TILE - 1) / TILE; }

/* Of an image: of each head its tiles of queries; its queries, some at once, where heads are mixed. */
static int pieces_of_an_image(const MaskedAttention *of) {
    return of->after ? (of->queries + mixed_at_once(of) - 1) / mixed_at_once(of) : of->heads * tiles_of(of);
}

int64_t masked_attention_pieces(const MaskedAttention *of) { return (int64_t)of->batch * pieces_of_an_image(of); }

int masked_attention(const MaskedAttention *of, int64_t first, int64_t last) {
    if (!takes(of) || first < 0 || last > masked_attention_pieces(of)) return 1;
    size_t n = (size_t)of->n, d = (size_t)whole_d(of), kept = of->after ? (size_t)of->heads : 1, even = (n + 1) / 2 * 2;
    size_t heads = (size_t)of->heads, w = (size_t)(of->mask_heads * numbers_of_w(of)), total = 0;
    size_t sizes[] = {kept * n * TILE, even / 2 * TILE, d * TILE, even * d / 2, even * d, kept * TILE, w, heads, n};
    enum { PARTS = sizeof sizes / sizeof *sizes };
    for (int i = 0; i < PARTS; i++) total += sizes[i] = (sizes[i] + LANES - 1) / LANES * LANES;
    float *memory = aligned_alloc(64, total * sizeof(float)), *at = memory, *parts[PARTS];
    if (!memory) return 2;
    for (int i = 0; i < PARTS; at += sizes[i++]) parts[i] = at;
    Scratch to = {parts[0], (uint32_t *)parts[1], parts[2], (uint32_t *)parts[3], parts[4], parts[5],
                  (char *)parts[6], (int32_t *)parts[7], (int32_t *)parts[8]};
    memset(to.spread, 0, heads * sizeof *to.spread);
    if (of->grid) place_keys(of, to.places);
    int pieces = pieces_of_an_image(of), tiles = tiles_of(of);
    for (int64_t piece = first; piece < last; piece++) {
        int64_t image = piece / pieces, rows = image * of->n, q_rows = image * of->queries;
        ptrdiff_t window = of->bias ? image % of->windows : 0;
        Image im = {.of = of, .q = of->q + q_rows * of->q_row, .k = of->k + rows * of->k_row,
                    .v = of->v + rows * of->v_row,
                    .bias = of->bias ? of->bias + window * of->bias_heads * lanes_of_queries(of) * of->n : NULL,
                    .first = (ptrdiff_t)q_rows * of->heads * of->d};
        if (of->after) {
            attend_mixed(&im, &to, (int)(piece % pieces) * mixed_at_once(of));
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

#else

int masked_attention_support(void) { return NONE; }

int64_t masked_attention_pieces(const MaskedAttention *of) { return (void)of, 0; }

int masked_attention(const MaskedAttention *of, int64_t first, int64_t last) {
    return (void)of, (void)first, (void)last, 1;
}

#endif
