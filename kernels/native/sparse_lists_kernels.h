/* The loops of sparse_lists.c over float32, for one instruction set: see for_each_isa.h. */

/* How many of n bits are set. */
static int64_t FN(count)(Bits bits, int64_t n) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += WORD) found += __builtin_popcountll(bits_at(bits, i, MIN(WORD, n - i)));
    return found;
}

/* Entries of a table, and of another if there is one, for the kept elements among n: at most `most` of them. Returns how
 * many. Tables and outputs have room for whole registers. */
INLINE int64_t FN(list_tables)(Bits bits, int64_t n, const int32_t *table, const int32_t *other, int64_t most, int32_t *out, int32_t *other_out) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t keep = within(bits_at(bits, i, MIN(WORD, n - i)), n - i, most - found);
        if (keep) EACH_STEP(s) {
            uint64_t m = keep >> s * LANES & low_bits(LANES);
            FN(compact)((key_t *)out + found, FN(load)(table + i + s * LANES), m);
            if (other) FN(compact)((key_t *)other_out + found, FN(load)(other + i + s * LANES), m);
            found += __builtin_popcountll(m);
        }
    }
    return found;
}

static int64_t FN(list)(Bits bits, int64_t n, const int32_t *table, int64_t most, int32_t *out) { return FN(list_tables)(bits, n, table, NULL, most, out, NULL); }
static int64_t FN(list_two)(Bits bits, int64_t n, const int32_t *table, const int32_t *other, int64_t most, int32_t *out, int32_t *other_out) {
    return FN(list_tables)(bits, n, table, other, most, out, other_out);
}

/* The largest magnitude, as bits. */
static uint32_t FN(largest)(const float *values, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        bits &= 0x7fffffff;
        most = MAX(most, bits);
    }
    return most;
}
