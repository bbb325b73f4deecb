/* Which instruction set the kernels run with, chosen once when the library is loaded. */
#include "common.h"

uint8_t compact8[256][8], expand8[256][8], compact_pairs[16][8], expand_pairs[16][8];
uint8_t compact16_bytes[256][16], expand16_bytes[256][16], compact32_bytes[16][16], expand32_bytes[16][16];
int active_isa = ISA_PORTABLE;

static const char *names[ISAS] = {[ISA_AVX512] = "avx512", [ISA_AVX2] = "avx2", [ISA_NEON] = "neon", [ISA_PORTABLE] = "portable"};
static int available[ISAS] = {[ISA_PORTABLE] = 1};

static void make_shuffle(uint8_t *bytes, const uint8_t *lanes, int lane_count, int lane_bytes) {
    for (int i = 0; i < lane_count; i++)
        for (int b = 0; b < lane_bytes; b++)
            bytes[i * lane_bytes + b] = lanes[i] == 0xff ? 0xff : (uint8_t)(lanes[i] * lane_bytes + b);
}

static void make_tables(void) {
    for (int m = 0; m < 256; m++) {
        int kept = 0;
        memset(compact8[m], 0xff, 8);
        memset(expand8[m], 0xff, 8);
        for (int i = 0; i < 8; i++)
            if (m >> i & 1) {
                compact8[m][kept] = (uint8_t)i;
                expand8[m][i] = (uint8_t)kept++;
            }
        make_shuffle(compact16_bytes[m], compact8[m], 8, 2);
        make_shuffle(expand16_bytes[m], expand8[m], 8, 2);
        if (m < 16) {
            make_shuffle(compact_pairs[m], compact8[m], 4, 2);
            make_shuffle(expand_pairs[m], expand8[m], 4, 2);
            make_shuffle(compact32_bytes[m], compact8[m], 4, 4);
            make_shuffle(expand32_bytes[m], expand8[m], 4, 4);
        }
    }
}

/* When the library is loaded: before any thread can call it. */
__attribute__((constructor)) static void choose_isa(void) {
    make_tables();
#ifdef SFX_X86
    __builtin_cpu_init();
    available[ISA_AVX2] = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    available[ISA_AVX512] = available[ISA_AVX2] && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi2");
#endif
#ifdef SFX_NEON
    available[ISA_NEON] = 1;
#endif
    for (int i = ISAS - 1; i >= 0; i--)
        if (available[i]) active_isa = i;
}

/* The name of the instruction set in use for a negative i; else of the i-th, empty where this machine does not have it. */
EXPORT const char *sfx_isa(int i) { return i < 0 ? names[active_isa] : i >= ISAS ? NULL : available[i] ? names[i] : ""; }

/* For tests and measurements. Returns 0, or -1 where this machine has no such instructions. */
EXPORT int sfx_set_isa(const char *name) {
    for (int i = 0; i < ISAS; i++)
        if (available[i] && !strcmp(names[i], name)) return active_isa = i, 0;
    return -1;
}

EXPORT int sfx_openmp(void) {
#ifdef _OPENMP
    return _OPENMP;
#else
    return 0;
#endif
}
