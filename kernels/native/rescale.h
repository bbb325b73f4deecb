/* A scale and a shift by channel for the kept elements of a pruned tensor: see rescale.c. No torch, no Python. */
#ifndef SFX_RESCALE_H
#define SFX_RESCALE_H

#include <stdint.h>

/* out[k] = values[k] * weight[c] + bias[c] for the k-th set bit i of the mask, c = i / run % channels.
 *
 * Without a mask every element is kept; weight or bias may be NULL. Returns 1 if the mask does not have `kept` bits, -1
 * without memory. */
int sfx_rescale(const float *values, int64_t kept, const uint8_t *mask, int64_t n, int64_t run, int64_t channels,
                const float *weight, const float *bias, float *out, int threads);

#endif
