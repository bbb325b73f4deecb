/* The affine part of a norm, for the elements that were kept of its normalised input.
 *
 * Chunks are independent once a first pass over the mask has counted where the values of each begin. The mask is read
 * twice, and another thread may have written to it in between: each chunk is given its own values and takes no others.
 */
#include "rescale.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    WORD = 64,
    CHUNK = 1 << 15,         /* elements per unit of parallel work: whole words */
    PARALLEL_FROM = 1 << 16, /* smaller tensors are done before a second thread is awake */
};

/* Bits of the elements from i on, at most 64 of them and none behind n. */
static uint64_t word_at(const uint8_t *mask, int64_t i, int64_t n) {
    int64_t left = n - i < WORD ? n - i : WORD;
    uint64_t bits = 0;
    if (mask) memcpy(&bits, mask + i / 8, (size_t)((left + 7) / 8));
    else bits = ~0ull;
    return left < WORD ? bits & ((1ull << left) - 1) : bits;
}

static int64_t count(const uint8_t *mask, int64_t from, int64_t to) {
    int64_t found = 0;
    for (int64_t i = from; i < to; i += WORD) found += __builtin_popcountll(word_at(mask, i, to));
    return found;
}

typedef struct {
    const uint8_t *mask;
    int64_t run, channels;
    const float *weight, *bias;
} Layout;

/* The `kept` values of the elements from `from` to `to`. */
static void rescale_chunk(Layout at, int64_t from, int64_t to, const float *values, int64_t kept, float *out) {
    int64_t k = 0;
    for (int64_t i = from; i < to && k < kept; i += WORD) {
        uint64_t bits = word_at(at.mask, i, to);
        int64_t passed = i / at.run, first = passed % at.channels, channel = first, next = (passed + 1) * at.run;
        for (; bits && k < kept; bits &= bits - 1, k++) {
            int64_t place = i + __builtin_ctzll(bits);
            if (at.run == 1) {
                channel = first + place - i;
                while (channel >= at.channels) channel -= at.channels; /* once, but for rows shorter than a word */
            } else {
                for (; place >= next; next += at.run) channel = channel + 1 == at.channels ? 0 : channel + 1;
            }
            float scaled = at.weight ? values[k] * at.weight[channel] : values[k];
            out[k] = at.bias ? scaled + at.bias[channel] : scaled;
        }
    }
    for (; k < kept; k++) out[k] = 0; /* the mask changed under us */
}

EXPORT int sfx_rescale(const float *values, int64_t kept, const uint8_t *mask, int64_t n, int64_t run, int64_t channels,
                       const float *weight, const float *bias, float *out, int threads) {
    if (run < 1 || channels < 1) return 1;
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
    int64_t *starts = malloc((size_t)(chunks + 1) * sizeof *starts);
    if (!starts) return -1;
    Layout at = {mask, run, channels, weight, bias};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n >= PARALLEL_FROM)
    for (int64_t c = 0; c < chunks; c++) {
        int64_t from = c * CHUNK, to = n - from < CHUNK ? n : from + CHUNK;
        starts[c + 1] = count(mask, from, to);
    }
    starts[0] = 0;
    for (int64_t c = 0; c < chunks; c++) starts[c + 1] += starts[c];
    int mismatch = starts[chunks] != kept || (mask && n % 8 && mask[n / 8] >> n % 8);
    if (!mismatch) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n >= PARALLEL_FROM)
        for (int64_t c = 0; c < chunks; c++) {
            int64_t from = c * CHUNK, to = n - from < CHUNK ? n : from + CHUNK;
            rescale_chunk(at, from, to, values + starts[c], starts[c + 1] - starts[c], out + starts[c]);
        }
    }
    free(starts);
    return mismatch;
}
