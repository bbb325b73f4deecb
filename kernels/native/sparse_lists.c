/* The kept elements of a pruned input as lists, one for each channel, chunk and class: see sparse_grad.c.
 *
 * A list has the values of its elements and where in a tile their output places start. Where channels are planes and all
 * elements meet the same taps, values stay where they are and places are compacted straight from the mask. Elsewhere the
 * elements of a chunk are first listed in the order of memory, with the number of their list, then counted and placed: what
 * is counted is a copy, so that both agree whatever becomes of the mask.
 */
#include "sparse_grad.h"
#include "scratch.h"

#define SFX_KERNELS "sparse_lists_kernels.h"
#include "for_each_isa.h"

enum {
    SPARE = 16,          /* entries that a register may write beyond the last of a list */
    LONGEST = 63,        /* longer lists are not sorted by length, nor by taps those with more than MANY_TAPS */
    MANY_TAPS = 4,
    AHEAD = 16,          /* elements between fetching the line of one from memory and writing it */
    BUCKETS = (MANY_TAPS + 1) * (LONGEST + 1) + 1,
};

typedef struct {
    int64_t (*count)(Bits bits, int64_t n);
    int64_t (*list)(Bits bits, int64_t n, const int32_t *table, int64_t most, int32_t *out);
    int64_t (*list_met)(Bits bits, int64_t n, const uint64_t *met, const int32_t *classes, const int32_t *table, const float *values, int64_t readable, int64_t most,
                        int64_t *seen, int32_t *out_classes, int32_t *out, float *out_values);
    uint32_t (*largest)(const float *values, int64_t n);
} ListKernels;

#define LIST(isa) {count_##isa##_32, list_##isa##_32, list_met_##isa##_32, largest_##isa##_32}

static const ListKernels tables[ISAS] = {
#ifdef SFX_X86
    [ISA_AVX512] = LIST(avx512),
    [ISA_AVX2] = LIST(avx2),
#endif
#ifdef SFX_NEON
    [ISA_NEON] = LIST(neon),
#endif
    [ISA_PORTABLE] = LIST(portable),
};

/* What one thread works in: elements of a chunk in the order of memory, and a count for each list. */
typedef struct {
    int32_t *list, *at;
    float *values;
    int64_t *counts;
} Work;

/* Where the values of each of `count` runs of n elements start; one more entry for the end. NULL without memory. */
int64_t *run_offsets(const uint8_t *mask, int64_t count, int64_t n, int threads) {
    const ListKernels *k = &tables[active_isa];
    int64_t bytes = (count * n + 7) / 8, offset = 0;
    int64_t *offsets = malloc((size_t)(count + 1) * sizeof *offsets);
    if (!offsets) return NULL;
    int shards = (int)MAX(1, MIN(count, threads));
    FOR_SHARDS(s, shards, count * n / 8)
        for (int64_t r = share(count, s, shards); r < share(count, s + 1, shards); r++) offsets[r] = k->count((Bits){mask, bytes, r * n}, n);
    for (int64_t r = 0; r <= count; r++) {
        int64_t here = r < count ? offsets[r] : 0;
        offsets[r] = offset;
        offset += here;
    }
    return offsets;
}

/* n elements, the i-th of list number list[i], into `count` lists with entries from `first` on; those of a number beyond the
 * last list meet no tap. */
static void place(const Grad *j, List *lists, int64_t count, int64_t first, const Work *w, const float *values, int64_t n) {
    int64_t *counts = w->counts;
    memset(counts, 0, (size_t)(count + 1) * sizeof *counts);
    for (int64_t i = 0; i < n; i++) counts[w->list[i]]++;
    for (int64_t i = 0; i <= count; i++) {
        int64_t here = counts[i];
        if (i < count) lists[i].at = j->at + first, lists[i].values = j->copied + first, lists[i].n = here;
        counts[i] = first;
        first += here;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t to = counts[w->list[i]]++, soon = counts[w->list[MIN(i + AHEAD, n - 1)]];
        __builtin_prefetch(j->at + soon, 1), __builtin_prefetch(j->copied + soon, 1);
        j->at[to] = w->at[i];
        j->copied[to] = values[i];
    }
}

/* The lists of one channel in one chunk, where channels are planes. Its entries start at *next; *done is how many values of
 * this sample's run earlier chunks have passed. Entries are never more than what was passed, and that never more than the
 * run has values, whatever the mask says now. */
static void list_plane(const Grad *j, const Work *w, int64_t chunk, int64_t channel, int64_t *next, int64_t *done) {
    const ListKernels *k = &tables[active_isa];
    int64_t inner = j->dim[1].size * j->dim[2].size, all = j->groups * j->in, bytes = (j->batch * all * j->places + 7) / 8;
    int64_t sample = chunk / j->row_chunks * j->samples, samples = MIN(j->samples, j->batch - sample), row = chunk % j->row_chunks * j->rows;
    int64_t n = MIN(j->rows, j->dim[0].size - row) * inner, found = 0, passed = 0;
    List *lists = j->made + (chunk * all + channel) * j->classes;
    lists->at = j->at + *next, lists->values = j->copied + *next;
    for (int64_t s = 0; s < samples; s++) {
        int64_t run = (sample + s) * all + channel, start = j->starts[run] + *done, most = j->starts[run + 1] - start, first = s * j->places;
        Bits bits = {j->mask, bytes, run * j->places + row * inner};
        if (j->classes == 1) {
            passed = k->list(bits, n, j->table + first, most, j->at + *next + found);
            if (samples == 1) lists->values = j->values + start; /* where they are */
            else memcpy(j->copied + *next + found, j->values + start, (size_t)passed * 4);
            found += passed;
        } else
            found += k->list_met(bits, n, j->met, j->class_of + first, j->table + first, j->values + start, j->kept - start, most, &passed, w->list + found, w->at + found, w->values + found);
    }
    if (j->classes > 1) place(j, lists, j->classes, *next, w, w->values, found);
    else lists->n = found;
    if (samples == 1) *done += passed;
    *next += found;
}

/* The lists of all channels in one chunk, where channels are the last dimension. */
static void list_rows(const Grad *j, const Work *w, int64_t chunk, const int32_t *columns) {
    const ListKernels *k = &tables[active_isa];
    int64_t inner = j->dim[1].size * j->dim[2].size, all = j->groups * j->in, bytes = (j->batch * j->places * all + 7) / 8;
    int64_t sample = chunk / j->row_chunks * j->samples, samples = MIN(j->samples, j->batch - sample), row = chunk % j->row_chunks * j->rows;
    int64_t n = MIN(j->rows, j->dim[0].size - row) * inner * samples, begin = sample * j->places + row * inner, first = j->starts[begin], found = 0;
    for (int64_t p = 0; p < n; p++) {
        int64_t class = j->class_of[p], most = j->starts[begin + p + 1] - first - found, some = 0;
        if (class < j->classes) some = k->list((Bits){j->mask, bytes, (begin + p) * all}, all, columns, most, w->list + found);
        for (int64_t i = 0; i < some && class; i++) w->list[found + i] += (int32_t)class;
        for (; some < most; some++) w->list[found + some] = (int32_t)(all * j->classes); /* no tap, or the mask has changed */
        for (int64_t i = 0; i < most; i += 8) /* in whole registers */
            for (int64_t e = 0; e < 8; e++) w->at[found + i + e] = j->table[p];
        found += most;
    }
    place(j, j->made + chunk * all * j->classes, all * j->classes, first, w, j->values + first, found);
}

/* Shard s of so many of all lists. Planes are shared by channel, rows by chunk. Every run, or chunk of rows, has entries of its
 * own: as many as it has values, and some to spare. */
static void list_shard(const Grad *j, const Work *w, int s, int shards, const int32_t *columns) {
    int64_t all = j->groups * j->in;
    if (j->x_last) {
        for (int64_t chunk = share(j->chunks, s, shards); chunk < share(j->chunks, s + 1, shards); chunk++) list_rows(j, w, chunk, columns);
        return;
    }
    for (int64_t sample = 0, chunk = 0; sample < j->batch; sample += j->samples, chunk += j->row_chunks) {
        int64_t first = j->starts[sample * all] + sample * all * SPARE, samples = MIN(j->samples, j->batch - sample);
        for (int64_t channel = 0; channel < share(all, s + 1, shards); channel++) {
            int64_t done = 0, next = first;
            if (channel >= share(all, s, shards))
                for (int64_t r = 0; r < j->row_chunks; r++) list_plane(j, w, chunk + r, channel, &next, &done);
            for (int64_t i = sample; i < sample + samples; i++) first += j->starts[i * all + channel + 1] - j->starts[i * all + channel];
            first += SPARE;
        }
    }
}

/* Of the lists of so many taps and so many elements. */
INLINE int64_t *bucket(int64_t *starts, int64_t taps, int64_t n) { return starts + (n ? MIN(taps, MANY_TAPS) * (LONGEST + 1) + MIN(n, LONGEST) : BUCKETS - 1); }

/* The lists of a chunk, each part by itself, by number of taps and by length, empty ones last: the end of a loop over a list comes where it
 * came for the one before, which a processor foresees. */
static void sort_lists(const Grad *j, int64_t chunk) {
    for (int64_t part = 0; part < j->groups * j->parts; part++) {
        int64_t group = part / j->parts * j->in, begin = group + part_begin(j, part % j->parts), end = group + part_begin(j, part % j->parts + 1);
        int64_t first = (chunk * j->groups * j->in + begin) * j->classes, n = (end - begin) * j->classes, starts[BUCKETS] = {0}, used = 0;
        List *made = j->made + first;
        for (int64_t i = 0, channel = 0, class = 0; i < n; i++) {
            int64_t taps = j->tap_start[class + 1] - j->tap_start[class];
            if (!taps) made[i].n = 0;
            made[i].channel = (int32_t)channel, made[i].class = (int32_t)class;
            (*bucket(starts, taps, made[i].n))++;
            if (++class == j->classes) class = 0, channel++;
        }
        for (int64_t i = 0; i < BUCKETS; i++) {
            int64_t here = starts[i];
            starts[i] = used, used += here;
        }
        for (int64_t i = 0; i < n; i++) {
            int64_t taps = j->tap_start[made[i].class + 1] - j->tap_start[made[i].class];
            j->lists[first + (*bucket(starts, taps, made[i].n))++] = made[i];
        }
    }
}

static int all_finite(const float *values, int64_t n, int threads) {
    int shards = (int)MAX(1, MIN(n, threads)), finite = 1;
    FOR_SHARDS(s, shards, n) {
        int64_t begin = share(n, s, shards), end = share(n, s + 1, shards);
        if (tables[active_isa].largest(values + begin, end - begin) >= 0x7f800000) __atomic_store_n(&finite, 0, __ATOMIC_RELAXED);
    }
    return finite;
}

int make_lists(Grad *j, int threads) {
    int64_t all = j->groups * j->in, n = j->batch * all * j->places, runs = j->batch * (j->x_last ? j->places : all);
    if (!all_finite(j->values, j->kept, threads)) return 2;
    j->starts = run_offsets(j->mask, runs, n / MAX(runs, 1), threads);
    if (!j->starts) return -1;
    if (j->starts[runs] != j->kept || has_stray_bits(j->mask, n)) return 1;

    int copies = j->classes > 1 || j->samples > 1 || j->x_last;
    int64_t lists = j->chunks * all * j->classes, entries = j->kept + SPARE * (j->x_last ? 1 : j->batch * all), counts = (j->x_last ? all : 1) * j->classes + 1;
    int64_t most = copies ? MIN(j->kept, j->chunk_places * (j->x_last ? all : 1)) + SPARE : 0;
    int shards = (int)MAX(1, MIN(j->x_last ? j->chunks : all, threads));
    char *block = NULL, *works = NULL;
    size_t used, each = 0;
    int32_t *columns = NULL;
    for (int pass = 0; pass < 2; pass++) { /* to count bytes, and to give them away */
        used = 0;
        j->lists = piece(block, &used, lists * (int64_t)sizeof *j->lists);
        j->made = piece(block, &used, lists * (int64_t)sizeof *j->made);
        j->at = piece(block, &used, entries * 4);
        j->copied = piece(block, &used, copies ? entries * 4 : 0);
        columns = piece(block, &used, j->x_last ? (all + WORD) * 4 : 0);
        works = piece(block, &used, (int64_t)each * shards);
        if (pass) break;
        for (int part = 0; part < 3; part++) piece(NULL, &each, most * 4);
        piece(NULL, &each, counts * 8);
        used += each * (size_t)shards;
        if (!(j->block = take_scratch(used + LINE))) return -1;
        block = whole_lines(j->block);
    }
    for (int64_t i = 0; j->x_last && i < all + WORD; i++) columns[i] = (int32_t)(MIN(i, all) * j->classes);
    FOR_SHARDS(s, shards, n) {
        size_t at = each * (size_t)s;
        Work w = {piece(works, &at, most * 4), piece(works, &at, most * 4), piece(works, &at, most * 4), piece(works, &at, counts * 8)};
        list_shard(j, &w, s, shards, columns);
    }
    int sorters = (int)MAX(1, MIN(j->chunks, threads));
    FOR_SHARDS(s, sorters, n) for (int64_t chunk = share(j->chunks, s, sorters); chunk < share(j->chunks, s + 1, sorters); chunk++) sort_lists(j, chunk);
    return 0;
}
