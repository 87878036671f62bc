/* Rows of Q or K of one head as they are multiplied:

       y = x^ o C + partner(x^) o S + D         x^ = (x - mean) / sqrt(variance + epsilon) if `normed`, or x

   The partner of a column is its neighbour; or, in the form of halves, the column d / 2 further or before. Float32
   throughout. Included by attention_on_vectors.h. */

#pragma once

/* Numbers of a row of `bytes` each. */
INLINE Floats numbers_of_row(const char *at, Part there, int bytes) {
#if HAS_BF16
    if (bytes == OF_BFLOAT16) return from_bfloat16((const uint16_t *)(const void *)at, there);
#endif
    return (void)bytes, loaded_part((const float *)(const void *)at, there);
}

/* x -> x^, (whole d). */
INLINE void normalise(float *x, int d, float epsilon) {
    Floats sum = zero(), squares = zero();
    for (int c = 0; c < d; c += LANES) sum = sum + loaded(x + c); /* beyond d there are zeros */
    const Floats mean = repeated(total(sum) / (float)d);
    for (int c = 0; c < d; c += LANES) store(x + c, loaded(x + c) - mean);
    for (int c = d; c < whole(d); c++) x[c] = 0;
    for (int c = 0; c < d; c += LANES) squares = fused(loaded(x + c), loaded(x + c), squares);
    const Floats factor = repeated(1) / square_root(repeated(total(squares) / (float)d + epsilon));
    for (int c = 0; c < d; c += LANES) store(x + c, loaded(x + c) * factor);
}

/* Columns at `tables`; plane: from C to S, and from S to D. */
INLINE Floats turned(const Rotation *by, const float *tables, ptrdiff_t plane, Floats x, Floats partner, Part there) {
    Floats y = x * loaded_part(tables, there);
    y = fused(partner, loaded_part(tables + plane, there), y);
    if (by->shifts) y = y + loaded_part(tables + 2 * plane, there);
    return y;
}

/* (rows, d) of numbers of `bytes` -> (rows, whole d). tables: of the first row. x: (whole d), for what lies between. */
INLINE void rotate_rows(const Rotation *by, const float *tables, ptrdiff_t plane, const char *from, ptrdiff_t row,
                        float *to, float *x, int rows, int d, int bytes) {
    const int half = d / 2;
    for (int j = 0; j < rows; j++, from += row * bytes, to += whole(d), tables += d) {
        for (int c = 0; c < d; c += LANES) store(x + c, numbers_of_row(from + c * bytes, part_of(d - c), bytes));
        if (by->normed) normalise(x, d, by->epsilon);
        if (by->halves)
            for (int c = 0; c < half; c += LANES) {
                const Part there = part_of(half - c);
                const Floats low = loaded_part(x + c, there), high = loaded_part(x + half + c, there);
                store_part(to + c, turned(by, tables + c, plane, low, high, there), there);
                store_part(to + half + c, turned(by, tables + half + c, plane, high, low, there), there);
            }
        else
            for (int c = 0; c < d; c += LANES) {
                const Floats all = loaded(x + c);
                const Part there = part_of(d - c);
                store_part(to + c, turned(by, tables + c, plane, all, swapped(all), there), there);
            }
    }
}

PHASE void rotate_rows_f32(const Rotation *by, const float *tables, ptrdiff_t plane, const char *from, ptrdiff_t row,
                           float *to, float *x, int rows, int d) {
    rotate_rows(by, tables, plane, from, row, to, x, rows, d, OF_FLOAT32);
}

#if HAS_BF16
PHASE void rotate_rows_b16(const Rotation *by, const float *tables, ptrdiff_t plane, const char *from, ptrdiff_t row,
                           float *to, float *x, int rows, int d) {
    rotate_rows(by, tables, plane, from, row, to, x, rows, d, OF_BFLOAT16);
}
#endif
