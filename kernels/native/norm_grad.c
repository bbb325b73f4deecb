/* The backward of batch and layer norm, from the pruned normalised input. Floats alone. */
#include "common.h"

enum {
    FLUSH = 16,             /* words whose sums run in floats before they go to doubles */
    LANES_MOST = 16,        /* of a register of any instruction set */
    SAMPLE_BYTES = 1 << 12, /* of a sample are read at once, channels side by side: a page */
    BLOCK_CHANNELS = 64,    /* at most */
    ROW_BLOCKS = 16,        /* parts of a layer norm's rows, each with sums of its own: as many for any number of threads */
};

/* Sums of g w and of g w hat, as they grow from run to run: the recent ones in floats, lane by lane. */
typedef struct {
    float recent[2][LANES_MOST];
    double sums[2][LANES_MOST];
    int64_t words; /* that `recent` is of */
} Sums;

#define SFX_KERNELS "norm_kernels.h"
#include "for_each_isa.h"

typedef struct {
    void (*sums)(const float *g, const float *w, int64_t n, Bits bits, const float *values, int64_t values_n, Sums *sums);
    void (*apply)(const float *g, const float *w, int64_t n, Bits bits, const float *values, int64_t values_n, float scale, float mean, float slope, float *dx, float *dw, float *db);
} NormKernels;

#define NORM(isa) {norm_sums_##isa##_32, norm_apply_##isa##_32}

static const NormKernels tables[ISAS] = {
#ifdef SFX_X86
    [ISA_AVX512] = NORM(avx512),
    [ISA_AVX2] = NORM(avx2),
#endif
#ifdef SFX_NEON
    [ISA_NEON] = NORM(neon),
#endif
    [ISA_PORTABLE] = NORM(portable),
};

static double total(const Sums *s, int which) {
    double sum = 0;
    for (int i = 0; i < LANES_MOST; i++) sum += s->sums[which][i] + (double)s->recent[which][i];
    return sum;
}

/* Asks for what the next sample will read: hardware does not foresee a jump to another page. */
static void prefetch(const float *p, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i);
}

/* Batch norm over [batch, channels, plane]: dx = scale (g - mean(g) - hat mean(g hat)), dw = sum(g hat), db = sum(g), by
 * channel. dx may be NULL. Returns 0, 1 where mask and values do not go together, or -1 without memory for scratch. */
EXPORT int sfx_batch_norm_grad(const float *g, const float *values, int64_t kept, const uint8_t *mask, int64_t batch, int64_t channels, int64_t plane, const float *scale, float *dx, float *dw, float *db, int threads) {
    int64_t count = batch * channels, n = count * plane, bytes = (n + 7) / 8;
    const NormKernels *k = &tables[active_isa];
    int64_t *offsets = run_offsets(mask, count, plane, threads);
    if (!offsets) return -1;
    int fits = offsets[count] == kept && !has_stray_bits(mask, n), shards = (int)MAX(1, MIN(channels, threads));
    int64_t block = MAX(1, MIN(BLOCK_CHANNELS, SAMPLE_BYTES / (plane * (int64_t)sizeof *g)));
    if (fits) {
        FOR_SHARDS(s, shards, n) {
            int64_t end = share(channels, s + 1, shards);
            for (int64_t first = share(channels, s, shards); first < end; first += block) {
                int64_t some = MIN(block, end - first);
                Sums sums[BLOCK_CHANNELS] = {0};
                float means[BLOCK_CHANNELS], slopes[BLOCK_CHANNELS];
                for (int64_t r = first; r < count; r += channels) {
                    int64_t next = r + channels;
                    if (next < count) prefetch(g + next * plane, some * plane), prefetch(values + offsets[next], offsets[next + some] - offsets[next]);
                    for (int64_t i = 0; i < some; i++)
                        k->sums(g + (r + i) * plane, NULL, plane, (Bits){mask, bytes, (r + i) * plane}, values + offsets[r + i], kept - offsets[r + i], &sums[i]);
                }
                for (int64_t i = 0; i < some; i++) {
                    double sum = total(&sums[i], 0), dot = total(&sums[i], 1), size = (double)(batch * plane);
                    dw[first + i] = (float)dot, slopes[i] = (float)(dot / size);
                    db[first + i] = (float)sum, means[i] = (float)(sum / size);
                }
                for (int64_t r = first; dx && r < count; r += channels)
                    for (int64_t i = 0; i < some; i++)
                        k->apply(g + (r + i) * plane, NULL, plane, (Bits){mask, bytes, (r + i) * plane}, values + offsets[r + i], kept - offsets[r + i],
                                 scale[first + i], means[i], slopes[i], dx + (r + i) * plane, NULL, NULL);
            }
        }
    }
    free(offsets);
    return fits ? 0 : 1;
}

/* Layer norm over rows of n elements: dx = rstd (g w - mean(g w) - hat mean(g w hat)), by row, dw = sum(g hat) and
 * db = sum(g) by column. w, dx, dw and db may be NULL. Returns as batch norm does. */
EXPORT int sfx_layer_norm_grad(const float *g, const float *values, int64_t kept, const uint8_t *mask, int64_t rows, int64_t n, const float *w, const float *rstd, float *dx, float *dw, float *db, int threads) {
    int64_t bytes = (rows * n + 7) / 8, blocks = MAX(1, MIN(rows, ROW_BLOCKS));
    const NormKernels *k = &tables[active_isa];
    int64_t *offsets = run_offsets(mask, rows, n, threads);
    float *parts = calloc((size_t)(2 * blocks * n), sizeof *parts);
    int ok = offsets && parts, fits = ok && offsets[rows] == kept && !has_stray_bits(mask, rows * n), shards = (int)MAX(1, MIN(blocks, threads));
    if (fits) {
        FOR_SHARDS(s, shards, rows * n)
            for (int64_t b = share(blocks, s, shards); b < share(blocks, s + 1, shards); b++)
                for (int64_t r = share(rows, b, blocks); r < share(rows, b + 1, blocks); r++) {
                    Bits bits = {mask, bytes, r * n};
                    Sums sums = {0};
                    if (dx) k->sums(g + r * n, w, n, bits, values + offsets[r], kept - offsets[r], &sums);
                    k->apply(g + r * n, w, n, bits, values + offsets[r], kept - offsets[r], rstd[r], (float)(total(&sums, 0) / (double)n), (float)(total(&sums, 1) / (double)n),
                             dx ? dx + r * n : NULL, dw ? parts + 2 * b * n : NULL, db ? parts + (2 * b + 1) * n : NULL);
                }
        for (int64_t i = 0; i < n; i++) {
            double sum_w = 0, sum_b = 0;
            for (int64_t b = 0; b < blocks; b++) sum_w += (double)parts[2 * b * n + i], sum_b += (double)parts[(2 * b + 1) * n + i];
            if (dw) dw[i] = (float)sum_w;
            if (db) db[i] = (float)sum_b;
        }
    }
    free(offsets);
    free(parts);
    return !ok ? -1 : fits ? 0 : 1;
}
