/* The weight gradient of convolutions and linear layers, straight from the pruned input.
 *
 *   dw[k][c][tap] = sum of x[n][c][p] g[n][k][q] over samples n and places p, where q is the output place that x[p] meets
 *                   under the tap; only kept elements of x are visited, so a ratio of 0.9 leaves a tenth of the work
 *
 * The input is cut into chunks: rows of one sample, or several small samples.
 *   1. The kept elements of each channel in each chunk become a list: their values, and where in a tile their output places
 *      start (sparse_lists.c). A stride makes elements of different phase meet different taps: they are of different classes
 *      and go into different lists.
 *   2. For `width` output channels at a time, and chunk by chunk, the part of g that a chunk meets becomes a tile: places by
 *      channels, with zeros around it so that no tap has to ask whether it is inside. It fits the first level cache.
 *   3. For each channel the list runs along; the sums of as many taps as registers hold stay in registers.
 * The sums of a weight are made in the same order by any number of threads: they share weights, not a sum. Where weights
 * are too few for that, the chunks are cut into as many spans for any number of threads, and the sums of spans are added up.
 *
 * An element of g that is infinite meets kept values alone, never a zero in the place of a dropped one.
 */
#include "sparse_grad.h"
#include "scratch.h"

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t quad_index __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (quad_index){__VA_ARGS__})
#endif
typedef float quad __attribute__((vector_size(16)));

enum { AHEAD = 2 }; /* lists between fetching what one needs from memory and its turn */

#define SFX_KERNELS "sparse_grad_kernels.h"
#include "for_each_isa.h"

enum {
    TILE_BYTES = 24 << 10,       /* a tile, of a first level cache of 32 KiB or more */
    LONG_TILE_BYTES = 256 << 10, /* where few elements meet few taps: rather the second level than a start for each of them */
    FETCHED = 12,               /* rows of g between fetching one from memory and copying it */
    BLOCK = 64,                 /* places of g that are widened to float at once */
    FEW_SHARES = 8,             /* of 16 input channels of a tile: with fewer, threads share spans of chunks */
    SPANS = 16,
};

static const double SPARSE = 0.15; /* the density below which tiles are longer */

typedef struct {
    void (*accumulate)(const Grad *j, const List *lists, int64_t n, const float *tile, float *sums);
    void (*turn)(const float *from, int64_t row, int64_t rows, int64_t n, float *to, int64_t to_row, int64_t width);
} GradKernels;

#define GRAD(isa) {accumulate_##isa##_32, turn_##isa##_32}

static const GradKernels tables[ISAS] = {
#ifdef SFX_X86
    [ISA_AVX512] = GRAD(avx512),
    [ISA_AVX2] = GRAD(avx2),
#endif
#ifdef SFX_NEON
    [ISA_NEON] = GRAD(neon),
#endif
    [ISA_PORTABLE] = GRAD(portable),
};

static int64_t first(const Dim *d, int64_t i) { return d->transposed ? i * d->stride - d->padding : (i + d->padding) / d->stride; }
static int64_t phase(const Dim *d, int64_t i) { return d->transposed ? 0 : (i + d->padding) % d->stride; }
static int64_t shift(const Dim *d, int64_t t) { return d->transposed ? t * d->dilation : -(t * d->dilation / d->stride); }
static int64_t tap_phase(const Dim *d, int64_t t) { return d->transposed ? 0 : t * d->dilation % d->stride; }
static int64_t phases(const Dim *d) { return d->transposed ? 1 : d->stride; }

/* What one thread works in: a tile, room to widen g, and sums by channel, tap in order of class, and output channel. */
typedef struct {
    float *tile, *wide, *sums;
} Work;

static float widened(uint16_t bits, Type type) {
    if (type == BFLOAT16) {
        uint32_t wide = (uint32_t)bits << 16;
        float f;
        memcpy(&f, &wide, 4);
        return f;
    }
    uint32_t sign = (uint32_t)(bits >> 15) << 31, exponent = bits >> 10 & 31, fraction = bits & 1023, wide;
    if (exponent == 0) {
        float f = (float)fraction * 0x1p-24f;
        return sign ? -f : f;
    }
    wide = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | fraction << 13;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}

/* `rows` channels of n places, starting with element `at` of g, as floats: g itself, or a widened copy. */
static const float *floats_at(const Grad *j, int64_t at, int64_t row, int64_t rows, int64_t n, float *wide, int64_t *wide_row) {
    if (j->type == FLOAT32) return *wide_row = row, (const float *)j->g + at;
    const uint16_t *g = (const uint16_t *)j->g + at;
    for (int64_t k = 0; k < rows; k++)
        for (int64_t i = 0; i < n; i++) wide[k * n + i] = widened(g[k * row + i], j->type);
    *wide_row = n;
    return wide;
}

/* n places of one sample, from `place` on, into the tile. */
static void fill_run(const Grad *j, const Work *w, int64_t sample, int64_t channel, int64_t channels, int64_t place, int64_t n, float *tile) {
    int64_t all = j->groups * j->out, wide_row;
    if (j->g_last) {
        int64_t at = (sample * j->g_places + place) * all + channel;
        for (int64_t i = 0; i < n; i++, at += all, tile += j->width) {
            for (int64_t line = 0; line < channels; line += 16) __builtin_prefetch((const char *)j->g + (at + FETCHED * all + line) * (j->type == FLOAT32 ? 4 : 2));
            memcpy(tile, floats_at(j, at, 0, 1, channels, w->wide, &wide_row), (size_t)channels * 4);
            memset(tile + channels, 0, (size_t)(j->width - channels) * 4);
        }
        return;
    }
    int64_t at = (sample * all + channel) * j->g_places + place, step = j->type == FLOAT32 ? n : BLOCK;
    for (int64_t i = 0; i < n; i += step) {
        int64_t some = MIN(step, n - i);
        const float *from = floats_at(j, at + i, j->g_places, channels, some, w->wide, &wide_row);
        tables[active_isa].turn(from, wide_row, channels, some, tile + i * j->width, j->width, j->width);
    }
}

/* The part of g that a chunk of one sample, from input row `row` on, meets, for output channels of one tile. */
static void fill_tile(const Grad *j, const Work *w, int64_t sample, int64_t row, int64_t group, int64_t t, float *tile) {
    int64_t channel = group * j->out + t * j->width, channels = MIN(j->width, j->out - t * j->width);
    int64_t low = first(&j->dim[0], row) + j->dim[0].low, size0 = j->dim[0].out, size1 = j->dim[1].out, size2 = j->dim[2].out;
    int64_t plane = j->pitch[0], line = j->pitch[1];
    memset(tile, 0, (size_t)(j->front * j->width) * 4);
    tile += j->front * j->width;
    int64_t begin = MAX(0, MIN(size0, low)), end = MAX(begin, MIN(size0, low + j->tile_rows));
    if (begin == end) {
        memset(tile, 0, (size_t)(j->tile_rows * plane * j->width) * 4);
        return;
    }
    memset(tile, 0, (size_t)((begin - low) * plane * j->width) * 4);
    memset(tile + (end - low) * plane * j->width, 0, (size_t)((low + j->tile_rows - end) * plane * j->width) * 4);
    tile += (begin - low) * plane * j->width;
    if (plane == size1 * size2) {
        fill_run(j, w, sample, channel, channels, begin * plane, (end - begin) * plane, tile);
        return;
    }
    for (int64_t y = begin; y < end; y++, tile += plane * j->width) {
        for (int64_t z = 0; z < size1; z++) {
            float *to = tile + z * line * j->width;
            fill_run(j, w, sample, channel, channels, (y * size1 + z) * size2, size2, to);
            memset(to + size2 * j->width, 0, (size_t)((line - size2) * j->width) * 4);
        }
        memset(tile + size1 * line * j->width, 0, (size_t)((plane - size1 * line) * j->width) * 4);
    }
}

/* The sums of one tile and input channels [begin, end), as the weight has its dimensions: rows become columns. */
static void write_out(const Grad *j, const Work *w, int64_t t, int64_t begin, int64_t end, float *dw) {
    int64_t group = t / j->tiles, from = t % j->tiles * j->width, channels = MIN(j->width, j->out - from), rows = (end - begin) * j->taps, row = j->in * j->taps;
    if (j->transposed) {
        float *to = dw + ((group * j->in + begin) * j->out + from) * j->taps;
        for (int64_t c = begin; c < end; c++, to += j->out * j->taps) tables[active_isa].turn(w->sums + (c - begin) * j->taps * j->width, j->width, j->taps, channels, to, j->taps, j->taps);
        return;
    }
    float *to = dw + (group * j->out + from) * row + begin * j->taps;
    for (int64_t r = 0; r < rows; r += BLOCK) { /* some rows at a time, to fill cache lines */
        int64_t some = MIN(BLOCK, rows - r);
        const float *sums = w->sums + r * j->width;
        if (j->classes > 1) { /* from the order of classes into that of taps */
            sums = w->wide;
            for (int64_t i = 0; i < some; i++) memcpy(w->wide + i * j->width, w->sums + ((r + i) / j->taps * j->taps + j->tap_place[(r + i) % j->taps]) * j->width, (size_t)j->width * 4);
        }
        for (int64_t i = 0; i < channels; i += 4) tables[active_isa].turn(sums + i, j->width, some, MIN(4, channels - i), to + i * row + r, row, some);
    }
}

/* The sums of one part of the input channels of a group, for one tile of its output channels, over one span of chunks. */
static void sum_tile(const Grad *j, const Work *w, int64_t t, int64_t part, int64_t span) {
    int64_t group = t / j->tiles, begin = part_begin(j, part), end = part_begin(j, part + 1);
    memset(w->sums, 0, (size_t)((end - begin) * j->taps * j->width) * 4);
    for (int64_t chunk = share(j->chunks, span, j->spans); chunk < share(j->chunks, span + 1, j->spans); chunk++) {
        int64_t sample = chunk / j->row_chunks * j->samples, samples = MIN(j->samples, j->batch - sample), row = chunk % j->row_chunks * j->rows;
        for (int64_t s = 0; s < samples; s++) fill_tile(j, w, sample + s, row, group, t % j->tiles, w->tile + s * j->tile_places * j->width);
        const List *lists = j->lists + ((chunk * j->groups + group) * j->in + begin) * j->classes;
        tables[active_isa].accumulate(j, lists, (end - begin) * j->classes, w->tile, w->sums);
    }
}

/* The same over all chunks, and into dw. */
static void run_tile(const Grad *j, const Work *w, int64_t t, int64_t part, float *dw) {
    sum_tile(j, w, t, part, 0);
    write_out(j, w, t, part_begin(j, part), part_begin(j, part + 1), dw);
}

/* The sums of a tile over all spans, which follow each other, into dw. */
static void add_spans(const Grad *j, Work w, int64_t t, float *sums, float *dw) {
    int64_t n = j->in * j->taps * j->width;
    for (int64_t span = 1; span < j->spans; span++)
        for (int64_t i = 0; i < n; i++) sums[i] += sums[span * n + i];
    w.sums = sums;
    write_out(j, &w, t, 0, j->in, dw);
}

/* Where one tap is in each dimension. */
static void tap_at(const Dim *d, int64_t tap, int64_t *at) { at[0] = tap / (d[1].taps * d[2].taps), at[1] = tap / d[2].taps % d[1].taps, at[2] = tap % d[2].taps; }

/* Classes, their taps, and the order in which taps are summed. Returns the most taps that a class has. */
static int64_t sort_taps(Grad *j) {
    const Dim *d = j->dim;
    int64_t most = 0, at[3];
    memset(j->tap_start, 0, (size_t)(j->classes + 1) * sizeof *j->tap_start);
    for (int64_t t = 0; t < j->taps; t++) {
        tap_at(d, t, at);
        j->tap_place[t] = (tap_phase(&d[0], at[0]) * phases(&d[1]) + tap_phase(&d[1], at[1])) * phases(&d[2]) + tap_phase(&d[2], at[2]); /* its class */
        int64_t count = ++j->tap_start[j->tap_place[t] + 1];
        most = MAX(most, count);
    }
    for (int64_t class = 0; class < j->classes; class++) j->tap_start[class + 1] += j->tap_start[class];
    for (int64_t t = 0; t < j->taps; t++) j->tap_index[j->tap_place[t] = j->tap_start[j->tap_place[t]]++] = t;
    for (int64_t class = j->classes; class > 0; class--) j->tap_start[class] = j->tap_start[class - 1];
    j->tap_start[0] = 0;
    return most;
}

/* How much of the input makes a chunk, and what its tile looks like. */
static void plan_chunks(Grad *j, int64_t budget) {
    Dim *d = j->dim;
    int64_t before[3], pitch[3] = {1, 1, 1}, unit = phases(&d[0]);
    for (int i = 1; i < 3; i++) {
        int64_t low = first(&d[i], 0) + d[i].low, high = first(&d[i], d[i].size - 1) + d[i].high;
        before[i] = MAX(0, -low);
        pitch[i] = d[i].out + MAX(before[i], MAX(0, high - d[i].out + 1)); /* what is right of one line is left of the next */
    }
    j->pitch[0] = pitch[1] * pitch[2];
    j->pitch[1] = pitch[2];
    j->front = before[1] * pitch[2] + before[2];
    int64_t most = MAX(1, budget / (4 * j->width));
    j->rows = d[0].size;
    for (;;) {
        j->tile_rows = first(&d[0], j->rows - 1) - first(&d[0], 0) + d[0].high - d[0].low + 1;
        j->tile_places = j->front + j->tile_rows * j->pitch[0];
        if (j->tile_places <= most || j->rows <= unit) break;
        int64_t fitting = j->rows * most / j->tile_places / unit * unit;
        j->rows = MAX(unit, MIN(fitting, (j->rows - 1) / unit * unit));
    }
    j->samples = j->rows == d[0].size ? MAX(1, MIN(j->batch, most / j->tile_places)) : 1;
    j->chunk_places = j->samples * j->rows * d[1].size * d[2].size;
    j->row_chunks = (d[0].size + j->rows - 1) / j->rows;
    j->chunks = (j->batch + j->samples - 1) / j->samples * j->row_chunks;
}

static void make_table(Grad *j) {
    const Dim *d = j->dim;
    int64_t at = 0, low = first(&d[0], 0) + d[0].low;
    for (int64_t y = 0; y < j->rows; y++)
        for (int64_t z = 0; z < d[1].size; z++) {
            int64_t line = j->front + (first(&d[0], y) - low) * j->pitch[0] + first(&d[1], z) * j->pitch[1], lines = phase(&d[0], y) * phases(&d[1]) + phase(&d[1], z);
            int64_t place = first(&d[2], 0), own = phase(&d[2], 0); /* what both are for x, without dividing */
            for (int64_t x = 0; x < d[2].size; x++, at++) {
                int64_t class = lines * phases(&d[2]) + own;
                j->table[at] = (int32_t)((line + place) * j->width);
                int64_t taps = j->tap_start[class + 1] - j->tap_start[class];
                j->class_of[at] = (int32_t)(taps ? class : j->classes);
                if (taps) j->met[at / WORD] |= 1ull << at % WORD;
                if (j->transposed) place += d[2].stride;
                else if (++own == d[2].stride) own = 0, place++;
            }
        }
    for (int64_t i = 0; at < j->chunk_places; at++, i++) { /* the same for further samples */
        j->table[at] = j->table[i] + (int32_t)(j->tile_places * j->width);
        j->class_of[at] = j->class_of[i];
    }
    for (int64_t t = 0; t < j->taps; t++) {
        int64_t place[3];
        tap_at(d, j->tap_index[t], place);
        j->tap_shift[t] = (shift(&d[0], place[0]) * j->pitch[0] + shift(&d[1], place[1]) * j->pitch[1] + shift(&d[2], place[2])) * j->width;
    }
}

static size_t lay_out_work(const Grad *j, Work *w, char *block) {
    size_t used = 0;
    w->tile = piece(block, &used, j->samples * j->tile_places * j->width * 4);
    w->wide = piece(block, &used, j->width * BLOCK * 4);
    w->sums = piece(block, &used, (j->in / j->parts + 1) * j->taps * j->width * 4);
    return used;
}

/* Output channels of a tile and its bytes. Sums stay in registers: many taps, or many channels. */
static void plan_tiles(Grad *j, int64_t taps) {
    int64_t n = j->batch * j->groups * j->in * j->places;
    j->width = taps >= 6 || j->out <= 16 ? 16 : j->out >= 128 && (j->out % 64 == 0 || j->out >= 512) ? 64 : 32;
    j->tiles = (j->out + j->width - 1) / j->width;
    double density = (double)MAX(1, j->kept) / (double)MAX(1, n), bytes = TILE_BYTES * (SPARSE / density);
    plan_chunks(j, (int64_t)(taps >= 6 ? TILE_BYTES : MIN(MAX(bytes, TILE_BYTES), LONG_TILE_BYTES)));
}

/* sizes: batch, groups, input and output channels of a group; of each of three dimensions size, output size, taps, stride,
 * padding, dilation; transposed, whether channels are last in x and in g, type of g. dw has the dimensions of the weight.
 * Returns 0, 1 where mask and values do not go together, 2 where a value is not finite (nothing is written then: the zeros
 * around a tile would make NaNs of it), or -1 without memory for scratch. */
EXPORT int sfx_weight_grad(const void *g, const float *values, int64_t kept, const uint8_t *mask, const int64_t *sizes, float *dw, int threads) {
    Grad j = {.g = g, .values = values, .mask = mask, .kept = kept, .batch = sizes[0], .groups = sizes[1], .in = sizes[2], .out = sizes[3], .transposed = (int)sizes[22],
              .x_last = (int)sizes[23], .g_last = (int)sizes[24], .type = (Type)sizes[25], .places = 1, .g_places = 1, .classes = 1, .taps = 1};
    for (int i = 0; i < 3; i++) {
        const int64_t *d = sizes + 4 + 6 * i;
        Dim dim = {d[0], d[1], d[2], d[3], d[4], d[5], j.transposed, 0, 0};
        for (int64_t t = 0; t < dim.taps; t++) dim.low = MIN(dim.low, shift(&dim, t)), dim.high = MAX(dim.high, shift(&dim, t));
        j.dim[i] = dim;
        j.places *= dim.size, j.g_places *= dim.out, j.classes *= phases(&dim), j.taps *= dim.taps;
    }
    int status = -1;
    void *works = NULL;
    j.tap_start = malloc((size_t)(j.classes + 1 + 3 * j.taps) * sizeof *j.tap_start);
    if (!j.tap_start) goto done;
    j.tap_index = j.tap_start + j.classes + 1;
    j.tap_place = j.tap_index + j.taps;
    j.tap_shift = j.tap_place + j.taps;
    plan_tiles(&j, sort_taps(&j));
    /* Input channels are cut too where tiles alone cannot be shared evenly. */
    int64_t tiles = j.groups * j.tiles;
    j.spans = tiles * MAX(1, j.in / 16) < FEW_SHARES ? MIN(j.chunks, SPANS) : 1;
    j.parts = j.spans > 1 || tiles % threads == 0 || tiles >= 4 * threads ? 1 : MAX(1, MIN(j.in / 16, threads));
    j.met = calloc((size_t)(j.chunk_places / WORD + 1) + (size_t)(j.chunk_places + WORD), 8);
    if (!j.met) goto done;
    j.table = (int32_t *)(j.met + j.chunk_places / WORD + 1);
    j.class_of = j.table + j.chunk_places + WORD;
    make_table(&j);
    status = make_lists(&j, threads);
    if (status) goto done;

    Work none;
    int64_t turns = tiles * j.parts * j.spans, sums = j.in * j.taps * j.width;
    size_t each = lay_out_work(&j, &none, NULL), of_spans = 0;
    if (j.spans > 1) piece(NULL, &of_spans, turns * sums * 4);
    int shards = (int)MAX(1, MIN(turns, threads));
    works = take_scratch(of_spans + each * (size_t)shards + LINE);
    if (!works) {
        status = -1;
        goto done;
    }
    float *spans = (float *)whole_lines(works);
    char *own = (char *)spans + of_spans;
    FOR_SHARDS(s, shards, j.batch * j.groups * j.in * j.places) {
        Work w;
        lay_out_work(&j, &w, own + (size_t)s * each);
        for (int64_t i = share(turns, s, shards); i < share(turns, s + 1, shards); i++) {
            if (j.spans == 1) run_tile(&j, &w, i / j.parts, i % j.parts, dw);
            else {
                w.sums = spans + i * sums;
                sum_tile(&j, &w, i / j.spans, 0, i % j.spans);
            }
        }
    }
    if (j.spans > 1) {
        Work w;
        lay_out_work(&j, &w, own);
        for (int64_t t = 0; t < tiles; t++) add_spans(&j, w, t, spans + t * j.spans * sums, dw);
    }
done:
    free(j.starts);
    give_scratch(j.block);
    free(j.tap_start);
    free(j.met);
    give_scratch(works);
    return status;
}
