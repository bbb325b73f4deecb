/* Includes the loops of a kernel, SFX_KERNELS, once for each instruction set: at an element width of 32 bits, with
 * SFX_ALL_WIDTHS at 16 and 64 too. SFX_ISA and SFX_WIDTH are set; what both define carries both in its name, FN(name). */

#define SFX_ISA portable
#include "for_each_width.h"
#undef SFX_ISA

#ifdef SFX_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt")
#endif
#define SFX_ISA avx2
#include "for_each_width.h"
#undef SFX_ISA
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2")
#endif
#define SFX_ISA avx512
#include "for_each_width.h"
#undef SFX_ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#ifdef SFX_NEON
#define SFX_ISA neon
#include "for_each_width.h"
#undef SFX_ISA
#endif
