/* What the C kernels share: no torch, no Python, plain pointers in and out, called through ctypes.
 *
 * A kernel's loops stand in a header of their own, included once for each instruction set by for_each_isa.h; the file that
 * includes them has the exported functions and a table of the loops, one row for each instruction set.
 *
 * No count of an earlier pass over an input is trusted, because another thread may have written to it in between: a word of
 * mask is cut to the elements and values that are left where it is used (`within`), and offsets are cut to the output where
 * they are made. A caller's race gives an unspecified tensor, never an overrun.
 */
#ifndef SFX_COMMON_H
#define SFX_COMMON_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exports.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bit masks are laid out for little-endian machines"
#endif
#if !defined(__GNUC__)
#error "needs GCC or Clang"
#endif
#if (defined(__x86_64__) || defined(__i386__)) && !defined(SFX_NO_SIMD)
#define SFX_X86 1
#include <immintrin.h>
#endif
#if defined(__aarch64__) && !defined(SFX_NO_SIMD)
#define SFX_NEON 1
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline, unused))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum {
    WORD = 64,              /* elements per step of every loop: one 64-bit word of mask */
    PARALLEL_FROM = 1 << 16,/* smaller tensors are done before a second thread is awake */
};

/* Rows of every table of loops, best first. */
enum { ISA_AVX512, ISA_AVX2, ISA_NEON, ISA_PORTABLE, ISAS };
extern int active_isa;

/* Lane tables for the instruction sets that compact by shuffling: source lane of each output lane, 0xff for none. */
extern uint8_t compact8[256][8], expand8[256][8];
/* The same for 64-bit lanes, as pairs of 32-bit ones (4 pairs to a register). */
extern uint8_t compact_pairs[16][8], expand_pairs[16][8];
/* The same as byte shuffles of 16-bit lanes (8 to a register) and 32-bit lanes (4 to a register). */
extern uint8_t compact16_bytes[256][16], expand16_bytes[256][16], compact32_bytes[16][16], expand32_bytes[16][16];

INLINE uint64_t low_bits(int64_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

/* The compiler may not read again what x was made from. */
#define SNAPSHOT(x) __asm__("" : "+r"(x))

/* The bound of every loop over the bits of a word: those of the first `elements`, and of them the lowest `most`. */
INLINE uint64_t within(uint64_t bits, int64_t elements, int64_t most) {
    SNAPSHOT(bits);
    bits &= low_bits(elements);
    if (__builtin_popcountll(bits) <= most) return bits;
    uint64_t kept = 0;
    for (; most > 0; most--, bits &= bits - 1) kept |= bits & -bits;
    return kept;
}

/* How many of the first n bits are set: where the values of the bits behind them start. Counted from the word for each register,
 * because adding up register by register makes each wait for the one before. */
INLINE int64_t set_before(uint64_t bits, int n) { return __builtin_popcountll(bits & low_bits(n)); }

/* Bits from `first` on, of a mask of so many bytes. */
typedef struct {
    const uint8_t *mask;
    int64_t bytes, first;
} Bits;

/* Up to 64 of them, from the i-th on. */
INLINE uint64_t bits_at(Bits b, int64_t i, int64_t count) {
    int64_t at = b.first + i, byte = at / 8, shift = at % 8;
    uint64_t low = 0, high = 0;
    if (byte + 9 <= b.bytes) memcpy(&low, b.mask + byte, 8), high = b.mask[byte + 8];
    else {
        uint8_t rest[16] = {0};
        memcpy(rest, b.mask + byte, (size_t)MIN(9, b.bytes - byte));
        memcpy(&low, rest, 8), high = rest[8];
    }
    return (low >> shift | (shift ? high << (64 - shift) : 0)) & low_bits(count);
}

/* Whether bits behind the last of n elements are set. */
INLINE int has_stray_bits(const uint8_t *mask, int64_t n) { return n % 8 && mask[n / 8] >> n % 8; }

/* Where the values of each of `count` runs of n elements start; one more entry for the end. NULL without memory. */
int64_t *run_offsets(const uint8_t *mask, int64_t count, int64_t n, int threads);

INLINE int64_t share(int64_t total, int64_t s, int64_t shards) { return total * s / shards; }

#define PRAGMA(text) _Pragma(#text)
/* `work` elements in all: with few, waiting for the other threads would cost more than they save. */
#define FOR_SHARDS(s, count, work) \
    PRAGMA(omp parallel for num_threads(count) schedule(static, 1) if ((count) > 1 && (work) >= PARALLEL_FROM)) \
    for (int s = 0; s < (count); s++)

#define CAT_(a, b, c) a##_##b##_##c
#define CAT(a, b, c) CAT_(a, b, c)
#define FN(name) CAT(name, SFX_ISA, SFX_WIDTH)

#endif
