/* Attention of all tokens at once, forward and backward, with the norms and rotary positions of queries and keys.
 *
 * In float32 it is one piece, which holds the scores of a few queries at a time and makes them again for the gradient
 * (Dao et al. 2022, "FlashAttention"). In bfloat16 processors have products of their own, a hundred times as fast as a
 * loop: there the products are PyTorch's, and what comes between them is here. Every sum has an order of its own that
 * neither the number of threads nor the rows beside it change. The width of a head is a multiple of 8, under rotary
 * positions of 16.
 */
#include "fused.h"

#define QUERIES 16 /* that are worked on together */

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

/* What a norm multiplies a vector with, or 1 where there is none. */
INLINE float one_over_rms(const struct attention *p, const float *x, const float *gain) {
    return gain ? 1.0f / sqrtf(dot_product(x, x, p->D) / p->D + p->eps) : 1.0f;
}

/* Norm one vector of a head, times `factor`, and turn it by its position; returns `one_over_rms`. */
INLINE float turn(const struct attention *p, const float *x, const float *gain, long b, long t, float factor, float *to) {
    const long D = p->D, half = D / 2;
    const float found = one_over_rms(p, x, gain);
    const lanes scale = ALL(found * factor);
    for (long i = 0; i < D; i += LANES) AT(to + i) = gain ? GET(x + i) * scale * GET(gain + i) : GET(x + i) * scale;
    if (p->cosines)
        for (long i = 0; i < half; i += LANES) {
            const lanes c = GET(p->cosines + b * p->angles + t * half + i);
            const lanes s = GET(p->sines + b * p->angles + t * half + i);
            const lanes u = GET(to + i), v = GET(to + half + i);
            AT(to + i) = u * c - v * s, AT(to + half + i) = v * c + u * s;
        }
    return found;
}

/* The same backward: what `d` (D) times `factor` says of the result, in place, becomes what it says of x. */
INLINE void turn_gradient(const struct attention *p, const float *x, const float *gain, long b, long t, float factor,
                            float rms, float *d, float *dx, float *dgain) {
    const long D = p->D, half = D / 2;
    if (p->cosines)
        for (long i = 0; i < half; i += LANES) {
            const lanes c = GET(p->cosines + b * p->angles + t * half + i);
            const lanes s = GET(p->sines + b * p->angles + t * half + i);
            const lanes u = GET(d + i), v = GET(d + half + i);
            AT(d + i) = u * c + v * s, AT(d + half + i) = v * c - u * s;
        }
    for (long i = 0; i < D; i += LANES) AT(d + i) *= ALL(factor);
    if (gain) norm_gradient(x, gain, 0.0f, rms, d, dx, dgain, NULL, D, 0, 0);
    else memcpy(dx, d, D * sizeof(float));
}

/* One head of one row of the batch, T vectors that lie `stride` apart; side by side they go into `to`. */
static void prepare(const struct attention *p, const float *x, long stride, const float *gain, long b, float factor,
                    float *to, float *scales) {
    for (long t = 0; t < p->T; t++) scales[t] = turn(p, x + t * stride, gain, b, t, factor, to + t * p->D);
}

static void prepare_gradient(const struct attention *p, const float *x, long stride, const float *gain, long b,
                             float factor, float *d, const float *scales, float *dx, float *dgain) {
    for (long t = 0; t < p->T; t++) {
        const long place = t * stride;
        turn_gradient(p, x + place, gain, b, t, factor, scales[t], d + t * p->D, dx + place, dgain);
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

/* In bfloat16: queries and keys are laid out for batched products, (B, T, heads D) as (B, K, T, heads / K, D). A unit is
 * one head of keys of one row of the batch, with its G = H / K heads of queries. */

INLINE long head_place(const struct attention *p, long row, long head, long heads) {
    const long b = row / p->T, t = row % p->T, G = heads / p->K;
    return (((b * p->K + head / G) * p->T + t) * G + head % G) * p->D;
}

void heads_forward(const struct attention *p, const uint16_t *x, long heads, const float *gain, float factor,
                   uint16_t *to) {
    const long D = p->D;
#pragma omp parallel for schedule(static)
    for (long row = 0; row < p->B * p->T; row++) {
        float vector[D], found[D];
        for (long head = 0; head < heads; head++) {
            copy_wide(x + (row * heads + head) * D, vector, D);
            turn(p, vector, gain, row / p->T, row % p->T, factor, found);
            copy_narrow(found, to + head_place(p, row, head, heads), D);
        }
    }
}

void heads_backward(const struct attention *p, const uint16_t *x, long heads, const float *gain, float factor,
                    const uint16_t *d, uint16_t *dx, float *dgain) {
    const long rows = p->B * p->T, D = p->D;
    float *parts = calloc(PARTS * D, sizeof(float));
#pragma omp parallel for schedule(static)
    for (long part = 0; part < PARTS; part++) {
        float vector[D], slope[D], found[D];
        for (long row = rows * part / PARTS; row < rows * (part + 1) / PARTS; row++)
            for (long head = 0; head < heads; head++) {
                copy_wide(x + (row * heads + head) * D, vector, D);
                copy_wide(d + head_place(p, row, head, heads), slope, D);
                const float rms = one_over_rms(p, vector, gain);
                turn_gradient(p, vector, gain, row / p->T, row % p->T, factor, rms, slope, found, parts + part * D);
                copy_narrow(found, dx + (row * heads + head) * D, D);
            }
    }
    if (gain) add_up(parts, PARTS, dgain, D);
    free(parts);
}

/* Which scores are at hand, (units, count G, keys): those of `count` tokens from `from` on with the first `keys` keys. */
struct tile { long unit, units, from, count, keys; };

INLINE struct keys seen_by(const struct attention *p, const struct tile *tile, long row, long *b, long *t) {
    const long G = p->H / p->K;
    *b = (tile->unit + row / (tile->count * G)) / p->K, *t = tile->from + row % (tile->count * G) / G;
    return (struct keys){first_of(p, *b, *t) / LANES * LANES, *t / LANES * LANES + LANES};
}

/* The place of a row's sum among those of all, (B K, T G). */
INLINE long sum_place(const struct attention *p, const struct tile *tile, long row) {
    const long G = p->H / p->K, each = tile->count * G;
    return ((tile->unit + row / each) * p->T + tile->from) * G + row % each;
}

INLINE long least(long a, long b) { return a < b ? a : b; }

/* Write what a row holds in `range`, and zeros around it. */
static void write_row(const float *row, struct keys range, uint16_t *to, long keys) {
    const long high = least(range.high, keys);
    memset(to, 0, range.low * sizeof *to);
    copy_narrow(row + range.low, to + range.low, high - range.low);
    memset(to + high, 0, (keys - high) * sizeof *to);
}

/* Scores, in place, become the weights of their softmax; `logsum` gets the logarithms of the divisors. */
void weights_forward(const struct attention *p, const struct tile *tile, uint16_t *scores, float *logsum) {
    const long rows = tile->units * tile->count * (p->H / p->K), keys = tile->keys;
#pragma omp parallel
    {
        float *row = malloc(width_for(keys) * sizeof(float));
#pragma omp for schedule(static, 16)
        for (long r = 0; r < rows; r++) {
            long b, t;
            const struct keys range = seen_by(p, tile, r, &b, &t);
            copy_wide(scores + r * keys + range.low, row + range.low, least(range.high, keys) - range.low);
            const float top = most(row, range, first_of(p, b, t), t), divisor = softmax(row, range, top);
            logsum[sum_place(p, tile, r)] = top + logf(divisor);
            for (long j = range.low; j < range.high; j += LANES) AT(row + j) *= ALL(1.0f / divisor);
            write_row(row, range, scores + r * keys, keys);
        }
        free(row);
    }
}

/* Scores, in place, become weights again, and what is known of the weights becomes the gradient of the scores. */
void weights_backward(const struct attention *p, const struct tile *tile, uint16_t *scores, uint16_t *dscores,
                      const float *logsum) {
    const long rows = tile->units * tile->count * (p->H / p->K), keys = tile->keys, wide = width_for(keys);
#pragma omp parallel
    {
        float *row = malloc(2 * wide * sizeof(float)), *drow = row + wide;
#pragma omp for schedule(static, 16)
        for (long r = 0; r < rows; r++) {
            long b, t;
            const struct keys range = seen_by(p, tile, r, &b, &t);
            const long count = least(range.high, keys) - range.low;
            copy_wide(scores + r * keys + range.low, row + range.low, count);
            copy_wide(dscores + r * keys + range.low, drow + range.low, count);
            for (long j = range.low + count; j < range.high; j++) drow[j] = 0;
            most(row, range, first_of(p, b, t), t);
            const lanes divisor = ALL(logsum[sum_place(p, tile, r)]);
            for (long j = range.low; j < range.high; j += LANES) AT(row + j) = exponential(GET(row + j) - divisor);
            const lanes dot = ALL(dot_product(row + range.low, drow + range.low, range.high - range.low));
            for (long j = range.low; j < range.high; j += LANES) AT(drow + j) = GET(row + j) * (GET(drow + j) - dot);
            write_row(row, range, scores + r * keys, keys);
            write_row(drow, range, dscores + r * keys, keys);
        }
        free(row);
    }
}
