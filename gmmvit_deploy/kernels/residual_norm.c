/* A residual sum, its LayerNorm, and that on the grid of int8, in one pass over the cache:

       s = x + b
       y = saturate(round((w (s - mean(s)) / sqrt(var(s) + epsilon) + c) / step))

   OpenVINO runs the sum and the norm one after the other, and the chunk of a batch fills the cache: each reads it
   from further away. Here a row is read once. w and c come divided by the step; rounding is to even, as OpenVINO's. */

#include "residual_norm.h"

#include <stddef.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
enum { LANES = 16 };

/* x + b, stored, and its total. */
AVX512 static float added(const float *x, const float *branch, float *sum, int64_t width) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t c = 0; c < width; c += LANES) {
        __m512 one = _mm512_add_ps(_mm512_loadu_ps(x + c), _mm512_loadu_ps(branch + c));
        _mm512_storeu_ps(sum + c, one);
        total = _mm512_add_ps(total, one);
    }
    return _mm512_reduce_add_ps(total);
}

AVX512 static float total_of(const float *x, int64_t width) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t c = 0; c < width; c += LANES) total = _mm512_add_ps(total, _mm512_loadu_ps(x + c));
    return _mm512_reduce_add_ps(total);
}

/* Of what lies in the nearest cache by now. */
AVX512 static void normed(const ResidualNorm *of, const float *sum, float total, int8_t *out) {
    const float part = 1.0f / (float)of->width;
    const __m512 mean = _mm512_set1_ps(total * part);
    __m512 squares = _mm512_setzero_ps();
    for (int64_t c = 0; c < of->width; c += LANES) {
        __m512 off = _mm512_sub_ps(_mm512_loadu_ps(sum + c), mean);
        squares = _mm512_fmadd_ps(off, off, squares);
    }
    const __m512 variance = _mm512_set1_ps(_mm512_reduce_add_ps(squares) * part + of->epsilon);
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1), _mm512_sqrt_ps(variance));
    for (int64_t c = 0; c < of->width; c += LANES) {
        __m512 off = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(sum + c), mean), inverse);
        __m512 steps = _mm512_fmadd_ps(off, _mm512_loadu_ps(of->weight + c), _mm512_loadu_ps(of->bias + c));
        _mm_storeu_si128((__m128i *)(out + c), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(steps)));
    }
}

int residual_norm(const ResidualNorm *of, int64_t first, int64_t last) {
    if (of->width <= 0 || of->width % LANES) return 1;
    for (int64_t at = first * of->width; at < last * of->width; at += of->width) {
        const float *sum = of->branch ? of->sum + at : of->x + at;
        float total = of->branch ? added(of->x + at, of->branch + at, of->sum + at, of->width)
                                 : total_of(of->x + at, of->width);
        normed(of, sum, total, of->normed + at);
    }
    return 0;
}

#else

int residual_norm(const ResidualNorm *of, int64_t first, int64_t last) {
    return (void)of, (void)first, (void)last, 1;
}

#endif
