/* The instructions of AVX-512 that the kernels use, in plain C, by Intel's description of each: so that the kernels for
   AVX-512 run on a processor without it. Compile with -Dtarget(x)= so that the compiler uses no such instruction. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float __m512 __attribute__((vector_size(64)));
typedef int64_t __m512i __attribute__((vector_size(64)));
typedef int64_t __m256i __attribute__((vector_size(32)));
typedef int64_t __m128i __attribute__((vector_size(16)));
typedef uint16_t __m512bh __attribute__((vector_size(64)));
typedef uint16_t __mmask16;
typedef uint32_t Lanes32 __attribute__((vector_size(64)));
typedef uint64_t Lanes64 __attribute__((vector_size(64)));
typedef uint16_t Lanes16 __attribute__((vector_size(64)));

enum { _MM_FROUND_TO_NEG_INF = 1, _MM_FROUND_NO_EXC = 8 };

#define EMULATED static inline __attribute__((unused))
#define FOR_LANES for (int i = 0; i < 16; i++)

EMULATED __m512 _mm512_set1_ps(float x) {
    __m512 r;
    FOR_LANES r[i] = x;
    return r;
}
EMULATED __m512 _mm512_setzero_ps(void) { return _mm512_set1_ps(0); }
EMULATED __m512i _mm512_set1_epi32(int x) {
    Lanes32 r;
    FOR_LANES r[i] = (uint32_t)x;
    return (__m512i)r;
}
EMULATED void _emulated_aligned(const void *p, uintptr_t bytes) {
    if ((uintptr_t)p % bytes) __builtin_trap(); /* as the processor does */
}
EMULATED __m512 _mm512_loadu_ps(const void *p) {
    __m512 r;
    memcpy(&r, p, sizeof r);
    return r;
}
EMULATED __m512 _mm512_load_ps(const void *p) { return _emulated_aligned(p, 64), _mm512_loadu_ps(p); }
EMULATED __m512i _mm512_load_si512(const void *p) { return (__m512i)_mm512_load_ps(p); }
EMULATED void _mm512_storeu_ps(void *p, __m512 x) { memcpy(p, &x, sizeof x); }
EMULATED void _mm512_store_ps(void *p, __m512 x) { _emulated_aligned(p, 64), _mm512_storeu_ps(p, x); }
EMULATED void _mm512_store_si512(void *p, __m512i x) { _mm512_store_ps(p, (__m512)x); }
EMULATED void _mm256_store_si256(__m256i *p, __m256i x) { _emulated_aligned(p, 32), memcpy(p, &x, sizeof x); }
EMULATED __m256i _mm256_loadu_si256(const __m256i *p) {
    __m256i r;
    memcpy(&r, p, sizeof r);
    return r;
}
EMULATED __m256i _mm512_extracti64x4_epi64(__m512i x, int half) {
    const __m256i r = {x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]};
    return r;
}
EMULATED __m256i _mm512_castsi512_si256(__m512i x) { return _mm512_extracti64x4_epi64(x, 0); }
EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 k, const void *p) {
    __m512 r = _mm512_setzero_ps();
    FOR_LANES if (k >> i & 1) {
        float x;
        memcpy(&x, (const char *)p + 4 * i, sizeof x);
        r[i] = x;
    }
    return r;
}
EMULATED void _mm512_mask_storeu_ps(void *p, __mmask16 k, __m512 x) {
    FOR_LANES if (k >> i & 1) {
        const float one = x[i];
        memcpy((char *)p + 4 * i, &one, sizeof one);
    }
}
EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    __m512 r;
    FOR_LANES r[i] = fmaf(a[i], b[i], c[i]);
    return r;
}
EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) {
    __m512 r;
    FOR_LANES r[i] = a[i] > b[i] ? a[i] : b[i]; /* the second where one is no number */
    return r;
}
EMULATED __m512 _mm512_sqrt_ps(__m512 x) {
    __m512 r;
    FOR_LANES r[i] = sqrtf(x[i]);
    return r;
}
EMULATED float _mm512_reduce_add_ps(__m512 x) {
    float sum = 0;
    FOR_LANES sum += x[i];
    return sum;
}
EMULATED __m512 _mm512_reduce_ps(__m512 x, int rounding) {
    __m512 r;
    if ((rounding & 3) != _MM_FROUND_TO_NEG_INF) __builtin_trap();
    FOR_LANES r[i] = isinf(x[i]) ? 0 : x[i] - floorf(x[i]);
    return r;
}
EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
    __m512 r;
    FOR_LANES r[i] = isnan(b[i]) ? b[i] : (float)ldexp(a[i], (int)fmax(fmin(floorf(b[i]), 4000), -4000));
    return r;
}
EMULATED __m512 _mm512_mask_mov_ps(__m512 x, __mmask16 k, __m512 y) {
    FOR_LANES if (k >> i & 1) x[i] = y[i];
    return x;
}
EMULATED __m512i _mm512_cvtps_epi32(__m512 x) {
    Lanes32 r;
    FOR_LANES {
        const float whole = rintf(x[i]);
        r[i] = whole >= 2147483648.0f || whole < -2147483648.0f || isnan(whole) ? 0x80000000u : (uint32_t)(int32_t)whole;
    }
    return (__m512i)r;
}
EMULATED __m128i _mm512_cvtsepi32_epi8(__m512i x) {
    const Lanes32 lanes = (Lanes32)x;
    int8_t bytes[16];
    __m128i r;
    FOR_LANES {
        const int32_t one = (int32_t)lanes[i];
        bytes[i] = (int8_t)(one > 127 ? 127 : one < -128 ? -128 : one);
    }
    memcpy(&r, bytes, sizeof r);
    return r;
}
EMULATED void _mm_mask_storeu_epi8(void *p, __mmask16 k, __m128i x) {
    char bytes[16];
    memcpy(bytes, &x, sizeof bytes);
    FOR_LANES if (k >> i & 1)((char *)p)[i] = bytes[i];
}

/* In each 128 bits by themselves: the low, or the high, halves of both in turn. */
EMULATED __m512i _emulated_unpack_32(__m512i a, __m512i b, int high) {
    const Lanes32 x = (Lanes32)a, y = (Lanes32)b;
    Lanes32 r;
    FOR_LANES {
        const int from = i / 4 * 4 + i % 4 / 2 + 2 * high;
        r[i] = i % 2 ? y[from] : x[from];
    }
    return (__m512i)r;
}
EMULATED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return _emulated_unpack_32(a, b, 0); }
EMULATED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return _emulated_unpack_32(a, b, 1); }
EMULATED __m512i _emulated_unpack_64(__m512i a, __m512i b, int high) {
    __m512i r;
    for (int i = 0; i < 8; i++) r[i] = i % 2 ? b[i - 1 + high] : a[i + high];
    return r;
}
EMULATED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return _emulated_unpack_64(a, b, 0); }
EMULATED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return _emulated_unpack_64(a, b, 1); }
EMULATED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int order) {
    __m512i r;
    for (int i = 0; i < 8; i++) {
        const int from = (order >> i / 2 * 2 & 3) * 2 + i % 2;
        r[i] = i < 4 ? a[from] : b[from];
    }
    return r;
}

EMULATED __m512 _mm512_cvtph_ps(__m256i x) {
    uint16_t halves[16];
    __m512 r;
    memcpy(halves, &x, sizeof halves);
    FOR_LANES {
        const int exponent = halves[i] >> 10 & 31, fraction = halves[i] & 1023;
        float size = exponent ? ldexpf((float)(1024 + fraction), exponent - 25) : ldexpf((float)fraction, -24);
        if (exponent == 31) size = fraction ? NAN : INFINITY;
        r[i] = halves[i] >> 15 ? -size : size;
    }
    return r;
}
EMULATED uint16_t _emulated_bfloat(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
EMULATED float _emulated_float(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float r;
    memcpy(&r, &bits, sizeof r);
    return r;
}
EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    __m512bh r;
    FOR_LANES r[i] = _emulated_bfloat(low[i]), r[16 + i] = _emulated_bfloat(high[i]);
    return r;
}
EMULATED __m256i _mm512_cvtneps_pbh(__m512 x) {
    uint16_t halves[16];
    __m256i r;
    FOR_LANES halves[i] = _emulated_bfloat(x[i]);
    memcpy(&r, halves, sizeof r);
    return r;
}
EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 k, const void *p) {
    uint16_t halves[16] = {0};
    __m256i r;
    FOR_LANES if (k >> i & 1) memcpy(halves + i, (const char *)p + 2 * i, sizeof *halves);
    memcpy(&r, halves, sizeof r);
    return r;
}
EMULATED void _mm256_mask_storeu_epi16(void *p, __mmask16 k, __m256i x) {
    uint16_t halves[16];
    memcpy(halves, &x, sizeof halves);
    FOR_LANES if (k >> i & 1) memcpy((char *)p + 2 * i, halves + i, sizeof *halves);
}
EMULATED __m512i _mm512_castsi256_si512(__m256i x) {
    const __m512i r = {x[0], x[1], x[2], x[3]};
    return r;
}
EMULATED __m512i _mm512_inserti64x4(__m512i x, __m256i y, int half) {
    for (int i = 0; i < 4; i++) x[4 * half + i] = y[i];
    return x;
}
EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    FOR_LANES for (int half = 1; half >= 0; half--) {
        const int at = 2 * i + half;
        sum[i] = fmaf(_emulated_float(a[at]), _emulated_float(b[at]), sum[i]);
    }
    return sum;
}
EMULATED __m512i _mm512_permutexvar_epi16(__m512i order, __m512i x) {
    const Lanes16 from = (Lanes16)order, lanes = (Lanes16)x;
    Lanes16 r;
    for (int i = 0; i < 32; i++) r[i] = lanes[from[i] & 31];
    return (__m512i)r;
}
/* The last argument is lane 0. */
#define _mm512_set_epi16(...) _emulated_reversed((const uint16_t[32]){__VA_ARGS__})
EMULATED __m512i _emulated_reversed(const uint16_t *lanes) {
    Lanes16 r;
    for (int i = 0; i < 32; i++) r[i] = lanes[31 - i];
    return (__m512i)r;
}
