/* The weight gradient of convolutions and linear layers, straight from the pruned input.
 *
 *   dw[k][c][tap] = sum of x[n][c][p] g[n][k][q] over samples n and places p, where q is the output place that x[p] meets
 *                   under the tap; only kept elements of x are visited, so a ratio of 0.9 leaves a tenth of the work
 *
 * The input is cut into chunks: rows of one sample, or several small samples.
 *   1. The kept elements of each channel in each chunk become a list: their values, and where in a tile their output places
 *      start. A stride makes elements of different phase meet different taps: they go into different lists.
 *   2. For `width` output channels at a time, and chunk by chunk, the part of g that a chunk meets becomes a tile: places by
 *      channels, with zeros around it so that no tap has to ask whether it is inside. It fits the first level cache.
 *   3. For each channel the list runs along; the sums of as many taps as registers hold stay in registers.
 * The sums of a weight are made in the same order by any number of threads: they share weights, never a sum.
 *
 * An element of g that is infinite meets kept values alone, never a zero in the place of a dropped one.
 */
#include "common.h"

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t quad_index __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (quad_index){__VA_ARGS__})
#endif
typedef float quad __attribute__((vector_size(16)));

#define SFX_KERNELS "sparse_grad_kernels.h"
#include "for_each_isa.h"

enum {
    TILE_BYTES = 24 << 10,      /* a tile, of a first level cache of 32 KiB */
    LONG_TILE_BYTES = 64 << 10, /* where there are one or two taps, lists are short: rather the second level than many starts */
    FEW_CLASSES = 4,            /* are listed one after the other, more in two passes over single bits */
    SPARE = 16,                 /* entries that the last register of a list may write beyond it */
    BLOCK = 64,                 /* places of g that are widened to float at once */
};

typedef struct {
    int64_t (*list)(Bits bits, int64_t n, const int32_t *table, int64_t most, int32_t *out);
    int64_t (*list_class)(Bits bits, int64_t n, const int32_t *table, const uint64_t *own, const float *values, int64_t most, int64_t room, int64_t *start, int32_t *out, float *out_values);
    void (*accumulate)(const int32_t *at, const float *values, int64_t n, const float *tile, const int64_t *shift, int taps, int width, float *sums);
    void (*turn)(const float *from, int64_t row, int64_t rows, int64_t n, float *to, int64_t to_row, int64_t width);
} GradKernels;

#define GRAD(isa) {list_##isa##_32, list_class_##isa##_32, accumulate_##isa##_32, turn_##isa##_32}

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

/* One dimension. Input place i under tap t meets output place first(i) + shift(t), if their phases are equal. */
typedef struct {
    int64_t size, out, taps, stride, padding, dilation;
    int transposed;
    int64_t low, high; /* of the shifts */
} Dim;

static int64_t first(const Dim *d, int64_t i) { return d->transposed ? i * d->stride - d->padding : (i + d->padding) / d->stride; }
static int64_t phase(const Dim *d, int64_t i) { return d->transposed ? 0 : (i + d->padding) % d->stride; }
static int64_t shift(const Dim *d, int64_t t) { return d->transposed ? t * d->dilation : -(t * d->dilation / d->stride); }
static int64_t tap_phase(const Dim *d, int64_t t) { return d->transposed ? 0 : t * d->dilation % d->stride; }
static int64_t phases(const Dim *d) { return d->transposed ? 1 : d->stride; }

typedef enum { FLOAT32, BFLOAT16, FLOAT16 } Type;

/* The kept elements of one channel, in one chunk and of one class. */
typedef struct {
    const int32_t *at;   /* where their output places start in the tile */
    const float *values;
    int64_t n;
} List;

typedef struct {
    const GradKernels *k;
    const void *g;
    const float *values;
    const uint8_t *mask;
    int64_t kept, batch, groups, in, out; /* in, out: channels of a group */
    Dim dim[3];
    int x_last, g_last;                   /* channels are the last dimension */
    Type type;                            /* of g */
    int64_t places, g_places, classes, taps;
    int64_t width, tiles;                 /* output channels of a tile, tiles of a group */
    int64_t pitch[2], front, rows, tile_rows, samples, tile_places; /* of a chunk */
    int64_t chunk_places, row_chunks, chunks; /* chunks of a sample, chunks in all */
    int32_t *table;                       /* of each place of a chunk: where its output places start in the tile */
    int32_t *class_of;                    /* and its class: which taps it meets; negative if none */
    uint64_t *own;                        /* where there are few classes: for each, bits of its places, by sample */
    int64_t met, own_words;               /* classes that meet a tap; words of bits for a sample */
    int64_t *tap_start, *tap_shift, *tap_index; /* the taps of each class, their shift in the tile, and which they are */
    int64_t *starts;                      /* of the values of each run: a sample's channel, or where x_last a place */
    List *lists;                          /* by chunk, channel of all groups, and class */
    int32_t *at;                          /* of all lists, with some to spare behind each */
    float *copied;                        /* their values, where they cannot stay where they are */
} Grad;

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
            memcpy(tile, floats_at(j, at, 0, 1, channels, w->wide, &wide_row), (size_t)channels * 4);
            memset(tile + channels, 0, (size_t)(j->width - channels) * 4);
        }
        return;
    }
    int64_t at = (sample * all + channel) * j->g_places + place, step = j->type == FLOAT32 ? n : BLOCK;
    for (int64_t i = 0; i < n; i += step) {
        int64_t some = MIN(step, n - i);
        const float *from = floats_at(j, at + i, j->g_places, channels, some, w->wide, &wide_row);
        j->k->turn(from, wide_row, channels, some, tile + i * j->width, j->width, j->width);
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

INLINE List *lists_of(const Grad *j, int64_t chunk, int64_t channel) { return j->lists + (chunk * j->groups * j->in + channel) * j->classes; }

/* Room for the lists of each class, as many entries as were counted; returns how many there are in all. */
static int64_t open_lists(const Grad *j, List *lists, int64_t first, int64_t *counts) {
    int64_t used = 0;
    for (int64_t i = 0; i < j->classes; i++) {
        int64_t count = counts[i];
        lists[i] = (List){j->at + first + used, j->copied + first + used, 0};
        counts[i] = first + used;
        used += count;
    }
    return used;
}

/* The lists of one channel in one chunk, where channels are planes. Its entries are from *next to `end`; *done is how many
 * values of this sample's run were listed in earlier chunks. The two move apart if the mask changes: entries that a list has
 * are not given away again, because the taps of one class may reach out of the tile from the places of another. */
static void list_plane(const Grad *j, int64_t chunk, int64_t channel, int64_t end, int64_t *next, int64_t *done, int64_t *counts) {
    int64_t inner = j->dim[1].size * j->dim[2].size, all = j->groups * j->in, bytes = (j->batch * all * j->places + 7) / 8;
    int64_t sample = chunk / j->row_chunks * j->samples, samples = MIN(j->samples, j->batch - sample), row = chunk % j->row_chunks * j->rows;
    int64_t n = MIN(j->rows, j->dim[0].size - row) * inner, used = *next;
    List *lists = lists_of(j, chunk, channel);
    if (j->classes == 1) { /* values stay where they are, but for those of several samples, which lie apart */
        lists[0] = (List){j->at + used, j->copied + used, 0};
        for (int64_t s = 0; s < samples; s++) {
            int64_t run = (sample + s) * all + channel, start = MIN(j->starts[run] + *done, j->kept);
            int64_t most = MIN(j->starts[run + 1], j->kept) - start; /* what there is room for, whatever the mask says now */
            int64_t found = j->k->list((Bits){j->mask, bytes, run * j->places + row * inner}, n, j->table + s * j->places, most, j->at + used);
            if (samples > 1) memcpy(j->copied + used, j->values + start, (size_t)found * 4);
            else lists[0].values = j->values + start, *done += found;
            used += found;
        }
        lists[0].n = used - *next;
        *next = used;
        return;
    }
    if (j->met <= FEW_CLASSES) { /* one class after the other */
        int64_t seen = *done;
        for (int64_t class = 0; class < j->classes; class++) {
            lists[class] = (List){j->at + used, j->copied + used, 0};
            if (j->tap_start[class] == j->tap_start[class + 1]) continue;
            for (int64_t s = 0; s < samples; s++) {
                int64_t run = (sample + s) * all + channel, start = MIN(j->starts[run] + *done, j->kept), last = start, most = MIN(j->starts[run + 1], j->kept) - start;
                Bits bits = {j->mask, bytes, run * j->places + row * inner};
                int64_t found = j->k->list_class(bits, n, j->table + s * j->places, j->own + class * j->own_words, j->values + start, most, end - used, &last, j->at + used, j->copied + used);
                used += found, lists[class].n += found;
                if (samples == 1) seen = last - j->starts[run];
            }
        }
        *done = seen;
        *next = used;
        return;
    }
    /* Twice over the bits: to count the elements of each class, and to place them. */
    int64_t room = end - used, seen = *done;
    memset(counts, 0, (size_t)j->classes * sizeof *counts);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t s = 0; s < samples; s++) {
            int64_t run = (sample + s) * all + channel, start = MIN(j->starts[run] + *done, j->kept), stop = MIN(j->starts[run + 1], j->kept);
            Bits bits = {j->mask, bytes, run * j->places + row * inner};
            for (int64_t i = 0; i < n; i += WORD) {
                uint64_t keep = within(bits_at(bits, i, MIN(WORD, n - i)), n - i, stop - start);
                for (; keep; keep &= keep - 1, start++) {
                    int64_t place = s * j->places + i + __builtin_ctzll(keep), class = j->class_of[place];
                    if (class < 0) continue;
                    if (!pass) {
                        if (room > 0) counts[class]++, room--;
                    } else if (counts[class] < (class + 1 < j->classes ? lists[class + 1].at - j->at : used)) {
                        j->at[counts[class]] = j->table[place];
                        j->copied[counts[class]++] = j->values[start];
                        lists[class].n++;
                    }
                }
            }
            if (samples == 1) seen = start - j->starts[run];
        }
        if (!pass) used += open_lists(j, lists, *next, counts);
    }
    *done = seen;
    *next = used;
}

/* The lists of all channels in one chunk, where channels are the last dimension: twice over the bits, as above. */
static void list_rows(const Grad *j, int64_t chunk, int64_t *counts) {
    int64_t inner = j->dim[1].size * j->dim[2].size, all = j->groups * j->in, bytes = (j->batch * j->places * all + 7) / 8;
    int64_t sample = chunk / j->row_chunks * j->samples, samples = MIN(j->samples, j->batch - sample), row = chunk % j->row_chunks * j->rows;
    int64_t n = MIN(j->rows, j->dim[0].size - row) * inner, begin = sample * j->places + row * inner, count = all * j->classes, used = j->starts[begin] + chunk * SPARE;
    List *lists = lists_of(j, chunk, 0);
    memset(counts, 0, (size_t)count * sizeof *counts);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t s = 0; s < samples; s++)
            for (int64_t p = 0; p < n; p++) {
                int64_t run = begin + s * j->places + p, place = s * j->places + p, class = j->class_of[place];
                if (class < 0) continue;
                int64_t start = MIN(j->starts[run], j->kept), end = MIN(j->starts[run + 1], j->kept);
                for (int64_t i = 0; i < all; i += WORD) {
                    uint64_t keep = within(bits_at((Bits){j->mask, bytes, run * all}, i, MIN(WORD, all - i)), all - i, end - start);
                    for (; keep; keep &= keep - 1, start++) {
                        int64_t list = (i + __builtin_ctzll(keep)) * j->classes + class;
                        if (!pass) counts[list]++;
                        else if (lists[list].n < counts[list]) {
                            int64_t at = lists[list].at - j->at + lists[list].n++;
                            j->at[at] = j->table[place];
                            j->copied[at] = j->values[start];
                        }
                    }
                }
            }
        for (int64_t i = 0; !pass && i < count; i++) {
            lists[i] = (List){j->at + used, j->copied + used, 0};
            used += counts[i];
        }
    }
}

/* Shard s of so many of all lists. Planes are shared by channel, rows by chunk. Every run, or chunk of rows, has entries of its
 * own: as many as it has values, and some to spare. */
static void make_lists(const Grad *j, int s, int shards, int64_t *counts) {
    int64_t all = j->groups * j->in;
    if (j->x_last) {
        for (int64_t chunk = share(j->chunks, s, shards); chunk < share(j->chunks, s + 1, shards); chunk++) list_rows(j, chunk, counts);
        return;
    }
    for (int64_t sample = 0, chunk = 0; sample < j->batch; sample += j->samples, chunk += j->row_chunks) {
        int64_t first = j->starts[sample * all] + sample * all * SPARE, samples = MIN(j->samples, j->batch - sample);
        for (int64_t channel = 0; channel < share(all, s + 1, shards); channel++) {
            int64_t done = 0, next = first, end = first;
            for (int64_t i = sample; i < sample + samples; i++) end += j->starts[i * all + channel + 1] - j->starts[i * all + channel];
            if (channel >= share(all, s, shards))
                for (int64_t r = 0; r < j->row_chunks; r++) list_plane(j, chunk + r, channel, end, &next, &done, counts);
            first = end + SPARE;
        }
    }
}

/* The sums of one tile and input channels [begin, end), as the weight has its dimensions: rows become columns. */
static void write_out(const Grad *j, const float *sums, int64_t t, int64_t begin, int64_t end, int transposed, float *dw) {
    int64_t group = t / j->tiles, from = t % j->tiles * j->width, channels = MIN(j->width, j->out - from), rows = (end - begin) * j->taps, row = j->in * j->taps;
    if (!transposed && j->classes == 1) { /* taps are in their own order: some rows at a time, to fill cache lines */
        float *to = dw + (group * j->out + from) * row + begin * j->taps;
        for (int64_t r = 0; r < rows; r += BLOCK)
            for (int64_t i = 0; i < channels; i += 4)
                j->k->turn(sums + r * j->width + i, j->width, MIN(BLOCK, rows - r), MIN(4, channels - i), to + i * row + r, row, MIN(BLOCK, rows - r));
        return;
    }
    for (int64_t r = 0; r < rows; r++, sums += j->width) {
        int64_t c = begin + r / j->taps, tap = j->tap_index[r % j->taps];
        int64_t first = transposed ? ((group * j->in + c) * j->out + from) * j->taps : ((group * j->out + from) * j->in + c) * j->taps;
        for (int64_t i = 0; i < channels; i++) dw[first + tap + i * (transposed ? j->taps : row)] = sums[i];
    }
}

/* Part `part` of the input channels of a group, for one tile of its output channels: all chunks, then into dw. */
static void run_tile(const Grad *j, const Work *w, int64_t t, int part, int parts, int transposed, float *dw) {
    int64_t group = t / j->tiles, begin = share(j->in, part, parts), end = share(j->in, part + 1, parts);
    memset(w->sums, 0, (size_t)((end - begin) * j->taps * j->width) * 4);
    for (int64_t chunk = 0; chunk < j->chunks; chunk++) {
        int64_t sample = chunk / j->row_chunks * j->samples, samples = MIN(j->samples, j->batch - sample), row = chunk % j->row_chunks * j->rows;
        for (int64_t s = 0; s < samples; s++) fill_tile(j, w, sample + s, row, group, t % j->tiles, w->tile + s * j->tile_places * j->width);
        const List *list = lists_of(j, chunk, group * j->in + begin);
        float *sums = w->sums;
        for (int64_t c = begin; c < end; c++, sums += j->taps * j->width)
            for (int64_t class = 0; class < j->classes; class++, list++) {
                int64_t taps = j->tap_start[class];
                if (list->n) j->k->accumulate(list->at, list->values, list->n, w->tile, j->tap_shift + taps, (int)(j->tap_start[class + 1] - taps), (int)j->width, sums + taps * j->width);
            }
    }
    write_out(j, w->sums, t, begin, end, transposed, dw);
}

/* Classes, their taps, and the order in which taps are summed. Returns the most taps that a class has. */
static int64_t sort_taps(Grad *j) {
    const Dim *d = j->dim;
    int64_t found = 0, most = 0;
    for (int64_t class = 0; class < j->classes; class++) {
        j->tap_start[class] = found;
        for (int64_t t = 0; t < j->taps; t++) {
            int64_t at[3] = {t / (d[1].taps * d[2].taps), t / d[2].taps % d[1].taps, t % d[2].taps};
            int64_t its = (tap_phase(&d[0], at[0]) * phases(&d[1]) + tap_phase(&d[1], at[1])) * phases(&d[2]) + tap_phase(&d[2], at[2]);
            if (its == class) j->tap_index[found++] = t;
        }
        most = MAX(most, found - j->tap_start[class]);
    }
    j->tap_start[j->classes] = found;
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
    int64_t at = 0;
    for (int64_t s = 0; s < j->samples; s++)
        for (int64_t y = 0; y < j->rows; y++)
            for (int64_t z = 0; z < d[1].size; z++)
                for (int64_t x = 0; x < d[2].size; x++, at++) {
                    int64_t low = first(&d[0], 0) + d[0].low;
                    int64_t place = s * j->tile_places + j->front + (first(&d[0], y) - low) * j->pitch[0] + first(&d[1], z) * j->pitch[1] + first(&d[2], x);
                    int64_t class = (phase(&d[0], y) * phases(&d[1]) + phase(&d[1], z)) * phases(&d[2]) + phase(&d[2], x);
                    j->table[at] = (int32_t)(place * j->width);
                    j->class_of[at] = j->tap_start[class] == j->tap_start[class + 1] ? -1 : (int32_t)class;
                    if (s == 0 && j->own) j->own[class * j->own_words + at / WORD] |= 1ull << at % WORD;
                }
    for (int64_t t = 0; t < j->taps; t++) {
        int64_t tap = j->tap_index[t], place[3] = {tap / (d[1].taps * d[2].taps), tap / d[2].taps % d[1].taps, tap % d[2].taps};
        j->tap_shift[t] = (shift(&d[0], place[0]) * j->pitch[0] + shift(&d[1], place[1]) * j->pitch[1] + shift(&d[2], place[2])) * j->width;
    }
}

/* A piece of a block of memory; with no block, counts. */
static void *piece(char *block, size_t *used, int64_t bytes) {
    void *at = block ? block + *used : NULL;
    *used += ((size_t)bytes + 127) / 64 * 64;
    return at;
}

static size_t lay_out_work(const Grad *j, Work *w, char *block, int parts) {
    size_t used = 0;
    w->tile = piece(block, &used, j->samples * j->tile_places * j->width * 4);
    w->wide = piece(block, &used, j->width * BLOCK * 4);
    w->sums = piece(block, &used, (j->in / parts + 1) * j->taps * j->width * 4);
    return used;
}

static int all_finite(const float *values, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        bits &= 0x7fffffff;
        largest = MAX(largest, bits);
    }
    return largest < 0x7f800000;
}

/* sizes: batch, groups, input and output channels of a group; of each of three dimensions size, output size, taps, stride,
 * padding, dilation; transposed, whether channels are last in x and in g, type of g. dw has the dimensions of the weight.
 * Returns 0, 1 where mask and values do not go together, 2 where a value is not finite (nothing is written then: the zeros
 * around a tile would make NaNs of it), or -1 without memory for scratch. */
EXPORT int sfx_weight_grad(const void *g, const float *values, int64_t kept, const uint8_t *mask, const int64_t *sizes, float *dw, int threads) {
    Grad j = {.k = &tables[active_isa], .g = g, .values = values, .mask = mask, .kept = kept, .batch = sizes[0], .groups = sizes[1], .in = sizes[2], .out = sizes[3],
              .x_last = (int)sizes[23], .g_last = (int)sizes[24], .type = (Type)sizes[25], .places = 1, .g_places = 1, .classes = 1, .taps = 1};
    int transposed = (int)sizes[22], status = -1;
    for (int i = 0; i < 3; i++) {
        const int64_t *d = sizes + 4 + 6 * i;
        Dim dim = {d[0], d[1], d[2], d[3], d[4], d[5], transposed, 0, 0};
        for (int64_t t = 0; t < dim.taps; t++) dim.low = MIN(dim.low, shift(&dim, t)), dim.high = MAX(dim.high, shift(&dim, t));
        j.dim[i] = dim;
        j.places *= dim.size, j.g_places *= dim.out, j.classes *= phases(&dim), j.taps *= dim.taps;
    }
    int64_t n = j.batch * j.groups * j.in * j.places, runs = j.x_last ? j.batch * j.places : j.batch * j.groups * j.in;
    if (!all_finite(values, kept)) return 2;
    char *block = NULL, *works = NULL;
    j.starts = run_offsets(mask, runs, n / MAX(runs, 1), threads);
    j.tap_start = malloc((size_t)(j.classes + 1 + 2 * j.taps) * sizeof *j.tap_start);
    if (!j.starts || !j.tap_start) goto done;
    if (j.starts[runs] != kept || has_stray_bits(mask, n)) {
        status = 1;
        goto done;
    }
    j.tap_index = j.tap_start + j.classes + 1;
    j.tap_shift = j.tap_index + j.taps;
    int64_t most = sort_taps(&j);
    j.width = most >= 6 || j.out <= 16 ? 16 : 32;
    j.tiles = (j.out + j.width - 1) / j.width;
    plan_chunks(&j, most >= 3 ? TILE_BYTES : LONG_TILE_BYTES);
    for (int64_t class = 0; class < j.classes; class++) j.met += j.tap_start[class] < j.tap_start[class + 1];
    j.own_words = j.rows * j.dim[1].size * j.dim[2].size / WORD + 1;
    int64_t entries = j.chunk_places + WORD, own_bytes = j.classes > 1 && j.met <= FEW_CLASSES ? j.classes * j.own_words * 8 : 0;
    int64_t all = j.groups * j.in, lists = j.chunks * all * j.classes, listed = kept + SPARE * (j.x_last ? j.chunks : j.batch * all) + WORD, tiles = j.groups * j.tiles;
    int copies = j.classes > 1 || j.samples > 1 || j.x_last;
    /* Input channels are cut too where tiles alone cannot be shared evenly. */
    int parts = tiles % threads == 0 || tiles >= 4 * threads ? 1 : (int)MAX(1, MIN(j.in / 16, threads));
    int shards = (int)MAX(1, MIN(tiles * parts, threads)), listers = (int)MAX(1, MIN(j.x_last ? j.chunks : all, threads));
    Work none;
    size_t used = 0, each = lay_out_work(&j, &none, NULL, parts), counts = (size_t)(j.x_last ? all * j.classes : j.classes) * 8;
    block = malloc((size_t)(entries * 8 + own_bytes + lists * (int64_t)sizeof *j.lists + listed * (copies ? 8 : 4)) + counts * (size_t)listers + 1024);
    works = malloc(each * (size_t)shards);
    if (!block || !works) goto done;
    j.table = piece(block, &used, entries * 4);
    j.class_of = piece(block, &used, entries * 4);
    j.lists = piece(block, &used, lists * (int64_t)sizeof *j.lists);
    j.at = piece(block, &used, listed * 4);
    j.copied = copies ? piece(block, &used, listed * 4) : (float *)j.at;
    int64_t *counted = piece(block, &used, (int64_t)counts * listers);
    memset(j.table, 0, (size_t)entries * 4);
    if (own_bytes) j.own = memset(piece(block, &used, own_bytes), 0, (size_t)own_bytes);
    make_table(&j);
    FOR_SHARDS(s, listers, n) make_lists(&j, s, listers, counted + (size_t)s * (counts / 8));
    FOR_SHARDS(s, shards, n) {
        Work w;
        lay_out_work(&j, &w, works + (size_t)s * each, parts);
        for (int64_t i = share(tiles * parts, s, shards); i < share(tiles * parts, s + 1, shards); i++) run_tile(&j, &w, i / parts, (int)(i % parts), parts, transposed, dw);
    }
    status = 0;
done:
    free(j.starts);
    free(j.tap_start);
    free(block);
    free(works);
    return status;
}
