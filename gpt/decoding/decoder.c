/* The decoder of gpt/model/decoder.py for CPUs, without gradients. That file defines the model; names are the same.

   `forward` appends tokens to the KV caches of their slots: one token of each of several texts, a piece of a prompt, or
   both at once. `unembed` returns logits. gpt/decoding/native.py compiles this file and fills its structures.

   Position p of a slot is in column p modulo the number of columns, a multiple of 16. Attention visits keys in the order
   of their positions, so a result does not depend on the number of columns. */
#include "packing.h"

enum { SLACK = 64 }; /* Columns of a windowed layer beyond its window, so positions that a pass may append. */
enum { QUERIES = VL == 16 ? 4 : 2 }; /* queries that share the keys and values which attention loads */

typedef struct { /* LayerNorm, or RMSNorm without a bias. Both vectors end with zeros up to a multiple of 32. */
    const float *weight, *bias;
} Norm;

typedef struct {
    Norm ln_1, q_norm, k_norm, ln_2; /* q_norm and k_norm have no weight if queries and keys are not normalized */
    Linear c_attn, c_proj, c_fc, mlp_c_proj;
    float *keys;   /* (slots, n_kv_head, columns / 16, head_size, 16) */
    float *values; /* (slots, n_kv_head, columns, value_size); value_size is head_size rounded up to a multiple of 16 */
    int64_t columns, window;
} Block;

typedef struct {
    int32_t n_layer, n_embd, n_head, n_kv_head, head_size, n_inner, is_gated, max_rows;
    float epsilon;
    int32_t unused;
    Linear wte, lm_head; /* If wte has no weights, the caller of `forward` looks up embeddings. */
    const float *position_table; /* (positions, n_embd), or NULL */
    const float *rope;           /* cosines and sines, (2, rope_positions, head_size), or NULL */
    int64_t rope_positions;
    const Block *h;
    Norm ln_f;
    char *memory; /* `memory_size` bytes for activations, zero at first */
} Model;

typedef struct { /* One pass over at most `max_rows` rows. Rows of a text are adjacent, in order of position. */
    const Model *m;
    int rows, texts;
    const int32_t *ids, *slots, *positions, *first_rows; /* first_rows: of each text, then the number of rows */
    float *x, *qkv, *y, *hidden;                         /* activations, (rows, … stride) */
    int64_t x_stride, qkv_stride, y_stride, hidden_stride, widest;
    float *normed;       /* (threads, widest) */
    float *scores;       /* (threads, QUERIES, columns + 32) */
    int64_t max_columns;
    Rows prepared;       /* Inputs of the current product: of many rows, then a single row of each thread. */
    float *out;          /* result of `forward` or `unembed` */
    int64_t out_stride;
} Pass;

/* ---- Memory ---- */

/* An odd multiple of 128 bytes, so that rows are spread over the sets of the CPU's cache. */
static int64_t stride_of(int64_t width) { return (width + 31) / 32 * 32 | 32; }

static char *carve(char **at, int64_t size) {
    char *part = *at;
    *at += (size + 63) / 64 * 64;
    return part;
}

/* Divides a model's memory into the arrays of a pass, and returns their end. */
static char *lay_out(const Model *m, Pass *p) {
    const int64_t rows = m->max_rows, all_rows = rows + BLOCK + MAX_THREADS + 1;
    char *at = m->memory;
    p->m = m;
    p->x_stride = stride_of(m->n_embd), p->qkv_stride = stride_of((m->n_head + 2 * m->n_kv_head) * m->head_size);
    p->y_stride = stride_of(m->n_head * m->head_size), p->hidden_stride = stride_of(m->n_inner * (1 + m->is_gated));
    p->widest = MAX(MAX(p->x_stride, p->qkv_stride), MAX(p->y_stride, p->hidden_stride));
    for (int i = 0; i < m->n_layer; i++) p->max_columns = MAX(p->max_columns, m->h[i].columns);
    p->x = (float *)carve(&at, 4 * rows * p->x_stride), p->qkv = (float *)carve(&at, 4 * rows * p->qkv_stride);
    p->y = (float *)carve(&at, 4 * rows * p->y_stride), p->hidden = (float *)carve(&at, 4 * rows * p->hidden_stride);
    p->normed = (float *)carve(&at, 4 * (MAX_THREADS + 1) * p->widest);
    p->scores = (float *)carve(&at, 4 * (MAX_THREADS + 1) * QUERIES * (p->max_columns + 32));
    p->prepared.numbers = (float *)carve(&at, 4 * all_rows * p->widest);
    p->prepared.levels = (int8_t *)carve(&at, all_rows * p->widest);
    p->prepared.scales = (float *)carve(&at, all_rows * p->widest / 8);
    p->prepared.sums = (int32_t *)carve(&at, all_rows * p->widest / 8);
    return at;
}

int64_t memory_size(const Model *m) {
    Pass p = {0};
    return lay_out(m, &p) - m->memory;
}

/* ---- Functions of a row ---- */

INLINE vf exponential(vf x) { /* The polynomial of Cephes; relative error 2e-7. Clamps x to ±87. */
    x = pick(x < -87, splat(-87), pick(x > 87, splat(87), x));
    const vf n = nearest(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    const vf p = ((1.9875691e-4f * r + 1.3981999e-3f) * r + 8.3334519e-3f) * r + 4.1665796e-2f;
    return (((p * r + 1.6666665e-1f) * r + .5f) * r * r + r + 1) * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

/* (x − mean) / √(variance + ε) · γ + β, or x / √(mean(x²) + ε) · γ. Stores `width` numbers. */
static void normalize(float *y, const float *x, int64_t width, const Norm *norm, float epsilon) {
    vf sum = {}, squares = {};
    for (int64_t k = 0; norm->bias && k < width; k += VL) sum += keep(load(x + k), width - k);
    const float mean = total(sum) / width;
    for (int64_t k = 0; k < width; k += VL) {
        const vf deviation = keep(load(x + k) - mean, width - k);
        squares += deviation * deviation;
    }
    const float scale = 1 / sqrtf(total(squares) / width + epsilon);
    for (int64_t k = 0; k < width; k += VL) {
        const vf v = (load(x + k) - mean) * scale * load(norm->weight + k);
        store_some(y + k, norm->bias ? v + load(norm->bias + k) : v, width - k);
    }
}

/* GELU (tanh approximation), or SwiGLU of (2, n_inner): silu(gate) · up. */
static void activate(float *y, const float *x, int64_t n_inner, int is_gated) {
    for (int64_t k = 0; k < n_inner; k += VL) {
        const vf v = load(x + k);
        const vf exponent = is_gated ? -v : v * -1.5957691216f * (1 + 0.044715f * v * v);
        const vf activated = v / (1 + exponential(exponent));
        store_some(y + k, is_gated ? activated * load(x + n_inner + k) : activated, n_inner - k);
    }
}

/* Rotates the pairs (i, i + D/2). The first half of the sines is negative. */
static void rotate(float *v, const float *cosines, const float *sines, int64_t D) {
    for (int64_t d = 0; d < D / 2; d++) {
        const float a = v[d], b = v[d + D / 2];
        v[d] = a * cosines[d] + b * sines[d];
        v[d + D / 2] = b * cosines[d + D / 2] + a * sines[d + D / 2];
    }
}

static void embed(const Pass *p, int row) {
    const Model *m = p->m;
    const float *added = m->position_table ? m->position_table + (int64_t)p->positions[row] * m->n_embd : NULL;
    for (int64_t k = 0; k < m->n_embd; k++) {
        const float x = m->wte.weights ? weight_at(&m->wte, p->ids[row], k) : p->out[row * m->n_embd + k];
        p->x[row * p->x_stride + k] = x + (added ? added[k] : 0);
    }
}

enum { NOTHING, NORMALIZE, ACTIVATE };

/* Makes inputs of a product with a matrix of `kind`: normalizes rows or applies the activation, and interleaves them. A
   single row is prepared by every thread for itself, which takes less time than a barrier. */
static Rows prepare(const Pass *p, int thread, const float *source, int64_t stride, int64_t width, int first,
                    const Norm *norm, int kind) {
    const Model *m = p->m;
    const int is_single = p->rows == 1;
    const int64_t own = is_single ? m->max_rows + BLOCK + thread : 0, groups = GROUPS(width);
    const Rows to = {p->prepared.numbers + own * p->widest, p->prepared.levels + own * p->widest,
                     p->prepared.scales + own * p->widest / 32, p->prepared.sums + own * p->widest / 32, groups};
    float *changed = p->normed + thread * p->widest;
    for (int r = is_single ? 0 : thread; r < p->rows; r += is_single ? 1 : threads) {
        const float *row = source + r * stride;
        if (first == NORMALIZE) normalize(changed, row, width, norm, m->epsilon);
        if (first == ACTIVATE) activate(changed, row, width, m->is_gated);
        if (first == NOTHING) memcpy(changed, row, width * sizeof(float));
        memset(changed + width, 0, (groups * GROUP - width) * sizeof(float));
        const int start = r - r % BLOCK, R = block_size(p->rows - start);
        if (kind >= INT8) quantize_row(changed, &to, start, r - start, R);
        else copy_row(changed, &to, start, r - start, R);
    }
    if (!is_single) barrier();
    return to;
}

/* ---- Attention ---- */

/* Normalizes and rotates queries and keys, and stores keys and values in the cache. */
static void append(const Pass *p, int thread, const Block *b) {
    const Model *m = p->m;
    const int64_t D = m->head_size, K = m->n_kv_head, value_size = (D + 15) / 16 * 16;
    const int64_t heads = m->n_head + 2 * K;
    for (int64_t i = thread; i < p->rows * heads; i += threads) {
        const int64_t row = i / heads, position = p->positions[row], column = position % b->columns;
        const int64_t head = i % heads - m->n_head, head_of_cache = p->slots[row] * K + head % K; /* negative: a query */
        float *v = p->qkv + row * p->qkv_stride + i % heads * D;
        if (head < K) {
            const Norm *norm = head < 0 ? &b->q_norm : &b->k_norm;
            if (norm->weight) normalize(v, v, D, norm, m->epsilon);
            if (m->rope) rotate(v, m->rope + position * D, m->rope + (m->rope_positions + position) * D, D);
        }
        if (head >= K) memcpy(b->values + (head_of_cache * b->columns + column) * value_size, v, D * sizeof(float));
        else if (head >= 0) {
            float *key = b->keys + (head_of_cache * b->columns + column / 16 * 16) * D + column % 16;
            for (int64_t d = 0; d < D; d++) key[d * 16] = v[d];
        }
    }
    barrier();
}

/* Computes J vectors, from number `d` on, of the outputs of Q queries: sums of the values of positions first … last,
   weighted by `scores`, (Q, score_stride). */
INLINE void mix(const Block *b, const float *values, int64_t value_size, const float *scores, int64_t score_stride,
                const float *shares, int64_t first, int64_t last, float **out, int64_t D, int64_t d, const int Q,
                const int J) {
    vf sums[Q][J];
    EACH(i, Q) EACH(j, J) sums[i][j] = (vf){};
    for (int64_t position = first, column = first % b->columns; position <= last; position++, scores++) {
        const float *value = values + column * value_size + d;
        EACH(j, J) {
            const vf v = load(value + VL * j);
            EACH(i, Q) sums[i][j] = multiply_add(v, splat(scores[i * score_stride]), sums[i][j]);
        }
        column = column + 1 < b->columns ? column + 1 : 0;
    }
    EACH(i, Q) EACH(j, J) store_some(out[i] + d + VL * j, sums[i][j] * shares[i], MAX(0, D - d - VL * j));
}

/* softmax(q kᵀ / √D) v for Q queries of a key/value head. Query i attends to positions lasts[i] − window + 1 … lasts[i].
   A hidden position gets the weight 0 exactly, so queries computed together don't change each other's results. */
INLINE void attend(const Block *b, const float *keys, const float *values, float **queries, float **out,
                   const int64_t *lasts, int64_t D, float *scores, int64_t score_stride, const int Q) {
    const float scale = 1 / sqrtf((float)D);
    const int64_t value_size = (D + 15) / 16 * 16;
    int64_t first = INT64_MAX, last = 0;
    float shares[Q];
    for (int i = 0; i < Q; i++) first = MIN(first, MAX(0, lasts[i] + 1 - b->window)), last = MAX(last, lasts[i]);
    const int64_t start = first - first % 16; /* Scores begin with the position `start`. */
    for (int64_t at = start; at <= last; at += 16) {
        const float *key = keys + at % b->columns * D;
        vf sums[Q][2][VECTORS]; /* of even and odd d */
        EACH(i, Q) EACH(u, 2) EACH(n, VECTORS) sums[i][u][n] = (vf){};
        for (int64_t d = 0; d < D - 1; d += 2) EACH(u, 2) EACH(n, VECTORS) {
            const vf k = load(key + (d + u) * 16 + VL * n);
            EACH(i, Q) sums[i][u][n] = multiply_add(k, splat(queries[i][d + u]), sums[i][u][n]);
        }
        if (D % 2) EACH(n, VECTORS) EACH(i, Q)
            sums[i][0][n] = multiply_add(load(key + (D - 1) * 16 + VL * n), splat(queries[i][D - 1]), sums[i][0][n]);
        EACH(i, Q) EACH(n, VECTORS) {
            const vi back = lanes(0) + (int)(at + VL * n - lasts[i]); /* 0 is the query's own position */
            const vi visible = (back <= 0) & (back > (int)MAX(-b->window, -INT_MAX));
            store(scores + i * score_stride + at - start + VL * n,
                  pick(visible, (sums[i][0][n] + sums[i][1][n]) * scale, splat(-INFINITY)));
        }
    }
    for (int i = 0; i < Q; i++) {
        float *score = scores + i * score_stride;
        vf most = splat(-INFINITY), sum = {};
        for (int64_t at = 0; at <= last - start; at += VL) most = larger(load(score + at), most);
        const float top = largest(most);
        for (int64_t at = 0; at <= last - start; at += VL) {
            const vf v = load(score + at), weight = pick(v == -INFINITY, splat(0), exponential(v - top));
            store(score + at, weight), sum += weight;
        }
        shares[i] = 1 / total(sum);
    }
    scores += first - start;
    int64_t d = 0;
    for (; d + 4 * VL <= value_size; d += 4 * VL)
        mix(b, values, value_size, scores, score_stride, shares, first, last, out, D, d, Q, 4);
    for (; d < value_size; d += VL)
        mix(b, values, value_size, scores, score_stride, shares, first, last, out, D, d, Q, 1);
}

/* Attention of all rows, (rows, n_head, D) → y. Threads take some queries of a text and a key/value head at a time. */
static void attention(const Pass *p, int thread, const Block *b) {
    const Model *m = p->m;
    const int64_t D = m->head_size, K = m->n_kv_head, group = m->n_head / K, score_stride = p->max_columns + 32;
    const int at_once = p->rows == 1 ? 1 : QUERIES; /* One row has few queries, so they are taken one by one. */
    float *scores = p->scores + thread * QUERIES * score_stride;
    int at = take(1), first = 0;
    for (int text = 0, after; text < p->texts; text++, first = after) {
        const int64_t row = p->first_rows[text], queries = (p->first_rows[text + 1] - row) * group;
        const int64_t parts = (queries + at_once - 1) / at_once;
        after = first + (int)(parts * K);
        for (; at < after; at = take(1)) {
            const int64_t head = (at - first) / parts, query = (at - first) % parts * at_once;
            const int64_t head_of_cache = (p->slots[row] * K + head) * b->columns;
            const float *keys = b->keys + head_of_cache * D, *values = b->values + head_of_cache * ((D + 15) / 16 * 16);
            float *from[4], *to[4];
            int64_t lasts[4];
            const int count = (int)MIN(at_once, queries - query);
            for (int i = 0; i < count; i++) {
                const int64_t r = row + (query + i) / group, column = (head * group + (query + i) % group) * D;
                from[i] = p->qkv + r * p->qkv_stride + column, to[i] = p->y + r * p->y_stride + column;
                lasts[i] = p->positions[r];
            }
            switch (count) {
#define ATTEND(Q) case Q: attend(b, keys, values, from, to, lasts, D, scores, score_stride, Q); break;
                ATTEND(1) ATTEND(2)
#if VL == 16
                ATTEND(3) ATTEND(4)
#endif
            }
        }
    }
    barrier();
}

/* ---- The model ---- */

static void block(const Pass *p, int thread, const Block *b) {
    const Model *m = p->m;
    Rows x = prepare(p, thread, p->x, p->x_stride, m->n_embd, NORMALIZE, &b->ln_1, b->c_attn.kind);
    linear(&b->c_attn, &x, p->rows, p->qkv, p->qkv_stride, 0);
    append(p, thread, b);
    attention(p, thread, b);
    x = prepare(p, thread, p->y, p->y_stride, m->n_head * m->head_size, NOTHING, NULL, b->c_proj.kind);
    linear(&b->c_proj, &x, p->rows, p->x, p->x_stride, 1);
    x = prepare(p, thread, p->x, p->x_stride, m->n_embd, NORMALIZE, &b->ln_2, b->c_fc.kind);
    linear(&b->c_fc, &x, p->rows, p->hidden, p->hidden_stride, 0);
    x = prepare(p, thread, p->hidden, p->hidden_stride, m->n_inner, ACTIVATE, NULL, b->mlp_c_proj.kind);
    linear(&b->mlp_c_proj, &x, p->rows, p->x, p->x_stride, 1);
}

static void trunk(void *pass, int thread) {
    const Pass *p = pass;
    const Model *m = p->m;
    for (int r = thread; r < p->rows; r += threads) embed(p, r);
    barrier();
    for (int i = 0; i < m->n_layer; i++) block(p, thread, m->h + i);
    for (int r = thread; r < p->rows; r += threads)
        normalize(p->out + r * m->n_embd, p->x + r * p->x_stride, m->n_embd, &m->ln_f, m->epsilon);
}

/* Appends `count` tokens to their slots, and writes the normalized residual stream, (count, n_embd), to `out`. If `wte`
   has no weights, `out` contains the embeddings. */
void forward(const Model *m, int count, const int32_t *ids, const int32_t *slots, const int32_t *positions, float *out,
             int thread_count) {
    Pass p = {0};
    lay_out(m, &p);
    for (int start = 0; start < count; start += p.rows) {
        int32_t first_rows[m->max_rows + 1];
        p.rows = MIN(m->max_rows, count - start), p.texts = 0, p.out = out + (int64_t)start * m->n_embd;
        p.ids = ids + start, p.slots = slots + start, p.positions = positions + start, p.first_rows = first_rows;
        for (int r = 0; r < p.rows; r++)
            if (!r || p.slots[r] != p.slots[r - 1]) first_rows[p.texts++] = r;
        first_rows[p.texts] = p.rows;
        in_parallel(trunk, &p, thread_count);
    }
}

static void head(void *pass, int thread) {
    const Pass *p = pass;
    Rows x = prepare(p, thread, p->x, p->m->n_embd, p->m->n_embd, NOTHING, NULL, p->m->lm_head.kind);
    linear(&p->m->lm_head, &x, p->rows, p->out, p->out_stride, 0);
}

/* Writes the logits of normalized rows x, (count, n_embd), to `out`, (count, vocabulary padded to a multiple of 16). */
void unembed(const Model *m, int count, const float *x, float *out, int thread_count) {
    Pass p = {0};
    lay_out(m, &p);
    p.out_stride = TILES(&m->lm_head) * TILE;
    for (int start = 0; start < count; start += p.rows) {
        p.rows = MIN(m->max_rows, count - start), p.out = out + start * p.out_stride;
        p.x = (float *)x + (int64_t)start * m->n_embd;
        in_parallel(head, &p, thread_count);
    }
}
