/* Symmetric 8-bit codes, one scale per block of 64 elements in memory order.
 *
 *   scale = max|x| / 127, code = x / scale rounded to nearest, ties to even; back: code * scale, rounded to the type.
 *
 * Zero stays zero. A block with NaN or an infinity has the scale NaN and codes of 0, so all of it comes back as NaN. Where
 * the scale would not be a normal number it is 0 and so is the block. Blocks are independent: any number of threads gives
 * the same bits. Loops are plain C in fixed steps, which the compiler turns into vectors for each instruction set below; a
 * division, not a product with the inverse, so that no multiplication meets an addition and nothing is fused.
 */
#include "quantize.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))

#if defined(__has_feature)
#define SFX_HAS(x) __has_feature(x)
#else
#define SFX_HAS(x) 0
#endif
/* One copy of a function for each instruction set, chosen when the library is loaded. Sanitizers are not up by then. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(SFX_NO_SIMD) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__) && !SFX_HAS(address_sanitizer) && !SFX_HAS(thread_sanitizer)
#define CLONED __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define CLONED
#endif

enum {
    BLOCK = 64,
    CHUNK = 1 << 14,         /* elements per unit of parallel work: whole blocks */
    PARALLEL_FROM = 1 << 16, /* smaller tensors are done before a second thread is awake */
};

#define ROUND32 12582912.0f          /* 1.5 * 2^23: added and taken away, it leaves a whole number, ties to even */
#define ROUND64 6755399441055744.0   /* 1.5 * 2^52 */

INLINE float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float from_bfloat16(uint16_t x) { return as_float((uint32_t)x << 16); }

/* Finite ones alone: the exponent is moved by a product, which is exact and takes subnormal numbers along. */
INLINE float from_float16(uint16_t x) {
    float magnitude = as_float((uint32_t)(x & 0x7fff) << 13) * 0x1p112f;
    return as_float(bits_of(magnitude) | (uint32_t)(x & 0x8000) << 16);
}

INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

INLINE uint16_t to_float16(float x) {
    uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32_t normal = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_of(as_float(magnitude) + 0.5f) - bits_of(0.5f); /* the sum rounds at 2^-24 */
    uint32_t found = magnitude < 0x38800000 ? subnormal : magnitude > 0x7f800000 ? 0x7e00 : normal;
    return (uint16_t)(sign | found);
}

INLINE float same_float(float x) { return x; }
INLINE double same_double(double x) { return x; }

/* The loops for one type: T in memory, B its bits, F what is computed in. `count` elements, BLOCK but for the last block. */
#define DEFINE(NAME, T, B, F, MAGNITUDE, INFINITE, SMALLEST, ROUND, FROM, TO)                                              \
    INLINE void NAME##_block(const T *restrict x, int64_t count, int8_t *restrict codes, F *restrict scale) {              \
        B largest = 0;                                                                                                     \
        for (int64_t i = 0; i < count; i++) {                                                                              \
            B bits;                                                                                                        \
            memcpy(&bits, x + i, sizeof bits);                                                                             \
            bits = (B)(bits & MAGNITUDE);                                                                                  \
            largest = bits > largest ? bits : largest;                                                                     \
        }                                                                                                                  \
        if (largest >= INFINITE) {                                                                                         \
            *scale = (F)NAN;                                                                                               \
            memset(codes, 0, (size_t)count);                                                                               \
            return;                                                                                                        \
        }                                                                                                                  \
        T most;                                                                                                            \
        memcpy(&most, &largest, sizeof most);                                                                              \
        F step = FROM(most) / (F)127;                                                                                      \
        if (step < SMALLEST) step = 0;                                                                                     \
        *scale = step;                                                                                                     \
        F by = step > 0 ? step : 1;                                                                                        \
        for (int64_t i = 0; i < count; i++) codes[i] = (int8_t)(int32_t)(FROM(x[i]) / by + ROUND - ROUND);                 \
    }                                                                                                                      \
    CLONED static void quantize_##NAME(const T *x, int64_t n, int8_t *codes, F *scales) {                                  \
        int64_t i = 0;                                                                                                     \
        for (; n - i >= BLOCK; i += BLOCK) NAME##_block(x + i, BLOCK, codes + i, scales + i / BLOCK);                      \
        if (i < n) NAME##_block(x + i, n - i, codes + i, scales + i / BLOCK);                                              \
    }                                                                                                                      \
    CLONED static void dequantize_##NAME(const int8_t *restrict codes, const F *restrict scales, int64_t n,                \
                                         T *restrict out) {                                                                \
        int64_t i = 0;                                                                                                     \
        for (; n - i >= BLOCK; i += BLOCK)                                                                                 \
            for (int64_t j = 0; j < BLOCK; j++) out[i + j] = TO((F)codes[i + j] * scales[i / BLOCK]);                      \
        for (; i < n; i++) out[i] = TO((F)codes[i] * scales[i / BLOCK]);                                                   \
    }

DEFINE(float32, float, int32_t, float, 0x7fffffff, 0x7f800000, FLT_MIN, ROUND32, same_float, same_float)
DEFINE(float64, double, int64_t, double, 0x7fffffffffffffff, 0x7ff0000000000000, DBL_MIN, ROUND64, same_double, same_double)
DEFINE(bfloat16, uint16_t, uint16_t, float, 0x7fff, 0x7f80, FLT_MIN, ROUND32, from_bfloat16, to_bfloat16)
DEFINE(float16, uint16_t, uint16_t, float, 0x7fff, 0x7c00, FLT_MIN, ROUND32, from_float16, to_float16)

static void quantize_chunk(const void *x, int64_t from, int64_t n, int kind, int8_t *codes, void *scales) {
    int64_t block = from / BLOCK;
    codes += from;
    switch (kind) {
        case SFX_FLOAT32: quantize_float32((const float *)x + from, n, codes, (float *)scales + block); break;
        case SFX_FLOAT64: quantize_float64((const double *)x + from, n, codes, (double *)scales + block); break;
        case SFX_BFLOAT16: quantize_bfloat16((const uint16_t *)x + from, n, codes, (float *)scales + block); break;
        default: quantize_float16((const uint16_t *)x + from, n, codes, (float *)scales + block); break;
    }
}

static void dequantize_chunk(const int8_t *codes, const void *scales, int64_t from, int64_t n, int kind, void *out) {
    int64_t block = from / BLOCK;
    codes += from;
    switch (kind) {
        case SFX_FLOAT32: dequantize_float32(codes, (const float *)scales + block, n, (float *)out + from); break;
        case SFX_FLOAT64: dequantize_float64(codes, (const double *)scales + block, n, (double *)out + from); break;
        case SFX_BFLOAT16: dequantize_bfloat16(codes, (const float *)scales + block, n, (uint16_t *)out + from); break;
        default: dequantize_float16(codes, (const float *)scales + block, n, (uint16_t *)out + from); break;
    }
}

EXPORT int sfx_quantize(const void *x, int64_t n, int kind, int8_t *codes, void *scales, int threads) {
    if (kind < SFX_FLOAT32 || kind > SFX_FLOAT16) return 1;
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n >= PARALLEL_FROM)
    for (int64_t c = 0; c < chunks; c++) {
        int64_t from = c * CHUNK, left = n - from;
        quantize_chunk(x, from, left < CHUNK ? left : CHUNK, kind, codes, scales);
    }
    return 0;
}

EXPORT int sfx_dequantize(const int8_t *codes, const void *scales, int64_t n, int kind, void *out, int threads) {
    if (kind < SFX_FLOAT32 || kind > SFX_FLOAT16) return 1;
    int64_t chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n >= PARALLEL_FROM)
    for (int64_t c = 0; c < chunks; c++) {
        int64_t from = c * CHUNK, left = n - from;
        dequantize_chunk(codes, scales, from, left < CHUNK ? left : CHUNK, kind, out);
    }
    return 0;
}
