/* Random sizes and bits through quantize.c and rescale.c, in blocks without slack: for the sanitizers. Prints ok. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "quantize.h"
#include "rescale.h"

static uint64_t state = 88172645463325252ull;

static int64_t random_below(int64_t most) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (int64_t)(state % (uint64_t)most);
}

static int round_trip(int64_t n) {
    static const int widths[] = {4, 8, 2, 2};
    int kind = (int)random_below(4), threads = 1 + (int)random_below(4), failed;
    size_t size = (size_t)(n * widths[kind]), blocks = (size_t)((n + 63) / 64);
    uint8_t *x = malloc(size), *out = malloc(size);
    int8_t *codes = malloc((size_t)n);
    void *scales = malloc(blocks * (kind == SFX_FLOAT64 ? 8 : 4));
    for (size_t i = 0; i < size; i++) x[i] = (uint8_t)random_below(256);
    failed = sfx_quantize(x, n, kind, codes, scales, threads) || sfx_dequantize(codes, scales, n, kind, out, threads);
    free(x), free(out), free(codes), free(scales);
    return failed;
}

static int rescaled(int64_t run, int64_t channels, int64_t n) {
    int64_t kept = 0, k = 0;
    uint8_t *mask = calloc((size_t)(n + 7) / 8, 1);
    for (int64_t i = 0; i < n; i++)
        if (random_below(4) == 0) mask[i / 8] |= (uint8_t)(1 << i % 8), kept++;
    float *values = malloc((size_t)kept * 4), *out = malloc((size_t)kept * 4), *weight = malloc((size_t)channels * 4);
    for (int64_t i = 0; i < kept; i++) values[i] = 1;
    for (int64_t i = 0; i < channels; i++) weight[i] = (float)i;
    int failed = sfx_rescale(values, kept, mask, n, run, channels, weight, weight, out, 1 + (int)random_below(4));
    for (int64_t i = 0; i < n; i++)
        if (mask[i / 8] >> i % 8 & 1) failed |= out[k++] != (float)(2 * (i / run % channels));
    failed |= kept > 0 && sfx_rescale(values, kept - 1, mask, n, run, channels, weight, weight, out, 1) != 1;
    free(mask), free(values), free(out), free(weight);
    return failed;
}

int main(void) {
    for (int i = 0; i < 1000; i++) {
        int64_t run = 1 + random_below(70), channels = 1 + random_below(70);
        if (round_trip(random_below(i % 10 ? 300 : 200000))) return printf("round trip failed in case %d\n", i), 1;
        if (rescaled(run, channels, run * channels * random_below(20))) return printf("case %d is not rescaled\n", i), 1;
    }
    return puts("ok"), 0;
}
