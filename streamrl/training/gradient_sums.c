/* Sums of fp32 and bf16 numbers, in place: each is read and written once. */
#include "floats.h"

/* Add x to the totals, both [count]; the bits are those of a conversion to fp32 and an addition */
void add_bf16(float *totals, const uint16_t *x, long count, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (long i = 0; i < count; i++) totals[i] += from_bf16(x[i]);
}
