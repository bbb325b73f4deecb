/* The loops of sparse_grad.c over float32, for one instruction set: see for_each_isa.h. */

typedef float FN(floats) __attribute__((vector_size(4 * LANES)));
#define floats FN(floats)

/* sums[tap][...] += value * tile[at + shift[tap]][...] over n kept elements, for TAPS taps and VECTORS registers of output
 * channels. The sums stay in registers; STREAMS elements go side by side where there are too few to hide the latency. */
INLINE void FN(taps)(const int32_t *at, const float *values, int64_t n, const float *tile, const int64_t *shift, float *sums, const int TAPS, const int VECTORS, const int STREAMS) {
    floats sum[4][9][16]; /* what is used of it stays in registers, which it would not with sizes that look variable */
    const float *base[9];
#pragma GCC unroll 16
    for (int t = 0; t < TAPS; t++) {
        base[t] = tile + shift[t];
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) {
            memcpy(&sum[0][t][v], sums + (t * VECTORS + v) * LANES, sizeof(floats));
#pragma GCC unroll 4
            for (int s = 1; s < STREAMS; s++) sum[s][t][v] = (floats){0};
        }
    }
    int64_t i = 0;
    for (; i + STREAMS <= n; i += STREAMS) {
#pragma GCC unroll 4
        for (int s = 0; s < STREAMS; s++) {
            floats value = values[i + s] - (floats){0};
            int64_t from = at[i + s];
#pragma GCC unroll 16
            for (int t = 0; t < TAPS; t++)
#pragma GCC unroll 16
                for (int v = 0; v < VECTORS; v++) {
                    floats g;
                    memcpy(&g, base[t] + from + v * LANES, sizeof g);
                    sum[s][t][v] += value * g;
                }
        }
    }
    for (; i < n; i++) {
        floats value = values[i] - (floats){0};
        int64_t from = at[i];
#pragma GCC unroll 16
        for (int t = 0; t < TAPS; t++)
#pragma GCC unroll 16
            for (int v = 0; v < VECTORS; v++) {
                floats g;
                memcpy(&g, base[t] + from + v * LANES, sizeof g);
                sum[0][t][v] += value * g;
            }
    }
#pragma GCC unroll 16
    for (int t = 0; t < TAPS; t++)
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) {
#pragma GCC unroll 4
            for (int s = 1; s < STREAMS; s++) sum[0][t][v] += sum[s][t][v];
            memcpy(sums + (t * VECTORS + v) * LANES, &sum[0][t][v], sizeof(floats));
        }
}

#define TAPS_CASE(COUNT, VECTORS, STREAMS) \
    for (; taps - t >= COUNT; t += COUNT) FN(taps)(list->at, list->values, list->n, tile, shift + t, sums + t * VECTORS * LANES, COUNT, VECTORS, STREAMS)

/* All taps of a list, for a tile of 16, 32 or 64 output channels, `width`: as many taps at once as there are registers for. */
INLINE void FN(accumulate_list)(const List *list, const float *tile, const int64_t *shift, int64_t taps, int64_t width, float *sums) {
    int64_t t = 0;
#if ISA_ID(SFX_ISA) == IS_avx512
    if (width == 16) {
        TAPS_CASE(9, 1, 1);
        TAPS_CASE(5, 1, 1);
        TAPS_CASE(3, 1, 2);
        TAPS_CASE(1, 1, 4);
    } else if (width == 32) {
        TAPS_CASE(4, 2, 1);
        TAPS_CASE(2, 2, 2);
        TAPS_CASE(1, 2, 4);
    } else {
        TAPS_CASE(4, 4, 1);
        TAPS_CASE(2, 4, 1);
        TAPS_CASE(1, 4, 2);
    }
#elif ISA_ID(SFX_ISA) == IS_neon
    if (width == 16) {
        TAPS_CASE(5, 4, 1);
        TAPS_CASE(1, 4, 2);
    } else if (width == 32) {
        TAPS_CASE(2, 8, 1);
        TAPS_CASE(1, 8, 2);
    } else TAPS_CASE(1, 16, 1);
#else /* eight lanes */
    if (width == 16) {
        TAPS_CASE(5, 2, 1);
        TAPS_CASE(2, 2, 2);
        TAPS_CASE(1, 2, 4);
    } else if (width == 32) {
        TAPS_CASE(2, 4, 1);
        TAPS_CASE(1, 4, 2);
    } else TAPS_CASE(1, 8, 1);
#endif
}

static void FN(accumulate)(const Grad *j, const List *lists, int64_t n, const float *tile, float *sums) {
    for (int64_t i = 0; i < n && lists[i].n; i++) {
        const List *list = lists + i, *soon = lists + MIN(i + AHEAD, n - 1);
        int64_t taps = j->tap_start[list->class];
        const float *later = sums + (soon->channel * j->taps + j->tap_start[soon->class]) * j->width;
        __builtin_prefetch(soon->at);
        __builtin_prefetch(soon->values);
        for (int line = 0; line < 4; line++) __builtin_prefetch(later + line * 16);
        FN(accumulate_list)(list, tile, j->tap_shift + taps, j->tap_start[list->class + 1] - taps, j->width, sums + (list->channel * j->taps + taps) * j->width);
    }
}

/* Four columns of four rows, turned: registers of 128 bits are the same everywhere. */
INLINE void FN(turn4)(const float *from, int64_t row, float *to, int64_t to_row) {
    quad a, b, c, d;
    memcpy(&a, from, 16), memcpy(&b, from + row, 16), memcpy(&c, from + 2 * row, 16), memcpy(&d, from + 3 * row, 16);
    quad ab = SHUFFLE(a, b, 0, 4, 1, 5), ab2 = SHUFFLE(a, b, 2, 6, 3, 7), cd = SHUFFLE(c, d, 0, 4, 1, 5), cd2 = SHUFFLE(c, d, 2, 6, 3, 7);
    a = SHUFFLE(ab, cd, 0, 1, 4, 5), b = SHUFFLE(ab, cd, 2, 3, 6, 7), c = SHUFFLE(ab2, cd2, 0, 1, 4, 5), d = SHUFFLE(ab2, cd2, 2, 3, 6, 7);
    memcpy(to, &a, 16), memcpy(to + to_row, &b, 16), memcpy(to + 2 * to_row, &c, 16), memcpy(to + 3 * to_row, &d, 16);
}

#if ISA_ID(SFX_ISA) == IS_avx512
enum { FN(TURNED) = 16 };
#define wide __m512
#define ON_WIDE(name) _mm512_##name
#define STEP_ROWS(at) _mm512_insertf32x4(_mm512_insertf32x4(_mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(at)), _mm_loadu_ps((at) + 4 * row), 1), _mm_loadu_ps((at) + 8 * row), 2), _mm_loadu_ps((at) + 12 * row), 3)
#elif ISA_ID(SFX_ISA) == IS_avx2
enum { FN(TURNED) = 8 };
#define wide __m256
#define ON_WIDE(name) _mm256_##name
#define STEP_ROWS(at) _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(at)), _mm_loadu_ps((at) + 4 * row), 1)
#else
enum { FN(TURNED) = 4 };
#endif

/* Four columns of as many rows as a register has lanes, turned: of every fourth row, one quarter after the other. */
INLINE void FN(turn_wide)(const float *from, int64_t row, float *to, int64_t to_row) {
#ifdef wide
    wide a = STEP_ROWS(from), b = STEP_ROWS(from + row), c = STEP_ROWS(from + 2 * row), d = STEP_ROWS(from + 3 * row);
    wide ab = ON_WIDE(unpacklo_ps)(a, b), ab2 = ON_WIDE(unpackhi_ps)(a, b), cd = ON_WIDE(unpacklo_ps)(c, d), cd2 = ON_WIDE(unpackhi_ps)(c, d);
    ON_WIDE(storeu_ps)(to, ON_WIDE(shuffle_ps)(ab, cd, 0x44));
    ON_WIDE(storeu_ps)(to + to_row, ON_WIDE(shuffle_ps)(ab, cd, 0xee));
    ON_WIDE(storeu_ps)(to + 2 * to_row, ON_WIDE(shuffle_ps)(ab2, cd2, 0x44));
    ON_WIDE(storeu_ps)(to + 3 * to_row, ON_WIDE(shuffle_ps)(ab2, cd2, 0xee));
#else
    FN(turn4)(from, row, to, to_row);
#endif
}

/* Turns `rows` rows of n floats, `row` apart, into n rows of `width`, `to_row` apart, with zeros beyond the rows. A cache
 * line of each row at a time: it is read once, and what is written stays near. */
static void FN(turn)(const float *from, int64_t row, int64_t rows, int64_t n, float *to, int64_t to_row, int64_t width) {
    for (int64_t begin = 0; begin < n; begin += 16) {
        int64_t end = MIN(begin + 16, n), whole = begin + (end - begin) / 4 * 4, k = 0;
        while (k + 4 <= rows) {
            int64_t some = k + FN(TURNED) <= rows ? FN(TURNED) : 4;
            for (int64_t r = k; r < k + some; r++) __builtin_prefetch(from + r * row + begin + 48);
            if (some == 4) for (int64_t i = begin; i < whole; i += 4) FN(turn4)(from + k * row + i, row, to + i * to_row + k, to_row);
            else for (int64_t i = begin; i < whole; i += 4) FN(turn_wide)(from + k * row + i, row, to + i * to_row + k, to_row);
            for (int64_t i = whole; i < end; i++)
                for (int64_t r = k; r < k + some; r++) to[i * to_row + r] = from[r * row + i];
            k += some;
        }
        for (; k < rows; k++)
            for (int64_t i = begin; i < end; i++) to[i * to_row + k] = from[k * row + i];
        for (int64_t i = begin; i < end && k < width; i++) memset(to + i * to_row + k, 0, (size_t)(width - k) * 4);
    }
}

#undef wide
#undef ON_WIDE
#undef STEP_ROWS
#undef floats
#undef TAPS_CASE
