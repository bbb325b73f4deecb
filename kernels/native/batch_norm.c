/* Batch norm over the statistics of the batch, to the bit what torch computes, in less time.
 *
 * torch adds up each channel of a contiguous tensor one element after the other, in doubles, and waits for every addition.
 * Here eight channels are added up side by side, each in that same order. The rest is torch's arithmetic step by step; whether
 * its build contracted a multiplication and an addition into one is not for us to know, so the caller says (`Fused`).
 */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "common.h"

/* Which of torch's expressions a * b + c round once. */
enum Fused { FUSED_OUTPUT = 1, FUSED_SHIFT = 2, FUSED_RUNNING = 4 };

enum {
    SIDE_BY_SIDE = 8,       /* channels, and elements of each that are loaded at once */
};

#define SFX_KERNELS "batch_norm_kernels.h"
#include "for_each_isa.h"

typedef struct {
    void (*sum)(const float *x, int64_t batch, int64_t stride, int64_t plane, int count, double sums[SIDE_BY_SIDE]);
    void (*deviation)(const float *x, int64_t batch, int64_t stride, int64_t plane, int count, const float *mean, double sums[SIDE_BY_SIDE]);
    void (*affine)(const float *x, int64_t n, float scale, float shift, int fused, float *y);
} BatchNormKernels;

#define BATCH_NORM(isa) {batch_norm_sum_##isa##_32, batch_norm_deviation_##isa##_32, batch_norm_affine_##isa##_32}

static const BatchNormKernels tables[ISAS] = {
#ifdef SFX_X86
    [ISA_AVX512] = BATCH_NORM(avx512),
    [ISA_AVX2] = BATCH_NORM(avx2),
#endif
#ifdef SFX_NEON
    [ISA_NEON] = BATCH_NORM(neon),
#endif
    [ISA_PORTABLE] = BATCH_NORM(portable),
};

/* New running statistics: the mean in floats; the variance is a double from the unbiased one on. */
static float moved_mean(float before, float now, float momentum, int fused) {
    float kept = (1 - momentum) * before;
    return fused & FUSED_RUNNING ? __builtin_fmaf(momentum, now, kept) : momentum * now + kept;
}

static float moved_variance(float before, float now, float momentum, int fused) {
    double kept = (double)((1 - momentum) * before);
    return (float)(fused & FUSED_RUNNING ? __builtin_fma((double)momentum, (double)now, kept) : (double)momentum * (double)now + kept);
}

/* Over [batch, channels, plane]: mean and rstd by channel, and y. weight and bias, and the running statistics, may be NULL. */
EXPORT void sfx_batch_norm(const float *x, int64_t batch, int64_t channels, int64_t plane, const float *weight, const float *bias, float *running_mean, float *running_var, float momentum, double eps, int fused, float *mean, float *rstd, float *y, int threads) {
    const BatchNormKernels *k = &tables[active_isa];
    int64_t n = batch * plane, stride = channels * plane;
    int shards = (int)MAX(1, MIN(channels, threads));
    FOR_SHARDS(s, shards, n * channels) {
        int64_t end = share(channels, s + 1, shards);
        for (int64_t first = share(channels, s, shards); first < end; first += SIDE_BY_SIDE) {
            int count = (int)MIN(SIDE_BY_SIDE, end - first);
            float scale[SIDE_BY_SIDE], shift[SIDE_BY_SIDE];
            double sums[SIDE_BY_SIDE];
            k->sum(x + first * plane, batch, stride, plane, count, sums);
            for (int i = 0; i < count; i++) mean[first + i] = (float)(sums[i] / (double)n);
            k->deviation(x + first * plane, batch, stride, plane, count, mean + first, sums);
            for (int i = 0; i < count; i++) {
                int64_t c = first + i;
                float squares = (float)sums[i], biased = squares / (float)n, unbiased = squares / (float)(n - 1);
                double variance = (double)biased + eps;
                rstd[c] = biased != 0 || eps != 0 ? (float)(1 / sqrt(variance)) : 0;
                if (running_mean) running_mean[c] = moved_mean(running_mean[c], mean[c], momentum, fused);
                if (running_var) running_var[c] = moved_variance(running_var[c], unbiased, momentum, fused);
                scale[i] = weight ? rstd[c] * weight[c] : rstd[c];
                shift[i] = bias ? bias[c] : 0;
                shift[i] = fused & FUSED_SHIFT ? __builtin_fmaf(-mean[c], scale[i], shift[i]) : shift[i] - mean[c] * scale[i];
            }
            for (int64_t b = 0; b < batch; b++)
                for (int i = 0; i < count; i++) {
                    int64_t at = b * stride + (first + i) * plane;
                    k->affine(x + at, plane, scale[i], shift[i], fused & FUSED_OUTPUT, y + at);
                }
        }
    }
}
