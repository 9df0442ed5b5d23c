/* Products of rows and matrices on a CPU, and the threads that share their work.

   A matrix (outputs, inputs) is stored in tiles of 16 outputs. Within a tile, outputs are interleaved by words of 4
   bytes: 1 float32, 2 bfloat16, 4 int8 or 8 int4 weights of an output. So one vector instruction multiplies the weights
   of many outputs by the same inputs, no sum runs across a vector, and a product reads its matrix as one stream.

   Each output is a single sum in the order of its inputs. This order depends neither on the number of rows nor on the
   number of threads, so a row's result never depends on its neighbors, to the last bit. For the same reason, the code
   is compiled without implicit fused multiply-adds: `multiply_add` is explicit. */
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined __x86_64__
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined __aarch64__
#include <arm_neon.h>
#define PAUSE() __asm__ volatile("isb")
#else
#define PAUSE() ((void)0)
#endif

#if defined __AVX512VNNI__ && defined __AVX512BW__
#define VL 16 /* numbers in a vector */
#elif defined __AVX2__ && defined __FMA__ && defined __F16C__
#define VL 8
#else
#define VL 4
#endif
#if VL == 16 || (VL == 8 && defined __AVXVNNI__)
#define VNNI 1 /* The dot product multiplies unsigned weights by signed inputs. */
#else
#define VNNI 0
#endif

#define TILE 16                  /* outputs */
#define VECTORS (TILE / VL)      /* vectors that have a word of each output of a tile */
#define GROUP 32                 /* inputs that share a scale */
#define BLOCK (VL == 16 ? 8 : 4) /* maximum rows of a kernel, whose sums are all in registers */
#define TILES(matrix) (((matrix)->outputs + TILE - 1) / TILE)
#define GROUPS(inputs) (((inputs) + GROUP - 1) / GROUP)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)
#else
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)
#endif

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef int8_t vb __attribute__((vector_size(VL)));
typedef float vf_memory __attribute__((vector_size(4 * VL), aligned(4), may_alias)); /* Needs no alignment. */
typedef int32_t vi_memory __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef uint16_t vh_memory __attribute__((vector_size(2 * VL), aligned(2), may_alias));

enum { FLOAT32, BFLOAT16, INT8, INT4 }; /* kinds of matrices */

typedef struct { /* A linear map. Missing outputs of the last tile and inputs of the last group are 0. */
    const void *weights;      /* (tiles, words, 16); byte j of an int4 group has inputs j and j + 16 */
    const uint16_t *scales;   /* int8 and int4: float16, (tiles, groups, 16) */
    const uint16_t *minimums; /* NULL, or float16, (tiles, groups, 16): a weight is level · scale + minimum */
    const float *bias;        /* (tiles, 16), or NULL */
    int32_t outputs, inputs, kind, unused;
} Linear;

/* ---- Vectors ---- */

INLINE vf splat(float x) { return (vf){} + x; }
INLINE vf load(const float *p) { return *(const vf_memory *)p; }
INLINE void store(float *p, vf v) { *(vf_memory *)p = v; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf larger(vf a, vf b) { return pick(a > b, a, b); }
INLINE vf magnitude(vf v) { return (vf)((vi)v & INT_MAX); }
INLINE vf nearest(vf v) { return (v + 12582912.f) - 12582912.f; } /* Adding 1.5 · 2²³ rounds to an integer. */

INLINE vi lanes(int64_t first) { /* first, first + 1, … */
    vi numbers;
    EACH(i, VL) numbers[i] = i + (int)first;
    return numbers;
}

/* Sets all but the first `count` numbers to 0. */
INLINE vf keep(vf v, int64_t count) { return count >= VL ? v : pick(lanes(0) < (int)count, v, splat(0)); }

INLINE void store_some(float *p, vf v, int64_t count) { /* Stores the first `count` numbers. */
    if (count >= VL) store(p, v);
    else memcpy(p, &v, count * sizeof(float));
}

INLINE float total(vf v) {
    float parts[VL];
    memcpy(parts, &v, sizeof v);
    for (int half = VL / 2; half; half /= 2) EACH(i, half) parts[i] += parts[i + half];
    return parts[0];
}

INLINE float largest(vf v) {
    float parts[VL];
    memcpy(parts, &v, sizeof v);
    for (int half = VL / 2; half; half /= 2) EACH(i, half) parts[i] = MAX(parts[i], parts[i + half]);
    return parts[0];
}

INLINE vf multiply_add(vf a, vf b, vf c) { /* a · b + c */
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined __aarch64__
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* Adds products of 4 bytes to each sum. The weights are unsigned with VNNI or if `small`, which means below 16. */
INLINE vi dot(vi sums, vi weights, vi x, const int small) {
    (void)small;
#if VL == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif VNNI
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#elif VL == 8
    __m256i size = (__m256i)weights, signed_x = (__m256i)x;
    if (!small) signed_x = _mm256_sign_epi8(signed_x, size), size = _mm256_abs_epi8(size);
    return sums + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), _mm256_set1_epi16(1));
#elif defined __ARM_FEATURE_DOTPROD
    return (vi)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)x);
#else
    for (int left = 24; left >= 0; left -= 8) sums += (weights << left >> 24) * (x << left >> 24);
    return sums;
#endif
}

INLINE vf load_half(const uint16_t *p) { /* float16 to float32 */
#if VL == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VL == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    const vi bits = __builtin_convertvector(*(const vh_memory *)p, vi); /* Exponents differ by 112. */
    return (vf)((vi)((vf)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
#endif
}

/* ---- Threads ---- */

enum { MAX_THREADS = 63, PIECES = 4 }; /* Each thread gets some 4 pieces of a product, and a slow one fewer. */
enum { PAUSES = 1000 };                /* Some 50 µs, after which a waiting thread sleeps and frees its core. */
typedef void Work(void *argument, int thread);

static struct { _Alignas(64) atomic_int value; } job, arrived, phase, next, sleeping;
static int threads = 1, started = 1; /* in the current job, and in the process; thread 0 is the caller */
static Work *work;
static void *argument;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

/* Returns the number of the next `count` pieces of work, which no other thread gets. */
static int take(int count) { return atomic_fetch_add(&next.value, count); }

static int await_change(atomic_int *counter, int old) {
    int now = old;
    for (int i = 0; i < PAUSES && (now = *counter) == old; i++) PAUSE();
    if (now != old) return now;
    pthread_mutex_lock(&lock);
    sleeping.value++;
    while ((now = *counter) == old) pthread_cond_wait(&wake, &lock);
    sleeping.value--;
    pthread_mutex_unlock(&lock);
    return now;
}

static void change(atomic_int *counter, int value) {
    *counter = value;
    if (!sleeping.value) return;
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
}

/* Waits for all threads of the job. After that, `take` starts at 0 again. */
static void barrier(void) {
    const int now = phase.value;
    if (atomic_fetch_add(&arrived.value, 1) < threads - 1) await_change(&phase.value, now);
    else {
        arrived.value = next.value = 0;
        change(&phase.value, now + 1);
    }
}

static void *serve(void *number) { /* The last 6 bits of a job are its number of threads. */
    for (int seen = 0;;) {
        seen = await_change(&job.value, seen);
        if ((intptr_t)number < seen % 64) work(argument, (int)(intptr_t)number), barrier();
    }
    return NULL;
}

static void forget_threads(void) { threads = started = 1, arrived.value = sleeping.value = 0; }

static void start_threads(int count) {
    static int is_first = 1;
    sigset_t all, old; /* Signals are for Python's threads. */
    sigfillset(&all), pthread_sigmask(SIG_SETMASK, &all, &old);
    if (is_first) is_first = 0, pthread_atfork(NULL, NULL, forget_threads); /* Threads don't survive a fork. */
    for (pthread_t thread; started < MIN(count, MAX_THREADS); started++) {
        if (started == 1) job.value = 0;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)started)) break; /* Fewer threads do the work. */
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/* Calls `function` in `count` threads. Callers must not overlap. */
static void in_parallel(Work *function, void *its_argument, int count) {
    if (count > started) start_threads(count);
    threads = MIN(count, started), work = function, argument = its_argument;
    if (threads > 1) change(&job.value, (job.value / 64 + 1) % (1 << 24) * 64 + threads);
    work(argument, 0), barrier();
}

/* ---- Rows of inputs ---- */

typedef struct { /* Rows in blocks of 1, 4 or 8 rows, which are interleaved like the outputs of a tile: */
    float *numbers; /* (inputs, rows of the block), for float32 and bfloat16 matrices */
    int8_t *levels; /* (words of 4, rows of the block, 4), for int8 and int4 matrices */
    float *scales;  /* (groups, rows of the block) */
    int32_t *sums;  /* (groups, rows of the block), of levels */
    int64_t groups;
} Rows;

/* Returns the rows of the next block if `left` rows are left. The last block can have fewer. */
static int block_size(int left) { return BLOCK == 8 && left > 4 ? 8 : left > 1 ? 4 : 1; }

/* Returns what to add to each level that a kernel reads. Stored int4 levels are 0 … 15, and mean −8 … 7 if the matrix has
   no minimums. With VNNI, int8 levels get 128 added while they are read. */
INLINE int level_offset(const Linear *m, int kind) { return kind == INT8 ? -128 * VNNI : m->minimums ? 0 : -8; }

/* Rounds a row to levels −127 … 127 with a scale per group. It becomes row `r` of the block that begins at row `start`
   and has R rows. A NaN or infinity makes the scale NaN. */
static void quantize_row(const float *x, const Rows *to, int64_t start, int r, int R) {
    int32_t *words = (int32_t *)to->levels + start * to->groups * 8 + r;
    int64_t at = start * to->groups + r;
    for (int64_t g = 0; g < to->groups; g++, x += GROUP, at += R, words += 8 * R) {
        vf most = {}, sum = {};
        int32_t bytes[8];
        EACH(i, GROUP / VL) most = larger(most, magnitude(load(x + VL * i)));
        const float top = largest(most), levels_per_unit = top > 1e-30f ? 127 / top : 0;
        EACH(i, GROUP / VL) {
            const vf level = nearest(load(x + VL * i) * levels_per_unit);
            const vb narrow = __builtin_convertvector(__builtin_convertvector(level, vi), vb);
            memcpy((int8_t *)bytes + VL * i, &narrow, VL);
            sum += level;
        }
        EACH(j, 8) words[j * R] = bytes[j];
        to->scales[at] = top / 127 + 0 * total(sum);
        to->sums[at] = isfinite(total(sum)) ? (int)total(sum) : 0;
    }
}

static void copy_row(const float *x, const Rows *to, int64_t start, int r, int R) {
    float *numbers = to->numbers + start * to->groups * GROUP + r;
    for (int64_t k = 0; k < to->groups * GROUP; k++) numbers[k * R] = x[k];
}

/* ---- Products ----

   A kernel multiplies R rows, from row `row` on, by N tiles. It returns y (N · R, 16), rows of a tile side by side.
   R, N and kind are constants, so each combination becomes a loop of its own, with all sums in registers. */

INLINE void multiply_numbers(const Linear *m, const Rows *x, int64_t row, int64_t tile, float (*y)[TILE], const int R,
                             const int N, const int kind) {
    const int each = kind == FLOAT32 ? 1 : 2; /* weights in a word */
    const int64_t words = x->groups * GROUP / each;
    const char *w = (const char *)m->weights + tile * words * 64;
    const float *numbers = x->numbers + row * x->groups * GROUP;
    vf sums[N][R][VECTORS];
    EACH(t, N) EACH(r, R) EACH(n, VECTORS) sums[t][r][n] = (vf){};
    for (int64_t k = 0; k < words; k++, w += 64, numbers += each * R)
        EACH(t, N) EACH(n, VECTORS) {
            const vi word = *(const vi_memory *)(w + t * words * 64 + 4 * VL * n);
            const vf first = (vf)(kind == FLOAT32 ? word : word << 16), second = (vf)(word & (int)0xffff0000);
            EACH(r, R) sums[t][r][n] = multiply_add(first, splat(numbers[r]), sums[t][r][n]);
            if (kind == BFLOAT16) EACH(r, R) sums[t][r][n] = multiply_add(second, splat(numbers[R + r]), sums[t][r][n]);
        }
    EACH(t, N) EACH(r, R) EACH(n, VECTORS) store(y[t * R + r] + VL * n, sums[t][r][n]);
}

/* Sums of levels are exact integers within a group. */
INLINE void multiply_levels(const Linear *m, const Rows *x, int64_t row, int64_t tile, float (*y)[TILE], const int R,
                            const int N, const int kind) {
    const int words = kind == INT8 ? 8 : 4; /* of a group */
    const int64_t groups = x->groups;
    const char *w = (const char *)m->weights + tile * groups * words * 64;
    const uint16_t *scales = m->scales + tile * groups * TILE;
    const uint16_t *minimums = m->minimums ? m->minimums + tile * groups * TILE : NULL;
    const int32_t *levels = (const int32_t *)x->levels + row * groups * 8, *level_sums = x->sums + row * groups;
    const float *x_scales = x->scales + row * groups;
    vf sums[N][R][VECTORS];
    EACH(t, N) EACH(r, R) EACH(n, VECTORS) sums[t][r][n] = (vf){};
    const int offset = level_offset(m, kind);
    for (int64_t g = 0; g < groups; g++, w += words * 64, levels += 8 * R, level_sums += R, x_scales += R)
        EACH(t, N) {
            vi dots[R][VECTORS];
            EACH(r, R) EACH(n, VECTORS) dots[r][n] = (vi){} + offset * level_sums[r];
            EACH(j, words) EACH(n, VECTORS) {
                const vi word = *(const vi_memory *)(w + (t * groups * words + j) * 64 + 4 * VL * n);
                if (kind == INT8) {
                    const vi level = VNNI ? word ^ (int)0x80808080 : word;
                    EACH(r, R) dots[r][n] = dot(dots[r][n], level, (vi){} + levels[j * R + r], 0);
                } else {
                    const vi low = word & 0x0f0f0f0f, high = word >> 4 & 0x0f0f0f0f;
                    EACH(r, R) dots[r][n] = dot(dots[r][n], low, (vi){} + levels[j * R + r], 1);
                    EACH(r, R) dots[r][n] = dot(dots[r][n], high, (vi){} + levels[(j + 4) * R + r], 1);
                }
            }
            EACH(n, VECTORS) {
                const vf scale = load_half(scales + (t * groups + g) * TILE + VL * n);
                EACH(r, R) {
                    const vf dots_of_row = __builtin_convertvector(dots[r][n], vf);
                    sums[t][r][n] = multiply_add(dots_of_row, scale * x_scales[r], sums[t][r][n]);
                }
                if (!minimums) continue;
                const vf minimum = load_half(minimums + (t * groups + g) * TILE + VL * n);
                EACH(r, R) sums[t][r][n] = multiply_add(minimum, splat(level_sums[r] * x_scales[r]), sums[t][r][n]);
            }
        }
    EACH(t, N) EACH(r, R) EACH(n, VECTORS) store(y[t * R + r] + VL * n, sums[t][r][n]);
}

/* A single row reads 4 tiles at once: sums of one tile would wait for each other. In float32 and bfloat16, 8 rows share
   the inputs that they load among 2 tiles. */
#define CASE(function, kind, R, N) case kind * 128 + R * 8 + N: function(m, x, row, tile, y, R, N, kind); break;
#define CASES(function, kind) CASE(function, kind, 1, 1) CASE(function, kind, 1, 4) CASE(function, kind, 4, 1)

static void multiply(const Linear *m, const Rows *x, int64_t row, int R, int64_t tile, int N, float (*y)[TILE]) {
    switch (m->kind * 128 + R * 8 + N) {
        CASES(multiply_numbers, FLOAT32) CASES(multiply_numbers, BFLOAT16)
        CASES(multiply_levels, INT8) CASES(multiply_levels, INT4)
#if BLOCK == 8
        CASE(multiply_numbers, FLOAT32, 8, 1) CASE(multiply_numbers, FLOAT32, 8, 2)
        CASE(multiply_numbers, BFLOAT16, 8, 1) CASE(multiply_numbers, BFLOAT16, 8, 2)
        CASE(multiply_levels, INT8, 8, 1) CASE(multiply_levels, INT4, 8, 1)
#endif
    }
}

/* out (rows, outputs) = x Wᵀ + b, or with `adds` out += x Wᵀ + b. A row of `out` has room for whole tiles. */
static void linear(const Linear *m, const Rows *x, int rows, float *out, int64_t stride, int adds) {
    const int shares_inputs = BLOCK == 8 && rows > 4 && m->kind <= BFLOAT16;
    const int64_t tiles = TILES(m), at_once = rows == 1 ? 4 : shares_inputs ? 2 : 1;
    const int64_t piece = (tiles / (PIECES * threads) / at_once + 1) * at_once;
    for (int64_t first; (first = take((int)piece)) < tiles;) {
        const int64_t end = MIN(first + piece, tiles);
        for (int64_t tile = first, together; tile < end; tile += together) {
            together = end - tile >= at_once ? at_once : 1;
            for (int row = 0, R; row < rows; row += R) {
                float y[16][TILE];
                R = block_size(rows - row);
                const int N = (int)together;
                if (N == 2 && R < 8) multiply(m, x, row, R, tile, 1, y), multiply(m, x, row, R, tile + 1, 1, y + R);
                else multiply(m, x, row, R, tile, N, y);
                for (int i = 0; i < N * R; i++) {
                    if (row + i % R >= rows) continue;
                    float *to = out + (row + i % R) * stride + (tile + i / R) * TILE;
                    EACH(n, VECTORS) {
                        vf v = load(y[i] + VL * n);
                        if (m->bias) v += load(m->bias + (tile + i / R) * TILE + VL * n);
                        store(to + VL * n, adds ? load(to + VL * n) + v : v);
                    }
                }
            }
        }
    }
    barrier();
}

/* Returns one weight. This defines the layout of a matrix. */
static float weight_at(const Linear *m, int64_t output, int64_t input) {
    const int64_t groups = GROUPS(m->inputs), lane = output % TILE, g = output / TILE * groups + input / GROUP;
    const int64_t k = input % GROUP; /* within group g */
    const char *tile_group = (const char *)m->weights + g * GROUP * (64 >> m->kind);
    if (m->kind == FLOAT32) return ((const float *)tile_group)[k * TILE + lane];
    if (m->kind == BFLOAT16) {
        const union { uint32_t bits; float number; } u = {
            (uint32_t)((const uint16_t *)tile_group)[(k / 2 * TILE + lane) * 2 + k % 2] << 16};
        return u.number;
    }
    const uint16_t halves[2][VL] = {{m->scales[g * TILE + lane]}, {m->minimums ? m->minimums[g * TILE + lane] : 0}};
    const float scale = load_half(halves[0])[0], minimum = load_half(halves[1])[0];
    const int8_t byte = ((const int8_t *)tile_group)[(k % (m->kind == INT8 ? 32 : 16) / 4 * TILE + lane) * 4 + k % 4];
    const int level = m->kind == INT8 ? byte : (k < 16 ? byte & 15 : byte >> 4 & 15) + level_offset(m, INT4);
    return level * scale + minimum;
}
