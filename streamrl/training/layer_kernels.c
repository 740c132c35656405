/* RMS norms, rotations by positions and gated activations, forward and backward, in fp32 from tensors in fp32 or bf16.

   A row, or a few values of both inputs of a gate, are turned into fp32 in the caches, computed and rounded once. Work
   is divided in the same way for any number of threads, so results do not depend on it. */
#include "wide_vectors.h"
#include "floats.h"
#include <stdlib.h>
#include <string.h>

#define ROWS 64 /* whose shares of a weight's gradient one thread adds up */
#define VALUES 512 /* of a gate at a time */

typedef struct {
    long rows, width;
    float eps, offset; /* out = x / rms(x) (weight + offset), rms(x)^2 = mean(x^2) + eps */
    int bf16;
} Norm;

typedef struct {
    long batch, heads, tokens, width, rotated; /* numbers of a head, of which the first ones are rotated */
    long from[3], to[3];                       /* distances of batches, heads and tokens, in elements */
    int bf16, back;                            /* back: the gradient of x from that of out */
} Rotation;

typedef struct {
    long count;
    int gelu; /* out = a sigmoid(m) b: m = a, or what makes it the tanh form of GELU */
    int bf16;
} Gate;

/* -- norms: tensors [rows, width], weight [width], inverse [rows]: 1 / rms */

static void load_weight(const Norm *n, float *to, const void *weight) {
    load(to, weight, n->bf16, 0, n->width, 1.0f);
    for (long i = 0; i < n->width; i++) to[i] += n->offset;
}

/* Compute out and inverse; returns 0, or 1: no memory */
int rms_norm(const Norm *n, const void *x, const void *weight, void *out, float *inverse, int threads) {
    long width = n->width;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *w = malloc(2 * width * sizeof(float)), *a = w + width;
        failed = !w;
        if (w) load_weight(n, w, weight);
#pragma omp for schedule(static)
        for (long row = 0; row < n->rows; row++) {
            if (!w) continue;
            load(a, x, n->bf16, row * width, width, 1.0f);
            float factor = inverse_rms(a, width, n->eps);
            inverse[row] = factor;
            for (long i = 0; i < width; i++) a[i] = a[i] * factor * w[i];
            store(a, out, n->bf16, row * width, width, 1.0f);
        }
        free(w);
    }
    return failed;
}

/* Compute of_x and, unless it is NULL, of_weight [ceil(rows / ROWS), width], whose sum is the gradient of the weight;
   returns as above. With r = 1 / rms, h = grad (weight + offset): of_x = r h - x r^3 mean(h x) */
int rms_norm_backward(const Norm *n, const void *x, const void *weight, const float *inverse, const void *grad,
                      void *of_x, float *of_weight, int threads) {
    long width = n->width, parts = (n->rows + ROWS - 1) / ROWS;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *w = malloc(4 * width * sizeof(float)), *a = w + width, *g = a + width, *sum = g + width;
        failed = !w;
        if (w) load_weight(n, w, weight);
#pragma omp for schedule(static)
        for (long part = 0; part < parts; part++) {
            if (!w) continue;
            for (long i = 0; i < width; i++) sum[i] = 0.0f;
            for (long row = part * ROWS; row < n->rows && row < (part + 1) * ROWS; row++) {
                load(a, x, n->bf16, row * width, width, 1.0f);
                load(g, grad, n->bf16, row * width, width, 1.0f);
                float factor = inverse[row];
                for (long i = 0; i < width; i++) {
                    sum[i] += g[i] * (a[i] * factor);
                    g[i] *= w[i];
                }
                float mean = product_sum(g, a, width) * factor * factor / width;
                for (long i = 0; i < width; i++) a[i] = factor * (g[i] - a[i] * mean);
                store(a, of_x, n->bf16, row * width, width, 1.0f);
            }
            if (of_weight) store(sum, of_weight, 0, part * width, width, 1.0f);
        }
        free(w);
    }
    return failed;
}

/* -- rotations: tensors [batch, heads, tokens, width], cosines and sines [batch, tokens, rotated] in fp32 */

/* With n = rotated / 2: out[i] = x[i] cos[i] - x[i + n] sin[i], out[i + n] = x[i + n] cos[i + n] + x[i] sin[i + n] */
static void rotate_row(const float *x, const float *cos, const float *sin, float *out, long n) {
    for (long i = 0; i < n; i++) {
        out[i] = x[i] * cos[i] - x[i + n] * sin[i];
        out[i + n] = x[i + n] * cos[i + n] + x[i] * sin[i + n];
    }
}

static void rotate_row_back(const float *grad, const float *cos, const float *sin, float *out, long n) {
    for (long i = 0; i < n; i++) {
        out[i] = grad[i] * cos[i] + grad[i + n] * sin[i + n];
        out[i + n] = grad[i + n] * cos[i + n] - grad[i] * sin[i];
    }
}

/* Compute out, or with `back` the gradient of x; returns 0, or 1: no memory */
int rotate(const Rotation *r, const void *x, const float *cos, const float *sin, void *out, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *a = malloc(2 * r->width * sizeof(float)), *b = a + r->width;
        failed = !a;
#pragma omp for collapse(2) schedule(static)
        for (long batch = 0; batch < r->batch; batch++)
            for (long token = 0; token < r->tokens; token++) {
                const float *c = cos + (batch * r->tokens + token) * r->rotated;
                const float *s = sin + (batch * r->tokens + token) * r->rotated;
                for (long head = 0; a && head < r->heads; head++) {
                    load(a, x, r->bf16, batch * r->from[0] + head * r->from[1] + token * r->from[2], r->width, 1.0f);
                    (r->back ? rotate_row_back : rotate_row)(a, c, s, b, r->rotated / 2);
                    for (long i = r->rotated; i < r->width; i++) b[i] = a[i];
                    store(b, out, r->bf16, batch * r->to[0] + head * r->to[1] + token * r->to[2], r->width, 1.0f);
                }
            }
        free(a);
    }
    return failed;
}

/* -- gates: tensors [count] */

#define CUBE 0.044715f
#define TWICE 1.5957691216057308f /* 2 sqrt(2 / pi) */

/* sigmoid(m), and the slope of m */
static inline float opened(float a, int gelu, float *slope) {
    float m = gelu ? TWICE * (a + CUBE * a * a * a) : a;
    *slope = gelu ? TWICE * (1.0f + 3.0f * CUBE * a * a) : 1.0f;
    return sigmoid(m);
}

#define GATE static inline __attribute__((always_inline)) void

GATE forward(int gelu, float *a, const float *b) {
    float slope;
    for (long i = 0; i < VALUES; i++) a[i] *= opened(a[i], gelu, &slope) * b[i];
}

GATE backward(int gelu, float *a, float *b, const float *grad) {
    for (long i = 0; i < VALUES; i++) {
        float slope, open = opened(a[i], gelu, &slope);
        float of_a = grad[i] * b[i] * (open + a[i] * open * (1.0f - open) * slope);
        b[i] = grad[i] * a[i] * open;
        a[i] = of_a;
    }
}

static void load_values(float *to, const void *x, int bf16, long at, long count) {
    load(to, x, bf16, at, count, 1.0f);
    if (count < VALUES) memset(to + count, 0, (VALUES - count) * sizeof(float));
}

/* Compute out from a and b */
void gate(const Gate *g, const void *a, const void *b, void *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long at = 0; at < g->count; at += VALUES) {
        float x[VALUES], y[VALUES];
        long count = least(VALUES, g->count - at);
        load_values(x, a, g->bf16, at, count);
        load_values(y, b, g->bf16, at, count);
        g->gelu ? forward(1, x, y) : forward(0, x, y);
        store(x, out, g->bf16, at, count, 1.0f);
    }
}

/* Compute the gradients of a and b from that of out */
void gate_backward(const Gate *g, const void *a, const void *b, const void *grad, void *of_a, void *of_b, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long at = 0; at < g->count; at += VALUES) {
        float x[VALUES], y[VALUES], z[VALUES];
        long count = least(VALUES, g->count - at);
        load_values(x, a, g->bf16, at, count);
        load_values(y, b, g->bf16, at, count);
        load_values(z, grad, g->bf16, at, count);
        g->gelu ? backward(1, x, y, z) : backward(0, x, y, z);
        store(x, of_a, g->bf16, at, count, 1.0f);
        store(y, of_b, g->bf16, at, count, 1.0f);
    }
}
