/* The backward of batch and layer norm, from the pruned normalised input. Floats alone. */
#include "common.h"

enum {
    FLUSH = 16,             /* words whose sums run in floats before they go to doubles */
    ROW_BLOCKS = 16,        /* parts of a layer norm's rows, each with sums of its own: as many for any number of threads */
};

#define SFX_KERNELS "norm_kernels.h"
#include "for_each_isa.h"

typedef struct {
    void (*sums)(const float *g, const float *w, int64_t n, Bits bits, const float *values, int64_t values_n, double sums[2]);
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

/* Batch norm over [batch, channels, plane]: dx = scale (g - mean(g) - hat mean(g hat)), dw = sum(g hat), db = sum(g), by
 * channel. dx may be NULL. Returns 0, 1 where mask and values do not go together, or -1 without memory for scratch. */
EXPORT int sfx_batch_norm_grad(const float *g, const float *values, int64_t kept, const uint8_t *mask, int64_t batch, int64_t channels, int64_t plane, const float *scale, float *dx, float *dw, float *db, int threads) {
    int64_t count = batch * channels, n = count * plane, bytes = (n + 7) / 8;
    const NormKernels *k = &tables[active_isa];
    int64_t *offsets = run_offsets(mask, count, plane, threads);
    if (!offsets) return -1;
    int fits = offsets[count] == kept && !has_stray_bits(mask, n), shards = (int)MAX(1, MIN(channels, threads));
    if (fits) {
        FOR_SHARDS(s, shards, n)
            for (int64_t c = share(channels, s, shards); c < share(channels, s + 1, shards); c++) {
                double sums[2] = {0, 0}, size = (double)(batch * plane);
                for (int64_t r = c; r < count; r += channels)
                    k->sums(g + r * plane, NULL, plane, (Bits){mask, bytes, r * plane}, values + offsets[r], kept - offsets[r], sums);
                dw[c] = (float)sums[1];
                db[c] = (float)sums[0];
                for (int64_t r = c; dx && r < count; r += channels)
                    k->apply(g + r * plane, NULL, plane, (Bits){mask, bytes, r * plane}, values + offsets[r], kept - offsets[r],
                             scale[c], (float)(sums[0] / size), (float)(sums[1] / size), dx + r * plane, NULL, NULL);
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
                    double sums[2] = {0, 0};
                    if (dx) k->sums(g + r * n, w, n, bits, values + offsets[r], kept - offsets[r], sums);
                    k->apply(g + r * n, w, n, bits, values + offsets[r], kept - offsets[r], rstd[r], (float)(sums[0] / (double)n), (float)(sums[1] / (double)n),
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
