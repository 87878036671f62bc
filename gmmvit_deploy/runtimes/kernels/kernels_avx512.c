/* The kernels for AVX-512: the vectors of attention_on_vectors.h and norm_on_vectors.h, also with its BF16 part,
   and chain_on_vectors.h with its VNNI part. */

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <stdint.h>

#define SIMD __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define SIMD_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512bf16")))
#define SIMD_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx512vnni")))
#include "vector_words.h"

#define LANES 16
#define HAS_BF16 1
/* Of 32 registers, 24 hold sums: the keys of a block of scores by its vectors of queries. */
#define MOST_VECTORS 4
#define SCORE_BLOCKS SCORES_OF(1, 16) SCORES_OF(2, 12) SCORES_OF(3, 8) SCORES_OF(4, 6)
/* Queries of a block of the output by its vectors of columns. */
#define OUTPUT_BLOCKS OUTPUT_OF(1, 16)
#define MOST_OUTPUT_QUERIES 16
#define FEW_KEYS 4      /* at once, where a vector holds queries of one column */
#define MIXED_AT_ONCE 16 /* outputs of mixed heads */
#define MIXED_VECTORS 1  /* of queries, by the same numbers */

typedef __m512 Floats;
typedef __m512i Words;
typedef __mmask16 Part;   /* some first lanes */
typedef __mmask16 Chosen; /* lanes */

INLINE Floats zero(void) { return _mm512_setzero_ps(); }
INLINE Floats repeated(float x) { return _mm512_set1_ps(x); }
INLINE Words repeated_word(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE Floats loaded(const float *from) { return _mm512_load_ps(from); } /* of a whole vector's alignment */
INLINE Floats loaded_anywhere(const float *from) { return _mm512_loadu_ps(from); }
INLINE Words loaded_words(const uint32_t *from) { return _mm512_load_si512(from); }
INLINE void store(float *to, Floats x) { _mm512_store_ps(to, x); }
INLINE void store_anywhere(float *to, Floats x) { _mm512_storeu_ps(to, x); }
INLINE void store_words(uint32_t *to, Words x) { _mm512_store_si512(to, x); }
INLINE void store_low(uint32_t *to, Words x) { _mm256_store_si256((__m256i *)to, _mm512_castsi512_si256(x)); }
INLINE void store_high(uint32_t *to, Words x) { _mm256_store_si256((__m256i *)to, _mm512_extracti64x4_epi64(x, 1)); }

/* The first `count` lanes, or all of them; the memory of no other lane is touched. */
INLINE Part part_of(int count) { return count <= 0 ? 0 : count < LANES ? (Part)((1u << count) - 1) : 0xffff; }
INLINE Floats loaded_part(const float *from, Part part) { return _mm512_maskz_loadu_ps(part, from); }
INLINE void store_part(float *to, Floats x, Part part) {
    if (part == 0xffff) _mm512_storeu_ps(to, x);
    else _mm512_mask_storeu_ps(to, part, x);
}

INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); } /* a b + c */
INLINE Floats greater(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats square_root(Floats x) { return _mm512_sqrt_ps(x); }
INLINE float total(Floats x) { return _mm512_reduce_add_ps(x); }

/* x = whole + fraction; 2^whole times `by`. */
INLINE Floats fraction_of(Floats x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE Floats times_two_to_whole(Floats by, Floats x, Floats fraction) { return (void)fraction, _mm512_scalef_ps(by, x); }

/* Lane 0, if there is something to choose; and x but for the chosen lanes. */
INLINE Chosen first_lane(int chosen) { return (__mmask16)(chosen != 0); }
INLINE Floats replaced(Floats x, Chosen lanes, float by) { return _mm512_mask_mov_ps(x, lanes, _mm512_set1_ps(by)); }

/* Rounded to even, saturated. */
INLINE void store_steps(int8_t *to, Floats x, Part part) {
    _mm_mask_storeu_epi8(to, part, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

/* Rounded to even, saturated to 0 to 255; below 2^31. */
INLINE void store_bytes(uint8_t *to, Floats x) {
    const Words whole = _mm512_max_epi32(_mm512_cvtps_epi32(x), _mm512_setzero_si512());
    _mm_storeu_si128((__m128i *)to, _mm512_cvtusepi32_epi8(whole));
}

INLINE Floats floats_of(Words x) { return _mm512_cvtepi32_ps(x); }
INLINE Words words_anywhere(const void *from) { return _mm512_loadu_si512(from); }
INLINE Words repeated_bytes(const void *four) {
    int word;
    __builtin_memcpy(&word, four, sizeof word);
    return _mm512_set1_epi32(word);
}

/* sum + the four products of each lane's unsigned and signed bytes. In assembly, because GCC 12 copies the sums of its
   intrinsic between registers and memory, which takes two thirds more time. */
INLINE_VNNI Words dot_bytes(Words sum, Words numbers, Words weights) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(numbers), "v"(weights));
    return sum;
}

INLINE void transpose(Words r[LANES]) {
    Words t[LANES];
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

/* Each lane has its neighbour's number. */
INLINE Floats swapped(Floats x) { return _mm512_permute_ps(x, 0xB1); }

INLINE Words words_of(Floats x) { return (Words)x; }

/* ---- two bfloat16 in a word -------------------------------------------------------------------------------------- */

INLINE Floats from_halves(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }

/* sum + the two products of each lane's pairs. */
INLINE_BF16 Floats dot(Floats sum, Words a, Words b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

INLINE Floats from_bfloat16(const uint16_t *from, Part there) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, from)), 16);
}

/* All of low, then all of high: pairs of neighbouring lanes. */
INLINE_BF16 Words neighbours_of(Floats low, Floats high) { return (Words)_mm512_cvtne2ps_pbh(high, low); }

/* The same of bfloat16 in memory, of which only some first lanes are there. */
INLINE_BF16 Words neighbours_at(const uint16_t *low, Part low_there, const uint16_t *high, Part high_there) {
    const __m256i first = _mm256_maskz_loadu_epi16(low_there, low), then = _mm256_maskz_loadu_epi16(high_there, high);
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), then, 1);
}

/* Low and high -> each lane's pair: of low, then of high. */
INLINE_BF16 Words paired(Words neighbours) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, neighbours);
}

/* As bfloat16. */
INLINE_BF16 void store_rounded(uint16_t *to, Floats x, Part part) {
    _mm256_mask_storeu_epi16(to, part, (__m256i)_mm512_cvtneps_pbh(x));
}

#define MASKED_ATTENTION masked_attention_avx512
#include "attention_on_vectors.h"
#define RESIDUAL_NORM residual_norm_avx512
#include "norm_on_vectors.h"
#define PRODUCT_CHAIN product_chain_avx512
#include "chain_on_vectors.h"

#endif
