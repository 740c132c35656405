/* Attention of packed groups, forward and backward, in fp32 from tensors in fp32 or bf16.

   A task is one key-value head of one group: its keys and values are turned into fp32 once, and all its queries, a few
   rows at a time, use them from the caches. A query's scores never leave the caches. Each task is computed by one thread
   in a fixed order, so results do not depend on the number of threads. */
#include "floats.h"
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define ROWS 12 /* 24 sums in 32 registers */
#else
#define LANES 8
#define ROWS 6 /* 12 sums in 16 registers */
#endif
#define WIDE (2 * LANES)
#define QUERIES 48 /* rows at a time: a multiple of ROWS */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define V(p) (*(vec *)(p))

typedef struct {
    void *data;
    long head, row; /* distances of heads and rows, in elements; a row's elements are next to each other */
} Tensor;

typedef struct {
    long heads, kv_heads, width, value_width; /* H, H_kv, D, D_v */
    long groups;
    const int64_t *numbers; /* start, prompt length, completions, their lengths; for each group */
    long window;            /* positions that a query sees; 0: all */
    float scale;
    int bf16;
} Shape;

static long up(long n) { return (n + WIDE - 1) / WIDE * WIDE; }
static long most(long a, long b) { return a > b ? a : b; }

/* -- rows of tensors */

static void load_row(float *to, const Tensor *x, int bf16, long head, long row, long width, float factor) {
    load(to, x->data, bf16, head * x->head + row * x->row, width, factor);
}

static void store_row(const float *from, const Tensor *x, int bf16, long head, long row, long width, float factor) {
    store(from, x->data, bf16, head * x->head + row * x->row, width, factor);
}

/* -- C [m, n] = A B or C + A B: n is a multiple of WIDE; element (i, k) of A is at i * ra + k * ca */

#define INLINE static inline __attribute__((always_inline)) void

INLINE tile(const int rows, long depth, const float *a, long ra, long ca, const float *b, long ldb, float *c, long ldc,
            int add) {
    vec sums[ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 2; j++) sums[i][j] = add ? V(c + i * ldc + j * LANES) : (vec){0};
    for (long k = 0; k < depth; k++) {
        vec first = V(b + k * ldb), second = V(b + k * ldb + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            float one = a[i * ra + k * ca];
            sums[i][0] += one * first;
            sums[i][1] += one * second;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 2; j++) V(c + i * ldc + j * LANES) = sums[i][j];
}

static void product(long m, long n, long depth, const float *a, long ra, long ca, const float *b, long ldb, float *c,
                    long ldc, int add) {
    for (long j = 0; j < n; j += WIDE) {
        long i = 0;
        for (; i + ROWS <= m; i += ROWS) tile(ROWS, depth, a + i * ra, ra, ca, b + j, ldb, c + i * ldc + j, ldc, add);
        for (; i + 3 <= m; i += 3) tile(3, depth, a + i * ra, ra, ca, b + j, ldb, c + i * ldc + j, ldc, add);
        for (; i < m; i++) tile(1, depth, a + i * ra, ra, ca, b + j, ldb, c + i * ldc + j, ldc, add);
    }
}

/* -- a group's keys and values */

typedef struct {
    long start, prompt, stop; /* rows of the packed row; a completion's rows follow the prompt's */
    const int64_t *lengths;   /* of the completions */
    long completions;
} Group;

typedef struct {
    long width, value_width; /* rounded up */
    long tokens, columns;    /* of the group; columns of the transposes */
    float *keys, *values;    /* [tokens, width], [tokens, value_width] */
    float *keys_t, *values_t; /* [D, columns], [D_v, columns] */
    float *of_keys, *of_values; /* gradients */
    float *query, *grad, *out; /* a few rows */
    float *scores, *slopes;    /* [QUERIES, scores_width] */
    long scores_width;
    char *memory;
} Space;

static Group group_of(const Shape *s, long number) {
    const int64_t *at = s->numbers;
    for (long i = 0; i < number; i++) at += 3 + at[2];
    Group g = {at[0], at[1], at[0] + at[1], at + 3, at[2]};
    for (long i = 0; i < g.completions; i++) g.stop += g.lengths[i];
    return g;
}

static float *cut(char **at, long floats) {
    float *here = (float *)*at;
    *at += (floats * sizeof(float) + 63) / 64 * 64;
    return here;
}

static void transpose(const Space *p, const float *rows, long ld, long width, float *to) {
    for (long i = 0; i < p->tokens; i++)
        for (long d = 0; d < width; d++) to[d * p->columns + i] = rows[i * ld + d];
}

static int make_space(Space *p, const Shape *s, const Group *g, const Tensor *key, const Tensor *value, long kv,
                      int backward) {
    long longest = g->prompt;
    for (long i = 0; i < g->completions; i++) longest = most(longest, g->lengths[i]);
    p->width = up(s->width), p->value_width = up(s->value_width);
    p->tokens = g->stop - g->start, p->columns = up(p->tokens) + WIDE;
    p->scores_width = up(g->prompt) + up(longest);
    long floats = p->tokens * (p->width + p->value_width) * (backward ? 2 : 1) +
                  p->columns * (s->width + (backward ? s->value_width : 0)) +
                  QUERIES * (2 * p->width + 2 * p->value_width + 2 * p->scores_width);
    char *at;
    if (posix_memalign((void **)&at, 64, floats * sizeof(float) + 16 * 64)) return 1;
    p->memory = at;
    memset(at, 0, floats * sizeof(float) + 16 * 64); /* what rounds widths up stays 0, and gradients begin with it */
    p->keys = cut(&at, p->tokens * p->width), p->values = cut(&at, p->tokens * p->value_width);
    p->keys_t = cut(&at, p->columns * s->width);
    p->query = cut(&at, QUERIES * p->width), p->grad = cut(&at, QUERIES * p->value_width);
    p->out = cut(&at, QUERIES * most(p->width, p->value_width));
    p->scores = cut(&at, QUERIES * p->scores_width), p->slopes = cut(&at, QUERIES * p->scores_width);
    for (long i = 0; i < p->tokens; i++) {
        load_row(p->keys + i * p->width, key, s->bf16, kv, g->start + i, s->width, 1.0f);
        load_row(p->values + i * p->value_width, value, s->bf16, kv, g->start + i, s->value_width, 1.0f);
    }
    transpose(p, p->keys, p->width, s->width, p->keys_t);
    if (!backward) return 0;
    p->values_t = cut(&at, p->columns * s->value_width);
    p->of_keys = cut(&at, p->tokens * p->width), p->of_values = cut(&at, p->tokens * p->value_width);
    transpose(p, p->values, p->value_width, s->value_width, p->values_t);
    return 0;
}

/* -- a few queries of one sequence */

typedef struct {
    long first, rows;    /* the queries' places in their sequence */
    long own, own_first; /* the sequence's first row in the group; the first of its keys that any of them sees */
    long shared, shared_first; /* keys of the prompt in front of it that any of them sees */
    long keys;           /* own keys, from own_first */
    long own_column;     /* where their scores begin */
} Piece;

static Piece piece_of(const Shape *s, const Group *g, long own, int is_completion, long first, long length) {
    Piece p = {first, least(QUERIES, length - first), own, 0, 0, g->prompt, 0, 0};
    if (s->window) p.own_first = most(0, first - s->window + 1);
    p.keys = first + p.rows - p.own_first;
    if (is_completion) {
        p.shared_first = s->window ? least(g->prompt, most(0, g->prompt + first - s->window + 1)) : 0;
        p.shared = g->prompt - p.shared_first;
    }
    p.own_column = up(p.shared);
    return p;
}

/* Scores of a query: the prompt's keys in [*a, shared), its own in [own_column + *c, own_column + *d) */
static inline void seen(const Shape *s, const Group *g, const Piece *p, long row, long *a, long *c, long *d) {
    long at = p->first + row;
    *a = *c = 0, *d = at + 1 - p->own_first;
    if (!s->window) return;
    *a = least(p->shared, most(0, g->prompt + at - s->window + 1 - p->shared_first));
    *c = most(0, at - s->window + 1 - p->own_first);
}

/* X [rows, ...] B of both parts of the keys, into columns of the scores */
static void with_keys(const Space *w, const Piece *p, const float *x, long width, long ldx, const float *b, float *to) {
    if (p->shared)
        product(p->rows, up(p->shared), width, x, ldx, 1, b + p->shared_first, w->columns, to, w->scores_width, 0);
    product(p->rows, up(p->keys), width, x, ldx, 1, b + p->own + p->own_first, w->columns, to + p->own_column,
            w->scores_width, 0);
}

/* scores [rows, keys] times rows of both parts of the keys */
static void over_keys(const Space *w, const Piece *p, const float *scores, const float *b, long width, float *to,
                      long ldt) {
    product(p->rows, width, p->keys, scores + p->own_column, w->scores_width, 1, b + (p->own + p->own_first) * width,
            width, to, ldt, 0);
    if (p->shared)
        product(p->rows, width, p->shared, scores, w->scores_width, 1, b + p->shared_first * width, width, to, ldt, 1);
}

/* transposed scores times rows of the queries, added to what belongs to both parts of the keys */
static void to_keys(const Space *w, const Piece *p, const float *scores, const float *x, long width, float *to) {
    product(p->keys, width, p->rows, scores + p->own_column, 1, w->scores_width, x, width,
            to + (p->own + p->own_first) * width, width, 1);
    if (p->shared)
        product(p->shared, width, p->rows, scores, 1, w->scores_width, x, width, to + p->shared_first * width, width,
                1);
}

static void clear(float *row, long from, long to) {
    if (to > from) memset(row + from, 0, sizeof(float) * (to - from));
}

static float highest(const float *x, long from, long to, float value) {
#pragma omp simd reduction(max : value)
    for (long i = from; i < to; i++) value = x[i] > value ? x[i] : value;
    return value;
}

static float exponentials(float *x, long from, long to, float shift) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = from; i < to; i++) {
        x[i] = exponential(x[i] - shift);
        sum += x[i];
    }
    return sum;
}

static float dot(const float *x, const float *y, long from, long to) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = from; i < to; i++) sum += x[i] * y[i];
    return sum;
}

/* Turn exponentials into weights P, and dP into dS = P (dP - mean) */
static void slope(float *weights, float *slopes, long from, long to, float share, float mean) {
    for (long i = from; i < to; i++) {
        weights[i] *= share;
        slopes[i] = weights[i] * (slopes[i] - mean);
    }
}

/* Turn a query's scores into exp(score - largest score), 0 for keys that it does not see; return their sum */
static float weigh(const Shape *s, const Group *g, const Piece *p, float *x, long row) {
    long a, c, d, own = p->own_column;
    seen(s, g, p, row, &a, &c, &d);
    float shift = highest(x, own + c, own + d, highest(x, a, p->shared, -INFINITY));
    float sum = exponentials(x, a, p->shared, shift) + exponentials(x, own + c, own + d, shift);
    clear(x, 0, a);
    clear(x, own, own + c);
    clear(x, own + d, own + p->keys);
    return sum;
}

/* What is computed: out from query, key and value, or, if `of_query` is not NULL, their gradients from that of out */
typedef struct {
    const Tensor *query, *key, *value, *out; /* [H, T, D], [H_kv, T, D], [H_kv, T, D_v], [H, T, D_v] */
    const Tensor *grad, *of_query, *of_key, *of_value;
} Work;

static void forward_piece(const Shape *s, const Group *g, Space *w, const Piece *p, const Work *work, long head) {
    long row = g->start + p->own + p->first;
    for (long i = 0; i < p->rows; i++)
        load_row(w->query + i * w->width, work->query, s->bf16, head, row + i, s->width, s->scale);
    with_keys(w, p, w->query, s->width, w->width, w->keys_t, w->scores);
    float sums[QUERIES];
    for (long i = 0; i < p->rows; i++) sums[i] = weigh(s, g, p, w->scores + i * w->scores_width, i);
    over_keys(w, p, w->scores, w->values, w->value_width, w->out, w->value_width);
    for (long i = 0; i < p->rows; i++)
        store_row(w->out + i * w->value_width, work->out, s->bf16, head, row + i, s->value_width, 1.0f / sums[i]);
}

/* Largest scores and sums are computed again: a log-sum-exp in their place is rounded, so that the weights of large
   scores would not add up to 1, and what all keys have in common would reach dQ.
   With P the weights and dP = dO V': dV = P' dO, dS = P (dP - rowsum(P dP)), dQ = scale dS K, dK = dS' (scale Q) */
static void backward_piece(const Shape *s, const Group *g, Space *w, const Piece *p, const Work *work, long head) {
    long row = g->start + p->own + p->first, own = p->own_column;
    for (long i = 0; i < p->rows; i++) {
        load_row(w->query + i * w->width, work->query, s->bf16, head, row + i, s->width, s->scale);
        load_row(w->grad + i * w->value_width, work->grad, s->bf16, head, row + i, s->value_width, 1.0f);
    }
    with_keys(w, p, w->query, s->width, w->width, w->keys_t, w->scores);
    with_keys(w, p, w->grad, s->value_width, w->value_width, w->values_t, w->slopes);
    for (long i = 0; i < p->rows; i++) {
        float *weights = w->scores + i * w->scores_width, *slopes = w->slopes + i * w->scores_width;
        float share = 1.0f / weigh(s, g, p, weights, i);
        float mean = share * (dot(weights, slopes, 0, p->shared) + dot(weights, slopes, own, own + p->keys));
        slope(weights, slopes, 0, p->shared, share, mean);
        slope(weights, slopes, own, own + p->keys, share, mean);
    }
    to_keys(w, p, w->scores, w->grad, w->value_width, w->of_values);
    to_keys(w, p, w->slopes, w->query, w->width, w->of_keys);
    over_keys(w, p, w->slopes, w->keys, w->width, w->out, w->width);
    for (long i = 0; i < p->rows; i++)
        store_row(w->out + i * w->width, work->of_query, s->bf16, head, row + i, s->width, s->scale);
}

/* All queries of one key-value head of one group; returns 1 if there is no memory for it */
static int task(const Shape *s, const Work *work, long number) {
    Group g = group_of(s, number / s->kv_heads);
    long kv = number % s->kv_heads, per_key = s->heads / s->kv_heads, own = 0;
    int backward = work->of_query != 0;
    Space w;
    if (make_space(&w, s, &g, work->key, work->value, kv, backward)) return 1;
    for (long sequence = -1; sequence < g.completions; sequence++) {
        long length = sequence < 0 ? g.prompt : g.lengths[sequence];
        for (long first = 0; first < length; first += QUERIES) {
            Piece p = piece_of(s, &g, own, sequence >= 0, first, length);
            for (long head = kv * per_key; head < (kv + 1) * per_key; head++)
                (backward ? backward_piece : forward_piece)(s, &g, &w, &p, work, head);
        }
        own += length;
    }
    for (long i = 0; backward && i < w.tokens; i++) {
        store_row(w.of_keys + i * w.width, work->of_key, s->bf16, kv, g.start + i, s->width, 1.0f);
        store_row(w.of_values + i * w.value_width, work->of_value, s->bf16, kv, g.start + i, s->value_width, 1.0f);
    }
    free(w.memory);
    return 0;
}

static int all_tasks(const Shape *s, const Work *work, int threads) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(| : failed)
    for (long number = 0; number < s->groups * s->kv_heads; number++) failed |= task(s, work, number);
    return failed;
}

/* Compute out; returns 0, or 1: no memory */
int group_attention(const Shape *s, const Tensor *query, const Tensor *key, const Tensor *value, const Tensor *out,
                    int threads) {
    Work work = {.query = query, .key = key, .value = value, .out = out};
    return all_tasks(s, &work, threads);
}

/* Compute the gradients of query, key and value from that of out; returns as above */
int group_attention_backward(const Shape *s, const Tensor *query, const Tensor *key, const Tensor *value,
                             const Tensor *grad, const Tensor *of_query, const Tensor *of_key, const Tensor *of_value,
                             int threads) {
    Work work = {query, key, value, 0, grad, of_query, of_key, of_value};
    return all_tasks(s, &work, threads);
}
