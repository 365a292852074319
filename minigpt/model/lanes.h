/* Eight numbers at a time, in the vector extensions of GCC and clang. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define AS_FLOAT(v) __builtin_convertvector(v, lanes)
#define ALL(number) ((number) - (lanes){0})

INLINE lanes where(words mask, lanes a, lanes b) { return (lanes)((mask & (words)a) | (~mask & (words)b)); }

/* The nearest whole numbers: this sum is so large that its last bit stands for 1. */
INLINE words whole(lanes v) { return (words)(v + 0x1.8p23f) - (words)ALL(0x1.8p23f); }

/* e^x for x <= 87, off by 1e-7 of it, and 0 below -87: x = n ln 2 + f, a polynomial for e^f, and n into the exponent.
 * NaN stays NaN. */
INLINE lanes exponential(lanes x) {
    const words tiny = x < -87, power = whole(x * 1.44269504f);
    const lanes n = AS_FLOAT(power), f = x - n * 0.693359375f + n * 2.12194440e-4f; /* n ln 2 in two parts */
    lanes p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1;
    return (lanes)(~tiny & ((words)p + (power << 23)));
}

/* 1 / (1 + e^-x) */
INLINE lanes sigmoid(lanes x) {
    const lanes negative = where(x < -87, ALL(87), -x);
    return 1 / (1 + exponential(negative));
}
