/* What the pieces of a training step share: float32 and bfloat16, sums in one order, and the gradient of a norm. */
#include "lanes.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define PARTS 32 /* in which the gradients of gains are summed up */

typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define AT(x) (*(lanes *)(x))
#define GET(x) (*(const lanes *)(x))

/* Eight numbers of an array: float32, or bfloat16 (its upper half) where it is `narrow`. */
INLINE lanes get(const void *x, long i, int narrow) {
    if (!narrow) return GET((const float *)x + i);
    const uint16_t *from = (const uint16_t *)x + i;
#ifdef __AVX2__
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    return (lanes)(__builtin_convertvector(*(const shorts *)from, bits) << 16);
#endif
}

/* The same back, rounded to the nearest, ties to even; NaN stays NaN. */
INLINE void put(void *x, long i, lanes v, int narrow) {
    if (!narrow) {
        AT((float *)x + i) = v;
        return;
    }
    const bits all = (bits)v, rounded = all + 0x7fff + (all >> 16 & 1);
    const bits half = (bits)where(v == v, (lanes)rounded, (lanes)(all | 0x400000)) >> 16;
    uint16_t *to = (uint16_t *)x + i;
#ifdef __AVX2__
    const __m256i packed = _mm256_packus_epi32((__m256i)half, (__m256i)half);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
    *(shorts *)to = __builtin_convertvector(half, shorts);
#endif
}

/* Copy `count` numbers of bfloat16 into as many of float32, or back. */
static void copy_wide(const uint16_t *from, float *to, long count) {
    const long whole = count / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) AT(to + i) = get(from, i, 1);
    uint16_t last[LANES] = {0};
    memcpy(last, from + whole, (count - whole) * sizeof *last);
    const lanes tail = get(last, 0, 1);
    memcpy(to + whole, &tail, (count - whole) * sizeof *to);
}

static void copy_narrow(const float *from, uint16_t *to, long count) {
    const long whole = count / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) put(to, i, GET(from + i), 1);
    uint16_t last[LANES];
    lanes tail = {0};
    memcpy(&tail, from + whole, (count - whole) * sizeof *from);
    put(last, 0, tail, 1);
    memcpy(to + whole, last, (count - whole) * sizeof *last);
}

INLINE float sum(lanes v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

INLINE float dot_product(const float *a, const float *b, long width) {
    lanes total = {0};
    for (long i = 0; i < width; i += LANES) total += GET(a + i) * GET(b + i);
    return sum(total);
}

INLINE lanes greater(lanes a, lanes b) { return where(a > b, a, b); }

INLINE float greatest(lanes v) {
    float found = v[0];
    for (int j = 1; j < LANES; j++) found = v[j] > found ? v[j] : found;
    return found;
}

/* The gradient of a norm, y = gain x^ + bias with x^ = s (x - mean), for one vector:
 * dx = s (g dy - mean(g dy) - x^ mean(g dy x^)), where RMSNorm has neither means nor a bias. dy x^ and dy are added to
 * the gradients of gain and bias. */
INLINE void norm_gradient(const float *x, const float *gain, float mean, float scale, const void *dy, float *dx,
                          float *dgain, float *dbias, long width, int layer, int narrow) {
    const lanes m = ALL(layer ? mean : 0.0f), s = ALL(scale);
    lanes along = {0}, all = {0};
    for (long i = 0; i < width; i += LANES) {
        const lanes d = GET(gain + i) * get(dy, i, narrow);
        along += d * (GET(x + i) - m);
        if (layer) all += d;
    }
    const lanes part = ALL(sum(along) / width * scale * scale), level = ALL(layer ? sum(all) / width : 0.0f);
    for (long i = 0; i < width; i += LANES) {
        const lanes v = GET(x + i) - m, d = get(dy, i, narrow);
        AT(dgain + i) += d * v * s;
        if (layer) AT(dbias + i) += d;
        AT(dx + i) = s * (GET(gain + i) * d - level - v * part);
    }
}

static void add_up(const float *parts, long count, float *total, long width) {
    memset(total, 0, width * sizeof(float));
    for (long part = 0; part < count; part++)
        for (long i = 0; i < width; i++) total[i] += parts[part * width + i];
}
