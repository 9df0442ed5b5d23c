/* Matrices in the layout of products.h, made from numbers or from quantized blocks of GGUF files.

   A block has levels of 32 inputs with a scale, and in some types with a minimum. Their formats are in llama.cpp,
   ggml/src/ggml-common.h. Levels of 4, 5 and 8 bits are copied: a weight is level · scale + minimum. Other types, and
   numbers, are rounded as in gpt/model/quantize.py. */
#include "products.h"

enum { F32, F16, Q4_0, Q4_1, Q5_0 = 6, Q5_1, Q8_0, Q4_K = 12, Q5_K, Q6_K, BF16 = 30 }; /* ggml's numbers of types */
enum { K_GROUPS = 8 };                                                                 /* groups in a block of a K-quant */
enum { TRIALS = 8 };                                                                   /* int4 scales tried per group */

static const int BYTES[] = {[Q4_0] = 18, [Q4_1] = 20, [Q5_0] = 22,  [Q5_1] = 24,
                            [Q8_0] = 34, [Q4_K] = 144, [Q5_K] = 176, [Q6_K] = 210}; /* of a block */

typedef struct { /* 32 inputs of an output: numbers, or levels that mean level · scale + minimum */
    float numbers[GROUP], scale, minimum;
    int8_t levels[GROUP];
    int has_levels;
} Group;

static float from_half(const uint8_t *p) {
    const uint32_t bits = p[0] | p[1] << 8;
    union { uint32_t bits; float number; } u = {(bits & 0x7fff) << 13};
    u.number *= 0x1p112f; /* Exponents differ by 112. */
    u.bits |= (bits & 0x8000) << 16 | ((bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0);
    return u.number;
}

static uint16_t to_half(float x) { /* Rounds to the nearest float16, ties to even. */
    const union { float number; uint32_t bits; } u = {fabsf(x)};
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    if (!(u.number < 65520)) return sign | (isnan(x) ? 0x7e00 : 0x7c00);
    if (u.number < 0x1p-14f) return sign | (uint16_t)rintf(u.number * 0x1p24f);
    return sign | (uint16_t)(((u.bits + 0xfff + (u.bits >> 13 & 1)) >> 13) - (112 << 10));
}

/* ---- Reading ---- */

static void read_numbers(Group *to, int type, const uint8_t *row, int64_t g, int count) {
    memset(to->numbers, 0, sizeof to->numbers);
    if (type == F32) memcpy(to->numbers, row + g * GROUP * 4, count * 4);
    for (int i = 0; type == F16 && i < count; i++) to->numbers[i] = from_half(row + (g * GROUP + i) * 2);
    for (int i = 0; type == BF16 && i < count; i++) memcpy((char *)(to->numbers + i) + 2, row + (g * GROUP + i) * 2, 2);
}

static void read_block(Group *to, int type, const uint8_t *block) {
    const int has_minimum = type == Q4_1 || type == Q5_1, has_fifth = type == Q5_0 || type == Q5_1;
    const uint8_t *pairs = block + 2 + 2 * has_minimum + 4 * has_fifth;
    const int middle = has_minimum ? 0 : has_fifth ? 16 : 8;
    uint32_t fifth = 0;
    to->scale = from_half(block), to->minimum = has_minimum ? from_half(block + 2) : 0;
    if (type == Q8_0) memcpy(to->levels, block + 2, GROUP);
    if (type == Q8_0) return;
    if (has_fifth) memcpy(&fifth, pairs - 4, 4);
    for (int j = 0; j < 16; j++) {
        to->levels[j] = ((pairs[j] & 15) | (fifth >> j & 1) << 4) - middle;
        to->levels[j + 16] = (pairs[j] >> 4 | (fifth >> (j + 16) & 1) << 4) - middle;
    }
}

static void read_k_block(Group *to, int type, const uint8_t *block, int i) { /* Reads group i of Q4_K or Q5_K. */
    const uint8_t *s = block + 4, *pairs = block + (type == Q5_K ? 48 : 16) + i / 2 * GROUP;
    const int scale = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
    const int minimum = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | s[i] >> 6 << 4;
    to->scale = from_half(block) * scale, to->minimum = -from_half(block + 2) * minimum;
    for (int j = 0; j < GROUP; j++)
        to->levels[j] = (pairs[j] >> i % 2 * 4 & 15) | (type == Q5_K ? (block[16 + j] >> i & 1) << 4 : 0);
}

static void read_q6_k(Group *to, const uint8_t *block, int i) { /* Here 16 inputs share a scale. */
    const uint8_t *low = block + i / 4 * 64 + i % 2 * GROUP, *high = block + 128 + i / 4 * GROUP;
    const int8_t *scales = (const int8_t *)block + 192 + 2 * i;
    const float scale = from_half(block + 208);
    for (int j = 0; j < GROUP; j++)
        to->levels[j] = ((low[j] >> i % 4 / 2 * 4 & 15) | (high[j] >> i % 4 * 2 & 3) << 4) - 32;
    for (int j = 0; j < GROUP; j++) to->numbers[j] = scale * scales[j / 16] * to->levels[j];
}

static void read_group(Group *to, int type, const uint8_t *row, int64_t g, int count) {
    to->has_levels = type >= Q4_0 && type <= Q5_K;
    if (type == F32 || type == F16 || type == BF16) read_numbers(to, type, row, g, count);
    else if (type <= Q8_0) read_block(to, type, row + g * BYTES[type]);
    else if (type == Q6_K) read_q6_k(to, row + g / K_GROUPS * BYTES[type], g % K_GROUPS);
    else read_k_block(to, type, row + g / K_GROUPS * BYTES[type], g % K_GROUPS);
}

/* ---- Rounding ---- */

INLINE vf round_levels(const float *x, float scale, float low, float high) {
    const vf level = nearest(load(x) / splat(scale));
    return larger(splat(low), -larger(splat(-high), -level));
}

static void to_numbers(Group *group) { /* Restores the numbers of levels. */
    for (int i = 0; i < GROUP; i += VL) {
        vb levels;
        memcpy(&levels, group->levels + i, VL);
        const vf level = __builtin_convertvector(__builtin_convertvector(levels, vi), vf);
        store(group->numbers + i, level * splat(group->scale) + splat(group->minimum));
    }
    group->has_levels = 0;
}

static float largest_number(const float *x) { /* Returns the number whose magnitude is largest. */
    vf most = {};
    EACH(i, GROUP / VL) most = larger(most, magnitude(load(x + VL * i)));
    const float top = largest(most);
    for (int i = 0; i < GROUP; i++)
        if (fabsf(x[i]) == top) return x[i];
    return NAN;
}

/* Returns the squared error of int4 levels with a scale, and the scale that fits these levels best. */
static float try_scale(const float *x, float scale, float *fitted) {
    vf products = {}, squares = {}, errors = {};
    for (int i = 0; i < GROUP; i += VL) {
        const vf level = round_levels(x + i, scale ? scale : 1, -8, 7), error = level * scale - load(x + i);
        products += level * load(x + i), squares += level * level, errors += error * error;
    }
    *fitted = total(products) / MAX(total(squares), 1);
    return total(errors);
}

static void quantize_group(Group *group, int bits) {
    const float top = largest_number(group->numbers);
    const float low = bits == 8 ? -127 : -8, high = -low - (bits == 4);
    uint16_t half = to_half(fabsf(top) / 127);
    float least = INFINITY, fitted;
    vf zeros = {};
    EACH(i, GROUP / VL) zeros += load(group->numbers + VL * i) * 0;
    if (total(zeros) != 0) half = to_half(NAN), bits = 8; /* Some number is NaN or infinite. */
    for (int i = 0; bits == 4 && i < TRIALS; i++) {
        try_scale(group->numbers, top / -(6.5f + 3.f * i / TRIALS), &fitted);
        const uint16_t rounded = to_half(fitted);
        const float error = try_scale(group->numbers, from_half((const uint8_t *)&rounded), &fitted);
        if (error < least) least = error, half = rounded;
    }
    group->scale = bits == 4 && least == INFINITY ? NAN : from_half((const uint8_t *)&half), group->minimum = 0;
    for (int i = 0; i < GROUP; i += VL) {
        const vf level = round_levels(group->numbers + i, group->scale ? group->scale : INFINITY, low, high);
        const vb narrow = __builtin_convertvector(__builtin_convertvector(level, vi), vb);
        memcpy(group->levels + i, &narrow, VL);
    }
}

/* ---- Writing ---- */

static void write_group(const Linear *m, int64_t output, int64_t g, const Group *from) {
    const int words = GROUP >> m->kind;
    const int64_t index = output / TILE * GROUPS(m->inputs) + g, lane = output % TILE;
    uint32_t *to = (uint32_t *)m->weights + index * words * TILE + lane, packed[GROUP];
    if (m->kind == FLOAT32) memcpy(packed, from->numbers, sizeof from->numbers);
    for (int i = 0; m->kind == BFLOAT16 && i < GROUP; i++)
        memcpy((uint16_t *)packed + i, (const char *)(from->numbers + i) + 2, 2);
    if (m->kind == INT8) memcpy(packed, from->levels, GROUP);
    const int middle = m->minimums ? 0 : 8;
    for (int j = 0; m->kind == INT4 && j < 16; j++)
        ((uint8_t *)packed)[j] = (from->levels[j] + middle) | (from->levels[j + 16] + middle) << 4;
    for (int k = 0; k < words; k++) to[k * TILE] = packed[k];
    if (m->kind >= INT8) ((uint16_t *)m->scales)[index * TILE + lane] = to_half(from->scale);
    if (m->minimums) ((uint16_t *)m->minimums)[index * TILE + lane] = to_half(from->minimum);
}

typedef struct {
    const Linear *m;
    int type;
    const uint8_t *rows;
    const int64_t *outputs;
    int64_t count, row_bytes;
    atomic_int is_infinite;
} Packing;

static void pack_group(Packing *p, int64_t row, int64_t g) {
    const Linear *m = p->m;
    const int fits_int4 = p->type == Q4_0 ? !m->minimums : m->minimums && (p->type == Q4_1 || p->type == Q4_K);
    Group group;
    read_group(&group, p->type, p->rows + row * p->row_bytes, g, (int)MIN(GROUP, m->inputs - g * GROUP));
    if (group.has_levels && m->kind != INT8 && !(m->kind == INT4 && fits_int4)) to_numbers(&group);
    if (m->kind >= INT8 && !group.has_levels) quantize_group(&group, m->kind == INT8 ? 8 : 4);
    if (m->kind >= INT8 && !(fabsf(group.scale) + fabsf(group.minimum) < 65520)) p->is_infinite = 1;
    write_group(m, p->outputs[row], g, &group);
}

static void pack_rows(void *packing, int thread) { /* Takes the rows of a tile at a time, whose words are adjacent. */
    Packing *p = packing;
    (void)thread;
    for (int64_t first; (first = take(TILE)) < p->count;)
        for (int64_t g = 0; g < GROUPS(p->m->inputs); g++)
            for (int64_t row = first; row < MIN(first + TILE, p->count); row++) pack_group(p, row, g);
}

typedef struct {
    int type, is_bfloat16;
    const uint8_t *rows;
    int64_t count, row_bytes, inputs;
    const int64_t *outputs;
    void *to;
} Restoring;

static void restore_rows(void *restoring, int thread) {
    const Restoring *p = restoring;
    (void)thread;
    for (int64_t row; (row = take(1)) < p->count;)
        for (int64_t g = 0; g < GROUPS(p->inputs); g++) {
            const int64_t start = p->outputs[row] * p->inputs + g * GROUP;
            const int count = (int)MIN(GROUP, p->inputs - g * GROUP);
            Group group;
            read_group(&group, p->type, p->rows + row * p->row_bytes, g, count);
            if (group.has_levels) to_numbers(&group);
            for (int i = 0; i < count; i += VL) {
                const vf numbers = load(group.numbers + i);
                if (!p->is_bfloat16) store_some((float *)p->to + start + i, numbers, count - i);
                if (!p->is_bfloat16) continue;
                const vi bits = (vi)numbers; /* Rounds to the nearest bfloat16, ties to even. */
                const vh half = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, vh);
                if (count - i >= VL) memcpy((uint16_t *)p->to + start + i, &half, sizeof half);
                else memcpy((uint16_t *)p->to + start + i, &half, (count - i) * 2);
            }
        }
}

/* Restores rows of a type as float32 or bfloat16, in a plain matrix of so many inputs. */
void restore(int type, const uint8_t *rows, int64_t count, int64_t row_bytes, const int64_t *outputs, int64_t inputs,
             int is_bfloat16, void *to, int thread_count) {
    Restoring restoring = {type, is_bfloat16, rows, count, row_bytes, inputs, outputs, to};
    in_parallel(restore_rows, &restoring, thread_count);
}

/* Copies rows of a type into a matrix. Returns whether a scale or a minimum is NaN or too large for float16. */
int pack(const Linear *m, int type, const uint8_t *rows, int64_t count, int64_t row_bytes, const int64_t *outputs,
         int thread_count) {
    Packing packing = {m, type, rows, outputs, count, row_bytes, 0};
    in_parallel(pack_rows, &packing, thread_count);
    return packing.is_infinite;
}
