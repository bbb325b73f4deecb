/* The functions that Python calls, as SIGNATURES in __init__.py lists them. */
#ifndef SFX_EXPORTS_H
#define SFX_EXPORTS_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT const char *sfx_isa(int i);
EXPORT int sfx_set_isa(const char *name);
EXPORT int sfx_openmp(void);

EXPORT int sfx_compress(const void *x, int64_t n, int64_t width, uint64_t inf, int64_t kept, void *values, uint8_t *mask, int threads);
EXPORT int sfx_compress_normalised(const float *x, int64_t n, const float *mean, const float *rstd, int64_t length, int64_t groups, int64_t kept, float *values, uint8_t *mask, int threads);
EXPORT int sfx_decompress(const void *values, int64_t kept, const uint8_t *mask, int64_t n, int64_t width, void *out, int threads);
EXPORT int sfx_pick(const void *x, int64_t n, int64_t width, const uint8_t *mask, int64_t kept, void *values, int threads);

EXPORT void sfx_pack_sign(const void *x, int64_t n, int64_t width, uint64_t inf, uint8_t *bits, int threads);
EXPORT void sfx_pack_bits(const uint8_t *mask, int64_t n, uint8_t *bits, int threads);
EXPORT int sfx_unpack_bits(const uint8_t *bits, int64_t n, uint8_t *mask, int threads);
EXPORT int sfx_select(const uint8_t *bits, int64_t n, int64_t width, const void *x, uint64_t value, void *out, int threads);

EXPORT void sfx_batch_norm(const float *x, int64_t batch, int64_t channels, int64_t plane, const float *weight, const float *bias, float *running_mean, float *running_var, float momentum, double eps, int fused, float *mean, float *rstd, float *y, int threads);
EXPORT int sfx_batch_norm_grad(const float *g, const float *values, int64_t kept, const uint8_t *mask, int64_t batch, int64_t channels, int64_t plane, const float *scale, float *dx, float *dw, float *db, int threads);
EXPORT int sfx_layer_norm_grad(const float *g, const float *values, int64_t kept, const uint8_t *mask, int64_t rows, int64_t n, const float *w, const float *rstd, float *dx, float *dw, float *db, int threads);

EXPORT int sfx_weight_grad(const void *g, const float *values, int64_t kept, const uint8_t *mask, const int64_t *sizes, float *dw, int threads);

#endif
