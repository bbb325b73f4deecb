/* 8-bit codes with one scale per block of 64 elements: see quantize.c. Plain pointers, no torch, no Python. */
#ifndef SFX_QUANTIZE_H
#define SFX_QUANTIZE_H

#include <stdint.h>

enum { SFX_FLOAT32, SFX_FLOAT64, SFX_BFLOAT16, SFX_FLOAT16 };

/* n elements of `kind` at x: a code for each, and a scale for each block (double for SFX_FLOAT64, else float). */
int sfx_quantize(const void *x, int64_t n, int kind, int8_t *codes, void *scales, int threads);

/* The way back: code times scale, rounded to `kind`. */
int sfx_dequantize(const int8_t *codes, const void *scales, int64_t n, int kind, void *out, int threads);

#endif
