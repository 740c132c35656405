/* y = x w' + b for a few rows of x, in fp32: every weight is read once, in order. Reading takes the time, so all rows of x
   use a row of weights while it is at hand. */
#include "call.h"

typedef float v8 __attribute__((vector_size(32), aligned(4)));
#define LOAD(p) (*(const v8 *)(p))
#define AHEAD 1024 /* floats */

static int prefetches = 1;

/* whether weights are prefetched from now on: it makes some CPUs faster, and others slower */
void prefetch(int is_on) { prefetches = is_on; }

static inline float sum(v8 v) {
    float s = 0;
    for (int i = 0; i < 8; i++) s += v[i];
    return s;
}

/* M rows of x; each has U independent sums, so that no addition waits for the one before */
#define ROWS(M, U)                                                                                             \
    static void rows_##M(const float *x, const float *w, const float *b, float *y, long n, long k) {          \
        const int ahead = prefetches;                                                                         \
        _Pragma("omp parallel for schedule(static)") for (long i = 0; i < n; i++) {                           \
            const float *row = w + i * k;                                                                     \
            v8 a[M][U];                                                                                       \
            for (int m = 0; m < M; m++)                                                                       \
                for (int u = 0; u < U; u++) a[m][u] = (v8){0};                                                \
            long j = 0;                                                                                       \
            for (; j + 8 * U <= k; j += 8 * U) {                                                              \
                if (ahead)                                                                                    \
                    for (int u = 0; u < U; u += 2) __builtin_prefetch(row + j + AHEAD + 8 * u);               \
                _Pragma("GCC unroll 8") for (int u = 0; u < U; u++) {                                         \
                    v8 b = LOAD(row + j + 8 * u);                                                             \
                    _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) a[m][u] +=                            \
                        LOAD(x + m * k + j + 8 * u) * b;                                                      \
                }                                                                                             \
            }                                                                                                 \
            for (int m = 0; m < M; m++) {                                                                     \
                v8 total = a[m][0];                                                                           \
                for (int u = 1; u < U; u++) total += a[m][u];                                                 \
                float s = sum(total);                                                                         \
                for (long rest = j; rest < k; rest++) s += row[rest] * x[m * k + rest];                       \
                y[m * n + i] = b ? s + b[i] : s;                                                              \
            }                                                                                                 \
        }                                                                                                     \
    }
ROWS(1, 4)
ROWS(2, 4)
ROWS(3, 2)
ROWS(4, 2)

long most_rows(void) { return 4; }

/* x [m, k], w [n, k], b [n] or NULL, y [m, n]; m from 1 to `most_rows` */
void few_rows(const float *x, const float *w, const float *b, float *y, long m, long n, long k) {
    switch (m) {
        case 1: rows_1(x, w, b, y, n, k); break;
        case 2: rows_2(x, w, b, y, n, k); break;
        case 3: rows_3(x, w, b, y, n, k); break;
        case 4: rows_4(x, w, b, y, n, k); break;
    }
}

/* pointers: x, w, b, y; sizes: m, n, k */
void few_rows_call(const Call *c) {
    few_rows(c->pointers[0], c->pointers[1], c->pointers[2], c->pointers[3], c->sizes[0], c->sizes[1], c->sizes[2]);
}
