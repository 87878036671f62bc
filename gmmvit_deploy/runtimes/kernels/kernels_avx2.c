/* The kernels for AVX2 and FMA. kernels_avx512.c says what each function on vectors does. */

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define SIMD __attribute__((target("avx2,fma")))
#define SIMD_BF16 SIMD
#include "vector_words.h"

#define LANES 8
#define HAS_BF16 0
/* Of 16 registers, 12 hold sums. */
#define MOST_VECTORS 2
#define SCORE_BLOCKS SCORES_OF(1, 12) SCORES_OF(2, 6)
#define OUTPUT_BLOCKS OUTPUT_OF(1, 8) OUTPUT_OF(2, 6)
#define MOST_OUTPUT_QUERIES 8
#define FEW_KEYS 2
#define MIXED_AT_ONCE 4
#define MIXED_VECTORS 2

typedef __m256 Floats;
typedef __m256i Words;
typedef struct {
    __m256i lanes;
    int count;
} Part;
typedef __m256 Chosen;

INLINE Floats zero(void) { return _mm256_setzero_ps(); }
INLINE Floats repeated(float x) { return _mm256_set1_ps(x); }
INLINE Floats loaded(const float *from) { return _mm256_load_ps(from); }
INLINE Floats loaded_anywhere(const float *from) { return _mm256_loadu_ps(from); }
INLINE void store(float *to, Floats x) { _mm256_store_ps(to, x); }
INLINE void store_anywhere(float *to, Floats x) { _mm256_storeu_ps(to, x); }
INLINE void store_words(uint32_t *to, Words x) { _mm256_store_si256((__m256i *)to, x); }

INLINE Part part_of(int count) {
    static const int32_t lanes[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
    count = count < 0 ? 0 : count < LANES ? count : LANES;
    const Part part = {_mm256_loadu_si256((const __m256i *)(lanes + LANES - count)), count};
    return part;
}
INLINE Floats loaded_part(const float *from, Part part) { return _mm256_maskload_ps(from, part.lanes); }
INLINE void store_part(float *to, Floats x, Part part) {
    if (part.count == LANES) _mm256_storeu_ps(to, x);
    else _mm256_maskstore_ps(to, part.lanes, x);
}

INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats greater(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats square_root(Floats x) { return _mm256_sqrt_ps(x); }
INLINE float total(Floats x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

/* 2^-127 and less is 0. The greater of two, of which x is no number, is the second. */
INLINE Floats bounded(Floats x) { return _mm256_max_ps(_mm256_set1_ps(-127), x); }
INLINE Floats fraction_of(Floats x) { return bounded(x) - _mm256_floor_ps(bounded(x)); }
INLINE Floats times_two_to_whole(Floats by, Floats x, Floats fraction) {
    const __m256i whole = _mm256_cvtps_epi32(bounded(x) - fraction);
    return by * (__m256)_mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23);
}

INLINE Chosen first_lane(int chosen) { return (__m256)_mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, chosen ? -1 : 0); }
INLINE Floats replaced(Floats x, Chosen lanes, float by) { return _mm256_blendv_ps(x, _mm256_set1_ps(by), lanes); }

INLINE void store_steps(int8_t *to, Floats x, Part part) {
    const __m256i steps = _mm256_cvtps_epi32(x);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(steps), _mm256_extracti128_si256(steps, 1));
    const __m128i bytes = _mm_packs_epi16(words, words);
    if (part.count == LANES) _mm_storel_epi64((__m128i *)to, bytes);
    else
        for (int64_t i = 0, all = _mm_cvtsi128_si64(bytes); i < part.count; i++) to[i] = (int8_t)(all >> (8 * i));
}

INLINE void transpose(Words r[LANES]) {
    Words t[LANES];
    UNROLL(4) for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL(2) for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL(4) for (int i = 0; i < 4; i++) {
        const Words low = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        r[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
        r[i] = low;
    }
}

INLINE Floats swapped(Floats x) { return _mm256_permute_ps(x, 0xB1); }

INLINE Words words_of(Floats x) { return (Words)x; }

#define MASKED_ATTENTION masked_attention_avx2
#include "attention_on_vectors.h"
#define RESIDUAL_NORM residual_norm_avx2
#include "norm_on_vectors.h"

#endif
