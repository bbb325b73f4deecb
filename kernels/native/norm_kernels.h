/* The loops of a norm's backward over float32, for one instruction set. See for_each_isa.h.
 *
 * g is the output gradient, `hat` the normalised input, zero but for the values that `bits` has a place for. Sums run in
 * floats for FLUSH words, then in doubles.
 */

typedef float FN(floats) __attribute__((vector_size(4 * LANES)));
#define floats FN(floats)
#pragma GCC diagnostic ignored "-Wpsabi" /* all that takes or returns one is inlined */

INLINE floats FN(floats_at)(const float *p) { floats v; memcpy(&v, p, sizeof v); return v; }
INLINE floats FN(hat)(const float *values, uint64_t m) { vec v = FN(expand_lanes)((const key_t *)values, m); floats f; memcpy(&f, &v, sizeof f); return f; }
INLINE void FN(flush)(floats *recent, double *sums) {
    for (int i = 0; i < LANES; i++) sums[i] += (double)(*recent)[i];
    *recent = (floats){0};
}

/* The first of n elements that fill a register, with zeros beyond them. */
INLINE floats FN(load_some)(const float *p, int64_t n) {
    floats v = {0};
    if (n >= LANES) return FN(floats_at)(p);
    memcpy(&v, p, (size_t)MAX(n, 0) * sizeof *p);
    return v;
}
INLINE void FN(store_some)(float *p, floats v, int64_t n) { memcpy(p, &v, n >= LANES ? sizeof v : (size_t)MAX(n, 0) * sizeof *p); }

/* The kept elements among a word of a run: their bits, and their values with enough behind them for whole registers. */
INLINE const float *FN(kept_values)(Bits bits, int64_t i, int64_t left, const float *values, const float *end, float *room, uint64_t *keep) {
    *keep = within(bits_at(bits, i, left), left, end - values);
    return end - values >= WORD ? values : memcpy(room, values, (size_t)__builtin_popcountll(*keep) * sizeof *values);
}

INLINE void FN(sum_word)(const float *g, const float *w, int64_t left, uint64_t keep, const float *values, floats *plain, floats *dot) {
    EACH_STEP(s) {
        floats gw = FN(load_some)(g + s * LANES, left - s * LANES), hat = FN(hat)(values + set_before(keep, s * LANES), keep >> s * LANES & low_bits(LANES));
        if (w) gw *= FN(load_some)(w + s * LANES, left - s * LANES);
        *plain += gw;
        *dot += gw * hat;
    }
}

/* A run's sums of g w and of g w hat; w is 1 where there is none. */
static void FN(norm_sums)(const float *g, const float *w, int64_t n, Bits bits, const float *values, int64_t values_n, Sums *sums) {
    const float *end = values + values_n;
    float room[2 * WORD];
    floats plain = FN(floats_at)(sums->recent[0]), dot = FN(floats_at)(sums->recent[1]);
    int64_t words = sums->words;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t keep;
        const float *from = FN(kept_values)(bits, i, MIN(WORD, n - i), values, end, room, &keep);
        if (n - i >= WORD) FN(sum_word)(g + i, w ? w + i : NULL, WORD, keep, from, &plain, &dot);
        else FN(sum_word)(g + i, w ? w + i : NULL, n - i, keep, from, &plain, &dot);
        values += __builtin_popcountll(keep);
        if (++words == FLUSH) FN(flush)(&plain, sums->sums[0]), FN(flush)(&dot, sums->sums[1]), words = 0;
    }
    memcpy(sums->recent[0], &plain, sizeof plain);
    memcpy(sums->recent[1], &dot, sizeof dot);
    sums->words = words;
}

INLINE void FN(apply_word)(const float *g, const float *w, int64_t left, uint64_t keep, const float *values, float scale, float mean, float slope, float *dx, float *dw, float *db) {
    EACH_STEP(s) {
        int64_t at = s * LANES, some = left - at;
        floats plain = FN(load_some)(g + at, some), hat = FN(hat)(values + set_before(keep, (int)at), keep >> at & low_bits(LANES)), gw = w ? plain * FN(load_some)(w + at, some) : plain;
        if (dw) FN(store_some)(dw + at, FN(load_some)(dw + at, some) + plain * hat, some);
        if (db) FN(store_some)(db + at, FN(load_some)(db + at, some) + plain, some);
        if (dx) FN(store_some)(dx + at, (gw - mean - hat * slope) * scale, some);
    }
}

/* dx = scale (g w - mean - hat slope); where there are dw and db, dw += g hat and db += g. dx may be g. */
static void FN(norm_apply)(const float *g, const float *w, int64_t n, Bits bits, const float *values, int64_t values_n, float scale, float mean, float slope, float *dx, float *dw, float *db) {
    const float *end = values + values_n;
    float room[2 * WORD];
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t keep;
        const float *from = FN(kept_values)(bits, i, MIN(WORD, n - i), values, end, room, &keep), *wi = w ? w + i : NULL;
        float *dxi = dx ? dx + i : NULL, *dwi = dw ? dw + i : NULL, *dbi = db ? db + i : NULL;
        if (n - i >= WORD) FN(apply_word)(g + i, wi, WORD, keep, from, scale, mean, slope, dxi, dwi, dbi);
        else FN(apply_word)(g + i, wi, n - i, keep, from, scale, mean, slope, dxi, dwi, dbi);
        values += __builtin_popcountll(keep);
    }
}

#undef floats
