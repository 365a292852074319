/* What a transformer does between its products, forward and backward: each piece goes through memory once.
 *
 * Numbers are computed in float32. What goes into products and comes from them is float32 too, or bfloat16 where it is
 * `narrow`. Every sum has an order of its own that neither the number of threads nor the rows beside it change. Widths
 * are multiples of 8.
 */
#include "fused.h"

#define BLOCK 1024 /* numbers that a thread takes at a time */

/* Call a piece so that the type is known inside it. */
#define OF_TYPE(narrow, piece, ...) ((narrow) ? piece(__VA_ARGS__, 1) : piece(__VA_ARGS__, 0))

/* One row of a norm; keeps the mean and 1 / deviation, or for RMSNorm 1 / rms alone. */
INLINE void norm_row(const float *x, const float *gain, const float *bias, void *y, float *mean, float *scale, long width,
                     float eps, int layer, int narrow) {
    lanes all = {0}, squares = {0};
    if (layer) {
        for (long i = 0; i < width; i += LANES) all += GET(x + i);
        *mean = sum(all) / width;
    }
    const lanes m = ALL(layer ? *mean : 0.0f);
    for (long i = 0; i < width; i += LANES) squares += (GET(x + i) - m) * (GET(x + i) - m);
    *scale = 1.0f / sqrtf(sum(squares) / width + eps);
    for (long i = 0; i < width; i += LANES) {
        lanes v = (GET(x + i) - m) * ALL(*scale) * GET(gain + i);
        if (layer) v += GET(bias + i);
        put(y, i, v, narrow);
    }
}

INLINE void norm_kind(const float *x, const float *gain, const float *bias, void *y, float *mean, float *scale,
                      long width, float eps, int narrow) {
    if (bias) norm_row(x, gain, bias, y, mean, scale, width, eps, 1, narrow);
    else norm_row(x, gain, bias, y, mean, scale, width, eps, 0, narrow);
}

/* RMSNorm, y = gain x / rms(x) (Zhang & Sennrich 2019), or with a bias LayerNorm (Ba et al. 2016): rows of `width`. */
void norm_forward(const float *x, const float *gain, const float *bias, char *y, float *means, float *scales, long rows,
                  long width, float eps, int narrow) {
    const long bytes = narrow ? 2 : 4;
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (long r = 0; r < rows; r++)
        OF_TYPE(narrow, norm_kind, x + r * width, gain, bias, y + r * width * bytes, means + r, scales + r, width, eps);
}

void norm_backward(const float *x, const float *gain, const float *means, const float *scales, const char *dy, float *dx,
                   float *dgain, float *dbias, long rows, long width, int narrow) {
    const long bytes = narrow ? 2 : 4;
    float *parts = calloc(2 * PARTS * width, sizeof(float)), *biases = parts + PARTS * width;
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (long part = 0; part < PARTS; part++)
        for (long r = rows * part / PARTS; r < rows * (part + 1) / PARTS; r++) {
            const float *from = x + r * width, mean = dbias ? means[r] : 0.0f;
            const char *slope = dy + r * width * bytes;
            float *to = dx + r * width, *gains = parts + part * width, *biased = biases + part * width;
            if (dbias) OF_TYPE(narrow, norm_gradient, from, gain, mean, scales[r], slope, to, gains, biased, width, 1);
            else OF_TYPE(narrow, norm_gradient, from, gain, mean, scales[r], slope, to, gains, biased, width, 0);
        }
    add_up(parts, PARTS, dgain, width);
    if (dbias) add_up(biases, PARTS, dbias, width);
    free(parts);
}

/* Call a piece for each block of numbers, of which there are `count`: by that name, since the pragma is a text. */
#define IN_BLOCKS(count, narrow, piece, ...)                                                   \
    _Pragma("omp parallel for schedule(static) if (count > 8192)")                             \
    for (long from = 0; from < count; from += BLOCK) {                                         \
        const long to = from + BLOCK < count ? from + BLOCK : count;                           \
        OF_TYPE(narrow, piece, from, to, __VA_ARGS__);                                         \
    }

INLINE void gate_block(long from, long to, const void *gate, const void *up, void *y, int narrow) {
    for (long i = from; i < to; i += LANES) {
        const lanes g = get(gate, i, narrow);
        put(y, i, g * sigmoid(g) * get(up, i, narrow), narrow);
    }
}

INLINE void gate_gradient(long from, long to, const void *gate, const void *up, const void *dy, void *dgate, void *dup,
                          int narrow) {
    for (long i = from; i < to; i += LANES) {
        const lanes g = get(gate, i, narrow), d = get(dy, i, narrow), s = sigmoid(g);
        put(dup, i, d * g * s, narrow);
        put(dgate, i, d * get(up, i, narrow) * s * (ALL(1.0f) + g * (ALL(1.0f) - s)), narrow);
    }
}

/* SwiGLU's middle, y = gate sigmoid(gate) up (Shazeer 2020). */
void gated_forward(const void *gate, const void *up, void *y, long count, int narrow) {
    IN_BLOCKS(count, narrow, gate_block, gate, up, y)
}

void gated_backward(const void *gate, const void *up, const void *dy, void *dgate, void *dup, long count, int narrow) {
    IN_BLOCKS(count, narrow, gate_gradient, gate, up, dy, dgate, dup)
}

/* GELU by its tanh, x / 2 (1 + tanh(u)) (Hendrycks & Gimpel 2016), which is x sigmoid(2 u) with
 * u = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE lanes twice_u(lanes x) { return x * (1.5957691216f + 0.0713548162726f * x * x); }

INLINE void gelu_block(long from, long to, const void *x, void *y, int narrow) {
    for (long i = from; i < to; i += LANES) {
        const lanes v = get(x, i, narrow);
        put(y, i, v * sigmoid(twice_u(v)), narrow);
    }
}

INLINE void gelu_gradient(long from, long to, const void *x, const void *dy, void *dx, int narrow) {
    for (long i = from; i < to; i += LANES) {
        const lanes v = get(x, i, narrow), s = sigmoid(twice_u(v)), slope = 1.5957691216f + 0.2140644488178f * v * v;
        put(dx, i, get(dy, i, narrow) * s * (ALL(1.0f) + v * (ALL(1.0f) - s) * slope), narrow);
    }
}

void gelu_forward(const void *x, void *y, long count, int narrow) { IN_BLOCKS(count, narrow, gelu_block, x, y) }

void gelu_backward(const void *x, const void *dy, void *dx, long count, int narrow) {
    IN_BLOCKS(count, narrow, gelu_gradient, x, dy, dx)
}

/* The last numbers of a row, fewer than LANES, and behind them what adds nothing to a softmax. */
INLINE lanes some(const float *x, long count) {
    lanes v = ALL(-INFINITY);
    memcpy(&v, x, count * sizeof(float));
    return v;
}

/* Turn a row of V logits into softmax minus one-hot, and return the cross-entropy. */
static float slope_row(float *row, long target, long V) {
    const long whole = V / LANES * LANES, rest = V - whole;
    lanes found = rest ? some(row + whole, rest) : GET(row), total = {0};
    for (long i = 0; i < whole; i += LANES) found = greater(GET(row + i), found);
    const float top = greatest(found), own = row[target] - top;
    for (long i = 0; i < whole; i += LANES) total += AT(row + i) = exponential(GET(row + i) - ALL(top));
    float sum_of_all = sum(total);
    if (rest) {
        const lanes tail = exponential(some(row + whole, rest) - ALL(top));
        for (long j = 0; j < rest; j++) sum_of_all += row[whole + j] = tail[j];
    }
    const float scale = 1.0f / sum_of_all;
    for (long i = 0; i < whole; i += LANES) AT(row + i) *= ALL(scale);
    for (long i = whole; i < V; i++) row[i] *= scale;
    row[target] -= 1.0f;
    return logf(sum_of_all) - own;
}

/* Cross-entropy of each of the rows of logits (rows, V), which become its gradient. A target that is `ignored` carries
 * neither. Returns -1, and does nothing, where another is not in the vocabulary. */
int softmax_slope(char *logits, const int64_t *targets, float *losses, long rows, long V, long ignored, int narrow) {
    for (long r = 0; r < rows; r++)
        if (targets[r] != ignored && (targets[r] < 0 || targets[r] >= V)) return -1;
    const long bytes = V * (narrow ? 2 : 4);
#pragma omp parallel if (rows * V > 8192)
    {
        float *wide = narrow ? malloc(V * sizeof(float)) : NULL;
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            char *row = logits + r * bytes;
            if (targets[r] == ignored) memset(row, 0, bytes), losses[r] = 0.0f;
            else if (narrow) {
                copy_wide((uint16_t *)row, wide, V);
                losses[r] = slope_row(wide, targets[r], V);
                copy_narrow(wide, (uint16_t *)row, V);
            } else losses[r] = slope_row((float *)row, targets[r], V);
        }
        free(wide);
    }
    return 0;
}
