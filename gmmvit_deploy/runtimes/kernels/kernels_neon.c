/* The kernels for 64-bit ARM. kernels_avx512.c says what each function on vectors does. */

#if defined(__aarch64__) && defined(__GNUC__)

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define SIMD
#define SIMD_BF16 __attribute__((target("arch=armv8.2-a+bf16")))
#include "vector_words.h"

#define LANES 4
#define HAS_BF16 1
/* Of 32 registers, 24 hold sums. */
#define MOST_VECTORS 4
#define SCORE_BLOCKS SCORES_OF(1, 16) SCORES_OF(2, 12) SCORES_OF(3, 8) SCORES_OF(4, 6)
#define OUTPUT_BLOCKS OUTPUT_OF(1, 16) OUTPUT_OF(2, 8) OUTPUT_OF(3, 8) OUTPUT_OF(4, 4)
#define MOST_OUTPUT_QUERIES 16
#define FEW_KEYS 4
#define MIXED_AT_ONCE 4
#define MIXED_VECTORS 4

typedef float32x4_t Floats;
typedef uint32x4_t Words;
typedef int Part; /* how many lanes */
typedef uint32x4_t Chosen;

INLINE Floats zero(void) { return vdupq_n_f32(0); }
INLINE Floats repeated(float x) { return vdupq_n_f32(x); }
INLINE Words repeated_word(uint32_t x) { return vdupq_n_u32(x); }
INLINE Floats loaded(const float *from) { return vld1q_f32(from); }
INLINE Floats loaded_anywhere(const float *from) { return vld1q_f32(from); }
INLINE Words loaded_words(const uint32_t *from) { return vld1q_u32(from); }
INLINE void store(float *to, Floats x) { vst1q_f32(to, x); }
INLINE void store_anywhere(float *to, Floats x) { vst1q_f32(to, x); }
INLINE void store_words(uint32_t *to, Words x) { vst1q_u32(to, x); }

INLINE Part part_of(int count) { return count < 0 ? 0 : count < LANES ? count : LANES; }
INLINE Floats loaded_part(const float *from, Part part) {
    if (part == LANES) return vld1q_f32(from);
    float numbers[LANES] = {0};
    for (int i = 0; i < part; i++) numbers[i] = from[i];
    return vld1q_f32(numbers);
}
INLINE void store_part(float *to, Floats x, Part part) {
    float numbers[LANES];
    vst1q_f32(numbers, x);
    if (part == LANES) vst1q_f32(to, x);
    else
        for (int i = 0; i < part; i++) to[i] = numbers[i];
}

INLINE Floats fused(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
INLINE Floats greater(Floats a, Floats b) { return vmaxq_f32(a, b); }
INLINE Floats square_root(Floats x) { return vsqrtq_f32(x); }
INLINE float total(Floats x) { return vaddvq_f32(x); }

INLINE Floats bounded(Floats x) { return vmaxq_f32(x, vdupq_n_f32(-127)); }
INLINE Floats fraction_of(Floats x) { return bounded(x) - vrndmq_f32(bounded(x)); }
INLINE Floats times_two_to_whole(Floats by, Floats x, Floats fraction) {
    const int32x4_t whole = vcvtnq_s32_f32(bounded(x) - fraction);
    return by * vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(whole, vdupq_n_s32(127)), 23));
}

INLINE Chosen first_lane(int chosen) { return vsetq_lane_u32(chosen ? UINT32_MAX : 0, vdupq_n_u32(0), 0); }
INLINE Floats replaced(Floats x, Chosen lanes, float by) { return vbslq_f32(lanes, vdupq_n_f32(by), x); }

INLINE void store_steps(int8_t *to, Floats x, Part part) {
    const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(x));
    int8_t bytes[2 * LANES];
    vst1_s8(bytes, vqmovn_s16(vcombine_s16(words, words)));
    memcpy(to, bytes, (size_t)part);
}

INLINE void transpose(Words r[LANES]) {
    const uint32x4_t a = vzip1q_u32(r[0], r[2]), b = vzip2q_u32(r[0], r[2]);
    const uint32x4_t c = vzip1q_u32(r[1], r[3]), d = vzip2q_u32(r[1], r[3]);
    r[0] = vzip1q_u32(a, c), r[1] = vzip2q_u32(a, c), r[2] = vzip1q_u32(b, d), r[3] = vzip2q_u32(b, d);
}

INLINE Floats swapped(Floats x) { return vrev64q_f32(x); }

INLINE Words words_of(Floats x) { return vreinterpretq_u32_f32(x); }

INLINE Floats from_halves(const void *from) {
    uint16x4_t halves;
    memcpy(&halves, from, sizeof halves);
    return vcvt_f32_f16(vreinterpret_f16_u16(halves));
}

INLINE Floats from_bfloat16(const uint16_t *from, Part there) {
    uint16_t halves[LANES] = {0};
    memcpy(halves, from, (size_t)there * sizeof *halves);
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(halves), 16));
}

INLINE_BF16 Floats dot(Floats sum, Words a, Words b) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}

INLINE_BF16 Words neighbours_of(Floats low, Floats high) {
    return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}

INLINE_BF16 Words neighbours_at(const uint16_t *low, Part low_there, const uint16_t *high, Part high_there) {
    uint16_t halves[2 * LANES] = {0};
    memcpy(halves, low, (size_t)low_there * sizeof *halves);
    memcpy(halves + LANES, high, (size_t)high_there * sizeof *halves);
    return vreinterpretq_u32_u16(vld1q_u16(halves));
}

INLINE_BF16 Words paired(Words neighbours) {
    const uint16x8_t all = vreinterpretq_u16_u32(neighbours);
    return vreinterpretq_u32_u16(vzip1q_u16(all, vextq_u16(all, all, LANES)));
}

INLINE_BF16 void store_rounded(uint16_t *to, Floats x, Part part) {
    uint16_t halves[LANES];
    vst1_u16(halves, vreinterpret_u16_bf16(vcvt_bf16_f32(x)));
    memcpy(to, halves, (size_t)part * sizeof *halves);
}

#define MASKED_ATTENTION masked_attention_neon
#include "attention_on_vectors.h"
#define RESIDUAL_NORM residual_norm_neon
#include "norm_on_vectors.h"

#endif
