/* What the generation of text spends its time with. Above all products of a few rows with a matrix: y (rows, outs) = x (rows, ins) W^T, where W (outs, ins) is float32, int8 or int4.
 *
 * A row alone waits for W to come from memory, so W is read once and turned into floats in registers. Every number of y
 * is summed up in the same order whatever rows stand beside it: a row alone is bit for bit that row among others.
 *
 * Eight words of 32 bits are read at a time; number k of each is had by shifting all eight. So number k of word j, which
 * is number n j + k of the block, meets lane j of vector k of x: x is put into that order first.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
#define MOST 4  /* rows of x that share what was read of W */
#define AHEAD 4 /* rows of W, to be in the cache in time: they are too short for the processor to see a pattern */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
#define AS_FLOAT(v) __builtin_convertvector(v, lanes)

enum kind { FLOAT32, INT8, INT4 };

INLINE float sum(lanes v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

INLINE float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* R rows of x with O rows of W, from output `first` on; both are known where it is called, so all loops unroll. */
INLINE void tile(enum kind kind, const float *x, const char *w, const void *scales, float *y, long ins, long outs,
                 long first, int R, int O) {
    const long size = kind == FLOAT32 ? 4 * ins : kind == INT8 ? ins : ins / 2; /* bytes of a row of W */
    const int vectors = kind == INT4 ? 8 : 4;                                   /* of a block */
    lanes acc[MOST * 2] = {{0}};
    w += first * size;
    for (long i = 0; i < ins; i += LANES * vectors, w += LANES * 4 * (kind == FLOAT32 ? 4 : 1)) {
        UNROLL for (int o = 0; o < O; o++) {
            const char *from = w + o * size;
            lanes scale = {0}, zero = {0};
            __builtin_prefetch(from + AHEAD * size);
            if (kind == FLOAT32) __builtin_prefetch(from + AHEAD * size + 64);
            if (kind == INT4) { /* two groups: lanes 0-3 and lanes 4-7 */
                const uint16_t *s = (const uint16_t *)scales + ((first + o) * ins + i) / 16;
                const float s0 = from_bfloat16(s[0]), z0 = from_bfloat16(s[1]);
                const float s1 = from_bfloat16(s[2]), z1 = from_bfloat16(s[3]);
                scale = (lanes){s0, s0, s0, s0, s1, s1, s1, s1}, zero = (lanes){z0, z0, z0, z0, z1, z1, z1, z1};
            }
            UNROLL for (int k = 0; k < vectors; k++) {
                lanes a; /* W */
                if (kind == FLOAT32) a = *(const lanes *)(from + 4 * LANES * k);
                else if (kind == INT8) a = AS_FLOAT((*(const words *)from << (24 - 8 * k)) >> 24);
                else a = scale * AS_FLOAT((*(const words *)from >> (4 * k)) & 15) + zero;
                UNROLL for (int r = 0; r < R; r++) 
                    acc[o * R + r] += a * *(const lanes *)(x + r * ins + i + LANES * k);
            }
        }
    }
    UNROLL for (int o = 0; o < O; o++)
        UNROLL for (int r = 0; r < R; r++) {
            const float total = sum(acc[o * R + r]);
            y[r * outs + first + o] = kind == INT8 ? total * ((const float *)scales)[first + o] : total;
        }
}

/* Bring n numbers of each of eight words side by side with what they are multiplied with. */
static void in_order(const float *x, float *to, long count, int n) {
    for (long i = 0; i < count; i += LANES * n)
        for (int k = 0; k < n; k++)
            for (int j = 0; j < LANES; j++) to[i + LANES * k + j] = x[i + n * j + k];
}

INLINE void product(enum kind kind, const float *x, const char *w, const void *scales, float *y, long rows, long ins,
                    long outs) {
    float *ordered = NULL;
    if (kind != FLOAT32) {
        ordered = malloc(rows * ins * sizeof(float));
        in_order(x, ordered, rows * ins, kind == INT8 ? 4 : 8);
        x = ordered;
    }
#pragma omp parallel for schedule(static)
    for (long o = 0; o < outs; o += 4) {
        long r = 0;
        for (; r + MOST <= rows; r += MOST) {
            tile(kind, x + r * ins, w, scales, y + r * outs, ins, outs, o, MOST, 2);
            tile(kind, x + r * ins, w, scales, y + r * outs, ins, outs, o + 2, MOST, 2);
        }
        for (; r + 2 <= rows; r += 2) tile(kind, x + r * ins, w, scales, y + r * outs, ins, outs, o, 2, 4);
        for (; r < rows; r++) tile(kind, x + r * ins, w, scales, y + r * outs, ins, outs, o, 1, 4);
    }
    free(ordered);
}

/* `outs` must be a multiple of 4, `ins` one of 32, and of 64 for int4. */
void product_float32(const float *x, const char *w, const void *none, float *y, long rows, long ins, long outs) {
    product(FLOAT32, x, w, none, y, rows, ins, outs);
}

/* W[o][i] = scales[o] * number[o][i] */
void product_int8(const float *x, const char *w, const float *scales, float *y, long rows, long ins, long outs) {
    product(INT8, x, w, scales, y, rows, ins, outs);
}

/* W[o][i] = scale * number[o][i] + zero, with a scale and a zero in bfloat16 for each 32 numbers of a row; of the two
 * numbers in a byte the lower comes first. */
void product_int4(const float *x, const char *w, const uint16_t *scales, float *y, long rows, long ins, long outs) {
    product(INT4, x, w, scales, y, rows, ins, outs);
}

/* Each of the rows of x (rows, width) to root mean square 1, times the gain; `width` must be a multiple of 16. */
void rms_norm(const float *x, const float *gain, float *y, long rows, long width, float eps) {
    for (long r = 0; r < rows; r++, x += width, y += width) {
        lanes acc[2] = {{0}};
        for (long i = 0; i < width; i += 2 * LANES)
            for (int k = 0; k < 2; k++) {
                const lanes v = *(const lanes *)(x + i + LANES * k);
                acc[k] += v * v;
            }
        const float scale = 1.0f / sqrtf(sum(acc[0] + acc[1]) / width + eps);
        for (long i = 0; i < width; i++) y[i] = x[i] * scale * gain[i];
    }
}
