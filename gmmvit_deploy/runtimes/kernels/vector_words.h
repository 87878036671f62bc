/* How the functions of a set of vectors are declared; SIMD, SIMD_BF16 and SIMD_VNNI say for which instructions. */

#pragma once

#define PRAGMA(x) _Pragma(#x)
#define UNROLL(n) PRAGMA(GCC unroll n)
/* Inlined with constant arguments, so that accumulators stay in registers. */
#define INLINE SIMD static inline __attribute__((always_inline, unused))
#define INLINE_BF16 SIMD_BF16 static inline __attribute__((always_inline, unused))
#define INLINE_VNNI SIMD_VNNI static inline __attribute__((always_inline, unused))
/* A phase of its own: one after another inlined, they would crowd each other's registers out. */
#define PHASE SIMD static __attribute__((noinline, unused))
#define PHASE_BF16 SIMD_BF16 static __attribute__((noinline, unused))
