/* Top-magnitude pruning, bitmask compression and bit packing on a CPU.
 *
 * No torch, no Python: plain pointers in, plain pointers out, called through ctypes. Floats are handled as the
 * unsigned integers that hold their bits. A magnitude is ordered by its key, min(bits & ~sign, inf + 1): the order of
 * |x|, with every NaN equal and above infinity. Keys are non-negative as signed integers, which is how SIMD compares.
 *
 * compress, exact for any input and any number of threads:
 *   1. bracket   the keys of n^(2/3) / 2 elements, one from each stratum; quantiles around the wanted rank give [lo, hi]
 *   2. count     one pass: per chunk, how many keys are above hi, at hi, at lo, and the few strictly inside, collected
 *   3. select    the k-th largest key T, by radix select among those few. Rank outside the bracket: radix select over x
 *   4. offsets   per chunk, how many elements it emits and how many ties with T it may keep: exact, from 2 and 3
 *   5. pack      one pass: compare, write the mask bits, compact the kept elements
 * Atoms at lo and hi are counted, never collected, so constant, two-valued and mostly-zero tensors stay on this path.
 *
 * Each pass reads its input again, and another thread may have written to it in between. So no count of an earlier pass
 * is trusted: a word of mask is cut to the elements and values that are left where it is used (`within`), and offsets are
 * cut to the output where they are made (`place_chunks`). A caller's race gives an unspecified tensor, never an overrun.
 *
 * What runs inside a chunk stands in chunk_kernels.h, included once for each instruction set and element width.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bit masks are laid out for little-endian machines"
#endif
#if !defined(__GNUC__)
#error "needs GCC or Clang"
#endif
#if (defined(__x86_64__) || defined(__i386__)) && !defined(SFX_NO_SIMD)
#define SFX_X86 1
#include <immintrin.h>
#endif
#if defined(__aarch64__) && !defined(SFX_NO_SIMD)
#define SFX_NEON 1
#include <arm_neon.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum {
    WORD = 64,              /* elements per step of every loop: one 64-bit word of mask */
    CHUNK = 1 << 15,        /* elements per unit of parallel work: a whole number of words */
    PARALLEL_FROM = 1 << 16,/* smaller tensors are done before a second thread is awake */
    BISECT_TO = 1 << 15,    /* elements: what a first or second level cache holds */
    RADIX_BITS = 11,
    BINS = 1 << RADIX_BITS,
    SAMPLE_FROM = 1 << 13,  /* smaller tensors go straight to the select */
    SAMPLE_MOST = 1 << 18,
    PAGE = 1 << 12,
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

/* One instruction set at one element width. Sizes are in elements. */
typedef struct {
    void (*gather)(const void *x, int64_t stride, int64_t begin, int64_t end, uint64_t nan_key, void *out);
    void (*histogram)(const void *x, int64_t n, uint64_t nan_key, uint64_t base, int bits, int shift, int64_t *bins);
    uint64_t (*bisect)(const void *x, int64_t n, uint64_t nan_key, int64_t *rank);
    void (*count)(const void *x, int64_t n, uint64_t nan_key, Bracket b, Chunk *c, void *room, int64_t room_n);
    void (*tally)(const void *keys, int64_t n, uint64_t t, int64_t *above, int64_t *equal);
    void (*pack)(const void *x, int64_t n, uint64_t nan_key, uint64_t t, const Chunk *c, void *out, uint8_t *mask);
    void (*expand)(const void *values, int64_t values_n, const uint8_t *mask, int64_t n, void *out, int stream);
    void (*sign)(const void *x, int64_t n, uint64_t nan_key, uint8_t *bits);
} Kernels;

/* Lane tables for the instruction sets that compact by shuffling: source lane of each output lane, 0xff for none. */
static uint8_t compact8[256][8], expand8[256][8];
/* The same for 64-bit lanes, as pairs of 32-bit ones (4 pairs to a register). */
static uint8_t compact_pairs[16][8], expand_pairs[16][8];
/* The same as byte shuffles of 16-bit lanes (8 to a register) and 32-bit lanes (4 to a register). */
static uint8_t compact16_bytes[256][16], expand16_bytes[256][16], compact32_bytes[16][16], expand32_bytes[16][16];

static void make_shuffle(uint8_t *bytes, const uint8_t *lanes, int lane_count, int lane_bytes) {
    for (int i = 0; i < lane_count; i++)
        for (int b = 0; b < lane_bytes; b++)
            bytes[i * lane_bytes + b] = lanes[i] == 0xff ? 0xff : (uint8_t)(lanes[i] * lane_bytes + b);
}

static void make_tables(void) {
    for (int m = 0; m < 256; m++) {
        int kept = 0;
        memset(compact8[m], 0xff, 8);
        memset(expand8[m], 0xff, 8);
        for (int i = 0; i < 8; i++)
            if (m >> i & 1) {
                compact8[m][kept] = (uint8_t)i;
                expand8[m][i] = (uint8_t)kept++;
            }
        make_shuffle(compact16_bytes[m], compact8[m], 8, 2);
        make_shuffle(expand16_bytes[m], expand8[m], 8, 2);
        if (m < 16) {
            make_shuffle(compact_pairs[m], compact8[m], 4, 2);
            make_shuffle(expand_pairs[m], expand8[m], 4, 2);
            make_shuffle(compact32_bytes[m], compact8[m], 4, 4);
            make_shuffle(expand32_bytes[m], expand8[m], 4, 4);
        }
    }
}

INLINE uint64_t low_bits(int64_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

/* The compiler may not read again what x was made from. */
#define SNAPSHOT(x) __asm__("" : "+r"(x))

/* The bound of every loop over the bits of a word: those of the first `elements`, and of them the lowest `most`. */
INLINE uint64_t within(uint64_t bits, int64_t elements, int64_t most) {
    SNAPSHOT(bits);
    bits &= low_bits(elements);
    if (__builtin_popcountll(bits) <= most) return bits;
    uint64_t kept = 0;
    for (; most > 0; most--, bits &= bits - 1) kept |= bits & -bits;
    return kept;
}

/* The element that stands for stratum i: hashed within it, so that no period of the data can alias with the stride. */
INLINE int64_t place_in_stratum(int64_t i, int64_t stride) {
    uint64_t h = ((uint64_t)i + 1) * 0x9e3779b97f4a7c15ull;
    h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9ull >> 32;
    return i * stride + (int64_t)(h * (uint64_t)stride >> 32);
}

#define CAT_(a, b, c) a##_##b##_##c
#define CAT(a, b, c) CAT_(a, b, c)
#define FN(name) CAT(name, SFX_ISA, SFX_WIDTH)
#define WIDTHS(isa) {{gather_##isa##_16, histogram_##isa##_16, bisect_##isa##_16, count_##isa##_16, tally_##isa##_16, pack_##isa##_16, expand_##isa##_16, sign_##isa##_16}, \
                     {gather_##isa##_32, histogram_##isa##_32, bisect_##isa##_32, count_##isa##_32, tally_##isa##_32, pack_##isa##_32, expand_##isa##_32, sign_##isa##_32}, \
                     {gather_##isa##_64, histogram_##isa##_64, bisect_##isa##_64, count_##isa##_64, tally_##isa##_64, pack_##isa##_64, expand_##isa##_64, sign_##isa##_64}}

#define SFX_ISA portable
#define SFX_WIDTH 16
#include "chunk_kernels.h"
#define SFX_WIDTH 32
#include "chunk_kernels.h"
#define SFX_WIDTH 64
#include "chunk_kernels.h"
#undef SFX_ISA

#ifdef SFX_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,popcnt")
#endif
#define SFX_ISA avx2
#define SFX_WIDTH 16
#include "chunk_kernels.h"
#define SFX_WIDTH 32
#include "chunk_kernels.h"
#define SFX_WIDTH 64
#include "chunk_kernels.h"
#undef SFX_ISA
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2")
#endif
#define SFX_ISA avx512
#define SFX_WIDTH 16
#include "chunk_kernels.h"
#define SFX_WIDTH 32
#include "chunk_kernels.h"
#define SFX_WIDTH 64
#include "chunk_kernels.h"
#undef SFX_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#ifdef SFX_NEON
#define SFX_ISA neon
#define SFX_WIDTH 16
#include "chunk_kernels.h"
#define SFX_WIDTH 32
#include "chunk_kernels.h"
#define SFX_WIDTH 64
#include "chunk_kernels.h"
#undef SFX_ISA
#endif

/* ---- choice of instruction set ---- */

typedef struct {
    const char *name;
    int available;
    Kernels widths[3];
} Isa;

static Isa isas[] = { /* best first */
#ifdef SFX_X86
    {"avx512", 0, WIDTHS(avx512)},
    {"avx2", 0, WIDTHS(avx2)},
#endif
#ifdef SFX_NEON
    {"neon", 1, WIDTHS(neon)},
#endif
    {"portable", 1, WIDTHS(portable)},
};
enum { ISAS = sizeof isas / sizeof *isas };
static const Isa *active;

static const Kernels *kernels_for(int64_t width) { return &active->widths[width == 2 ? 0 : width == 4 ? 1 : 2]; }

/* When the library is loaded: before any thread can call it. */
__attribute__((constructor)) static void choose_isa(void) {
    make_tables();
#ifdef SFX_X86
    __builtin_cpu_init();
    isas[1].available = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    isas[0].available = isas[1].available && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi2");
#endif
    for (int i = ISAS - 1; i >= 0; i--)
        if (isas[i].available) active = &isas[i];
}

EXPORT const char *sfx_isa(int i) { return i < 0 ? active->name : i < ISAS && isas[i].available ? isas[i].name : i < ISAS ? "" : NULL; }

/* For tests and measurements. Returns 0, or -1 where this machine has no such instructions. */
EXPORT int sfx_set_isa(const char *name) {
    for (int i = 0; i < ISAS; i++)
        if (isas[i].available && !strcmp(isas[i].name, name)) return active = &isas[i], 0;
    return -1;
}

EXPORT int sfx_openmp(void) {
#ifdef _OPENMP
    return _OPENMP;
#else
    return 0;
#endif
}

/* ---- compress ---- */

typedef struct {
    const Kernels *k;
    const char *x;
    int64_t n, width, kept, chunks;
    uint64_t nan_key;
    int shards; /* threads asked for; the work is cut the same way if fewer run */
} Job;

INLINE int64_t chunk_size(int64_t n, int64_t c) { return MIN(CHUNK, n - c * CHUNK); }
INLINE int64_t share(int64_t total, int64_t s, int64_t shards) { return total * s / shards; }

static int shards_for(int64_t n, int threads) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    return (int)MAX(1, MIN(chunks, threads));
}

#define PRAGMA(text) _Pragma(#text)
/* `work` elements in all: with few, waiting for the other threads would cost more than they save. */
#define FOR_SHARDS(s, count, work) \
    PRAGMA(omp parallel for num_threads(count) schedule(static, 1) if ((count) > 1 && (work) >= PARALLEL_FROM)) \
    for (int s = 0; s < (count); s++)

/* Whether memory from the allocator has yet to be faulted in, judged by the page in its middle. */
static int is_fresh(const void *p, int64_t bytes) {
#if defined(__linux__)
    unsigned char resident = 1;
    uintptr_t middle = ((uintptr_t)p + (uintptr_t)bytes / 2) & ~(uintptr_t)(PAGE - 1);
    return bytes >= 16 * PAGE && mincore((void *)middle, 1, &resident) == 0 && !(resident & 1);
#else
    (void)p, (void)bytes;
    return 0;
#endif
}

/* Faults pages in, many to a system call and just before they are written: about two thirds of the price of faulting at
 * each. Huge pages would be cheaper still where the kernel has them at hand, and many times dearer where it has not. */
static void fault_in(void *p, int64_t bytes) {
#if defined(__linux__)
    uintptr_t begin = ((uintptr_t)p + PAGE - 1) & ~(uintptr_t)(PAGE - 1), end = ((uintptr_t)p + (uintptr_t)bytes) & ~(uintptr_t)(PAGE - 1);
    if (end > begin) (void)madvise((void *)begin, end - begin, 23); /* MADV_POPULATE_WRITE: Linux 5.14; before it, refused */
#else
    (void)p, (void)bytes;
#endif
}

/* The rank-th largest of the keys >= base and <= top that lie in the parts. *rank becomes the rank among its equals. */
static uint64_t select_key(const Job *j, const void *const *parts, const int64_t *sizes, int count, uint64_t base, uint64_t top, int64_t *rank, int64_t *bins) {
    int bits = top > base ? 64 - __builtin_clzll(top - base) : 0;
    int64_t work = 0;
    for (int s = 0; s < count; s++) work += sizes[s];
    if (count == 1 && work <= BISECT_TO) return j->k->bisect(parts[0], work, j->nan_key, rank);
    while (bits > 0) {
        int shift = MAX(bits - RADIX_BITS, 0);
        FOR_SHARDS(s, count, work) {
            memset(bins + (int64_t)s * BINS, 0, BINS * sizeof *bins);
            j->k->histogram(parts[s], sizes[s], j->nan_key, base, bits, shift, bins + (int64_t)s * BINS);
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
    if (j->n < SAMPLE_FROM) return p;
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
    FOR_SHARDS(s, j->shards, p.sample)
        j->k->gather(j->x, j->n / p.sample, share(p.sample, s, j->shards), share(p.sample, s + 1, j->shards), j->nan_key, room);
    int64_t rank_hi = (int64_t)(p.rank - p.margin), rank_lo = (int64_t)(p.rank + p.margin) + 1;
    const void *part = room;
    Bracket b = {0, j->nan_key};
    if (rank_hi >= 1) b.hi = select_key(j, &part, &p.sample, 1, 0, j->nan_key, &rank_hi, bins);
    if (rank_lo <= p.sample) b.lo = select_key(j, &part, &p.sample, 1, 0, j->nan_key, &rank_lo, bins);
    return b;
}

static Chunk count_chunks(const Job *j, Bracket b, Chunk *chunks, char *room, int64_t room_each) {
    FOR_SHARDS(s, j->shards, j->n) {
        char *at = room + (int64_t)s * room_each * j->width;
        int64_t left = room_each;
        for (int64_t c = share(j->chunks, s, j->shards); c < share(j->chunks, s + 1, j->shards); c++) {
            j->k->count(j->x + c * CHUNK * j->width, chunk_size(j->n, c), j->nan_key, b, &chunks[c], at, left);
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
    for (int s = 0; s < j->shards; s++) { /* the bracket missed, or its inside did not fit */
        int64_t begin = share(j->chunks, s, j->shards) * CHUNK, end = MIN(share(j->chunks, s + 1, j->shards) * CHUNK, j->n);
        parts[s] = j->x + begin * j->width;
        sizes[s] = end - begin;
    }
    *ties = j->kept;
    b->lo = b->hi = select_key(j, parts, sizes, j->shards, 0, j->nan_key, ties, bins);
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

/* Keeps the `kept` largest |x| of n elements: their bits in memory order to values, one bit per element to mask.
 * 0 < kept < n. inf is the bit pattern of infinity. Returns 0, or -1 if there was no memory for scratch. */
EXPORT int sfx_compress(const void *x, int64_t n, int64_t width, uint64_t inf, int64_t kept, void *values, uint8_t *mask, int threads) {
    Job j = {kernels_for(width), x, n, width, kept, (n + CHUNK - 1) / CHUNK, inf + 1, shards_for(n, threads)};
    Sampling p = plan_sampling(&j);
    int64_t need = MAX(p.sample, p.room_each * j.shards), ties = kept;
    Chunk *chunks = malloc((size_t)j.chunks * sizeof *chunks);
    int64_t *bins = malloc((size_t)j.shards * BINS * sizeof *bins);
    char *own_room = need > kept ? malloc((size_t)(need * width)) : NULL;
    char *room = need > kept ? own_room : values; /* the output is scratch until it is written */
    int ok = chunks && bins && room, fresh = is_fresh(values, kept * width);
    if (ok) {
        if (fresh) fault_in(room, need * width);
        Bracket b;
        if (p.sample) b = sample_bracket(&j, p, room, bins);
        else b.lo = b.hi = select_key(&j, &x, &n, 1, 0, j.nan_key, &ties, bins);
        uint64_t t = find_threshold(&j, &b, chunks, room, p.room_each, bins, &ties);
        place_chunks(&j, b, t, ties, chunks);
        FOR_SHARDS(s, j.shards, n) { /* from the last chunk to the first: what count read last is still in the cache */
            int64_t first = share(j.chunks, s, j.shards), ready = share(j.chunks, s + 1, j.shards);
            for (int64_t c = ready - 1; c >= first; c--) {
                if (fresh && c < ready) {
                    int64_t end = ready < j.chunks ? chunks[ready].offset : kept, next = MAX(ready - CHUNKS_AHEAD, first);
                    fault_in((char *)values + chunks[next].offset * width, (end - chunks[next].offset) * width);
                    fault_in(mask + next * (CHUNK / 8), (MIN(ready * CHUNK, n) - next * CHUNK) / 8);
                    ready = next;
                }
                j.k->pack(j.x + c * CHUNK * width, chunk_size(n, c), j.nan_key, t, &chunks[c], (char *)values + chunks[c].offset * width, mask + c * (CHUNK / 8));
            }
        }
    }
    free(chunks);
    free(bins);
    free(own_room);
    return ok ? 0 : -1;
}

/* ---- decompress ---- */

/* Whether bits behind the last of n elements are set. */
static int has_stray_bits(const uint8_t *mask, int64_t n) { return n % 8 && mask[n / 8] >> n % 8; }

/* Whether to write past the cache: large outputs, of pages that were not just zeroed in it, where the stores are aligned. */
static int is_streamed(const void *out, int64_t bytes, int fresh) { return !fresh && bytes >= STREAM_BYTES && (uintptr_t)out % 64 == 0; }

static int64_t count_bits(const uint8_t *bits, int64_t n) {
    int64_t sum = 0, i = 0;
    for (uint64_t w; i + 8 <= n; i += 8) memcpy(&w, bits + i, 8), sum += __builtin_popcountll(w);
    for (; i < n; i++) sum += __builtin_popcount(bits[i]);
    return sum;
}

/* Puts the values where the mask has bits, zeros elsewhere. Returns 0, 1 if the mask does not have `kept` bits among the
 * first n and none after (nothing is written then), or -1 if there was no memory for scratch. */
EXPORT int sfx_decompress(const void *values, int64_t kept, const uint8_t *mask, int64_t n, int64_t width, void *out, int threads) {
    const Kernels *k = kernels_for(width);
    int64_t chunks = (n + CHUNK - 1) / CHUNK, offset = 0;
    int shards = shards_for(n, threads), fresh = is_fresh(out, n * width);
    int stream = is_streamed(out, n * width, fresh);
    int64_t *offsets = malloc((size_t)(chunks + 1) * sizeof *offsets);
    if (!offsets) return -1;
    FOR_SHARDS(s, shards, n / 8)
        for (int64_t c = share(chunks, s, shards); c < share(chunks, s + 1, shards); c++)
            offsets[c] = count_bits(mask + c * (CHUNK / 8), (chunk_size(n, c) + 7) / 8);
    for (int64_t c = 0; c < chunks; c++) {
        int64_t here = offsets[c];
        offsets[c] = offset;
        offset += here;
    }
    int fits = offset == kept && !has_stray_bits(mask, n);
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

/* One value where a bit is set, zero elsewhere: an expansion of values that are all the same. Returns 0, 1 if bits behind
 * the last element are set (nothing is written then), or -1 if there was no memory for scratch. */
EXPORT int sfx_unpack_value(const uint8_t *bits, int64_t n, int64_t width, uint64_t value, void *out, int threads) {
    if (has_stray_bits(bits, n)) return 1;
    int64_t chunks = (n + CHUNK - 1) / CHUNK, room = CHUNK + WORD;
    const Kernels *k = kernels_for(width);
    int shards = shards_for(n, threads), stream = is_streamed(out, n * width, 0);
    char *values = malloc((size_t)(room * width));
    if (!values) return -1;
    for (int64_t i = 0; i < room; i++) memcpy(values + i * width, &value, (size_t)width); /* little-endian: its low bytes */
    FOR_SHARDS(s, shards, n)
        for (int64_t c = share(chunks, s, shards); c < share(chunks, s + 1, shards); c++)
            k->expand(values, room, bits + c * (CHUNK / 8), chunk_size(n, c), (char *)out + c * CHUNK * width, stream);
    free(values);
    return 0;
}
