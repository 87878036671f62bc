/* A residual sum, its LayerNorm, and that on the grid of int8, in one pass over the cache:

       s = x + b
       y = saturate(round((w (s - mean(s)) / sqrt(var(s) + epsilon) + c) / step))

   OpenVINO runs the sum and the norm one after the other, and the chunk of a batch fills the cache: each reads it
   from further away. Here a row is read once. w and c come divided by the step; rounding is to even, as OpenVINO's.

   Written once, on vectors whose width and functions a kernels_*.c defines, which includes this file and
   names the function in RESIDUAL_NORM. */

#pragma once

#include "residual_norm.h"

#include <stddef.h>

/* x + b, stored, and its total. */
SIMD static float added(const float *x, const float *branch, float *sum, int64_t width) {
    Floats all = zero();
    for (int64_t c = 0; c < width; c += LANES) {
        const Floats one = loaded_anywhere(x + c) + loaded_anywhere(branch + c);
        store_anywhere(sum + c, one);
        all = all + one;
    }
    return total(all);
}

SIMD static float total_of(const float *x, int64_t width) {
    Floats all = zero();
    for (int64_t c = 0; c < width; c += LANES) all = all + loaded_anywhere(x + c);
    return total(all);
}

/* Of what lies in the nearest cache by now. */
SIMD static void normed(const ResidualNorm *of, const float *sum, float all, int8_t *out) {
    const float part = 1.0f / (float)of->width;
    const Floats mean = repeated(all * part);
    Floats squares = zero();
    for (int64_t c = 0; c < of->width; c += LANES) {
        const Floats off = loaded_anywhere(sum + c) - mean;
        squares = fused(off, off, squares);
    }
    const Floats inverse = repeated(1) / square_root(repeated(total(squares) * part + of->epsilon));
    for (int64_t c = 0; c < of->width; c += LANES) {
        const Floats off = (loaded_anywhere(sum + c) - mean) * inverse;
        store_steps(out + c, fused(off, loaded_anywhere(of->weight + c), loaded_anywhere(of->bias + c)), part_of(LANES));
    }
}

int RESIDUAL_NORM(const ResidualNorm *of, int64_t first, int64_t last) {
    for (int64_t at = first * of->width; at < last * of->width; at += of->width) {
        const float *sum = of->branch ? of->sum + at : of->x + at;
        const float all = of->branch ? added(of->x + at, of->branch + at, of->sum + at, of->width)
                                     : total_of(of->x + at, of->width);
        normed(of, sum, all, of->normed + at);
    }
    return 0;
}
