/* Compares one instruction set with the portable one, on exactly sized heap blocks so that a sanitizer sees any overrun.
 * Usage: check ISA */
#include "prune_pack.c"

#include <stdio.h>

static uint64_t random_bits(void) {
    static uint64_t s = 88172645463325252ull;
    s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    return s;
}

static void fill(char *x, int64_t n, int64_t width, int kind) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t v = random_bits();
        if (kind == 1) v = v >> 63 ? v : 0;     /* half zeros */
        if (kind == 2) v = 0x3c003c003c003c00;  /* all equal */
        if (kind == 3) v &= 0x8000800080038003; /* few distinct, many subnormal */
        memcpy(x + i * width, &v, (size_t)width);
    }
}

static int check(const char *isa, int64_t n, int64_t width, uint64_t inf, int64_t kept, int kind) {
    int64_t bytes = (n + 7) / 8;
    char *x = malloc((size_t)(n * width)), *values[2], *restored[2];
    uint8_t *mask[2], *sign[2];
    int wrong = 0;
    fill(x, n, width, kind);
    for (int i = 0; i < 2; i++) {
        values[i] = malloc((size_t)(kept * width));
        restored[i] = malloc((size_t)(n * width));
        mask[i] = malloc((size_t)bytes);
        sign[i] = malloc((size_t)bytes);
        if (sfx_set_isa(i ? isa : "portable")) return printf("no %s here\n", isa), 1;
        wrong |= sfx_compress(x, n, width, inf, kept, values[i], mask[i], 3);
        wrong |= sfx_decompress(values[i], kept, mask[i], n, width, restored[i], 3);
        sfx_pack_sign(x, n, width, inf, sign[i], 3);
    }
    wrong |= memcmp(values[0], values[1], (size_t)(kept * width)) || memcmp(mask[0], mask[1], (size_t)bytes) ||
             memcmp(restored[0], restored[1], (size_t)(n * width)) || memcmp(sign[0], sign[1], (size_t)bytes);
    if (wrong) printf("%s differs: n %lld, width %lld, kept %lld, kind %d\n", isa, (long long)n, (long long)width, (long long)kept, kind);
    for (int i = 0; i < 2; i++) free(values[i]), free(restored[i]), free(mask[i]), free(sign[i]);
    free(x);
    return wrong;
}

int main(int argc, char **argv) {
    static const int64_t sizes[] = {2, 7, 63, 64, 65, 129, 1000, 8192, 32768 + 1, 100003};
    static const uint64_t infs[] = {0x7c00, 0x7f80, 0x7f800000, 0x7ff0000000000000};
    static const int64_t widths[] = {2, 2, 4, 8};
    int wrong = argc != 2;
    for (int d = 0; d < 4; d++)
        for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int kind = 0; kind < 4; kind++)
                for (int tenth = 1; tenth < 10; tenth += 4) {
                    int64_t kept = MAX(1, MIN(sizes[i] - 1, sizes[i] * tenth / 10));
                    wrong |= check(argv[argc - 1], sizes[i], widths[d], infs[d], kept, kind);
                }
    puts(wrong ? "FAILED" : "ok");
    return wrong;
}
