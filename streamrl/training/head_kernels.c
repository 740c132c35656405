/* Log-probabilities, entropies and gradients of a head's projections [rows, width], in fp32 from fp32 or bf16.

   Values of a row are turned into fp32 in the caches, a few at a time. A row belongs to one thread, so results do not
   depend on how many there are. */
#include "wide_vectors.h"
#include "floats.h"

#define VALUES 1024 /* at a time */
#define LEAST_SHIFTED -1e4f /* where the exponential is 0; its product with -inf is not */

typedef struct {
    long rows, width;
    float scale, softcap, temperature; /* z = softcap tanh(scale x / softcap) / temperature; softcap 0: none */
    int bf16;
} Head;

static inline float tanh_of(float x) {
    float less = exponential_less_1(-2.0f * fabsf(x));
    return copysignf(less / (2.0f + less), x);
}

/* Turn projections x from `at` on into z; with a soft cap, `slope` is that of the cap */
static void load_logits(const Head *h, const void *x, long at, long count, float *z, float *slope) {
    float cap = h->softcap, temperature = h->temperature;
    load(z, x, h->bf16, at, count, h->scale);
    if (cap != 0.0f) {
#pragma omp simd
        for (long i = 0; i < count; i++) {
            float bounded = tanh_of(z[i] / cap);
            slope[i] = 1.0f - bounded * bounded;
            z[i] = bounded * cap;
        }
    }
    if (temperature != 1.0f)
        for (long i = 0; i < count; i++) z[i] /= temperature;
}

/* Compute, each [rows]: log p of the targets, sum(exp(z - max z)), max z and the entropy in nats */
void log_sums(const Head *h, const void *x, const int64_t *targets, float *logprobs, float *totals, float *largest,
              float *entropy, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < h->rows; row++) {
        float z[VALUES], slope[VALUES], most = -INFINITY, of_target = NAN;
        for (long at = 0; at < h->width; at += VALUES) {
            long count = least(VALUES, h->width - at);
            load_logits(h, x, row * h->width + at, count, z, slope);
#pragma omp simd reduction(max : most)
            for (long i = 0; i < count; i++) most = z[i] > most ? z[i] : most;
        }
        double others = 0.0, mean = 0.0; /* without and with the target */
        for (long at = 0; at < h->width; at += VALUES) {
            long count = least(VALUES, h->width - at), target = targets[row] - at;
            load_logits(h, x, row * h->width + at, count, z, slope);
            float sum = 0.0f, weighted = 0.0f;
            if (target >= 0 && target < count) of_target = z[target] - most;
#pragma omp simd reduction(+ : weighted)
            for (long i = 0; i < count; i++) {
                float shifted = z[i] - most;
                z[i] = exponential(shifted);
                weighted += z[i] * (shifted < LEAST_SHIFTED ? LEAST_SHIFTED : shifted);
            }
            if (target >= 0 && target < count) z[target] = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (long i = 0; i < count; i++) sum += z[i];
            others += sum;
            mean += weighted;
        }
        float excess = (float)others + expm1f(of_target); /* of the sum over 1, the likeliest token's */
        float log_total = log1pf(excess);
        logprobs[row] = of_target - log_total;
        totals[row] = 1.0f + excess;
        largest[row] = most;
        entropy[row] = log_total - (float)mean / totals[row];
    }
}

/* Replace x by the gradient in x: that in z is of_others exp(z - max z), and of_targets at the targets; each [rows] */
void slopes(const Head *h, void *x, const int64_t *targets, const float *largest, const float *of_others,
            const float *of_targets, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long row = 0; row < h->rows; row++) {
        float z[VALUES], slope[VALUES], most = largest[row], factor = of_others[row];
        for (long at = 0; at < h->width; at += VALUES) {
            long count = least(VALUES, h->width - at), target = targets[row] - at, first = row * h->width + at;
            load_logits(h, x, first, count, z, slope);
            for (long i = 0; i < count; i++) z[i] = exponential(z[i] - most) * factor;
            if (target >= 0 && target < count) z[target] = of_targets[row];
            if (h->softcap != 0.0f)
                for (long i = 0; i < count; i++) z[i] *= slope[i];
            store(z, x, h->bf16, first, count, 1.0f);
        }
    }
}
