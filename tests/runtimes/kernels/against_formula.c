/* Compares the kernels with the formulas, computed in double, on one processor or an emulator of it.

       against_formula SET ARITHMETIC [KIND NUMBER ...]

   SET: the instruction set that is expected to be chosen.  ARITHMETIC: 1 or 2.  KIND: the only case to compute, in place
   of all below: "attention" and the numbers of a Case, "norm" and (adds, rows, width), or "product" and (rows, depth,
   width). Prints a line for each case: its name, the largest error, the error that is allowed. Returns 0 if none is larger. */

#include "instruction_sets.h"
#include "masked_attention.h"
#include "product_chain.h"
#include "residual_norm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *name;
    int batch, heads, queries, n, d, masked, mixings, windows;
    float step; /* of int8; or 0 */
    int grid;   /* of a mask that depends on distances; or 0 */
    int shared; /* do all heads share the mask, or the bias? */
    float times; /* what the queries are multiplied by; 0 for 1 */
    int rotation; /* of Q and K: 1 of pairs, 2 of halves, 4 more if they are normed and shifted; or 0 */
} Case;

static const Case CASES[] = {
    {"whole vectors", 2, 3, 64, 64, 16, 1, 0, 0, 0, 0},
    {"two tiles, and remaining keys", 1, 2, 65, 65, 32, 1, 0, 0, 0, 0},
    {"windows with biases", 4, 2, 49, 49, 32, 0, 0, 2, 0, 0},
    {"mixed before and after", 2, 4, 17, 17, 48, 1, 2, 0, 0, 0},
    {"mixed after, 12 heads", 1, 12, 33, 33, 16, 0, 1, 0, 0, 0},
    {"mixed, 5 heads", 1, 5, 40, 40, 16, 1, 2, 0, 0, 0},
    {"head dim 33", 2, 3, 50, 50, 33, 1, 0, 0, 0, 0},
    {"head dim 35", 1, 2, 20, 20, 35, 1, 0, 0, 0, 0},
    {"head dim 30", 1, 2, 31, 31, 30, 1, 0, 0, 0, 0},
    {"head dim 6", 2, 2, 16, 16, 6, 1, 0, 0, 0, 0},
    {"head dim 1", 1, 2, 7, 7, 1, 1, 0, 0, 0, 0},
    {"one query", 2, 2, 1, 37, 20, 0, 0, 0, 0, 0},
    {"one token", 2, 2, 1, 1, 16, 1, 0, 0, 0, 0},
    {"int8", 2, 3, 50, 50, 33, 1, 0, 0, 0.02f, 0},
    {"int8, head dim 8", 1, 2, 18, 18, 8, 1, 0, 0, 0.02f, 0},
    {"on a grid", 2, 2, 36, 36, 16, 1, 0, 0, 0, 6},
    {"on a grid, with a class token", 1, 2, 82, 82, 20, 1, 0, 0, 0, 9},
    {"on a grid, rows of 14", 1, 2, 196, 196, 16, 1, 0, 0, 0, 14},
    {"on a grid, five tiles", 1, 2, 257, 257, 48, 1, 0, 0, 0, 16},
    {"on a grid, mixed, half a tile", 1, 4, 101, 101, 16, 1, 2, 0, 0, 10},
    {"on a grid, mixed after", 3, 3, 50, 50, 32, 1, 1, 0, 0, 7},
    {"on a grid, windows", 4, 2, 49, 49, 32, 1, 0, 2, 0, 7},
    {"windows, two tiles", 3, 2, 100, 100, 16, 0, 0, 3, 0, 0},
    {"16 mixed heads, three tokens", 1, 16, 3, 3, 16, 1, 2, 0, 0, 0},
    {"one query, mixed", 2, 4, 1, 64, 48, 0, 2, 0, 0, 0},
    {"one query, windows", 3, 2, 1, 50, 16, 0, 0, 3, 0, 0},
    {"int8, mixed", 2, 4, 64, 64, 48, 1, 2, 0, 0.02f, 0},
    {"a shared mask", 2, 3, 65, 65, 20, 1, 0, 0, 0, 8, 1},
    {"a shared mask, mixed", 1, 4, 100, 100, 16, 1, 2, 0, 0, 0, 1},
    {"a shared bias", 3, 3, 65, 65, 16, 0, 0, 1, 0, 0, 1},
    {"scores beyond a plain exponential", 1, 1, 40, 40, 16, 1, 0, 0, 0, 0, 0, 100},
    {"rotated pairs", 2, 3, 66, 66, 20, 0, 0, 0, 0, 0, 0, 0, 1},
    {"rotated halves", 2, 2, 50, 50, 36, 1, 0, 0, 0, 0, 1, 0, 2},
    {"normed and rotated, windows", 4, 2, 49, 49, 32, 0, 0, 2, 0, 0, 1, 0, 5},
    {"normed, rotated halves, one query", 2, 3, 1, 37, 64, 0, 0, 0, 0.02f, 0, 0, 0, 6},
};

static uint32_t state = 1;

static float random_number(void) { /* roughly normal: the sum of 12 uniform numbers */
    float sum = -6;
    for (int i = 0; i < 12; i++) {
        state = state * 1664525u + 1013904223u;
        sum += (float)(state >> 8) / 16777216.0f;
    }
    return sum;
}

static void *allocated(size_t bytes) {
    void *memory = calloc(bytes + 1, 1);
    if (!memory) exit(3);
    return memory;
}

static float *random_numbers(size_t count) {
    float *numbers = allocated(count * sizeof *numbers);
    for (size_t i = 0; i < count; i++) numbers[i] = random_number();
    return numbers;
}

static double rounded(float x, int arithmetic) {
    uint32_t bits;
    if (arithmetic == MASKED_ATTENTION_FLOAT32) return x;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t half_of(float x) { /* of numbers that are small, normal in float16 or nearly 0; cut off */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int exponent = (int)(bits >> 23 & 255) - 112;
    return (uint16_t)((bits >> 16 & 0x8000) | (exponent <= 0 ? 0 : (uint32_t)exponent << 10 | (bits >> 13 & 1023)));
}

static float of_half(uint16_t x) {
    uint32_t bits = (uint32_t)(x & 0x8000) << 16 | (x & 0x7fff ? ((x >> 10 & 31) + 112u) << 23 | (x & 1023u) << 13 : 0);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static size_t whole(int count) { return ((size_t)count + 15) / 16 * 16; }

/* (heads, queries, n) -> (heads) by tiles of 64 queries, (n, 64), of M^T log2(e). */
static float *by_tiles(const float *mask, int heads, int queries, int n) {
    const size_t lanes = whole(queries);
    float *tiles = calloc((size_t)heads * lanes * (size_t)n + 64, sizeof *tiles);
    if (!tiles) exit(3);
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < queries; i++)
            for (int j = 0; j < n; j++) {
                const size_t tile = (size_t)i / 64 * 64, width = lanes - tile < 64 ? lanes - tile : 64;
                const size_t at = ((size_t)h * lanes + tile) * (size_t)n + (size_t)j * width + (size_t)i - tile;
                tiles[at] = mask[((size_t)h * (size_t)queries + (size_t)i) * (size_t)n + (size_t)j] * 1.44269504f;
            }
    return tiles;
}

/* Makes a mask of distances: (heads, n, n) from T, (heads, (2g - 1)^2, the class token's number, ...). */
static void mask_from_distances(const float *t, int heads, int g, int n, float *mask) {
    const int apart = 2 * g - 1, first = n - g * g;
    for (int h = 0; h < heads; h++, t += whole(apart * apart + 16))
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) {
                const int q = i - first, k = j - first;
                const int rows = q / g - k / g + g - 1, columns = q % g - k % g + g - 1;
                mask[(h * n + i) * n + j] = q < 0 || k < 0 ? t[apart * apart] : t[rows * apart + columns];
            }
}

static void mix(double *weights, const float *mixing, int heads, size_t each) {
    for (size_t at = 0; at < each; at++) {
        double sums[16] = {0};
        for (int h = 0; h < heads; h++)
            for (int g = 0; g < heads; g++) sums[g] += weights[(size_t)h * each + at] * mixing[h * heads + g];
        for (int g = 0; g < heads; g++) weights[(size_t)g * each + at] = sums[g];
    }
}

/* As bfloat16, rounded to even. */
static uint16_t *rounded_numbers(const float *numbers, size_t count) {
    uint16_t *halves = malloc((count + 1) * sizeof *halves);
    if (!halves) exit(3);
    for (size_t i = 0; i < count; i++) {
        const float x = (float)rounded(numbers[i], MASKED_ATTENTION_BFLOAT16);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    return halves;
}

static float of_bfloat16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Returns what is allowed of a row of weights in float32: a bound of sum_j |error of w_j|, of first order,

       u (2 sum_j w_j a_j + 2 sqrt(n) + 8),    u = 2^-24,    mean_size = sum_j w_j a_j.

   a_j is the sum of the magnitudes of what score j is summed from: d products, a bias, and heads where they are mixed. The
   error of a sum of random numbers around 0, as here, is within c u a_j, where c does not grow with d: N. Higham and
   T. Mary (2020), Sharper probabilistic backward error analysis for basic linear algebra kernels with random data, SIAM J.
   Sci. Comput. 42 (5). Here c = 1; the largest error of 250 random cases with d <= 200 and n <= 200 is half of what is
   allowed. Scores with errors e_j have weights with errors w_j (e_j - sum_k w_k e_k), whose sum is at most
   2 sum_j w_j |e_j|.
   The terms of the sums of weights, and of weights and values, over n keys do not cancel: each sum has sqrt(n) u (N. Higham
   and T. Mary (2019), A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41 (5)).
   8 u: 2^x, at most 3 u, in a weight and in their sum, the reciprocal of the sum, and its product. */
static double error_of_row(double mean_size, int n) { return ldexp(2 * mean_size + 2 * sqrt(n) + 8, -24); }

/* Q or K of all images as they are multiplied, (rows, columns), and the sums of the magnitudes that they are summed from.
   The kernel rotates in float32, within 8 u of these magnitudes; where a tie of bfloat16 lies so near, it may round to the
   other side: a difference that counts as 1 / u times itself, since error_of_row() takes u of what it is given. */
static void rotate_exactly(const Case *of, const Rotation *by, const float *x, size_t row, size_t tokens, int in_bfloat16,
                           int arithmetic, double *exact, double *sizes) {
    const size_t d = (size_t)of->d, heads = (size_t)of->heads, plane = (size_t)by->heads * tokens * d;
    for (size_t at = 0; at < (size_t)of->batch * tokens * heads; at++, exact += d, sizes += d) {
        const size_t token = at / heads % tokens, head = at % heads;
        const float *from = x + at / heads * row + head * d;
        double mean = 0, variance = 0;
        for (size_t c = 0; c < d; c++) {
            exact[c] = rounded(from[c], in_bfloat16 || !by->tables ? arithmetic : MASKED_ATTENTION_FLOAT32);
            sizes[c] = fabs(exact[c]);
            mean += exact[c] / (double)d;
        }
        if (!by->tables) continue;
        const float *cosine = by->tables + ((head % (size_t)by->heads) * tokens + token) * d, *sine = cosine + plane;
        double normed[256], terms[256]; /* the norm subtracts the mean, also where the rest is much smaller */
        for (size_t c = 0; c < d; c++) variance += pow(exact[c] - mean, 2) / (double)d;
        const double deviation = sqrt(variance + by->epsilon);
        for (size_t c = 0; c < d; c++) {
            normed[c] = by->normed ? (exact[c] - mean) / deviation : exact[c];
            terms[c] = by->normed ? (fabs(exact[c]) + fabs(mean)) / deviation : fabs(exact[c]);
        }
        for (size_t c = 0; c < d; c++) {
            const size_t partner = by->halves ? (c + d / 2) % d : c ^ 1;
            const double shift = by->shifts ? sine[plane + c] : 0;
            const double turned = normed[c] * cosine[c] + normed[partner] * sine[c] + shift;
            exact[c] = rounded((float)turned, arithmetic);
            sizes[c] = terms[c] * fabs(cosine[c]) + terms[partner] * fabs(sine[c]) + fabs(shift);
            const double off = ldexp(8 * sizes[c], -24);
            if (arithmetic == MASKED_ATTENTION_BFLOAT16)
                sizes[c] += ldexp(rounded((float)(turned + off), arithmetic) - rounded((float)(turned - off), arithmetic), 24);
        }
    }
}

/* Returns the largest error in what is allowed.  in_bfloat16: whether Q, K, V and the output are bfloat16. */
static double attention_error(const Case *of, int arithmetic, int in_bfloat16) {
    const size_t columns = (size_t)of->heads * (size_t)of->d, q = (size_t)of->queries, n = (size_t)of->n;
    const size_t heads = (size_t)of->heads, batch = (size_t)of->batch, each = q * n, out_size = batch * q * columns;
    float *queries = random_numbers(batch * q * columns), *keys = random_numbers(batch * n * 2 * columns);
    const size_t own = of->shared ? 1 : heads; /* masks, or biases of a window */
    float *mask = random_numbers(own * each), *bias = random_numbers((size_t)(of->windows + 1) * own * each);
    float *mixings = random_numbers(2 * heads * heads), *out = malloc(out_size * sizeof *out);
    int8_t *steps = malloc(out_size);
    for (size_t i = 0; of->times && i < batch * q * columns; i++) queries[i] *= of->times;
    uint16_t *q_halves = rounded_numbers(queries, batch * q * columns), *halves_out = calloc(out_size, sizeof *halves_out);
    uint16_t *k_halves = rounded_numbers(keys, batch * n * 2 * columns);
    double *weights = malloc(heads * each * sizeof *weights), *sizes = malloc(heads * each * sizeof *sizes);
    double *row_errors = malloc(heads * q * sizeof *row_errors);
    float *magnitudes = malloc(2 * heads * heads * sizeof *magnitudes); /* of the mixings */
    if (!out || !weights || !sizes || !row_errors || !magnitudes || !steps || !halves_out) exit(3);
    for (size_t i = 0; i < 2 * heads * heads; i++) magnitudes[i] = fabsf(mixings[i]);
    const size_t apart = (size_t)(2 * of->grid - 1), tiled = own * (of->grid ? whole((int)(apart * apart) + 16)
                                                                            : whole(of->queries) * n);
    float *tiles = of->grid ? random_numbers(tiled + 64) : by_tiles(mask, (int)own, of->queries, of->n);
    if (of->grid) mask_from_distances(tiles, (int)own, of->grid, of->n, mask);
    for (size_t i = 0; of->grid && i < tiled; i++) tiles[i] *= 1.44269504f;
    uint16_t *halves = malloc((tiled + 64) * sizeof *halves);
    if (!halves) exit(3);
    for (size_t i = 0; i < tiled; i++) halves[i] = half_of(tiles[i]);
    float *biases = by_tiles(bias, (int)own * (of->windows + 1), of->queries, of->n);
    const float scale = 1 / sqrtf((float)of->d);
    const int normed = of->rotation >> 2;
    const Rotation of_queries = {of->rotation ? random_numbers(3 * own * q * (size_t)of->d) : NULL, (int)own,
                                 of->rotation & 2, normed, normed, 1e-5f};
    const Rotation of_keys = {of->rotation ? random_numbers(3 * own * n * (size_t)of->d) : NULL, (int)own,
                              of->rotation & 2, normed, normed, 1e-5f};
    double *exact[4]; /* of queries and keys; then the magnitudes that they are summed from */
    for (int i = 0; i < 4; i++) exact[i] = allocated(batch * (i % 2 ? n : q) * columns * sizeof **exact);
    rotate_exactly(of, &of_queries, queries, columns, q, in_bfloat16, arithmetic, exact[0], exact[2]);
    rotate_exactly(of, &of_keys, keys, 2 * columns, n, in_bfloat16, arithmetic, exact[1], exact[3]);
    const MaskedAttention what = {
        .q = in_bfloat16 ? (void *)q_halves : queries, .k = in_bfloat16 ? (void *)k_halves : keys,
        .v = in_bfloat16 ? (void *)(k_halves + columns) : keys + columns, .rounded = in_bfloat16,
        .out = of->step ? NULL : in_bfloat16 ? (void *)halves_out : out, .quantised = of->step ? steps : NULL,
        .mask = !of->masked ? NULL : arithmetic == MASKED_ATTENTION_BFLOAT16 ? (void *)halves : (void *)tiles,
        .bias = of->windows ? biases : NULL, .before = of->mixings == 2 ? mixings : NULL,
        .after = of->mixings ? mixings + heads * heads : NULL, .q_row = (int64_t)columns, .k_row = 2 * (int64_t)columns,
        .v_row = 2 * (int64_t)columns, .batch = of->batch, .heads = of->heads, .queries = of->queries, .n = of->n,
        .d = of->d, .mask_heads = of->masked ? (int)own : 0, .bias_heads = of->windows ? (int)own : 0,
        .windows = of->windows, .grid = of->grid, .arithmetic = arithmetic, .scale = scale * 1.44269504f,
        .steps = of->step ? 1 / of->step : 0, .of_queries = of_queries, .of_keys = of_keys};
    /* In two calls, of which the first may end within a head's tiles. */
    const int64_t pieces = masked_attention_pieces(&what);
    if (masked_attention(&what, 0, 1) || masked_attention(&what, 1, pieces)) return INFINITY;
    const double of_weights = arithmetic == MASKED_ATTENTION_BFLOAT16 ? 0.00390625 : 0; /* 2^-8 of each */
    const double of_output = in_bfloat16 && !of->step ? 0.001953125 : 0; /* 2^-9 of a weighted mean of values */
    double greatest = 1, error = 0, allowed = 1;
    for (size_t i = 0; i < batch * n * 2 * columns; i++) greatest = fabs(keys[i]) > greatest ? fabs(keys[i]) : greatest;
    for (size_t b = 0; b < batch; b++) {
        for (size_t h = 0; h < heads; h++)
            for (size_t i = 0; i < q; i++)
                for (size_t j = 0; j < n; j++) {
                    double sum = 0, size = 0;
                    for (size_t c = 0; c < (size_t)of->d; c++) {
                        const size_t query = (b * q + i) * columns + h * (size_t)of->d + c;
                        const size_t key = (b * n + j) * columns + h * (size_t)of->d + c;
                        sum += exact[0][query] * exact[1][key], size += exact[2][query] * exact[3][key];
                    }
                    float m = of->masked ? mask[h % own * each + i * n + j] : scale;
                    if (of->masked && arithmetic == MASKED_ATTENTION_BFLOAT16)
                        m = of_half(half_of(m * 1.44269504f)) / 1.44269504f;
                    const size_t at = h * each + i * n + j;
                    const float added =
                        of->windows ? bias[(b % (size_t)of->windows * own + h % own) * each + i * n + j] : 0;
                    weights[at] = sum * m + added;
                    sizes[at] = size * fabs(m) + fabs(added);
                }
        if (of->mixings == 2) {
            mix(weights, mixings, of->heads, each);
            mix(sizes, magnitudes, of->heads, each);
        }
        for (size_t row = 0; row < heads * q; row++) {
            double top = -INFINITY, total = 0, mean_size = 0, *at = weights + row * n;
            for (size_t j = 0; j < n; j++) top = at[j] > top ? at[j] : top;
            for (size_t j = 0; j < n; j++) total += at[j] = exp(at[j] - top);
            for (size_t j = 0; j < n; j++) mean_size += (at[j] /= total) * sizes[row * n + j];
            row_errors[row] = error_of_row(mean_size, of->n);
        }
        if (of->mixings) {
            mix(weights, mixings + heads * heads, of->heads, each);
            mix(row_errors, magnitudes + heads * heads, of->heads, q);
        }
        for (size_t h = 0; h < heads; h++)
            for (size_t i = 0; i < q; i++)
                for (size_t c = 0; c < (size_t)of->d; c++) {
                    double sum = 0, whole_weight = 0;
                    for (size_t j = 0; j < n; j++) {
                        const double weight = weights[h * each + i * n + j];
                        sum += weight * rounded(keys[(b * n + j) * 2 * columns + columns + h * (size_t)of->d + c], arithmetic);
                        whole_weight += fabs(weight);
                    }
                    const size_t at = (b * q + i) * columns + h * (size_t)of->d + c;
                    const double number = in_bfloat16 ? of_bfloat16(halves_out[at]) : out[at];
                    const double got = of->step ? steps[at] * of->step : number, end = of->step * 127.0;
                    if (of->step) sum = sum > end ? end : sum < -end - of->step ? -end - of->step : sum;
                    const double limit = ((of_weights + of_output) * whole_weight + row_errors[h * q + i]) * greatest +
                                         of->step * 0.5001;
                    if (!isfinite(got)) return INFINITY;
                    if (fabs(got - sum) / limit > error / allowed) error = fabs(got - sum), allowed = limit;
                }
    }
    printf("%-32s %s error %.2e, allowed %.2e\n", of->name, in_bfloat16 ? "bfloat16" : "float32 ", error, allowed);
    free(q_halves), free(k_halves), free(halves_out), free(queries), free(keys), free(mask), free(bias), free(mixings), free(out), free(steps), free(weights);
    free(sizes), free(row_errors), free(magnitudes);
    free(tiles), free(halves), free(biases), free((void *)of_queries.tables), free((void *)of_keys.tables);
    for (int i = 0; i < 4; i++) free(exact[i]);
    return error / allowed;
}

static double norm_error(int adds, int rows, int width) {
    const double step = 0.03, epsilon = 1e-5;
    const size_t count = (size_t)rows * (size_t)width;
    float *x = random_numbers(count), *branch = random_numbers(count), *weight = random_numbers((size_t)width);
    float *bias = random_numbers((size_t)width), *sum = random_numbers(count);
    int8_t *got = allocated(count);
    double error = 0;
    weight[0] = 1000, weight[1] = -1000; /* beyond int8 */
    const ResidualNorm what = {.x = x, .branch = adds ? branch : NULL, .weight = weight, .bias = bias, .sum = sum,
                               .normed = got, .width = width, .epsilon = (float)epsilon};
    for (int c = 0; c < width; c++) weight[c] /= (float)step, bias[c] /= (float)step;
    if (residual_norm(&what, 0, rows)) return INFINITY;
    for (int row = 0; row < rows; row++) {
        double mean = 0, variance = 0;
        for (int c = 0; c < width; c++) {
            if (adds) x[row * width + c] += branch[row * width + c];
            if (adds && sum[row * width + c] != x[row * width + c]) error = INFINITY;
            mean += x[row * width + c] / (double)width;
        }
        for (int c = 0; c < width; c++) variance += pow(x[row * width + c] - mean, 2) / width;
        for (int c = 0; c < width; c++) {
            double exact = (x[row * width + c] - mean) / sqrt(variance + epsilon) * weight[c] + bias[c];
            exact = exact > 127 ? 127 : exact < -128 ? -128 : exact;
            error = fmax(error, fabs(got[row * width + c] - exact));
        }
    }
    printf("%-32s error %.4f, allowed 0.5010\n", adds ? "norm of a sum" : "norm", error);
    free(x), free(branch), free(weight), free(bias), free(sum), free(got);
    return error / 0.501;
}

/* As product_chains.py packs them: panels of 48 columns, of which 4 weights of each column lie beside each other. */
static uint8_t *packed(const int8_t *weights, int depth, int columns) {
    uint8_t *all = malloc((size_t)(depth * columns)), *to = all;
    for (int first = 0; first < columns; first += 48)
        for (int k = 0; k < depth; k += 4)
            for (int c = first; c < first + 48 && c < columns; c++)
                for (int i = 0; i < 4; i++) *to++ = (uint8_t)weights[(k + i) * columns + c];
    return all;
}

/* A function of its own, because GCC 12 for ARM fails at this loop inside another. */
__attribute__((noinline)) static int column_product(const int8_t *values, const int8_t *column, int depth, int columns) {
    int sum = 0;
    for (int k = 0; k < depth; k++) sum += values[k] * column[k * columns];
    return sum;
}

/* A product of int8 values, added to x, whose sum is then normed as norm_error() tests. */
static double added_product_error(int rows, int depth, int width) {
    const size_t count = (size_t)rows * (size_t)width, columns = (size_t)width;
    int8_t *values = allocated((size_t)(rows * depth)), *weights = allocated((size_t)(depth * width));
    int8_t *got = allocated(count), *expected = allocated(count), *minus_128 = allocated((size_t)depth);
    int32_t *start = allocated(columns * sizeof *start);
    float *x = random_numbers(count), *scale = random_numbers(columns), *ones = random_numbers(columns);
    float *bias = random_numbers(columns), *sum = random_numbers(count);
    double error = 0, greatest = 0;
    memset(minus_128, -128, (size_t)depth);
    for (int i = 0; i < rows * depth; i++) values[i] = (int8_t)(i * 37 + i / 5);
    for (int i = 0; i < depth * width; i++) weights[i] = (int8_t)(i * 91 + i / 7);
    for (int c = 0; c < width; c++) {
        start[c] = column_product(minus_128, weights + c, depth, width);
        scale[c] /= 1000;
    }
    uint8_t *in_panels = packed(weights, depth, width);
    const ChainStep steps[] = {
        {.kind = CHAIN_ADD, .weights = in_panels, .start = start, .scale = scale, .bias = bias, .depth = depth,
         .columns = width},
        {.kind = CHAIN_NORM, .scale = ones, .bias = ones, .epsilon = 1e-5f},
    };
    const ProductChain what = {.bytes = values, .rows = rows, .x = x, .sum = sum, .normed = got, .width = width,
                               .widest = depth > width ? depth : width, .steps = steps, .count = 2};
    const int first = rows * 3 / 5; /* of the second core */
    if (product_chain(&what, 0, first) || product_chain(&what, first, rows)) return INFINITY;
    for (int row = 0; row < rows; row++)
        for (int c = 0; c < width; c++) {
            const int total = column_product(values + row * depth, weights + c, depth, width);
            const double exact = total * (double)scale[c] + (double)bias[c] + (double)x[row * width + c];
            error = fmax(error, fabs((double)sum[row * width + c] - exact));
            greatest = fmax(greatest, fabs(exact));
        }
    const ResidualNorm norm = {.x = sum, .weight = ones, .bias = ones, .normed = expected, .width = width, .epsilon = 1e-5f};
    if (residual_norm(&norm, 0, rows) || memcmp(got, expected, count)) return INFINITY;
    printf("%-32s error %.2e, allowed %.2e\n", "int8 product added to x", error, greatest * 4 * 6e-8);
    free(x), free(scale), free(ones), free(bias), free(in_panels), free(values), free(weights), free(got);
    free(expected), free(minus_128), free(start), free(sum);
    return error / (greatest * 4 * 6e-8);
}

/* All numbers of 0 to 255 that stand for -8 to 7.94; their GELU on another grid, or x sigma(x (slope + cubic x^2)) if
   the slope is not 0, seen by a product with ones. gated: the activation is multiplied by x. */
static double quantised_activation_error(float slope, float cubic, int gated) {
    enum { ROWS = 4, WIDTH = 64 };
    static int8_t ones[WIDTH * WIDTH];
    static float values[ROWS * WIDTH], out[ROWS * WIDTH], scale[WIDTH], bias[WIDTH], same[WIDTH], nothing[WIDTH];
    static const int32_t start[WIDTH];
    const double steps_in_1 = 40, zero = 7; /* from -0.175 to 6.2: some are beyond the grid */
    double error = 0;
    for (int i = 0; i < ROWS * WIDTH; i++) values[i] = (float)(i - 128) / 16;
    for (int c = 0; c < WIDTH; c++) ones[c * WIDTH + c] = 1, scale[c] = 1.0f / 16, bias[c] = -8, same[c] = 1;
    uint8_t *in_panels = packed(ones, WIDTH, WIDTH);
    const ChainStep steps[] = {
        {.kind = CHAIN_QUANTISE, .depth = WIDTH, .steps = 16, .zero = 128},
        {.kind = CHAIN_HOLD, .weights = in_panels, .start = start, .scale = scale, .bias = bias, .depth = WIDTH,
         .columns = WIDTH},
        {.kind = slope ? CHAIN_SIGMOID : CHAIN_GELU, .slope = slope, .cubic = cubic, .weights = in_panels, .start = start, .scale = scale, .bias = bias, .depth = WIDTH,
         .columns = WIDTH, .steps = (float)steps_in_1, .zero = (float)zero},
        {.kind = CHAIN_OUT, .weights = in_panels, .start = start, .scale = same, .bias = nothing, .depth = WIDTH,
         .columns = WIDTH, .out = out},
    };
    ChainStep without[3] = {steps[0], steps[2], steps[3]};
    const ProductChain what = {.values = values, .rows = ROWS, .widest = WIDTH, .steps = gated ? steps : without,
                               .count = gated ? 4 : 3};
    if (product_chain(&what, 0, ROWS)) return INFINITY;
    for (int i = 0; i < ROWS * WIDTH; i++) {
        const double x = (double)values[i], sigmoid = 1 / (1 + exp(-x * (slope + cubic * x * x)));
        const double active = (slope ? x * sigmoid : x / 2 * (1 + erf(x / sqrt(2)))) * (gated ? x : 1);
        const double exact = active * steps_in_1 + zero;
        error = fmax(error, fabs((double)out[i] - fmin(fmax(exact, 0), 255)));
    }
    printf("%-32s error %.4f, allowed 0.5010\n", slope ? "quantised x sigmoid(x)" : "quantised GELU", error);
    free(in_panels);
    return error / 0.501;
}

/* The larger error of both types of Q, K and V. */
static double attention_errors(const Case *of, int arithmetic) {
    const double error = attention_error(of, arithmetic, 0);
    return arithmetic == MASKED_ATTENTION_BFLOAT16 ? fmax(error, attention_error(of, arithmetic, 1)) : error;
}

enum { MOST_NUMBERS = 13 }; /* of a Case, without its name */

static double error_of_case(const char *kind, const double *numbers, int arithmetic) {
    int n[MOST_NUMBERS];
    for (int i = 0; i < MOST_NUMBERS; i++) n[i] = (int)numbers[i];
    if (!strcmp(kind, "norm")) return norm_error(n[0], n[1], n[2]);
    if (!strcmp(kind, "product")) return product_chain_support() ? added_product_error(n[0], n[1], n[2]) : 0;
    const Case of = {kind, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], (float)numbers[8], n[9], n[10], (float)numbers[11],
                     n[12]};
    return attention_errors(&of, arithmetic);
}

int main(int count, char **arguments) {
    if (count < 3) return 2;
    if (strcmp(gmmvit_instruction_set_name(), arguments[1])) {
        printf("expected %s, got %s %s\n", arguments[1], gmmvit_instruction_set_name(), gmmvit_why_no_instruction_set());
        return 2;
    }
    const int arithmetic = atoi(arguments[2]);
    double worst = 0;
    if (count > 3) {
        double numbers[MOST_NUMBERS] = {0};
        for (int i = 4; i < count && i - 4 < MOST_NUMBERS; i++) numbers[i - 4] = atof(arguments[i]);
        return !(error_of_case(arguments[3], numbers, arithmetic) <= 1);
    }
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++)
        worst = fmax(worst, attention_errors(&CASES[i], arithmetic));
    worst = fmax(worst, fmax(norm_error(0, 3, 48), norm_error(1, 3, 48)));
    if (product_chain_support()) {
        worst = fmax(worst, added_product_error(101, 48, 80));
        worst = fmax(worst, quantised_activation_error(0, 0, 0));
        worst = fmax(worst, quantised_activation_error(1, 0, 0)); /* SiLU */
        worst = fmax(worst, quantised_activation_error(1.5957691f, 0.0713548f, 0)); /* GELU with tanh */
        worst = fmax(worst, quantised_activation_error(0, 0, 1));
        worst = fmax(worst, quantised_activation_error(1, 0, 1)); /* SwiGLU */
    } else printf("int8 products: not computed by our kernel on this processor\n");
    float one = 0; /* of 17 mixed heads nothing is read */
    const MaskedAttention refused = {.batch = 1, .heads = 17, .queries = 1, .n = 1, .d = 1, .out = &one, .q = &one,
                                     .k = &one, .v = &one, .after = &one, .arithmetic = arithmetic};
    if (!masked_attention(&refused, 0, 1)) worst = INFINITY;
    printf("%s, arithmetic %d: %s\n", arguments[1], arithmetic, worst <= 1 ? "right" : "WRONG");
    return !(worst <= 1);
}
