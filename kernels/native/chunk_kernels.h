/* The loops of prune_pack.c over one chunk, for one instruction set and one element width: see for_each_isa.h. */

#if SFX_WIDTH == 32
/* The next n elements of x, normalised. Runs end where they end: most words lie within one. Where each is a single element,
 * as where channels lie last, neighbours have neighbouring statistics. */
INLINE void FN(normalise)(Source *s, const float *x, int64_t n, float *out) {
    const Statistics *t = s->statistics;
    if (n == WORD && s->left > WORD) {
        float mean = t->mean[s->group], rstd = t->rstd[s->group];
        for (int i = 0; i < WORD; i++) out[i] = normalised(x[i], mean, rstd);
        s->left -= WORD;
        return;
    }
    if (t->run == 1) {
        for (int64_t some; n > 0; n -= some, x += some, out += some) {
            const float *mean = t->mean + s->group, *rstd = t->rstd + s->group;
            some = MIN(n, t->groups - s->group);
            for (int64_t i = 0; i < some; i++) out[i] = normalised(x[i], mean[i], rstd[i]);
            if ((s->group += some) == t->groups) s->group = 0;
        }
        return;
    }
    for (int64_t some; n > 0; n -= some, x += some, out += some) {
        float mean = t->mean[s->group], rstd = t->rstd[s->group];
        some = MIN(n, s->left);
        for (int64_t i = 0; i < some; i++) out[i] = normalised(x[i], mean, rstd);
        if ((s->left -= some) == 0) s->left = t->run, s->group = s->group + 1 < t->groups ? s->group + 1 : 0;
    }
}
#endif

/* A word of 64 elements of a source, in order from its first on: x itself, or a copy where it is normalised, or padded because
 * fewer are left. Asks for the page after this one, which the hardware's own prefetcher does not look into: a third off the
 * time of a pass over memory. */
INLINE const key_t *FN(next_word)(Source *s, int64_t left, key_t *copy) {
    const key_t *x = s->x;
    for (size_t line = 0; line < WORD * sizeof *x; line += 64) __builtin_prefetch((const char *)x + PREFETCH_BYTES + line);
    s->x = x + WORD;
    if (left < WORD) memset(copy, 0, WORD * sizeof *copy);
#if SFX_WIDTH == 32
    if (s->statistics) {
        FN(normalise)(s, (const float *)x, MIN(left, WORD), (float *)copy);
        return copy;
    }
#endif
    if (left >= WORD) return x;
    memcpy(copy, x, (size_t)left * sizeof *x);
    return copy;
}

INLINE uint64_t FN(greater_word)(const key_t *x, vec nan_key, vec than) {
    uint64_t m = 0;
    EACH_STEP(s) m |= FN(greater)(FN(keys)(FN(load)(x + s * LANES), nan_key), than) << s * LANES;
    return m;
}

/* The keys of elements [begin, end) of a sample, one from each stratum of so many elements. */
static void FN(gather)(Source s, int64_t stride, int64_t begin, int64_t end, uint64_t nan_key, void *out_) {
    const key_t *x = s.x;
    key_t *out = out_;
#if SFX_WIDTH == 32
    if (s.statistics) {
        const Statistics *t = s.statistics;
        int64_t first = begin * stride, group = first / t->run % t->groups, next = (first / t->run + 1) * t->run;
        for (int64_t i = begin; i < end; i++) {
            int64_t at = place_in_stratum(i, stride);
            __builtin_prefetch(x + place_in_stratum(i + 16, stride));
            if (t->run == 1) group = at % t->groups;
            else for (; at >= next; next += t->run) group = group + 1 < t->groups ? group + 1 : 0;
            float from, hat;
            memcpy(&from, x + at, sizeof from);
            hat = normalised(from, t->mean[group], t->rstd[group]);
            memcpy(&out[i], &hat, sizeof hat);
            out[i] = key_of(out[i], (key_t)nan_key);
        }
        return;
    }
#endif
    for (int64_t i = begin; i < end; i++) {
        __builtin_prefetch(x + place_in_stratum(i + 16, stride)); /* beyond the end it is a hint for nothing */
        out[i] = key_of(x[place_in_stratum(i, stride)], (key_t)nan_key);
    }
}

/* Digits of the keys in [base, base + 2^bits). Two rows of counters, so that equal neighbours do not wait for each other. */
static void FN(histogram)(Source s, int64_t n, uint64_t nan_key, uint64_t base, int bits, int shift, int64_t *bins) {
    key_t copy[WORD];
    uint32_t rows[2][BINS];
    for (int64_t done = 0; done < n; done += 1 << 30) {
        int64_t end = MIN(n, done + (1 << 30));
        memset(rows, 0, sizeof rows);
        for (int64_t i = done; i < end; i += WORD) {
            const key_t *word = FN(next_word)(&s, n - i, copy);
            for (int64_t k = 0; k < MIN(WORD, end - i); k++) {
                uint64_t digit = (uint64_t)key_of(word[k], (key_t)nan_key) - base;
                SNAPSHOT(digit);
                if (digit >> bits == 0) rows[k & 1][digit >> shift]++;
            }
        }
        for (int b = 0; b < BINS; b++) bins[b] += (int64_t)rows[0][b] + rows[1][b];
    }
}

/* The rank-th largest of keys that all lie in [lo, hi], by bisection of the key's value: for what fits a cache, one SIMD pass
 * a bit beats a histogram. The keys are in `count` parts. */
static uint64_t FN(bisect)(const void *const *parts, const int64_t *sizes, int count, uint64_t lo, uint64_t hi, int64_t *rank) {
    int64_t above_hi = 0; /* keys > hi */
    while (lo < hi) {
        uint64_t middle = lo + (hi - lo + 1) / 2;
        vec below = FN(splat)(middle - 1);
        int64_t found = 0;
        for (int p = 0; p < count; p++) {
            const key_t *keys = parts[p];
            int64_t i = 0;
            for (; i + WORD <= sizes[p]; i += WORD) {
                uint64_t m = 0;
                EACH_STEP(s) m |= FN(greater)(FN(load)(keys + i + s * LANES), below) << s * LANES;
                found += __builtin_popcountll(m);
            }
            for (; i < sizes[p]; i++) found += keys[i] >= middle;
        }
        if (found >= *rank) lo = middle;
        else hi = middle - 1, above_hi = found;
    }
    *rank -= above_hi;
    return lo;
}

static void FN(count)(Source source, int64_t n, uint64_t nan_key_, Bracket b, Chunk *c, void *room, int64_t room_n) {
    key_t copy[WORD], *out = room;
    vec nan_key = FN(splat)(nan_key_), lo = FN(splat)(b.lo), below_lo = FN(splat)(b.lo - 1), hi = FN(splat)(b.hi), below_hi = FN(splat)(b.hi - 1);
    int64_t above = 0, from_hi = 0, above_lo = 0, from_lo = 0, stored = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        const key_t *word = FN(next_word)(&source, n - i, copy);
        uint64_t valid = low_bits(n - i), over = 0, at_hi = 0, over_lo = 0, at_lo = 0;
        EACH_STEP(s) {
            vec k = FN(keys)(FN(load)(word + s * LANES), nan_key);
            over |= FN(greater)(k, hi) << s * LANES;
            at_hi |= FN(greater)(k, below_hi) << s * LANES;
            over_lo |= FN(greater)(k, lo) << s * LANES;
            at_lo |= FN(greater)(k, below_lo) << s * LANES;
        }
        above += __builtin_popcountll(over & valid);
        from_hi += __builtin_popcountll(at_hi & valid);
        above_lo += __builtin_popcountll(over_lo & valid);
        from_lo += __builtin_popcountll(at_lo & valid);
        uint64_t inside = over_lo & ~at_hi & valid;
        if (inside && room_n - stored >= WORD) {
            EACH_STEP(s) FN(compact)(out + stored + set_before(inside, s * LANES), FN(keys)(FN(load)(word + s * LANES), nan_key), inside >> s * LANES & low_bits(LANES));
            stored += __builtin_popcountll(inside);
        }
    }
    c->above = above;
    c->at_hi = from_hi - above;
    c->at_lo = b.lo < b.hi ? from_lo - above_lo : 0;
    c->inside = b.lo < b.hi ? above_lo - from_hi : 0;
    c->stored = stored;
    c->candidates = room;
}

static void FN(tally)(const void *keys_, int64_t n, uint64_t t, int64_t *above, int64_t *equal) {
    const key_t *keys = keys_, threshold = (key_t)t;
    int64_t greater = 0, same = 0;
    for (int64_t i = 0; i < n; i++) greater += keys[i] > threshold, same += keys[i] == threshold;
    *above += greater;
    *equal = same;
}

/* Keeps the first elements, as many as were promised to the chunks behind. */
static void FN(pack_first)(Source source, int64_t n, int64_t count, key_t *out, uint8_t *mask) {
    key_t copy[WORD];
    for (int64_t i = 0; i < count; i += WORD) memcpy(out + i, FN(next_word)(&source, n - i, copy), (size_t)MIN(WORD, count - i) * sizeof *out);
    memset(mask, 0, (size_t)(n + 7) / 8);
    memset(mask, 0xff, (size_t)count / 8);
    if (count % 8) mask[count / 8] = (uint8_t)low_bits(count % 8);
}

static void FN(pack)(Source given, int64_t n, uint64_t nan_key_, uint64_t t, const Chunk *c, void *out_, uint8_t *mask) {
    Source source = given;
    key_t copy[WORD], *out = out_, *end = out + c->emitted;
    int64_t ties = c->ties;
    int some_ties = ties > 0 && ties < c->tied;
    vec nan_key = FN(splat)(nan_key_), threshold = FN(splat)(t), cut = FN(splat)(ties ? t - 1 : t);
    for (int64_t i = 0; i < n; i += WORD) {
        const key_t *word = FN(next_word)(&source, n - i, copy);
        uint64_t keep = FN(greater_word)(word, nan_key, cut);
        if (some_ties) {
            uint64_t above = FN(greater_word)(word, nan_key, threshold), tied = within(keep & ~above, n - i, ties);
            ties -= __builtin_popcountll(tied);
            keep = above | tied;
        }
        keep = within(keep, n - i, end - out);
        memcpy(mask + i / 8, &keep, n - i >= WORD ? 8 : (size_t)(n - i + 7) / 8);
        if (end - out >= WORD) { /* a wide store past the end would hit the next chunk's output */
            EACH_STEP(s) FN(compact)(out + set_before(keep, s * LANES), FN(load)(word + s * LANES), keep >> s * LANES & low_bits(LANES));
            out += __builtin_popcountll(keep);
        } else
            for (; keep; keep &= keep - 1) *out++ = word[__builtin_ctzll(keep)];
    }
    if (out != end) FN(pack_first)(given, n, c->emitted, out_, mask); /* x has changed since it was counted */
}

static void FN(expand)(const void *values_, int64_t values_n, const uint8_t *mask, int64_t n, void *out_, int stream) {
    const key_t *values = values_, *end = values + values_n;
    key_t *out = out_;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t keep = 0;
        memcpy(&keep, mask + i / 8, n - i >= WORD ? 8 : (size_t)(n - i + 7) / 8);
        keep = within(keep, n - i, end - values);
        if (n - i >= WORD && end - values >= WORD) {
            EACH_STEP(s) {
                vec v = FN(expand_lanes)(values + set_before(keep, s * LANES), keep >> s * LANES & low_bits(LANES));
                if (stream) FN(stream)(out + i + s * LANES, v);
                else FN(store)(out + i + s * LANES, v);
            }
            values += __builtin_popcountll(keep);
        } else {
            memset(out + i, 0, (size_t)MIN(WORD, n - i) * sizeof *out);
            for (; keep; keep &= keep - 1) out[i + __builtin_ctzll(keep)] = *values++;
        }
    }
#ifdef SFX_X86
    if (stream) _mm_sfence();
#endif
}

/* The elements whose bits are set, in order; of `out_n` that were counted, zeros for those that are no longer there. */
static void FN(pick)(const void *x_, int64_t n, const uint8_t *mask, void *out_, int64_t out_n) {
    const key_t *x = x_;
    key_t *out = out_, *end = out + out_n;
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t set = 0;
        memcpy(&set, mask + i / 8, n - i >= WORD ? 8 : (size_t)(n - i + 7) / 8);
        set = within(set, n - i, end - out);
        if (n - i >= WORD && end - out >= WORD) { /* a wide store past the end would hit the next chunk's output */
            EACH_STEP(s) FN(compact)(out + set_before(set, s * LANES), FN(load)(x + i + s * LANES), set >> s * LANES & low_bits(LANES));
            out += __builtin_popcountll(set);
        } else
            for (; set; set &= set - 1) *out++ = x[i + __builtin_ctzll(set)];
    }
    memset(out, 0, (size_t)(end - out) * sizeof *out);
}

/* x, or where there is none `value`, in the places of bits that are set; zero elsewhere. */
static void FN(select)(const uint8_t *bits, int64_t n, const void *x_, uint64_t value, void *out_, int stream) {
    const key_t *x = x_;
    key_t *out = out_;
    vec same = FN(splat)(value);
    for (int64_t i = 0; i < n; i += WORD) {
        uint64_t set = 0;
        memcpy(&set, bits + i / 8, n - i >= WORD ? 8 : (size_t)(n - i + 7) / 8);
        if (n - i >= WORD) EACH_STEP(s) {
            vec v = FN(keep_lanes)(x ? FN(load)(x + i + s * LANES) : same, set >> s * LANES & low_bits(LANES));
            if (stream) FN(stream)(out + i + s * LANES, v);
            else FN(store)(out + i + s * LANES, v);
        }
        else
            for (int64_t k = i; k < n; k++) out[k] = set >> (k - i) & 1 ? x ? x[k] : (key_t)value : 0;
    }
#ifdef SFX_X86
    if (stream) _mm_sfence();
#endif
}

static void FN(sign)(const void *x, int64_t n, uint64_t nan_key_, uint8_t *bits) {
    Source source = {.x = x};
    key_t copy[WORD];
    vec zero = FN(splat)(0), inf = FN(splat)(nan_key_ - 1), nan_key = FN(splat)(nan_key_);
    for (int64_t i = 0; i < n; i += WORD) {
        const key_t *word = FN(next_word)(&source, n - i, copy);
        uint64_t set = 0;
        EACH_STEP(s) {
            vec v = FN(load)(word + s * LANES);
            set |= (FN(greater)(v, zero) | FN(greater)(FN(keys)(v, nan_key), inf)) << s * LANES;
        }
        memcpy(bits + i / 8, &set, n - i >= WORD ? 8 : (size_t)(n - i + 7) / 8);
    }
}
