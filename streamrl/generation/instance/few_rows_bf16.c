/* y = x w' + b for up to 32 rows of x, in bf16 with sums in fp32, on CPUs that multiply bf16: with AMX by tiles of 16
   rows, with AVX-512 row by row. Weights are read once, in order.

   They lie in panels of 16 outputs, [n / 16][k / 2][16][2], so that both kinds of instructions read 64 bytes at a time
   that belong to 16 outputs. n is a multiple of 16, k of 32. */
#include "call.h"
#include <stdint.h>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;
enum { PANEL = 16, LINE = 32, DEPTH = 32, TILES = 2 };
#define AHEAD 8192 /* bytes */

static int prefetches = 1;

/* whether weights are prefetched from now on: it makes some CPUs faster, and others slower */
void prefetch(int is_on) { prefetches = is_on; }

static inline __m512 bias_of(const bf16 *b, long i) {
    if (!b) return _mm512_setzero_ps();
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(b + i))), 16));
}

static inline void put(__m512 sums, bf16 *y) { _mm256_storeu_si256((void *)y, (__m256i)_mm512_cvtneps_pbh(sums)); }

/* M rows of x; each has U independent sums, so that no addition waits for the one before */
#define ROWS(M, U)                                                                                             \
    static void rows_##M(const bf16 *x, const bf16 *w, const bf16 *b, bf16 *y, long n, long k) {              \
        const int ahead = prefetches;                                                                         \
        _Pragma("omp parallel for schedule(static)") for (long i = 0; i < n; i += PANEL) {                    \
            const bf16 *panel = w + i * k;                                                                    \
            __m512 a[M][U];                                                                                   \
            for (int m = 0; m < M; m++)                                                                       \
                for (int u = 0; u < U; u++) a[m][u] = u ? _mm512_setzero_ps() : bias_of(b, i);                \
            for (long j = 0; j < k; j += 2 * U)                                                               \
                _Pragma("GCC unroll 8") for (int u = 0; u < U; u++) {                                         \
                    const bf16 *pairs = panel + (j + 2 * u) * PANEL;                                          \
                    if (ahead) _mm_prefetch((const char *)pairs + AHEAD, _MM_HINT_T1);                        \
                    __m512bh v = (__m512bh)_mm512_loadu_si512(pairs);                                         \
                    _Pragma("GCC unroll 8") for (int m = 0; m < M; m++) {                                     \
                        int32_t pair;                                                                         \
                        memcpy(&pair, x + m * k + j + 2 * u, sizeof pair);                                    \
                        a[m][u] = _mm512_dpbf16_ps(a[m][u], (__m512bh)_mm512_set1_epi32(pair), v);            \
                    }                                                                                         \
                }                                                                                             \
            for (int m = 0; m < M; m++) {                                                                     \
                for (int u = 1; u < U; u++) a[m][0] = _mm512_add_ps(a[m][0], a[m][u]);                        \
                put(a[m][0], y + m * n + i);                                                                  \
            }                                                                                                 \
        }                                                                                                     \
    }
ROWS(1, 8)
ROWS(2, 8)
ROWS(3, 4)
ROWS(4, 4)
ROWS(5, 4)
ROWS(6, 2)
ROWS(7, 2)
ROWS(8, 2)

#ifdef __AMX_BF16__
#define TILE_DATA 18
#define ARCH_REQ_XCOMP_PERM 0x1023
static int has_tiles;

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Layout;

/* tiles 0 and 1: sums of up to 16 rows of x each; 2: weights; 3: the first 16 rows of x; 4: the last ones */
static void lay_out(long m) {
    Layout layout = {.palette = 1};
    for (int i = 0; i < 5; i++) layout.row_bytes[i] = 64, layout.rows[i] = 16;
    layout.rows[(m - 1) / 16] = layout.rows[4] = (m - 1) % 16 + 1;
    __asm__ volatile("" : : "r"(&layout) : "memory"); /* gcc takes the instruction for one that reads 8 bytes */
    _tile_loadconfig(&layout);
}

#define SUM(T, X, ROWS_OF_X)                                                                                   \
    _tile_loadd(X, ROWS_OF_X + j, 2 * k);                                                                      \
    _tile_dpbf16ps(T, X, 2);
#define STORE(T, NUMBER)                                                                                       \
    if (T < NUMBER) {                                                                                          \
        float sums[16][PANEL] __attribute__((aligned(64)));                                                    \
        _tile_stored(T, sums, 64);                                                                             \
        for (int r = 0; r < 16 && 16 * T + r < m; r++)                                                         \
            put(_mm512_add_ps(_mm512_load_ps(sums[r]), bias), y + (16 * T + r) * LINE);                        \
    }
#define PANEL_OF(NUMBER, SUMS)                                                                                 \
    static inline void panel_##NUMBER(const bf16 *x, const bf16 *panel, __m512 bias, bf16 *y, long m, long k) { \
        _tile_zero(0);                                                                                         \
        _tile_zero(1);                                                                                         \
        const int ahead = prefetches;                                                                          \
        for (long j = 0; j < k; j += DEPTH) {                                                                  \
            const char *next = (const char *)(panel + j * PANEL) + AHEAD;                                      \
            if (ahead)                                                                                         \
                _Pragma("GCC unroll 16") for (int line = 0; line < 16; line++)                                 \
                    _mm_prefetch(next + 64 * line, _MM_HINT_T1);                                               \
            _tile_loadd(2, panel + j * PANEL, 64);                                                             \
            SUMS                                                                                               \
        }                                                                                                      \
        STORE(0, NUMBER) STORE(1, NUMBER)                                                                      \
    }
PANEL_OF(1, SUM(0, 4, x))
PANEL_OF(2, SUM(0, 3, x) SUM(1, 4, x + 16 * k))

static void tiles(const bf16 *x, const bf16 *w, const bf16 *b, bf16 *y, long m, long n, long k) {
#pragma omp parallel
    {
        Layout before;
        _tile_storeconfig(&before); /* other libraries may keep theirs from call to call */
        lay_out(m);
#pragma omp for schedule(static)
        for (long i = 0; i < n; i += LINE) {
            bf16 rows[16 * TILES][LINE]; /* y takes whole lines: its rows may all lie in one set of the caches */
            long width = n - i < LINE ? n - i : LINE;
            for (long j = 0; j < width; j += PANEL) {
                const bf16 *panel = w + (i + j) * k;
                __m512 bias = bias_of(b, i + j);
                if (m <= 16) panel_1(x, panel, bias, rows[0] + j, m, k);
                else panel_2(x, panel, bias, rows[0] + j, m, k);
            }
            for (long r = 0; r < m; r++) memcpy(y + r * n + i, rows[r], width * sizeof(bf16));
        }
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
}
#endif

/* the largest m of `few_rows`; asks the kernel for AMX, without which its instructions end the process */
long most_rows(void) {
#ifdef __AMX_BF16__
    has_tiles = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    if (has_tiles) return 16 * TILES;
#endif
    return 8;
}

/* w [n, k] into panels */
void arrange(const bf16 *w, bf16 *panels, long n, long k) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i += PANEL)
        for (long j = 0; j < k; j += 2)
            for (long output = 0; output < PANEL; output++)
                memcpy(panels + i * k + j * PANEL + 2 * output, w + (i + output) * k + j, 2 * sizeof(bf16));
}

/* x [m, k], w panels of [n, k], b [n] or NULL, y [m, n]; m from 1 to `most_rows` */
void few_rows(const bf16 *x, const bf16 *w, const bf16 *b, bf16 *y, long m, long n, long k) {
#ifdef __AMX_BF16__
    if (has_tiles) return tiles(x, w, b, y, m, n, k);
#endif
    switch (m) {
        case 1: rows_1(x, w, b, y, n, k); break;
        case 2: rows_2(x, w, b, y, n, k); break;
        case 3: rows_3(x, w, b, y, n, k); break;
        case 4: rows_4(x, w, b, y, n, k); break;
        case 5: rows_5(x, w, b, y, n, k); break;
        case 6: rows_6(x, w, b, y, n, k); break;
        case 7: rows_7(x, w, b, y, n, k); break;
        case 8: rows_8(x, w, b, y, n, k); break;
    }
}

/* pointers: x, w, b, y; sizes: m, n, k */
void few_rows_call(const Call *c) {
    few_rows(c->pointers[0], c->pointers[1], c->pointers[2], c->pointers[3], c->sizes[0], c->sizes[1], c->sizes[2]);
}
#else
long most_rows(void) { return 0; }
void prefetch(int is_on) { (void)is_on; }
#endif
