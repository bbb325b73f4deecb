/* The loops of batch_norm.c, for one instruction set. See for_each_isa.h.
 *
 * x is the first of `count` channels that lie side by side, of planes so many elements long, `stride` elements from one
 * sample to the next. Channels beyond `count` are those of the last one again.
 */

typedef float FN(eight) __attribute__((vector_size(4 * SIDE_BY_SIDE)));
typedef double FN(wide) __attribute__((vector_size(8 * SIDE_BY_SIDE)));
#define eight FN(eight)
#define wide FN(wide)
#pragma GCC diagnostic ignored "-Wpsabi" /* all that takes or returns one is inlined */

/* element[i]: the i-th of each channel. */
INLINE void FN(transpose)(const float *const channel[SIDE_BY_SIDE], int64_t at, eight element[SIDE_BY_SIDE]) {
#if ISA_ID(SFX_ISA) == IS_avx2 || ISA_ID(SFX_ISA) == IS_avx512
    __m256 half[SIDE_BY_SIDE], pair[SIDE_BY_SIDE];
    for (int c = 0; c < 4; c++) { /* the first four elements of channels c and c + 4, then the last four */
        __m256 low = _mm256_loadu_ps(channel[c] + at), high = _mm256_loadu_ps(channel[c + 4] + at);
        half[c] = _mm256_permute2f128_ps(low, high, 0x20);
        half[c + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
    for (int h = 0; h < 8; h += 4) {
        pair[h] = _mm256_unpacklo_ps(half[h], half[h + 1]), pair[h + 1] = _mm256_unpackhi_ps(half[h], half[h + 1]);
        pair[h + 2] = _mm256_unpacklo_ps(half[h + 2], half[h + 3]), pair[h + 3] = _mm256_unpackhi_ps(half[h + 2], half[h + 3]);
        element[h] = (eight)_mm256_shuffle_ps(pair[h], pair[h + 2], 0x44), element[h + 1] = (eight)_mm256_shuffle_ps(pair[h], pair[h + 2], 0xee);
        element[h + 2] = (eight)_mm256_shuffle_ps(pair[h + 1], pair[h + 3], 0x44), element[h + 3] = (eight)_mm256_shuffle_ps(pair[h + 1], pair[h + 3], 0xee);
    }
#else
    for (int i = 0; i < SIDE_BY_SIDE; i++)
        for (int c = 0; c < SIDE_BY_SIDE; c++) element[i][c] = channel[c][at + i];
#endif
}

INLINE wide FN(squared)(eight x, eight mean, int centred) {
    if (centred) x -= mean, x *= x;
    return __builtin_convertvector(x, wide);
}

/* The sums of x, or of the squares of x - mean, by channel: each in order, one addition at a time. */
INLINE void FN(add_up)(const float *x, int64_t batch, int64_t stride, int64_t plane, int count, const float *mean, int centred, double sums[SIDE_BY_SIDE]) {
    const float *channel[SIDE_BY_SIDE];
    eight centre, element[SIDE_BY_SIDE];
    wide sum = {0};
    for (int c = 0; c < SIDE_BY_SIDE; c++) {
        channel[c] = x + MIN(c, count - 1) * plane;
        centre[c] = centred ? mean[MIN(c, count - 1)] : 0;
    }
    for (int64_t b = 0; b < batch; b++) {
        int64_t i = 0;
        for (; i + SIDE_BY_SIDE <= plane; i += SIDE_BY_SIDE) {
            FN(transpose)(channel, i, element);
            for (int e = 0; e < SIDE_BY_SIDE; e++) sum += FN(squared)(element[e], centre, centred);
        }
        for (; i < plane; i++) {
            eight last = {0};
            for (int c = 0; c < SIDE_BY_SIDE; c++) last[c] = channel[c][i];
            sum += FN(squared)(last, centre, centred);
        }
        for (int c = 0; c < SIDE_BY_SIDE; c++) channel[c] += stride;
    }
    memcpy(sums, &sum, sizeof sum);
}

static void FN(batch_norm_sum)(const float *x, int64_t batch, int64_t stride, int64_t plane, int count, double sums[SIDE_BY_SIDE]) {
    FN(add_up)(x, batch, stride, plane, count, NULL, 0, sums);
}

static void FN(batch_norm_deviation)(const float *x, int64_t batch, int64_t stride, int64_t plane, int count, const float *mean, double sums[SIDE_BY_SIDE]) {
    FN(add_up)(x, batch, stride, plane, count, mean, 1, sums);
}

static void FN(batch_norm_affine)(const float *restrict x, int64_t n, float scale, float shift, int fused, float *restrict y) {
    if (fused)
        for (int64_t i = 0; i < n; i++) y[i] = __builtin_fmaf(x[i], scale, shift);
    else
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale + shift;
}

#undef eight
#undef wide
