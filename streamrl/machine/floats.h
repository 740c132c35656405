/* What the kernels of CPUs share: fp32 and bf16, and exp(), in forms that compilers turn into vector instructions. */
#include <math.h>
#include <stdint.h>

static inline long least(long x, long y) { return x < y ? x : y; }

static inline float from_bf16(uint16_t bits) {
    union { uint32_t bits; float value; } one = {(uint32_t)bits << 16};
    return one.value;
}

/* To nearest, ties to even */
static inline uint16_t to_bf16(float value) {
    union { float value; uint32_t bits; } one = {value};
    uint32_t rounded = (one.bits + 0x7fff + ((one.bits >> 16) & 1)) >> 16;
    return (one.bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

/* Turn `count` numbers of x from `at` on into fp32, times a factor */
static inline void load(float *to, const void *x, int bf16, long at, long count, float factor) {
    if (!bf16) {
        const float *from = (const float *)x + at;
        for (long i = 0; i < count; i++) to[i] = from[i] * factor;
        return;
    }
    const uint16_t *from = (const uint16_t *)x + at;
    for (long i = 0; i < count; i++) to[i] = from_bf16(from[i]) * factor;
}

/* The other way */
static inline void store(const float *from, void *x, int bf16, long at, long count, float factor) {
    if (!bf16) {
        float *to = (float *)x + at;
        for (long i = 0; i < count; i++) to[i] = from[i] * factor;
        return;
    }
    uint16_t *to = (uint16_t *)x + at;
    for (long i = 0; i < count; i++) to[i] = to_bf16(from[i] * factor);
}

static inline float product_sum(const float *x, const float *y, long count) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < count; i++) sum += x[i] * y[i];
    return sum;
}

/* 1 / rms(x), rms(x)^2 = mean(x^2) + epsilon */
static inline float inverse_rms(const float *x, long count, float epsilon) {
    return 1.0f / sqrtf(product_sum(x, x, count) / count + epsilon);
}

/* exp(x) = 2^n (1 + what is returned) for -87 <= x <= 0, |x - n log 2| <= log(2) / 2: the polynomial is Cephes' expf */
static inline float exponential_parts(float x, float *power) {
    float bounded = x < -87.0f ? -87.0f : x;
    bounded = bounded != bounded ? 0.0f : bounded; /* no integer is NaN */
    float n = __builtin_rintf(bounded * 1.44269504088896341f);
    float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t bits; float value; } two_to_n = {(int32_t)((uint32_t)((int32_t)n + 127) << 23)};
    *power = two_to_n.value;
    return p * r * r + r;
}

/* exp(x) for x <= 0 */
static inline float exponential(float x) {
    float power, part = exponential_parts(x, &power);
    return x < -87.0f ? 0.0f : x != x ? x : (part + 1.0f) * power;
}

/* exp(x) - 1 for x <= 0 */
static inline float exponential_less_1(float x) {
    float power, part = exponential_parts(x, &power);
    return x != x ? x : part * power + (power - 1.0f);
}

static inline float sigmoid(float x) {
    float e = exponential(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
