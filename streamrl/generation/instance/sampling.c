/* Log-probabilities of logits, and a token drawn of each row, while the row is in the caches. */
#include "wide_vectors.h"
#include "floats.h"

#define PART 256 /* tokens whose probabilities are added in fp32; more would need fp64 for the rare ones at their end */

static inline float largest(const float *x, long count) {
    float most = x[0];
#pragma omp simd reduction(max : most)
    for (long i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Write exp(x - most) to e, and return the sum */
static inline float powers(const float *x, float most, float *e, long count) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) sum += e[i] = exponential(x[i] - most);
    return sum;
}

/* The first of `count` ends, given as sums, that is beyond a value; the last one that adds something, if none is */
static inline long first_beyond(const float *adds, long count, double wanted, double *before) {
    long last = 0;
    double sum = 0.0;
    for (long i = 0; i < count; i++) {
        if (adds[i] > 0.0f) {
            last = i;
            *before = sum;
        }
        sum += adds[i];
        if (sum > wanted) return i;
    }
    return last;
}

/* logits [rows, width], rows `stride` floats apart, become log-probabilities; numbers [rows]: uniform in [0, 1); tokens
   [rows]: of each row the one in whose share of the probability its number lies; never one of probability 0, and any
   one of a row that is not finite */
void draw(float *logits, const double *numbers, int64_t *tokens, long rows, long width, long stride) {
    long parts = (width + PART - 1) / PART;
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; row++) {
        float *x = logits + row * stride, e[PART], sums[parts], most = largest(x, width);
        double total = 0.0, before = 0.0, within = 0.0;
        for (long part = 0; part < parts; part++)
            total += sums[part] = powers(x + part * PART, most, e, least(PART, width - part * PART));
        double wanted = numbers[row] * total;
        long part = first_beyond(sums, parts, wanted, &before);
        long count = least(PART, width - part * PART);
        powers(x + part * PART, most, e, count);
        tokens[row] = part * PART + first_beyond(e, count, wanted - before, &within);
        float shift = log(total);
        for (long i = 0; i < width; i++) x[i] = x[i] - most - shift;
    }
}
