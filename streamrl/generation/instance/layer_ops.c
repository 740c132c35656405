/* What a decoder layer computes beside products and attention, from tensors in fp32 or bf16: as the trainer's kernels do
   (`training/layer_kernels.c`), in fp32 inside and rounded once. */
#include "wide_vectors.h"
#include "call.h"
#include "floats.h"

#define VALUES 512 /* of a row at a time */

/* x, residual or NULL, out: [rows, width], weight or NULL: [width]. residual += x, rounded; out = residual /
   rms(residual) weight; without a residual, of x. out may be x. Rows of x lie in groups of `heads` that follow one
   another, and groups `distance` elements from each other */
void norm(const void *x, void *residual, const void *weight, void *out, long rows, long width, int bf16, long heads,
          long distance, float epsilon) {
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; row++) {
        float a[width], b[width];
        load(a, x, bf16, row / heads * distance + row % heads * width, width, 1.0f);
        if (residual) {
            load(b, residual, bf16, row * width, width, 1.0f);
            for (long i = 0; i < width; i++) b[i] += a[i];
            store(b, residual, bf16, row * width, width, 1.0f);
            load(a, residual, bf16, row * width, width, 1.0f);
        }
        float factor = inverse_rms(a, width, epsilon);
        for (long i = 0; i < width; i++) a[i] *= factor;
        if (weight) {
            load(b, weight, bf16, 0, width, 1.0f);
            for (long i = 0; i < width; i++) a[i] *= b[i];
        }
        store(a, out, bf16, row * width, width, 1.0f);
    }
}

/* pointers: those of `norm`; sizes: rows, width, bf16, heads, distance; number: epsilon */
void norm_call(const Call *c) {
    norm(c->pointers[0], c->pointers[1], c->pointers[2], c->pointers[3], c->sizes[0], c->sizes[1], c->sizes[2],
         c->sizes[3], c->sizes[4], c->number);
}

/* x [rows, 2 width], out [rows, width]. With the halves a and b of a row of x: out = a sigmoid(a) b */
void gate(const void *x, void *out, long rows, long width, int bf16) {
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; row++)
        for (long at = 0; at < width; at += VALUES) {
            float a[VALUES], b[VALUES];
            long count = least(VALUES, width - at);
            load(a, x, bf16, 2 * row * width + at, count, 1.0f);
            load(b, x, bf16, 2 * row * width + width + at, count, 1.0f);
            for (long i = 0; i < count; i++) a[i] *= sigmoid(a[i]) * b[i];
            store(a, out, bf16, row * width + at, count, 1.0f);
        }
}

/* pointers: those of `gate`; sizes: rows, width, bf16 */
void gate_call(const Call *c) { gate(c->pointers[0], c->pointers[1], c->sizes[0], c->sizes[1], c->sizes[2]); }

void run(const Call *calls, long count) {
    for (long i = 0; i < count; i++) calls[i].function(calls + i);
}
