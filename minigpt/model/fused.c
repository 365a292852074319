/* What a transformer does between its products, forward and backward, in float32: each piece goes through memory once.
 *
 * Every sum has an order of its own that neither the number of threads nor the rows beside it change.
 * Widths are multiples of 8, those of rotary heads of 16.
 */
#include "lanes.h"

#define QUERIES 16 /* that are worked on together */
#define PARTS 32   /* in which the gradient of a gain is summed up */

#define AT(x) (*(lanes *)(x))
#define GET(x) (*(const lanes *)(x))

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

/* The last numbers of a row, fewer than LANES, and behind them what adds nothing to a softmax. */
INLINE lanes some(const float *x, long count) {
    lanes v = ALL(-INFINITY);
    memcpy(&v, x, count * sizeof(float));
    return v;
}

/* RMSNorm, y = gain x / rms(x) (Zhang & Sennrich 2019): rows of `width`. `scales` keeps 1 / rms of each row. */
void rms_norm_forward(const float *x, const float *gain, float *y, float *scales, long rows, long width, float eps) {
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (long r = 0; r < rows; r++) {
        const float *from = x + r * width;
        scales[r] = 1.0f / sqrtf(dot_product(from, from, width) / width + eps);
        for (long i = 0; i < width; i += LANES) AT(y + r * width + i) = GET(from + i) * ALL(scales[r]) * GET(gain + i);
    }
}

/* One row of its gradient: dx = s (g dy - x^ mean(g dy x^)) with x^ = s x, and dy x^ added to the gain's. */
INLINE void norm_gradient(const float *x, const float *gain, float scale, const float *dy, float *dx, float *dgain,
                          long width) {
    lanes dot = {0};
    for (long i = 0; i < width; i += LANES) dot += GET(gain + i) * GET(dy + i) * GET(x + i);
    const lanes s = ALL(scale), mean = ALL(sum(dot) / width * scale * scale);
    for (long i = 0; i < width; i += LANES) {
        const lanes v = GET(x + i), d = GET(dy + i);
        AT(dgain + i) += d * v * s;
        AT(dx + i) = s * (GET(gain + i) * d - v * mean);
    }
}

static void add_up(const float *parts, long count, float *total, long width) {
    memset(total, 0, width * sizeof(float));
    for (long part = 0; part < count; part++)
        for (long i = 0; i < width; i++) total[i] += parts[part * width + i];
}

void rms_norm_backward(const float *x, const float *gain, const float *scales, const float *dy, float *dx, float *dgain,
                       long rows, long width) {
    float *parts = calloc(PARTS * width, sizeof(float));
#pragma omp parallel for schedule(static) if (rows * width > 8192)
    for (long part = 0; part < PARTS; part++)
        for (long r = rows * part / PARTS; r < rows * (part + 1) / PARTS; r++)
            norm_gradient(x + r * width, gain, scales[r], dy + r * width, dx + r * width, parts + part * width, width);
    add_up(parts, PARTS, dgain, width);
    free(parts);
}

/* SwiGLU's middle, y = gate sigmoid(gate) up (Shazeer 2020). */
void gated_forward(const float *gate, const float *up, float *y, long count) {
#pragma omp parallel for schedule(static) if (count > 8192)
    for (long i = 0; i < count; i += LANES) {
        const lanes g = GET(gate + i);
        AT(y + i) = g * sigmoid(g) * GET(up + i);
    }
}

void gated_backward(const float *gate, const float *up, const float *dy, float *dgate, float *dup, long count) {
#pragma omp parallel for schedule(static) if (count > 8192)
    for (long i = 0; i < count; i += LANES) {
        const lanes g = GET(gate + i), d = GET(dy + i), s = sigmoid(g);
        AT(dup + i) = d * g * s;
        AT(dgate + i) = d * GET(up + i) * s * (ALL(1.0f) + g * (ALL(1.0f) - s));
    }
}

/* Cross-entropy of each of the rows of logits (rows, V), which become its gradient: softmax minus one-hot. A target
 * that is `ignored` carries neither. Returns -1, and does nothing, where another is not in the vocabulary. */
int softmax_slope(float *logits, const int64_t *targets, float *losses, long rows, long V, long ignored) {
    for (long r = 0; r < rows; r++)
        if (targets[r] != ignored && (targets[r] < 0 || targets[r] >= V)) return -1;
#pragma omp parallel for schedule(static) if (rows * V > 8192)
    for (long r = 0; r < rows; r++) {
        float *row = logits + r * V;
        const long target = targets[r], whole = V / LANES * LANES, rest = V - whole;
        if (target == ignored) {
            memset(row, 0, V * sizeof(float)), losses[r] = 0.0f;
            continue;
        }
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
        losses[r] = logf(sum_of_all) - own;
    }
    return 0;
}

/* R rows of c (m, n) = or += a (m, k) b (k, n), n a multiple of 8; a may lie in any order, `ra` and `ca` apart. */
INLINE void product_rows(const float *a, long ra, long ca, const float *b, long n_of_b, float *c, long n_of_c, long k,
                         long n, int R, int N, int adds) {
    for (long j = 0; j < n; j += LANES * N) {
        lanes acc[8] = {{0}};
        for (long i = 0; i < k; i++) {
            lanes right[2];
            UNROLL for (int v = 0; v < N; v++) right[v] = GET(b + i * n_of_b + j + LANES * v);
            UNROLL for (int r = 0; r < R; r++) {
                const lanes left = ALL(a[r * ra + i * ca]);
                UNROLL for (int v = 0; v < N; v++) acc[r * N + v] += left * right[v];
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < N; v++) {
                float *to = c + r * n_of_c + j + LANES * v;
                if (adds) AT(to) += acc[r * N + v];
                else AT(to) = acc[r * N + v];
            }
    }
}

static void product(const float *a, long ra, long ca, const float *b, long n_of_b, float *c, long n_of_c, long m, long k,
                    long n, int adds) {
    const long even = n / (2 * LANES) * 2 * LANES;
    long r = 0;
    for (; r + 4 <= m; r += 4) {
        product_rows(a + r * ra, ra, ca, b, n_of_b, c + r * n_of_c, n_of_c, k, even, 4, 2, adds);
        if (even < n) product_rows(a + r * ra, ra, ca, b + even, n_of_b, c + r * n_of_c + even, n_of_c, k, LANES, 4, 1, adds);
    }
    for (; r < m; r++) product_rows(a + r * ra, ra, ca, b, n_of_b, c + r * n_of_c, n_of_c, k, n, 1, 1, adds);
}

/* How long the rows of a matrix of T columns are: whole vectors, and no power of two, or its columns would share a few
 * places of the cache. */
static long width_for(long T) { return (T + LANES - 1) / LANES * LANES + LANES; }

static void transpose(const float *x, float *to, long rows, long width, long stride) {
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < width; i++) to[i * stride + r] = x[r * width + i];
}

/* Attention as a whole: the queries (B, T, H D), keys and values (B, T, K D) of the projections, the gains (D) of their
 * norms or none, cosines and sines (T, D/2) or (B, T, D/2) of their positions or none, and for each token (B, T) the
 * first one that it sees, or none where all see from the beginning. */
struct attention {
    const float *query, *key, *value, *query_gain, *key_gain, *cosines, *sines;
    const int32_t *first;
    float *out, *logsum; /* (B, T, H D), and (B, H, T) the logarithms of the softmax's divisors */
    const float *dout;
    float *dquery, *dkey, *dvalue, *dquery_gain, *dkey_gain;
    long B, T, H, K, D, angles; /* how far apart the angles of two rows of the batch lie */
    float eps, scale;
};

/* Norm and turn one head of one row of the batch, T vectors that lie `stride` apart; side by side and times `factor`
 * they go into `to`. */
static void prepare(const struct attention *p, const float *x, long stride, const float *gain, long b, float factor,
                    float *to, float *scales) {
    const long D = p->D, half = D / 2;
    for (long t = 0; t < p->T; t++, x += stride, to += D) {
        scales[t] = gain ? 1.0f / sqrtf(dot_product(x, x, D) / D + p->eps) : 1.0f;
        const lanes scale = ALL(scales[t] * factor);
        for (long i = 0; i < D; i += LANES) AT(to + i) = gain ? GET(x + i) * scale * GET(gain + i) : GET(x + i) * scale;
        if (p->cosines)
            for (long i = 0; i < half; i += LANES) {
                const lanes c = GET(p->cosines + b * p->angles + t * half + i);
                const lanes s = GET(p->sines + b * p->angles + t * half + i);
                const lanes u = GET(to + i), v = GET(to + half + i);
                AT(to + i) = u * c - v * s, AT(to + half + i) = v * c + u * s;
            }
    }
}

/* The same backward: what `d` (T, D) times `factor` says of the result, in place, becomes what it says of x. */
static void prepare_gradient(const struct attention *p, const float *x, long stride, const float *gain, long b,
                             float factor, float *d, const float *scales, float *dx, float *dgain) {
    const long D = p->D, half = D / 2;
    for (long t = 0; t < p->T; t++, x += stride, d += D, dx += stride) {
        if (p->cosines)
            for (long i = 0; i < half; i += LANES) {
                const lanes c = GET(p->cosines + b * p->angles + t * half + i);
                const lanes s = GET(p->sines + b * p->angles + t * half + i);
                const lanes u = GET(d + i), v = GET(d + half + i);
                AT(d + i) = u * c + v * s, AT(d + half + i) = v * c - u * s;
            }
        for (long i = 0; i < D; i += LANES) AT(d + i) *= ALL(factor);
        if (gain) norm_gradient(x, gain, scales[t], d, dx, dgain, D);
        else memcpy(dx, d, D * sizeof(float));
    }
}

/* The keys that a block of queries from `from` on may see: from `low`, a multiple of 8, to before `high`. */
struct keys { long low, high; };

static struct keys seen(const struct attention *p, long b, long from, long count) {
    struct keys range = {0, (from + count + LANES - 1) / LANES * LANES};
    if (p->first) {
        range.low = p->T;
        for (long t = from; t < from + count; t++) {
            const long first = p->first[b * p->T + t];
            if (first < range.low) range.low = first;
        }
        range.low = range.low / LANES * LANES;
    }
    return range;
}

/* Take the keys that query t does not see out of its scores, and return the greatest of the others. */
static float most(float *row, struct keys range, long first, long t) {
    for (long j = range.low; j < first; j++) row[j] = -INFINITY;
    for (long j = t + 1; j < range.high; j++) row[j] = -INFINITY;
    lanes found = GET(row + range.low);
    for (long j = range.low; j < range.high; j += LANES) found = greater(GET(row + j), found);
    return greatest(found);
}

/* Scores of one query, in place, become the weights of its softmax before they are divided; returns the divisor. */
static float softmax(float *row, struct keys range, float top) {
    lanes total = {0};
    for (long j = range.low; j < range.high; j += LANES) total += AT(row + j) = exponential(GET(row + j) - ALL(top));
    return sum(total);
}

INLINE long first_of(const struct attention *p, long b, long t) { return p->first ? p->first[b * p->T + t] : 0; }

void attention_forward(const struct attention *p) {
    const long T = p->T, D = p->D, G = p->H / p->K, wide = width_for(T), C = p->H * D, KD = p->K * D;
#pragma omp parallel for schedule(dynamic)
    for (long unit = 0; unit < p->B * p->H; unit++) {
        const long b = unit / p->H, h = unit % p->H, g = h / G;
        float *out = p->out + b * T * C + h * D, *logsum = p->logsum + unit * T, divisors[QUERIES];
        float *memory = calloc(2 * T * D + 2 * wide * D + T + QUERIES * wide, sizeof(float));
        float *q = memory, *k = q + T * D, *turned = k + T * D, *v = turned + D * wide, *scales = v + wide * D;
        float *scores = scales + T;
        prepare(p, p->query + b * T * C + h * D, C, p->query_gain, b, p->scale, q, scales);
        prepare(p, p->key + b * T * KD + g * D, KD, p->key_gain, b, 1.0f, k, scales);
        transpose(k, turned, T, D, wide);
        for (long t = 0; t < T; t++) memcpy(v + t * D, p->value + (b * T + t) * KD + g * D, D * sizeof(float));
        for (long from = 0; from < T; from += QUERIES) {
            const long count = T - from < QUERIES ? T - from : QUERIES;
            const struct keys range = seen(p, b, from, count);
            const long low = range.low, keys = range.high - low;
            product(q + from * D, D, 1, turned + low, wide, scores + low, wide, count, D, keys, 0);
            for (long r = 0; r < count; r++) {
                const float top = most(scores + r * wide, range, first_of(p, b, from + r), from + r);
                divisors[r] = softmax(scores + r * wide, range, top);
                logsum[from + r] = top + logf(divisors[r]);
            }
            product(scores + low, wide, 1, v + low * D, D, out + from * C, C, count, keys, D, 0);
            for (long r = 0; r < count; r++)
                for (long i = 0; i < D; i += LANES) AT(out + (from + r) * C + i) /= ALL(divisors[r]);
        }
        free(memory);
    }
}

/* From scores of one query and what the result's gradient says of the weights to weights and the gradient of the
 * scores, in place: ds = w (dw - sum w dw) (Dao et al. 2022, "FlashAttention", appendix B). */
static void softmax_gradient(float *row, float *drow, struct keys range, float logsum, float dot) {
    for (long j = range.low; j < range.high; j += LANES) {
        AT(row + j) = exponential(GET(row + j) - ALL(logsum));
        AT(drow + j) = GET(row + j) * (GET(drow + j) - ALL(dot));
    }
}

/* One row of the batch and one head of keys, with all its heads of queries. */
static void head_gradient(const struct attention *p, long b, long g, float *dquery_gain, float *dkey_gain) {
    const long T = p->T, D = p->D, G = p->H / p->K, wide = width_for(T), C = p->H * D, KD = p->K * D;
    float *memory = calloc(3 * T * D + 5 * wide * D + 2 * T + 2 * QUERIES * wide, sizeof(float));
    float *q = memory, *dq = q + T * D, *v = dq + T * D, *k = v + T * D, *turned = k + wide * D;
    float *v_turned = turned + wide * D, *dk = v_turned + wide * D, *dv = dk + wide * D, *q_scales = dv + wide * D;
    float *k_scales = q_scales + T, *scores = k_scales + T, *dscores = scores + QUERIES * wide;
    const float *key = p->key + b * T * KD + g * D, *logsum = p->logsum + b * p->H * T;
    prepare(p, key, KD, p->key_gain, b, 1.0f, k, k_scales);
    transpose(k, turned, T, D, wide);
    for (long t = 0; t < T; t++) memcpy(v + t * D, p->value + (b * T + t) * KD + g * D, D * sizeof(float));
    transpose(v, v_turned, T, D, wide);
    for (long h = g * G; h < (g + 1) * G; h++) {
        const float *query = p->query + b * T * C + h * D;
        prepare(p, query, C, p->query_gain, b, p->scale, q, q_scales);
        for (long from = 0; from < T; from += QUERIES) {
            const long count = T - from < QUERIES ? T - from : QUERIES;
            const struct keys range = seen(p, b, from, count);
            const long low = range.low, keys = range.high - low;
            const float *dout = p->dout + (b * T + from) * C + h * D, *out = p->out + (b * T + from) * C + h * D;
            product(q + from * D, D, 1, turned + low, wide, scores + low, wide, count, D, keys, 0);
            product(dout, C, 1, v_turned + low, wide, dscores + low, wide, count, D, keys, 0);
            for (long r = 0; r < count; r++) {
                most(scores + r * wide, range, first_of(p, b, from + r), from + r);
                softmax_gradient(scores + r * wide, dscores + r * wide, range, logsum[h * T + from + r],
                                 dot_product(dout + r * C, out + r * C, D));
            }
            product(dscores + low, wide, 1, k + low * D, D, dq + from * D, D, count, keys, D, 0);
            product(dscores + low, 1, wide, q + from * D, D, dk + low * D, D, keys, count, D, 1);
            product(scores + low, 1, wide, dout, C, dv + low * D, D, keys, count, D, 1);
        }
        prepare_gradient(p, query, C, p->query_gain, b, p->scale, dq, q_scales, p->dquery + b * T * C + h * D, dquery_gain);
    }
    prepare_gradient(p, key, KD, p->key_gain, b, 1.0f, dk, k_scales, p->dkey + b * T * KD + g * D, dkey_gain);
    for (long t = 0; t < T; t++) memcpy(p->dvalue + (b * T + t) * KD + g * D, dv + t * D, D * sizeof(float));
    free(memory);
}

void attention_backward(const struct attention *p) {
    const long units = p->B * p->K, D = p->D;
    float *gains = calloc(2 * units * D, sizeof(float));
#pragma omp parallel for schedule(dynamic)
    for (long unit = 0; unit < units; unit++)
        head_gradient(p, unit / p->K, unit % p->K, gains + unit * D, gains + (units + unit) * D);
    if (p->query_gain) add_up(gains, units, p->dquery_gain, D);
    if (p->key_gain) add_up(gains + units * D, units, p->dkey_gain, D);
    free(gains);
}
