/* The loops of sparse_lists.c over float32, for one instruction set: see for_each_isa.h. */

/* How many of n bits are set. */
static int64_t FN(count)(Bits bits, int64_t n) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += WORD) found += __builtin_popcountll(bits_at(bits, i, MIN(WORD, n - i)));
    return found;
}

/* Entries of a table for the kept elements among n: at most `most` of them. Returns how many. Table and output have room for
 * whole registers. */
static int64_t FN(list)(Bits bits, int64_t n, const int32_t *table, int64_t most, int32_t *out) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t keep = within(bits_at(bits, i, MIN(WORD, n - i)), n - i, most - found);
        if (keep) EACH_STEP(s) {
            uint64_t m = keep >> s * LANES & low_bits(LANES);
            FN(compact)((key_t *)out + found, FN(load)(table + i + s * LANES), m);
            found += __builtin_popcountll(m);
        }
    }
    return found;
}

/* The same for the elements that meet a tap, by bits of their places, with their classes and values; *seen counts all kept
 * elements, `most` of them at most. Of the values `readable` are left from the first on. */
static int64_t FN(list_met)(Bits bits, int64_t n, const uint64_t *met, const int32_t *classes, const int32_t *table, const float *values, int64_t readable, int64_t most,
                            int64_t *seen, int32_t *out_classes, int32_t *out, float *out_values) {
    int64_t found = 0, passed = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t keep = within(bits_at(bits, i, MIN(WORD, n - i)), n - i, most - passed), mine = keep & met[i / WORD];
        if (mine && readable - passed >= WORD) EACH_STEP(s) {
            uint64_t all = keep >> s * LANES & low_bits(LANES), m = mine >> s * LANES & low_bits(LANES);
            FN(compact)((key_t *)out_classes + found, FN(load)(classes + i + s * LANES), m);
            FN(compact)((key_t *)out + found, FN(load)(table + i + s * LANES), m);
            FN(compact)((key_t *)out_values + found, FN(expand_lanes)((const key_t *)values + passed, all), m);
            found += __builtin_popcountll(m), passed += __builtin_popcountll(all);
        } else { /* registers would read past the last value */
            for (; mine; mine &= mine - 1, found++) {
                int64_t bit = __builtin_ctzll(mine);
                out_classes[found] = classes[i + bit], out[found] = table[i + bit];
                out_values[found] = values[passed + __builtin_popcountll(keep & low_bits(bit))];
            }
            passed += __builtin_popcountll(keep);
        }
    }
    *seen = passed;
    return found;
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
