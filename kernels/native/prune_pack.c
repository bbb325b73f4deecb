/* Top-magnitude pruning, bitmask compression and bit packing on a CPU.
 *
 * Floats are handled as the unsigned integers that hold their bits. A magnitude is ordered by its key,
 * min(bits & ~sign, inf + 1): the order of |x|, with every NaN equal and above infinity. Keys are non-negative as signed
 * integers, which is how SIMD compares.
 *
 * compress, exact for any input and any number of threads:
 *   1. bracket   the keys of n^(2/3) / 2 elements, one from each stratum; quantiles around the wanted rank give [lo, hi]
 *   2. count     one pass: per chunk, how many keys are above hi, at hi, at lo, and the few strictly inside, collected
 *   3. select    the k-th largest key T, by radix select among those few. Rank outside the bracket: radix select over x
 *   4. offsets   per chunk, how many elements it emits and how many ties with T it may keep: exact, from 2 and 3
 *   5. pack      one pass: compare, write the mask bits, compact the kept elements
 * Atoms at lo and hi are counted, never collected, so constant, two-valued and mostly-zero tensors stay on this path.
 *
 * What is compressed may be x normalised, which is never written out: each pass makes it anew from x, a word at a time.
 */
#include "common.h"
#include "pages.h"
#include "scratch.h"

enum {
    CHUNK = 1 << 15,        /* elements per unit of parallel work: a whole number of words */
    BISECT_TO = 1 << 15,    /* elements: what a first or second level cache holds */
    RADIX_BITS = 11,
    BINS = 1 << RADIX_BITS,
    SAMPLE_FROM = 1 << 13,  /* smaller tensors go straight to the select */
    SAMPLE_MOST = 1 << 18,
    CHUNKS_AHEAD = 8,       /* output faulted in at once: what fits a cache */
    PREFETCH_BYTES = 4096,
};
static const double BRACKET_SIGMAS = 4.0;       /* a miss (about 1 call in 10,000) costs time, never correctness */
static const int64_t STREAM_BYTES = 8 << 20;    /* restored tensors larger than this bypass the cache */

typedef struct {
    int64_t above, at_hi, at_lo, inside; /* keys > hi, == hi, == lo (0 where lo == hi), strictly between */
    int64_t stored;                      /* how many of the `inside` there was room for */
    const void *candidates;              /* those */
    int64_t tied, ties, emitted, offset; /* keys == T it has, and keeps; its share of the output, and where that starts */
} Chunk;

typedef struct {
    uint64_t lo, hi;
} Bracket;

/* Statistics of runs of elements, which take turns: element i has those of group i / run % groups. */
typedef struct {
    const float *mean, *rstd;
    int64_t run, groups;
} Statistics;

/* Elements in order: of x, or where there are statistics of x normalised; then the group of the next one, and how many of its
 * run are left. */
typedef struct {
    const void *x;
    const Statistics *statistics;
    int64_t group, left;
} Source;

/* One rounding after each of the two: the same bits from any instruction set. */
INLINE float normalised(float x, float mean, float rstd) { return (x - mean) * rstd; }

/* One instruction set at one element width. Sizes are in elements. */
typedef struct {
    void (*gather)(Source x, int64_t stride, int64_t begin, int64_t end, uint64_t nan_key, void *out);
    void (*histogram)(Source x, int64_t n, uint64_t nan_key, uint64_t base, int bits, int shift, int64_t *bins);
    uint64_t (*bisect)(const void *const *parts, const int64_t *sizes, int count, uint64_t lo, uint64_t hi, int64_t *rank);
    void (*count)(Source x, int64_t n, uint64_t nan_key, Bracket b, Chunk *c, void *room, int64_t room_n);
    void (*tally)(const void *keys, int64_t n, uint64_t t, int64_t *above, int64_t *equal);
    void (*pack)(Source x, int64_t n, uint64_t nan_key, uint64_t t, const Chunk *c, void *out, uint8_t *mask);
    void (*expand)(const void *values, int64_t values_n, const uint8_t *mask, int64_t n, void *out, int stream);
    void (*sign)(const void *x, int64_t n, uint64_t nan_key, uint8_t *bits);
    void (*pick)(const void *x, int64_t n, const uint8_t *mask, void *out, int64_t out_n);
    void (*select)(const uint8_t *bits, int64_t n, const void *x, uint64_t value, void *out, int stream);
} Kernels;

/* The element that stands for stratum i: hashed within it, so that no period of the data can alias with the stride. */
INLINE int64_t place_in_stratum(int64_t i, int64_t stride) {
    uint64_t h = ((uint64_t)i + 1) * 0x9e3779b97f4a7c15ull;
    h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9ull >> 32;
    return i * stride + (int64_t)(h * (uint64_t)stride >> 32);
}

#define SFX_KERNELS "chunk_kernels.h"
#define SFX_ALL_WIDTHS
#include "for_each_isa.h"

#define WIDTHS(isa) {{gather_##isa##_16, histogram_##isa##_16, bisect_##isa##_16, count_##isa##_16, tally_##isa##_16, pack_##isa##_16, expand_##isa##_16, sign_##isa##_16, pick_##isa##_16, select_##isa##_16}, \
                     {gather_##isa##_32, histogram_##isa##_32, bisect_##isa##_32, count_##isa##_32, tally_##isa##_32, pack_##isa##_32, expand_##isa##_32, sign_##isa##_32, pick_##isa##_32, select_##isa##_32}, \
                     {gather_##isa##_64, histogram_##isa##_64, bisect_##isa##_64, count_##isa##_64, tally_##isa##_64, pack_##isa##_64, expand_##isa##_64, sign_##isa##_64, pick_##isa##_64, select_##isa##_64}}

static const Kernels tables[ISAS][3] = {
#ifdef SFX_X86
    [ISA_AVX512] = WIDTHS(avx512),
    [ISA_AVX2] = WIDTHS(avx2),
#endif
#ifdef SFX_NEON
    [ISA_NEON] = WIDTHS(neon),
#endif
    [ISA_PORTABLE] = WIDTHS(portable),
};

static const Kernels *kernels_for(int64_t width) { return &tables[active_isa][width == 2 ? 0 : width == 4 ? 1 : 2]; }

/* ---- compress ---- */

typedef struct {
    const Kernels *k;
    const char *x;
    int64_t n, width, kept, chunks;
    uint64_t nan_key;
    int shards; /* threads asked for; the work is cut the same way if fewer run */
    const Statistics *statistics; /* to normalise x by, where there are any */
} Job;

INLINE int64_t chunk_size(int64_t n, int64_t c) { return MIN(CHUNK, n - c * CHUNK); }

/* The elements from one on, as they are compressed. */
INLINE Source source_at(const Job *j, int64_t first) {
    Source s = {.x = j->x + first * j->width, .statistics = j->statistics};
    if (s.statistics) s.group = first / s.statistics->run % s.statistics->groups, s.left = s.statistics->run - first % s.statistics->run;
    return s;
}

static int shards_for(int64_t n, int threads) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    return (int)MAX(1, MIN(chunks, threads));
}

/* The rank-th largest of the keys >= base and <= top that lie in the parts, without parts of all keys. *rank becomes the
 * rank among its equals. */
static uint64_t select_key(const Job *j, const void *const *parts, const int64_t *sizes, int count, uint64_t base, uint64_t top, int64_t *rank, int64_t *bins) {
    int bits = top > base ? 64 - __builtin_clzll(top - base) : 0;
    int64_t work = parts ? 0 : j->n;
    for (int s = 0; parts && s < count; s++) work += sizes[s];
    if (parts && work <= BISECT_TO) return j->k->bisect(parts, sizes, count, base, top, rank);
    while (bits > 0) {
        int shift = MAX(bits - RADIX_BITS, 0);
        FOR_SHARDS(s, count, work) {
            memset(bins + (int64_t)s * BINS, 0, BINS * sizeof *bins);
            if (parts) j->k->histogram((Source){.x = parts[s]}, sizes[s], j->nan_key, base, bits, shift, bins + (int64_t)s * BINS);
            else
                for (int64_t c = share(j->chunks, s, count); c < share(j->chunks, s + 1, count); c++)
                    j->k->histogram(source_at(j, c * CHUNK), chunk_size(j->n, c), j->nan_key, base, bits, shift, bins + (int64_t)s * BINS);
        }
        for (int b = BINS - 1; b >= 0; b--) {
            int64_t here = 0;
            for (int s = 0; s < count; s++) here += bins[(int64_t)s * BINS + b];
            if (*rank <= here) {
                base += (uint64_t)b << shift;
                break;
            }
            *rank -= here;
        }
        bits = shift;
    }
    return base;
}

/* How many elements to sample, how wide the bracket around the wanted rank is, and how much room its inside may take. */
typedef struct {
    int64_t sample, room_each;
    double rank, margin;
} Sampling;

static Sampling plan_sampling(const Job *j) {
    Sampling p = {0};
    if (j->n < SAMPLE_FROM) return p.sample = j->n, p; /* all of it: the bracket is the threshold */
    p.sample = MIN((int64_t)(pow((double)j->n, 2.0 / 3) / 2), SAMPLE_MOST);
    double q = (double)j->kept / (double)j->n, expected;
    p.rank = q * p.sample;
    p.margin = BRACKET_SIGMAS * sqrt(p.rank * (1 - q)) + 2;
    expected = 2 * p.margin / p.sample * j->n;
    p.room_each = (int64_t)(2 * expected) / j->shards + CHUNK / 8;
    return p;
}

/* A bracket that holds the k-th largest key with high probability. */
static Bracket sample_bracket(const Job *j, Sampling p, void *room, int64_t *bins) {
    FOR_SHARDS(s, j->shards, p.sample) {
        int64_t stride = j->n / p.sample, begin = share(p.sample, s, j->shards), end = share(p.sample, s + 1, j->shards);
        j->k->gather(source_at(j, 0), stride, begin, end, j->nan_key, room);
    }
    const void *part = room;
    Bracket b = {0, j->nan_key};
    if (p.sample == j->n) {
        int64_t rank = j->kept;
        b.lo = b.hi = select_key(j, &part, &p.sample, 1, 0, j->nan_key, &rank, bins);
        return b;
    }
    int64_t rank_hi = (int64_t)(p.rank - p.margin), rank_lo = (int64_t)(p.rank + p.margin) + 1;
    if (rank_hi >= 1) b.hi = select_key(j, &part, &p.sample, 1, 0, j->nan_key, &rank_hi, bins);
    if (rank_lo <= p.sample) b.lo = select_key(j, &part, &p.sample, 1, 0, j->nan_key, &rank_lo, bins);
    return b;
}

static Chunk count_chunks(const Job *j, Bracket b, Chunk *chunks, char *room, int64_t room_each) {
    FOR_SHARDS(s, j->shards, j->n) {
        char *at = room + (int64_t)s * room_each * j->width;
        int64_t left = room_each;
        for (int64_t c = share(j->chunks, s, j->shards); c < share(j->chunks, s + 1, j->shards); c++) {
            j->k->count(source_at(j, c * CHUNK), chunk_size(j->n, c), j->nan_key, b, &chunks[c], at, left);
            left -= chunks[c].stored;
            at += chunks[c].stored * j->width;
        }
    }
    Chunk sum = {0};
    for (int64_t c = 0; c < j->chunks; c++) {
        sum.above += chunks[c].above, sum.at_hi += chunks[c].at_hi, sum.at_lo += chunks[c].at_lo;
        sum.inside += chunks[c].inside, sum.stored += chunks[c].stored;
    }
    return sum;
}

/* The threshold T, in *ties how many keys equal to T to keep, in *b the bracket that the chunks' counts are for. */
static uint64_t find_threshold(const Job *j, Bracket *b, Chunk *chunks, char *room, int64_t room_each, int64_t *bins, int64_t *ties) {
    const void *parts[j->shards];
    int64_t sizes[j->shards];
    Chunk sum = count_chunks(j, *b, chunks, room, room_each);
    int64_t from_hi = j->kept - sum.above, from_inside = from_hi - sum.at_hi, from_lo = from_inside - sum.inside;
    if (from_hi > 0 && from_inside <= 0) return *ties = from_hi, b->hi;
    if (from_lo > 0 && from_lo <= sum.at_lo) return *ties = from_lo, b->lo;
    if (from_inside > 0 && from_lo <= 0 && sum.stored == sum.inside) {
        for (int s = 0; s < j->shards; s++) {
            parts[s] = room + (int64_t)s * room_each * j->width;
            sizes[s] = 0;
            for (int64_t c = share(j->chunks, s, j->shards); c < share(j->chunks, s + 1, j->shards); c++) sizes[s] += chunks[c].stored;
        }
        *ties = from_inside;
        return select_key(j, parts, sizes, j->shards, b->lo, b->hi, ties, bins);
    }
    *ties = j->kept; /* the bracket missed, or its inside did not fit */
    b->lo = b->hi = select_key(j, NULL, NULL, j->shards, 0, j->nan_key, ties, bins);
    count_chunks(j, *b, chunks, room, 0);
    return b->hi;
}

/* What each chunk emits, now that T is known: of each chunk at most its elements, of all together exactly `kept`. */
static void place_chunks(const Job *j, Bracket b, uint64_t t, int64_t ties, Chunk *chunks) {
    int64_t candidates = 0;
    for (int64_t c = 0; c < j->chunks; c++) candidates += chunks[c].stored;
    FOR_SHARDS(s, j->shards, candidates)
        for (int64_t c = share(j->chunks, s, j->shards); c < share(j->chunks, s + 1, j->shards); c++) {
            Chunk *k = &chunks[c];
            k->emitted = k->above + (t < b.hi ? k->at_hi : 0);
            k->tied = t == b.hi ? k->at_hi : k->at_lo;
            if (t < b.hi && t == b.lo) k->emitted += k->inside;
            if (t < b.hi && t > b.lo) j->k->tally(k->candidates, k->stored, t, &k->emitted, &k->tied);
        }
    int64_t offset = 0, after = j->n; /* `after`: elements of the chunks behind this one, which must find room for the rest */
    for (int64_t c = 0; c < j->chunks; c++) {
        int64_t size = chunk_size(j->n, c), left = j->kept - offset;
        after -= size;
        chunks[c].ties = MAX(0, MIN(chunks[c].tied, ties));
        ties -= chunks[c].ties;
        chunks[c].emitted = MAX(MIN(MIN(chunks[c].emitted + chunks[c].ties, size), left), left - after);
        chunks[c].offset = offset;
        offset += chunks[c].emitted;
    }
}

/* The output of a job: `kept` values and the mask. Returns 0, or -1 if there was no memory for scratch. */
static int run(Job j, void *values, uint8_t *mask) {
    Sampling p = plan_sampling(&j);
    int64_t need = MAX(p.sample, p.room_each * j.shards), width = j.width, ties = j.kept;
    Chunk *chunks = malloc((size_t)j.chunks * sizeof *chunks);
    int64_t *bins = malloc((size_t)j.shards * BINS * sizeof *bins);
    char *own_room = need > j.kept ? take_scratch((size_t)(need * width)) : NULL;
    char *room = need > j.kept ? own_room : values; /* the output is scratch until it is written */
    int ok = chunks && bins && room, fresh = is_fresh(values, j.kept * width);
    if (ok) {
        if (fresh) fault_in(room, need * width);
        Bracket b = sample_bracket(&j, p, room, bins);
        uint64_t t = find_threshold(&j, &b, chunks, room, p.room_each, bins, &ties);
        place_chunks(&j, b, t, ties, chunks);
        FOR_SHARDS(s, j.shards, j.n) { /* from the last chunk to the first: what count read last is still in the cache */
            int64_t first = share(j.chunks, s, j.shards), ready = share(j.chunks, s + 1, j.shards);
            for (int64_t c = ready - 1; c >= first; c--) {
                if (fresh && c < ready) {
                    int64_t end = ready < j.chunks ? chunks[ready].offset : j.kept, next = MAX(ready - CHUNKS_AHEAD, first);
                    fault_in((char *)values + chunks[next].offset * width, (end - chunks[next].offset) * width);
                    fault_in(mask + next * (CHUNK / 8), (MIN(ready * CHUNK, j.n) - next * CHUNK) / 8);
                    ready = next;
                }
                j.k->pack(source_at(&j, c * CHUNK), chunk_size(j.n, c), j.nan_key, t, &chunks[c], (char *)values + chunks[c].offset * width, mask + c * (CHUNK / 8));
            }
        }
    }
    free(chunks);
    free(bins);
    give_scratch(own_room);
    return ok ? 0 : -1;
}

static Job job(const void *x, int64_t n, int64_t width, uint64_t inf, int64_t kept, int threads) {
    return (Job){.k = kernels_for(width), .x = x, .n = n, .width = width, .kept = kept, .chunks = (n + CHUNK - 1) / CHUNK, .nan_key = inf + 1, .shards = shards_for(n, threads)};
}

/* Keeps the `kept` largest |x| of n elements: their bits in memory order to values, one bit per element to mask.
 * 0 < kept < n. inf is the bit pattern of infinity. Returns 0, or -1 if there was no memory for scratch. */
EXPORT int sfx_compress(const void *x, int64_t n, int64_t width, uint64_t inf, int64_t kept, void *values, uint8_t *mask, int threads) {
    return run(job(x, n, width, inf, kept, threads), values, mask);
}

/* The same of (x - mean) * rstd, for floats: runs of so many elements have one mean and one rstd, and the groups of which
 * there are statistics take turns. */
EXPORT int sfx_compress_normalised(const float *x, int64_t n, const float *mean, const float *rstd, int64_t length, int64_t groups, int64_t kept, float *values, uint8_t *mask, int threads) {
    Job j = job(x, n, sizeof *x, 0x7f800000, kept, threads);
    Statistics statistics = {mean, rstd, length, groups};
    j.statistics = &statistics;
    return run(j, values, mask);
}

/* ---- decompress ---- */

/* Whether to write past the cache: large outputs, of pages that were not just zeroed in it, where the stores are aligned. */
static int is_streamed(const void *out, int64_t bytes, int fresh) { return !fresh && bytes >= STREAM_BYTES && (uintptr_t)out % 64 == 0; }

static int64_t count_bits(const uint8_t *bits, int64_t n) {
    int64_t sum = 0, i = 0;
    for (uint64_t w; i + 8 <= n; i += 8) memcpy(&w, bits + i, 8), sum += __builtin_popcountll(w);
    for (; i < n; i++) sum += __builtin_popcount(bits[i]);
    return sum;
}

/* Where the values of each chunk start, and after the last the end. NULL without memory. */
static int64_t *chunk_offsets(const uint8_t *mask, int64_t n, int shards) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK, offset = 0;
    int64_t *offsets = malloc((size_t)(chunks + 1) * sizeof *offsets);
    if (!offsets) return NULL;
    FOR_SHARDS(s, shards, n / 8)
        for (int64_t c = share(chunks, s, shards); c < share(chunks, s + 1, shards); c++)
            offsets[c] = count_bits(mask + c * (CHUNK / 8), (chunk_size(n, c) + 7) / 8);
    for (int64_t c = 0; c < chunks; c++) {
        int64_t here = offsets[c];
        offsets[c] = offset;
        offset += here;
    }
    offsets[chunks] = offset;
    return offsets;
}

/* Puts the values where the mask has bits, zeros elsewhere. Returns 0, 1 if the mask does not have `kept` bits among the
 * first n and none after (nothing is written then), or -1 if there was no memory for scratch. */
EXPORT int sfx_decompress(const void *values, int64_t kept, const uint8_t *mask, int64_t n, int64_t width, void *out, int threads) {
    const Kernels *k = kernels_for(width);
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    int shards = shards_for(n, threads), fresh = is_fresh(out, n * width);
    int stream = is_streamed(out, n * width, fresh);
    int64_t *offsets = chunk_offsets(mask, n, shards);
    if (!offsets) return -1;
    int fits = offsets[chunks] == kept && !has_stray_bits(mask, n);
    if (fits) {
        FOR_SHARDS(s, shards, n)
            for (int64_t c = share(chunks, s, shards), end = share(chunks, s + 1, shards), ready = c; c < end; c++) {
                char *at = (char *)out + c * CHUNK * width;
                if (fresh && c == ready) {
                    ready = MIN(c + CHUNKS_AHEAD, end);
                    fault_in(at, (MIN(ready * CHUNK, n) - c * CHUNK) * width);
                }
                k->expand((const char *)values + offsets[c] * width, kept - offsets[c], mask + c * (CHUNK / 8), chunk_size(n, c), at, stream);
            }
    }
    free(offsets);
    return fits ? 0 : 1;
}

/* The other way: the elements of x where the mask has bits. Returns as sfx_decompress does. */
EXPORT int sfx_pick(const void *x, int64_t n, int64_t width, const uint8_t *mask, int64_t kept, void *values, int threads) {
    const Kernels *k = kernels_for(width);
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    int shards = shards_for(n, threads);
    int64_t *offsets = chunk_offsets(mask, n, shards);
    if (!offsets) return -1;
    int fits = offsets[chunks] == kept && !has_stray_bits(mask, n);
    if (fits) FOR_SHARDS(s, shards, n)
        for (int64_t c = share(chunks, s, shards); c < share(chunks, s + 1, shards); c++)
            k->pick((const char *)x + c * CHUNK * width, chunk_size(n, c), mask + c * (CHUNK / 8), (char *)values + offsets[c] * width, offsets[c + 1] - offsets[c]);
    free(offsets);
    return fits ? 0 : 1;
}

/* ---- bit packing ---- */

/* Bit i is set where x[i] > 0 or x[i] is NaN: where ReLU passes the gradient. */
EXPORT void sfx_pack_sign(const void *x, int64_t n, int64_t width, uint64_t inf, uint8_t *bits, int threads) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    const Kernels *k = kernels_for(width);
    int shards = shards_for(n, threads);
    FOR_SHARDS(s, shards, n)
        for (int64_t c = share(chunks, s, shards); c < share(chunks, s + 1, shards); c++)
            k->sign((const char *)x + c * CHUNK * width, chunk_size(n, c), inf + 1, bits + c * (CHUNK / 8));
}

/* Eight bytes of 0 or 1 against one byte, by multiplication: every byte's low bit travels to its place in the top byte. */
EXPORT void sfx_pack_bits(const uint8_t *mask, int64_t n, uint8_t *bits, int threads) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    int shards = shards_for(n, threads);
    FOR_SHARDS(s, shards, n) {
        int64_t i = share(chunks, s, shards) * CHUNK, end = MIN(share(chunks, s + 1, shards) * CHUNK, n);
        for (; i < end; i += 8) {
            uint64_t w = 0;
            memcpy(&w, mask + i, i + 8 <= end ? 8 : (size_t)(end - i));
            bits[i / 8] = (uint8_t)(w * 0x0102040810204080ull >> 56);
        }
    }
}

/* Returns 0, or 1 if bits behind the last element are set (nothing is written then). */
EXPORT int sfx_unpack_bits(const uint8_t *bits, int64_t n, uint8_t *mask, int threads) {
    if (has_stray_bits(bits, n)) return 1;
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    int shards = shards_for(n, threads);
    FOR_SHARDS(s, shards, n) {
        int64_t i = share(chunks, s, shards) * CHUNK, end = MIN(share(chunks, s + 1, shards) * CHUNK, n);
        for (; i < end; i += 8) {
            uint64_t w = (bits[i / 8] * 0x0101010101010101ull) & 0x8040201008040201ull; /* byte b keeps bit b */
            w = (w + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
            memcpy(mask + i, &w, i + 8 <= end ? 8 : (size_t)(end - i));
        }
    }
    return 0;
}

/* x where a bit is set, or where there is no x `value`; zero elsewhere. x may be the output. Returns 0, or 1 if bits behind
 * the last element are set (nothing is written then). */
EXPORT int sfx_select(const uint8_t *bits, int64_t n, int64_t width, const void *x, uint64_t value, void *out, int threads) {
    if (has_stray_bits(bits, n)) return 1;
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    const Kernels *k = kernels_for(width);
    int shards = shards_for(n, threads), stream = x != out && is_streamed(out, n * width, 0);
    FOR_SHARDS(s, shards, n)
        for (int64_t c = share(chunks, s, shards); c < share(chunks, s + 1, shards); c++)
            k->select(bits + c * (CHUNK / 8), chunk_size(n, c), x ? (const char *)x + c * CHUNK * width : NULL, value, (char *)out + c * CHUNK * width, stream);
    return 0;
}
