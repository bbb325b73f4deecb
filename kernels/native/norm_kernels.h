/* The loops of a norm's backward over float32, for one instruction set. See for_each_isa.h.
 *
 * g is the output gradient, `hat` the normalised input, zero but for the values that `bits` has a place for. Sums run in
 * floats for FLUSH words, then in doubles. What is left of a run after its last whole word goes one by one.
 */

typedef float FN(floats) __attribute__((vector_size(4 * LANES)));
#define floats FN(floats)
#pragma GCC diagnostic ignored "-Wpsabi" /* all that takes or returns one is inlined */

INLINE floats FN(floats_at)(const float *p) { floats v; memcpy(&v, p, sizeof v); return v; }
INLINE floats FN(hat)(const float *values, uint64_t m) { vec v = FN(expand_lanes)((const key_t *)values, m); floats f; memcpy(&f, &v, sizeof f); return f; }
INLINE double FN(total)(floats v) { double sum = 0; for (int i = 0; i < LANES; i++) sum += (double)v[i]; return sum; }

/* sums[0] += sum of g w, sums[1] += sum of g w hat; w is 1 where there is none. */
static void FN(norm_sums)(const float *g, const float *w, int64_t n, Bits bits, const float *values, int64_t values_n, double sums[2]) {
    const float *end = values + values_n;
    floats plain = {0}, dot = {0};
    int64_t i = 0;
    for (int words = 0; n - i >= WORD && end - values >= WORD; i += WORD) {
        uint64_t keep = bits_at(bits, i, WORD);
        EACH_STEP(s) {
            uint64_t m = keep >> s * LANES & low_bits(LANES);
            floats gw = FN(floats_at)(g + i + s * LANES);
            if (w) gw *= FN(floats_at)(w + i + s * LANES);
            plain += gw;
            dot += gw * FN(hat)(values, m);
            values += __builtin_popcountll(m);
        }
        if (++words == FLUSH) sums[0] += FN(total)(plain), sums[1] += FN(total)(dot), plain = (floats){0}, dot = (floats){0}, words = 0;
    }
    sums[0] += FN(total)(plain);
    sums[1] += FN(total)(dot);
    for (; i < n; i++) {
        double gw = w ? (double)(g[i] * w[i]) : (double)g[i];
        sums[0] += gw;
        if (within(bits_at(bits, i, 1), 1, end - values)) sums[1] += gw * (double)*values++;
    }
}

/* dx = scale (g w - mean - hat slope); where there are dw and db, dw += g hat and db += g. */
static void FN(norm_apply)(const float *g, const float *w, int64_t n, Bits bits, const float *values, int64_t values_n, float scale, float mean, float slope, float *dx, float *dw, float *db) {
    const float *end = values + values_n;
    int64_t i = 0;
    for (; n - i >= WORD && end - values >= WORD; i += WORD) {
        uint64_t keep = bits_at(bits, i, WORD);
        EACH_STEP(s) {
            int64_t at = i + s * LANES;
            uint64_t m = keep >> s * LANES & low_bits(LANES);
            floats plain = FN(floats_at)(g + at), hat = FN(hat)(values, m), gw = w ? plain * FN(floats_at)(w + at) : plain, out;
            values += __builtin_popcountll(m);
            out = (gw - mean - hat * slope) * scale;
            if (dx) memcpy(dx + at, &out, sizeof out);
            if (dw) out = FN(floats_at)(dw + at) + plain * hat, memcpy(dw + at, &out, sizeof out);
            if (db) out = FN(floats_at)(db + at) + plain, memcpy(db + at, &out, sizeof out);
        }
    }
    for (; i < n; i++) {
        float hat = within(bits_at(bits, i, 1), 1, end - values) ? *values++ : 0, gw = w ? g[i] * w[i] : g[i];
        if (dw) dw[i] += g[i] * hat;
        if (db) db[i] += g[i];
        if (dx) dx[i] = (gw - mean - hat * slope) * scale; /* last: dx may be g */
    }
}

#undef floats
