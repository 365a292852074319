/* What the generation of text spends its time with: products of lines with matrices, and the whole decoder over them.
 *
 * A line is one token's vector. y (lines, outs) = x (lines, ins) W^T, where W (outs, ins) is float32, int8 or int4. A
 * line alone waits for W to come from memory, so W is read once, as it is stored. Where W is of whole numbers, x is
 * rounded to whole numbers too, with one scale a line and as many bits as leave the sums exact in 32 bits: 12 to 16.
 *
 * Every number is summed up in the same order whatever lines stand beside it and however many threads there are: a line
 * alone is bit for bit that line among others.
 */
#include "lanes.h"
#include <omp.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define OUTS 4   /* outputs of a tile: rows of W that are read side by side */
#define BLOCK 16 /* outputs for which all lines are gone through, so that their part of W stays in the cache */
#define GROUP 32 /* weights of int4 that share a scale and a zero */

typedef int16_t halves __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int16_t eight __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t bytes __attribute__((vector_size(2 * LANES), aligned(1), may_alias));
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

enum kind { FLOAT32, INT8, INT4 };

struct matrix {
    const char *numbers;
    const void *scales; /* int8: a float32 for each output; int4: a scale and a zero in bfloat16 for each group */
    const float *bias;  /* or NULL */
    long outs, ins, kind;
};

/* Lines that are multiplied. Those but `floats` are for matrices of whole numbers: int4 wants, of each group, the 16
 * numbers at even places first, and eight numbers that add up to the group. */
struct lines {
    const float *floats;
    int16_t *whole;
    float *scales, *sums;
};

/* Keep in a register what is used several times: gcc would read it from memory each time. */
#ifdef __AVX2__
#define HOLD(v) ({ __asm__("" : "+x"(v)); })
#else
#define HOLD(v) (void)v
#endif

/* sum + a b, rounded once: gcc may do that in one loop and not in another. */
INLINE lanes fused(lanes sum, lanes a, lanes b) {
#ifdef __FMA__
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

/* The sums of four vectors, each in the same order. */
INLINE quad sums(lanes a, lanes b, lanes c, lanes d) {
    const words low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    const words first = {0, 1, 8, 9, 4, 5, 12, 13}, last = {2, 3, 10, 11, 6, 7, 14, 15};
    const lanes ab = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    const lanes cd = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
    const lanes all = __builtin_shuffle(ab, cd, first) + __builtin_shuffle(ab, cd, last);
    return (quad){all[0], all[1], all[2], all[3]} + (quad){all[4], all[5], all[6], all[7]};
}

INLINE float sum(lanes v) {
    const lanes none = {0};
    return sums(v, none, none, none)[0];
}

/* Add up the products of pairs. */
INLINE words dot(words sum, halves a, halves b) {
#ifdef __AVX2__
    return sum + (words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    const words u = (words)a, v = (words)b;
    return sum + (u << 16 >> 16) * (v << 16 >> 16) + (u >> 16) * (v >> 16);
#endif
}

INLINE halves widened(const char *from) {
#ifdef __AVX2__
    return (halves)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#else
    return __builtin_convertvector(*(const bytes *)from, halves);
#endif
}

/* Tiles: R lines of x with O rows of W; both are known where they are called, so all loops unroll. */

INLINE void tile_float32(const float *w, const float *x, long ins, lanes *acc, int R, int O) {
    for (long i = 0; i < ins; i += LANES) {
        lanes b[3];
        UNROLL for (int r = 0; r < R; r++) b[r] = *(const lanes *)(x + r * ins + i), HOLD(b[r]);
        UNROLL for (int o = 0; o < O; o++) {
            lanes a = *(const lanes *)(w + o * ins + i);
            HOLD(a);
            UNROLL for (int r = 0; r < R; r++) acc[r * OUTS + o] = fused(acc[r * OUTS + o], a, b[r]);
        }
    }
}

/* Two lines are kept in registers, and there is none left for the third. W is fetched two tiles ahead. */
INLINE void tile_int8(const char *w, const int16_t *x, long ins, words *acc, int R, int O) {
    for (long i = 0; i < ins; i += 2 * LANES) {
        halves b[3];
        __builtin_prefetch(w + 2 * OUTS * ins + i * OUTS);
        UNROLL for (int r = 0; r < R; r++) {
            b[r] = *(const halves *)(x + r * ins + i);
            if (r < 2) HOLD(b[r]);
        }
        UNROLL for (int o = 0; o < O; o++) {
            halves a = widened(w + o * ins + i);
            HOLD(a);
            UNROLL for (int r = 0; r < R; r++) acc[r * OUTS + o] = dot(acc[r * OUTS + o], a, b[r]);
        }
    }
}

/* Split sixteen bytes into the numbers below and above. */
INLINE void split(const char *from, halves *low, halves *high) {
    const halves both = widened(from);
    *low = both & 15, *high = (both >> 4) & 15;
}

/* Of several lines the first ones keep W in 16 bits for the `later` ones. */
INLINE void tile_int4(const char *w, int16_t *kept, int later, const int32_t *scales, const int16_t *x,
                      const float *totals, long ins, lanes *acc, int R, int O) {
    for (long g = 0; g < ins / GROUP; g++) {
        if (!later) __builtin_prefetch(w + OUTS * ins + g * GROUP / 2 * OUTS);
        UNROLL for (int o = 0; o < O; o++) {
            const long place = o * ins + g * GROUP;
            halves low, high, *two = (halves *)(kept + place);
            if (later) low = two[0], high = two[1];
            else split(w + place / 2, &low, &high);
            HOLD(low), HOLD(high);
            if (R > 1 && !later) two[0] = low, two[1] = high;
            const words both = scales[o * (ins / GROUP) + g] - (words){0}; /* scale below, zero above */
            const lanes scale = (lanes)(both << 16), zero = (lanes)(both & -65536);
            UNROLL for (int r = 0; r < R; r++) {
                const int16_t *from = x + r * ins + g * GROUP;
                const words none = {0};
                const words number = dot(dot(none, low, *(const halves *)from), high, *(const halves *)(from + 16));
                const lanes total = *(const lanes *)(totals + r * ins / 4 + g * LANES);
                acc[r * OUTS + o] += fused(zero * total, scale, AS_FLOAT(number));
            }
        }
    }
}

/* R lines from `line` on with the outputs from `o` on, whose rows of W, `row` bytes each, begin at `w`. */
INLINE void tile(const struct matrix *m, int kind, const char *w, long row, int16_t *kept, int later,
                 const struct lines *x, long line, float *y, long stride, long o, int add, int R) {
    const long ins = m->ins, groups = ins / GROUP;
    const int16_t *whole = x->whole + line * ins;
    const int32_t *scales = (const int32_t *)m->scales + o * groups;
    const float *totals = x->sums + line * ins / 4;
    lanes acc[3 * OUTS] = {{0}};
    words number[3 * OUTS] = {{0}};
    const int O = R == 1 && kind == FLOAT32 ? 1 : OUTS; /* a line alone reads it from end to end, as memory likes it */
    UNROLL for (int p = 0; p < OUTS; p += O) {
        const char *from = w + p * row;
        if (kind == FLOAT32) tile_float32((const float *)from, x->floats + line * ins, ins, acc + p, R, O);
        else if (kind == INT8) tile_int8(from, whole, ins, number + p, R, O);
        else tile_int4(from, kept, later, scales + p * groups, whole, totals, ins, acc + p, R, O);
    }
    if (kind == INT8) UNROLL for (int k = 0; k < R * OUTS; k++) acc[k] = AS_FLOAT(number[k]);
    UNROLL for (int r = 0; r < R; r++) {
        const lanes *a = acc + r * OUTS;
        quad value = sums(a[0], a[1], a[2], a[3]), *to = (quad *)(y + (line + r) * stride + o);
        if (kind == INT8) value *= *(const quad *)((const float *)m->scales + o);
        if (kind != FLOAT32) value *= x->scales[line + r];
        if (m->bias) value += *(const quad *)(m->bias + o);
        if (add) value += *to;
        *to = value;
    }
}

/* Outputs `from` to `to` of all lines; `add` adds them to y, whose lines are `stride` apart. `room` is for BLOCK rows
 * of int4 in 16 bits. The kind is known where this is called. */
INLINE void product_of(int kind, const struct matrix *m, const struct lines *x, long count, float *y, long stride,
                       long from, long to, int add, int16_t *room) {
    const long row = kind == FLOAT32 ? 4 * m->ins : kind == INT8 ? m->ins : m->ins / 2; /* bytes of W */
    for (long o = from, R; o < to; o += BLOCK)
        for (long r = 0; r < count; r += R) {
            R = count - r == 4 ? 2 : count - r < 3 ? count - r : 3; /* of several lines none is left alone */
            for (long p = o; p < o + BLOCK && p < to; p += OUTS) {
                const int later = kind == INT4 && r;
#define TILE(R, later) \
    tile(m, kind, m->numbers + p * row, row, room + (p - o) * m->ins, later, x, r, y, stride, p, add, R)
                if (R == 1) TILE(1, 0);
                else if (R == 2 && later) TILE(2, 1);
                else if (R == 2) TILE(2, 0);
                else if (later) TILE(3, 1);
                else TILE(3, 0);
#undef TILE
            }
        }
}

static void product(const struct matrix *m, const struct lines *x, long count, float *y, long stride, long from,
                    long to, int add, int16_t *room) {
    if (m->kind == FLOAT32) product_of(FLOAT32, m, x, count, y, stride, from, to, add, room);
    else if (m->kind == INT8) product_of(INT8, m, x, count, y, stride, from, to, add, room);
    else product_of(INT4, m, x, count, y, stride, from, to, add, room);
}

INLINE eight nearest(lanes v) { return __builtin_convertvector(whole(v), eight); }

/* Round line `r` of x to whole numbers. */
static void whole_numbers(const struct matrix *m, const struct lines *x, long r) {
    if (m->kind == FLOAT32) return;
    const long ins = m->ins, exact = INT32_MAX / 127 / ins;
    const float limit = m->kind == INT8 && exact < INT16_MAX ? exact : INT16_MAX;
    const float *from = x->floats + r * ins;
    int16_t *to = x->whole + r * ins;
    words most = {0};
    for (long i = 0; i < ins; i += LANES) { /* bits of numbers without a sign are in the order of the numbers */
        const words bits = *(const words *)(from + i) & INT32_MAX, more = bits > most;
        most = (bits & more) | (most & ~more);
    }
    float greatest = 0;
    for (int k = 0; k < LANES; k++) greatest = fmaxf(greatest, ((lanes)most)[k]);
    const float factor = greatest > 0 ? limit / greatest : 0;
    x->scales[r] = greatest / limit;
    for (long i = 0; i < ins; i += LANES) *(eight *)(to + i) = nearest(*(const lanes *)(from + i) * factor);
    if (m->kind == INT8) return;
    const words none = {0};
    const halves ones = (int16_t)1 - (halves){0};
    for (long i = 0; i < ins; i += GROUP) {
        int16_t group[GROUP];
        for (int k = 0; k < GROUP / 2; k++) group[k] = to[i + 2 * k], group[k + 16] = to[i + 2 * k + 1];
        memcpy(to + i, group, sizeof group);
        const words total = dot(dot(none, *(halves *)group, ones), *(halves *)(group + 16), ones);
        *(lanes *)(x->sums + r * ins / 4 + i / 4) = AS_FLOAT(total);
    }
}

/* Parts of a decoder. */

struct layer {
    struct matrix qkv, o, wide, down; /* `wide` is gate and up */
    const float *attention_norm, *mlp_norm, *q_norm, *k_norm; /* the last two may be NULL */
};

struct model {
    long layers, hidden, heads, kv_heads, head_dim, width;
    float eps;
    const float *frequencies, *norm; /* head_dim / 2 radians a position; the last norm */
    struct matrix table;             /* the embedding: float32 or int8 */
    const struct layer *layer;
};

/* `length` tokens of each row follow those that the cache holds: keys and values (layers, rows, kv_heads, slots,
 * head_dim). Position p lives in slot p mod slots; a query sees `window` positions, its own among them. */
struct pass {
    const int64_t *tokens; /* (rows, length) */
    const int64_t *held;   /* (rows) */
    float *keys, *values, *out;
    void *room; /* as many bytes as `decoder` asks for */
    long rows, length, slots, window;
};

/* What the threads share, and for each of them a block of W in 16 bits and then the scores of three queries. */
struct room {
    float *x, *normed, *joined, *mixed, *wide, *bent, *turns;
    struct lines lines;
    char *own;
    long block, size; /* bytes of that block, and of all that a thread has for itself */
    long stride;      /* scores of a query */
};

/* To root mean square 1, times the gain; x and y may be the same. */
static void rms_norm(const float *x, const float *gain, float *y, long width, float eps) {
    lanes squares = {0};
    for (long i = 0; i < width; i += LANES) squares = fused(squares, *(const lanes *)(x + i), *(const lanes *)(x + i));
    const float scale = 1.0f / sqrtf(sum(squares) / width + eps);
    for (long i = 0; i < width; i++) y[i] = x[i] * scale * gain[i];
}

static void embed(const struct matrix *table, long token, float *to) {
    const long width = table->ins;
    if (table->kind == FLOAT32) memcpy(to, (const float *)table->numbers + token * width, width * sizeof(float));
    else
        for (long i = 0; i < width; i++)
            to[i] = ((const float *)table->scales)[token] * ((const int8_t *)table->numbers)[token * width + i];
}

/* Cosines, then sines, of the angles of a position. */
static void angles(const struct model *m, long position, float *to) {
    const long half = m->head_dim / 2;
    for (long i = 0; i < half; i++) {
        const float angle = position * m->frequencies[i];
        to[i] = cosf(angle), to[half + i] = sinf(angle);
    }
}

/* Turn the pairs (v[i], v[i + half]) by their angles. */
static void rotate(float *v, const float *turns, long half) {
    for (long i = 0; i < half; i++) {
        const float first = v[i], second = v[half + i];
        v[i] = first * turns[i] - second * turns[half + i];
        v[half + i] = second * turns[i] + first * turns[half + i];
    }
}

/* The place in the cache of a key or value of a layer: slot 0 of that head in that row. */
static long in_cache(const struct model *m, const struct pass *p, long layer, long row, long head) {
    return ((layer * p->rows + row) * m->kv_heads + head) * p->slots * m->head_dim;
}

/* Norm and turn head `h` of query, key and value of a line, and put keys and values into the cache. */
static void place_head(const struct model *m, const struct pass *p, const struct room *room, long layer, long line,
                       long h) {
    const long D = m->head_dim, row = line / p->length, place = p->held[row] + line % p->length;
    const struct layer *l = m->layer + layer;
    float *v = room->joined + (line * (m->heads + 2 * m->kv_heads) + h) * D;
    const int value = h >= m->heads + m->kv_heads, key = !value && h >= m->heads;
    if (!value) {
        if (l->q_norm) rms_norm(v, key ? l->k_norm : l->q_norm, v, D, m->eps);
        rotate(v, room->turns + line * D, D / 2);
    }
    if (value || key) {
        const long head = (h - m->heads) % m->kv_heads;
        float *to = (value ? p->values : p->keys) + in_cache(m, p, layer, row, head);
        memcpy(to + place % p->slots * D, v, D * sizeof(float));
    }
}

/* The products of R queries with `count` keys; each has a row of `stride` scores. */
INLINE void scores_of(const float *queries, const float *keys, long count, long D, float *to, long stride, int R) {
    long s = 0;
    for (; s + OUTS <= count; s += OUTS) {
        lanes acc[3 * OUTS] = {{0}};
        tile_float32(keys + s * D, queries, D, acc, R, OUTS);
        UNROLL for (int r = 0; r < R; r++) {
            const lanes *a = acc + r * OUTS;
            *(quad *)(to + r * stride + s) = sums(a[0], a[1], a[2], a[3]);
        }
    }
    for (; s < count; s++) {
        lanes acc[3 * OUTS] = {{0}};
        tile_float32(keys + s * D, queries, D, acc, R, 1);
        UNROLL for (int r = 0; r < R; r++) to[r * stride + s] = sum(acc[r * OUTS]);
    }
}

/* exp(scale (score - greatest)) in place of each score, 0 up to the end of a vector; returns their sum. */
static float soften(float *scores, long count, float scale) {
    const words place = {0, 1, 2, 3, 4, 5, 6, 7};
    lanes most = ALL(scores[0]), total = {0};
    for (long s = 0; s < count; s += LANES) {
        const lanes v = *(const lanes *)(scores + s);
        most = where((place + (int32_t)s < (int32_t)count) & (v > most), v, most);
    }
    float greatest = most[0];
    for (int k = 1; k < LANES; k++) greatest = fmaxf(greatest, most[k]);
    for (long s = 0; s < count; s += LANES) {
        lanes *v = (lanes *)(scores + s);
        total += *v = where(place + (int32_t)s < (int32_t)count, exponential((*v - greatest) * scale), ALL(0));
    }
    return sum(total);
}

/* Add `count` values, each times its weight, to V vectors of what each of R queries gathers. */
INLINE void gather(const float *weights, long stride, const float *values, long count, long D, float *out, int V, int R) {
    lanes acc[3 * 4];
    UNROLL for (int k = 0; k < V * R; k++) acc[k] = *(const lanes *)(out + k / V * D + k % V * LANES);
    for (long s = 0; s < count; s++, values += D)
        UNROLL for (int k = 0; k < V; k++) {
            lanes value = *(const lanes *)(values + k * LANES);
            HOLD(value);
            UNROLL for (int r = 0; r < R; r++)
                acc[r * V + k] = fused(acc[r * V + k], ALL(weights[r * stride + s]), value);
        }
    UNROLL for (int k = 0; k < V * R; k++) *(lanes *)(out + k / V * D + k % V * LANES) = acc[k];
}

/* What a line sees of a layer and head of its cache: the end of a ring, then its beginning, or the former alone. */
struct sight {
    const float *keys, *values;
    long first, before, seen; /* the slot of the oldest; how many there are up to the end of the ring, and in all */
};

static struct sight look(const struct model *m, const struct pass *p, long layer, long line, long head) {
    const long row = line / p->length, end = p->held[row] + line % p->length + 1;
    const long seen = end < p->window ? end : p->window, first = (end - seen) % p->slots;
    const long before = seen < p->slots - first ? seen : p->slots - first, place = in_cache(m, p, layer, row, head);
    return (struct sight){p->keys + place, p->values + place, first, before, seen};
}

/* What R queries gather that see the same, each by how well it fits the keys. */
INLINE void attend(const struct sight *v, const float *queries, float *out, long D, float *scores, long stride, int R) {
    const float *keys = v->keys + v->first * D, *values = v->values + v->first * D;
    const long before = v->before, after = v->seen - before;
    float share[3];
    scores_of(queries, keys, before, D, scores, stride, R);
    scores_of(queries, v->keys, after, D, scores + before, stride, R);
    for (int r = 0; r < R; r++) share[r] = 1.0f / soften(scores + r * stride, v->seen, 1.0f / sqrtf(D));
    memset(out, 0, R * D * sizeof(float));
    long i = 0;
#define GATHER(V)                                                                          \
    for (; i + V * LANES <= D; i += V * LANES) {                                           \
        gather(scores, stride, values + i, before, D, out + i, V, R);                      \
        gather(scores + before, stride, v->values + i, after, D, out + i, V, R);           \
    }
    GATHER(4) GATHER(1)
#undef GATHER
    for (int r = 0; r < R; r++)
        for (long k = 0; k < D; k++) out[r * D + k] *= share[r];
}

/* The heads of a line that share a key/value head. */
static void attend_all(const struct model *m, const struct pass *p, const struct room *room, long layer, long line,
                       long head, float *scores) {
    const long D = m->head_dim, group = m->heads / m->kv_heads, stride = room->stride;
    const struct sight sight = look(m, p, layer, line, head);
    const float *queries = room->joined + (line * (m->heads + 2 * m->kv_heads) + head * group) * D;
    float *out = room->mixed + (line * m->heads + head * group) * D;
    long h = 0;
    for (; h + 3 <= group; h += 3) attend(&sight, queries + h * D, out + h * D, D, scores, stride, 3);
    for (; h + 2 <= group; h += 2) attend(&sight, queries + h * D, out + h * D, D, scores, stride, 2);
    for (; h < group; h++) attend(&sight, queries + h * D, out + h * D, D, scores, stride, 1);
}

/* The share of thread t in what is counted in units. */
static void share(long total, long unit, long t, long threads, long *from, long *to) {
    *from = total / unit * t / threads * unit, *to = total / unit * (t + 1) / threads * unit;
}

/* silu(gate) up, for the numbers `from` to `to` of a line. */
static void bend(const float *wide, float *to_line, long width, long from, long to) {
    for (long i = from; i < to; i += LANES) {
        const lanes gate = *(const lanes *)(wide + i), up = *(const lanes *)(wide + width + i);
        *(lanes *)(to_line + i) = gate * sigmoid(gate) * up;
    }
}

/* Cut the room into its parts; returns how many bytes they take. */
static long lay_out(const struct model *m, const struct pass *p, long threads, struct room *room) {
    const long lines = p->rows * p->length, mixed = m->heads * m->head_dim;
    const long widest = m->hidden > m->width ? (m->hidden > mixed ? m->hidden : mixed) : m->width > mixed ? m->width : mixed;
    char *at = p->room;
#define TAKE(place, bytes) room->place = (void *)at, at += ((bytes) + 63) / 64 * 64
    TAKE(x, lines * m->hidden * 4);
    TAKE(normed, lines * m->hidden * 4);
    TAKE(joined, lines * (m->heads + 2 * m->kv_heads) * m->head_dim * 4);
    TAKE(mixed, lines * mixed * 4);
    TAKE(wide, lines * 2 * m->width * 4);
    TAKE(bent, lines * m->width * 4);
    TAKE(turns, lines * m->head_dim * 4);
    TAKE(lines.whole, lines * widest * 2);
    TAKE(lines.scales, lines * 4);
    TAKE(lines.sums, lines * widest);
    room->block = BLOCK * widest * 2;
    room->stride = (p->slots + 2 * LANES) / 16 * 16 + 16;
    room->size = (room->block + 3 * room->stride * 4 + 63) / 64 * 64;
    TAKE(own, threads * room->size);
#undef TAKE
    return at - (char *)p->room;
}

/* Norm lines of the stream, and make them ready to be multiplied with a matrix. */
static void norm_lines(const struct model *m, const struct room *room, const float *gain, const struct matrix *with,
                       struct lines *x, long from, long to) {
    const long C = m->hidden;
    x->floats = room->normed;
    for (long r = from; r < to; r++) {
        rms_norm(room->x + r * C, gain, room->normed + r * C, C, m->eps);
        whole_numbers(with, x, r);
    }
}

/* What one of the threads does; each part waits for the one before. */
static void work(const struct model *m, const struct pass *p, const struct room *room, long t, long threads) {
    const long lines = p->rows * p->length, C = m->hidden, heads = m->heads + 2 * m->kv_heads;
    struct lines x = room->lines;
    int16_t *block = (int16_t *)(room->own + t * room->size);
    float *scores = (float *)((char *)block + room->block);
    long from, to, mine, last; /* of what is divided, and of the lines */
    share(lines, 1, t, threads, &mine, &last);
#define WAIT _Pragma("omp barrier")
    for (long r = mine; r < last; r++) {
        embed(&m->table, p->tokens[r], room->x + r * C);
        angles(m, p->held[r / p->length] + r % p->length, room->turns + r * m->head_dim);
    }
    for (long layer = 0; layer < m->layers; layer++) {
        const struct layer *l = m->layer + layer;
        norm_lines(m, room, l->attention_norm, &l->qkv, &x, mine, last);
        WAIT
        share(l->qkv.outs, OUTS, t, threads, &from, &to);
        product(&l->qkv, &x, lines, room->joined, l->qkv.outs, from, to, 0, block);
        WAIT
        share(lines * heads, 1, t, threads, &from, &to);
        for (long i = from; i < to; i++) place_head(m, p, room, layer, i / heads, i % heads);
        WAIT
        for (long i = t; i < lines * m->kv_heads; i += threads) { /* in turns: later ones see more */
            const long row = i / (m->kv_heads * p->length), head = i / p->length % m->kv_heads;
            attend_all(m, p, room, layer, row * p->length + i % p->length, head, scores);
        }
        WAIT
        x.floats = room->mixed;
        for (long r = mine; r < last; r++) whole_numbers(&l->o, &x, r);
        WAIT
        share(C, OUTS, t, threads, &from, &to);
        product(&l->o, &x, lines, room->x, C, from, to, 1, block);
        WAIT
        norm_lines(m, room, l->mlp_norm, &l->wide, &x, mine, last);
        WAIT
        share(m->width, LANES, t, threads, &from, &to);
        product(&l->wide, &x, lines, room->wide, 2 * m->width, from, to, 0, block);
        product(&l->wide, &x, lines, room->wide, 2 * m->width, m->width + from, m->width + to, 0, block);
        for (long r = 0; r < lines; r++)
            bend(room->wide + r * 2 * m->width, room->bent + r * m->width, m->width, from, to);
        WAIT
        x.floats = room->bent;
        for (long r = mine; r < last; r++) whole_numbers(&l->down, &x, r);
        WAIT
        share(C, OUTS, t, threads, &from, &to);
        product(&l->down, &x, lines, room->x, C, from, to, 1, block);
        WAIT
    }
    for (long r = mine; r < last; r++) rms_norm(room->x + r * C, m->norm, p->out + r * C, C, m->eps);
#undef WAIT
}

/* Tokens to hidden states (lines, hidden), from the embedding to the last norm. Returns how many bytes of room that
 * takes, and does no more where none is given; or -1 where a token has no embedding. Widths are multiples of 16, or 32
 * for int4; head_dim of 8. */
long decoder(const struct model *m, const struct pass *p) {
    struct room room;
    const long size = lay_out(m, p, omp_get_max_threads(), &room);
    if (!p->room) return size;
    for (long r = 0; r < p->rows * p->length; r++)
        if (p->tokens[r] < 0 || p->tokens[r] >= m->table.outs) return -1;
#pragma omp parallel
    work(m, p, &room, omp_get_thread_num(), omp_get_num_threads());
    return size;
}

/* y (count, outs) = x (count, ins) W^T + bias. `outs` is a multiple of 4, `ins` of 16, and of 32 for int4. */
void product_alone(const struct matrix *m, const float *x, float *y, long count) {
    const long threads = omp_get_max_threads(), whole = m->kind == FLOAT32 ? 0 : count * m->ins;
    struct lines lines = {.floats = x};
    char *room = aligned_alloc(64, (whole * 3 + (count + 15) / 16 * 64 + threads * BLOCK * m->ins * 2 + 63) / 64 * 64);
    lines.whole = (int16_t *)room;
    lines.sums = (float *)(room + whole * 2);
    lines.scales = (float *)(room + whole * 3);
    int16_t *blocks = (int16_t *)(room + whole * 3 + (count + 15) / 16 * 64);
#pragma omp parallel
    {
        const long t = omp_get_thread_num(), n = omp_get_num_threads();
        long from, to;
        share(count, 1, t, n, &from, &to);
        for (long r = from; r < to; r++) whole_numbers(m, &lines, r);
#pragma omp barrier
        share(m->outs, OUTS, t, n, &from, &to);
        product(m, &lines, count, y, m->outs, from, to, 0, blocks + t * BLOCK * m->ins);
    }
    free(room);
}
