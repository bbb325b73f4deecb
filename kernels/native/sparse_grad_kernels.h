/* The loops of sparse_grad.c over float32, for one instruction set: see for_each_isa.h. */

typedef float FN(floats) __attribute__((vector_size(4 * LANES)));
#define floats FN(floats)

/* Offsets of the kept elements among n, from a table with an entry for each: at most `most` of them. Returns how many.
 * Table and output have room for whole registers. */
static int64_t FN(list)(Bits bits, int64_t n, const int32_t *table, int64_t most, int32_t *out) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t keep = within(bits_at(bits, i, MIN(WORD, n - i)), n - i, most - found);
        if (keep) EACH_STEP(s) {
            uint64_t m = keep >> s * LANES & low_bits(LANES);
            if (!m) continue;
            FN(compact)((key_t *)out + found, FN(load)(table + i + s * LANES), m);
            found += __builtin_popcountll(m);
        }
    }
    return found;
}

/* The same for elements of one class, whose places `own` has the bits of; their values are copied too, `room` of them
 * at most. *start counts all elements. */
static int64_t FN(list_class)(Bits bits, int64_t n, const int32_t *table, const uint64_t *own, const float *values, int64_t most, int64_t room, int64_t *start, int32_t *out, float *out_values) {
    int64_t found = 0, seen = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t keep = within(bits_at(bits, i, MIN(WORD, n - i)), n - i, most - seen), mine = keep & own[i / WORD];
        if (most - seen >= WORD) EACH_STEP(s) {
            uint64_t all = keep >> s * LANES & low_bits(LANES), m = mine >> s * LANES & low_bits(LANES);
            if (m && found + __builtin_popcountll(m) <= room) {
                FN(compact)((key_t *)out + found, FN(load)(table + i + s * LANES), m);
                FN(compact)((key_t *)out_values + found, FN(expand_lanes)((const key_t *)values + seen, all), m);
                found += __builtin_popcountll(m);
            }
            seen += __builtin_popcountll(all);
        } else for (; keep; keep &= keep - 1, seen++) { /* registers would read past the last value */
            int64_t bit = __builtin_ctzll(keep);
            if (own[i / WORD] >> bit & 1 && found < room) out[found] = table[i + bit], out_values[found++] = values[seen];
        }
    }
    *start += seen;
    return found;
}

/* sums[tap][...] += value * tile[at + shift[tap]][...] over n kept elements, for TAPS taps and VECTORS registers of output
 * channels. The sums stay in registers; STREAMS elements go side by side where there are too few to hide the latency. */
INLINE void FN(taps)(const int32_t *at, const float *values, int64_t n, const float *tile, const int64_t *shift, float *sums, const int TAPS, const int VECTORS, const int STREAMS) {
    floats sum[STREAMS][TAPS][VECTORS];
    const float *base[TAPS];
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
    for (; taps - t >= COUNT; t += COUNT) FN(taps)(at, values, n, tile, shift + t, sums + t * VECTORS * LANES, COUNT, VECTORS, STREAMS)

/* All taps of a list, for a tile of 16 or 32 output channels, `width`: as many taps at once as there are registers for. */
static void FN(accumulate)(const int32_t *at, const float *values, int64_t n, const float *tile, const int64_t *shift, int taps, int width, float *sums) {
    int t = 0;
#if ISA_ID(SFX_ISA) == IS_avx512
    if (width == 16) {
        TAPS_CASE(9, 1, 1);
        TAPS_CASE(5, 1, 1);
        TAPS_CASE(3, 1, 2);
        TAPS_CASE(1, 1, 4);
    } else {
        TAPS_CASE(4, 2, 1);
        TAPS_CASE(2, 2, 2);
        TAPS_CASE(1, 2, 4);
    }
#elif ISA_ID(SFX_ISA) == IS_neon
    if (width == 16) {
        TAPS_CASE(5, 4, 1);
        TAPS_CASE(1, 4, 2);
    } else {
        TAPS_CASE(2, 8, 1);
        TAPS_CASE(1, 8, 2);
    }
#else /* eight lanes */
    if (width == 16) {
        TAPS_CASE(5, 2, 1);
        TAPS_CASE(2, 2, 2);
        TAPS_CASE(1, 2, 4);
    } else {
        TAPS_CASE(2, 4, 1);
        TAPS_CASE(1, 4, 2);
    }
#endif
}

/* Four columns of four rows, turned: registers of 128 bits are the same everywhere. */
INLINE void FN(turn4)(const float *from, int64_t row, float *to, int64_t to_row) {
    quad a, b, c, d;
    memcpy(&a, from, 16), memcpy(&b, from + row, 16), memcpy(&c, from + 2 * row, 16), memcpy(&d, from + 3 * row, 16);
    quad ab = SHUFFLE(a, b, 0, 4, 1, 5), ab2 = SHUFFLE(a, b, 2, 6, 3, 7), cd = SHUFFLE(c, d, 0, 4, 1, 5), cd2 = SHUFFLE(c, d, 2, 6, 3, 7);
    a = SHUFFLE(ab, cd, 0, 1, 4, 5), b = SHUFFLE(ab, cd, 2, 3, 6, 7), c = SHUFFLE(ab2, cd2, 0, 1, 4, 5), d = SHUFFLE(ab2, cd2, 2, 3, 6, 7);
    memcpy(to, &a, 16), memcpy(to + to_row, &b, 16), memcpy(to + 2 * to_row, &c, 16), memcpy(to + 3 * to_row, &d, 16);
}

/* Turns `rows` rows of n floats, `row` apart, into n rows of `width`, `to_row` apart, with zeros beyond the rows. A cache
 * line of each row at a time: it is read once, and what is written stays near. */
static void FN(turn)(const float *from, int64_t row, int64_t rows, int64_t n, float *to, int64_t to_row, int64_t width) {
    for (int64_t begin = 0; begin < n; begin += 16) {
        int64_t end = MIN(begin + 16, n), k = 0;
        for (; k + 4 <= rows; k += 4) {
            int64_t i = begin;
            for (; i + 4 <= end; i += 4) FN(turn4)(from + k * row + i, row, to + i * to_row + k, to_row);
            for (; i < end; i++)
                for (int j = 0; j < 4; j++) to[i * to_row + k + j] = from[(k + j) * row + i];
        }
        for (; k < rows; k++)
            for (int64_t i = begin; i < end; i++) to[i * to_row + k] = from[k * row + i];
        for (int64_t i = begin; i < end && k < width; i++) memset(to + i * to_row + k, 0, (size_t)(width - k) * 4);
    }
}

#undef floats
#undef TAPS_CASE
