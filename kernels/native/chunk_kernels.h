/* The loops over one chunk, for one instruction set and one element width.
 *
 * Included by prune_pack.c, with SFX_ISA (portable, avx2, avx512, neon) and SFX_WIDTH (16, 32, 64) set; what both define
 * carries both in its name, FN(name). First the primitives of a register, which differ, then the loops, which do not.
 */

#if SFX_WIDTH == 16
typedef uint16_t FN(key);
#elif SFX_WIDTH == 32
typedef uint32_t FN(key);
#else
typedef uint64_t FN(key);
#endif
#define key_t FN(key)
#define ABS_BITS ((key_t)(((key_t)~(key_t)0) >> 1))

INLINE key_t FN(key_of)(key_t bits, key_t nan_key) {
    key_t magnitude = bits & ABS_BITS;
    return MIN(magnitude, nan_key);
}
#define key_of FN(key_of)

/* -- Primitives: a register of LANES elements. greater() compares as signed integers and gives one bit per lane;
 *    compact() may write LANES elements whatever the mask, expand() may read LANES. -- */

#define IS_portable 1
#define IS_avx2 2
#define IS_avx512 3
#define IS_neon 4
#define ISA_ID_(isa) IS_##isa
#define ISA_ID(isa) ISA_ID_(isa)

#if ISA_ID(SFX_ISA) == IS_portable

enum { FN(LANES) = 8 };
typedef struct { key_t lane[8]; } FN(vec);
#define vec FN(vec)
INLINE vec FN(load)(const void *p) { vec v; memcpy(&v, p, sizeof v); return v; }
INLINE void FN(store)(void *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE void FN(stream)(void *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE vec FN(splat)(uint64_t a) { vec v; for (int i = 0; i < 8; i++) v.lane[i] = (key_t)a; return v; }
INLINE vec FN(keys)(vec v, vec nan_key) { for (int i = 0; i < 8; i++) v.lane[i] = key_of(v.lane[i], nan_key.lane[i]); return v; }
INLINE uint64_t FN(greater)(vec a, vec b) {
    uint64_t m = 0;
    key_t flip = (key_t)(ABS_BITS + 1u); /* signed order from an unsigned compare */
    for (int i = 0; i < 8; i++) m |= (uint64_t)((key_t)(a.lane[i] ^ flip) > (key_t)(b.lane[i] ^ flip)) << i;
    return m;
}
INLINE void FN(compact)(key_t *out, vec v, uint64_t m) { for (int i = 0, at = 0; i < 8; i++) { out[at] = v.lane[i]; at += m >> i & 1; } }
INLINE vec FN(expand_lanes)(const key_t *p, uint64_t m) {
    vec v;
    for (int i = 0, at = 0; i < 8; at += m >> i & 1, i++) v.lane[i] = (key_t)(p[at] & (key_t)-(key_t)(m >> i & 1));
    return v;
}

#elif ISA_ID(SFX_ISA) == IS_avx512

enum { FN(LANES) = 512 / SFX_WIDTH };
#define vec __m512i
INLINE vec FN(load)(const void *p) { return _mm512_loadu_si512(p); }
INLINE void FN(store)(void *p, vec v) { _mm512_storeu_si512(p, v); }
INLINE void FN(stream)(void *p, vec v) { _mm512_stream_si512(p, v); }
#if SFX_WIDTH == 16
INLINE vec FN(splat)(uint64_t a) { return _mm512_set1_epi16((short)a); }
INLINE vec FN(keys)(vec v, vec nan_key) { return _mm512_min_epi16(_mm512_and_si512(v, _mm512_set1_epi16(0x7fff)), nan_key); }
INLINE uint64_t FN(greater)(vec a, vec b) { return _mm512_cmpgt_epi16_mask(a, b); }
INLINE void FN(compact)(key_t *out, vec v, uint64_t m) { _mm512_storeu_si512(out, _mm512_maskz_compress_epi16((__mmask32)m, v)); }
INLINE vec FN(expand_lanes)(const key_t *p, uint64_t m) { return _mm512_maskz_expand_epi16((__mmask32)m, _mm512_loadu_si512(p)); }
#elif SFX_WIDTH == 32
INLINE vec FN(splat)(uint64_t a) { return _mm512_set1_epi32((int)a); }
INLINE vec FN(keys)(vec v, vec nan_key) { return _mm512_min_epi32(_mm512_and_si512(v, _mm512_set1_epi32(0x7fffffff)), nan_key); }
INLINE uint64_t FN(greater)(vec a, vec b) { return _mm512_cmpgt_epi32_mask(a, b); }
INLINE void FN(compact)(key_t *out, vec v, uint64_t m) { _mm512_storeu_si512(out, _mm512_maskz_compress_epi32((__mmask16)m, v)); }
INLINE vec FN(expand_lanes)(const key_t *p, uint64_t m) { return _mm512_maskz_expand_epi32((__mmask16)m, _mm512_loadu_si512(p)); }
#else
INLINE vec FN(splat)(uint64_t a) { return _mm512_set1_epi64((long long)a); }
INLINE vec FN(keys)(vec v, vec nan_key) { return _mm512_min_epi64(_mm512_and_si512(v, _mm512_set1_epi64(0x7fffffffffffffffll)), nan_key); }
INLINE uint64_t FN(greater)(vec a, vec b) { return _mm512_cmpgt_epi64_mask(a, b); }
INLINE void FN(compact)(key_t *out, vec v, uint64_t m) { _mm512_storeu_si512(out, _mm512_maskz_compress_epi64((__mmask8)m, v)); }
INLINE vec FN(expand_lanes)(const key_t *p, uint64_t m) { return _mm512_maskz_expand_epi64((__mmask8)m, _mm512_loadu_si512(p)); }
#endif

#elif ISA_ID(SFX_ISA) == IS_avx2 && SFX_WIDTH == 16

enum { FN(LANES) = 8 };
#define vec __m128i
INLINE vec FN(load)(const void *p) { return _mm_loadu_si128((const vec *)p); }
INLINE void FN(store)(void *p, vec v) { _mm_storeu_si128((vec *)p, v); }
INLINE void FN(stream)(void *p, vec v) { _mm_stream_si128((vec *)p, v); }
INLINE vec FN(splat)(uint64_t a) { return _mm_set1_epi16((short)a); }
INLINE vec FN(keys)(vec v, vec nan_key) { return _mm_min_epi16(_mm_and_si128(v, _mm_set1_epi16(0x7fff)), nan_key); }
INLINE uint64_t FN(greater)(vec a, vec b) { return (uint64_t)_mm_movemask_epi8(_mm_packs_epi16(_mm_cmpgt_epi16(a, b), _mm_setzero_si128())); }
INLINE void FN(compact)(key_t *out, vec v, uint64_t m) { FN(store)(out, _mm_shuffle_epi8(v, FN(load)(compact16_bytes[m]))); }
INLINE vec FN(expand_lanes)(const key_t *p, uint64_t m) { return _mm_shuffle_epi8(FN(load)(p), FN(load)(expand16_bytes[m])); }

#elif ISA_ID(SFX_ISA) == IS_avx2

enum { FN(LANES) = 256 / SFX_WIDTH };
#define vec __m256i
INLINE vec FN(load)(const void *p) { return _mm256_loadu_si256((const vec *)p); }
INLINE void FN(store)(void *p, vec v) { _mm256_storeu_si256((vec *)p, v); }
INLINE void FN(stream)(void *p, vec v) { _mm256_stream_si256((vec *)p, v); }
#if SFX_WIDTH == 32
INLINE vec FN(splat)(uint64_t a) { return _mm256_set1_epi32((int)a); }
INLINE vec FN(keys)(vec v, vec nan_key) { return _mm256_min_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0x7fffffff)), nan_key); }
INLINE uint64_t FN(greater)(vec a, vec b) { return (uint64_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b))); }
#define SFX_TABLE(name) name##8
#else
INLINE vec FN(splat)(uint64_t a) { return _mm256_set1_epi64x((long long)a); }
INLINE vec FN(keys)(vec v, vec nan_key) {
    v = _mm256_and_si256(v, _mm256_set1_epi64x(0x7fffffffffffffffll));
    return _mm256_blendv_epi8(v, nan_key, _mm256_cmpgt_epi64(v, nan_key));
}
INLINE uint64_t FN(greater)(vec a, vec b) { return (uint64_t)_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpgt_epi64(a, b))); }
#define SFX_TABLE(name) name##_pairs
#endif
INLINE vec FN(lanes)(const uint8_t *table) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)table)); } /* none: -1 */
INLINE void FN(compact)(key_t *out, vec v, uint64_t m) { FN(store)(out, _mm256_permutevar8x32_epi32(v, FN(lanes)(SFX_TABLE(compact)[m]))); }
INLINE vec FN(expand_lanes)(const key_t *p, uint64_t m) {
    vec from = FN(lanes)(SFX_TABLE(expand)[m]);
    return _mm256_andnot_si256(_mm256_srai_epi32(from, 31), _mm256_permutevar8x32_epi32(FN(load)(p), from));
}
#undef SFX_TABLE

#else /* neon */

enum { FN(LANES) = 128 / SFX_WIDTH };
#define vec uint8x16_t
INLINE vec FN(load)(const void *p) { return vld1q_u8((const uint8_t *)p); }
INLINE void FN(store)(void *p, vec v) { vst1q_u8((uint8_t *)p, v); }
INLINE void FN(stream)(void *p, vec v) { vst1q_u8((uint8_t *)p, v); }
#if SFX_WIDTH == 16
INLINE vec FN(splat)(uint64_t a) { return vreinterpretq_u8_u16(vdupq_n_u16((uint16_t)a)); }
INLINE vec FN(keys)(vec v, vec nan_key) {
    return vreinterpretq_u8_u16(vminq_u16(vandq_u16(vreinterpretq_u16_u8(v), vdupq_n_u16(0x7fff)), vreinterpretq_u16_u8(nan_key)));
}
INLINE uint64_t FN(greater)(vec a, vec b) {
    static const uint16_t bit[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    return vaddvq_u16(vandq_u16(vcgtq_s16(vreinterpretq_s16_u8(a), vreinterpretq_s16_u8(b)), vld1q_u16(bit)));
}
INLINE void FN(compact)(key_t *out, vec v, uint64_t m) { FN(store)(out, vqtbl1q_u8(v, FN(load)(compact16_bytes[m]))); }
INLINE vec FN(expand_lanes)(const key_t *p, uint64_t m) { return vqtbl1q_u8(FN(load)(p), FN(load)(expand16_bytes[m])); }
#elif SFX_WIDTH == 32
INLINE vec FN(splat)(uint64_t a) { return vreinterpretq_u8_u32(vdupq_n_u32((uint32_t)a)); }
INLINE vec FN(keys)(vec v, vec nan_key) {
    return vreinterpretq_u8_u32(vminq_u32(vandq_u32(vreinterpretq_u32_u8(v), vdupq_n_u32(0x7fffffff)), vreinterpretq_u32_u8(nan_key)));
}
INLINE uint64_t FN(greater)(vec a, vec b) {
    static const uint32_t bit[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcgtq_s32(vreinterpretq_s32_u8(a), vreinterpretq_s32_u8(b)), vld1q_u32(bit)));
}
INLINE void FN(compact)(key_t *out, vec v, uint64_t m) { FN(store)(out, vqtbl1q_u8(v, FN(load)(compact32_bytes[m]))); }
INLINE vec FN(expand_lanes)(const key_t *p, uint64_t m) { return vqtbl1q_u8(FN(load)(p), FN(load)(expand32_bytes[m])); }
#else
INLINE vec FN(splat)(uint64_t a) { return vreinterpretq_u8_u64(vdupq_n_u64(a)); }
INLINE vec FN(keys)(vec v, vec nan_key) {
    uint64x2_t k = vandq_u64(vreinterpretq_u64_u8(v), vdupq_n_u64(0x7fffffffffffffffull)), top = vreinterpretq_u64_u8(nan_key);
    return vreinterpretq_u8_u64(vbslq_u64(vcgtq_u64(k, top), top, k));
}
INLINE uint64_t FN(greater)(vec a, vec b) {
    uint64x2_t g = vcgtq_s64(vreinterpretq_s64_u8(a), vreinterpretq_s64_u8(b));
    return (vgetq_lane_u64(g, 0) & 1) | (vgetq_lane_u64(g, 1) & 2);
}
INLINE void FN(compact)(key_t *out, vec v, uint64_t m) {
    uint64_t lane[2];
    FN(store)(lane, v);
    out[0] = lane[m == 2];
    out[1] = lane[1];
}
INLINE vec FN(expand_lanes)(const key_t *p, uint64_t m) {
    uint64_t lane[2] = {m & 1 ? p[0] : 0, m & 2 ? p[m & 1] : 0};
    return FN(load)(lane);
}
#endif
#endif

/* -- Loops over words of 64 elements -- */

#define LANES FN(LANES)
#define EACH_STEP(s) for (int s = 0; s < WORD / LANES; s++)

/* A word of 64 elements: x itself, or where fewer are left a padded copy. Asks for the page after this one, which the
 * hardware's own prefetcher does not look into: a third off the time of a pass over memory. */
INLINE const key_t *FN(word_at)(const key_t *x, int64_t left, key_t *padded) {
    for (size_t line = 0; line < WORD * sizeof *x; line += 64) __builtin_prefetch((const char *)x + PREFETCH_BYTES + line);
    if (left >= WORD) return x;
    memset(padded, 0, WORD * sizeof *padded);
    memcpy(padded, x, (size_t)left * sizeof *x);
    return padded;
}

INLINE uint64_t FN(greater_word)(const key_t *x, vec nan_key, vec than) {
    uint64_t m = 0;
    EACH_STEP(s) m |= FN(greater)(FN(keys)(FN(load)(x + s * LANES), nan_key), than) << s * LANES;
    return m;
}

static void FN(gather)(const void *x_, int64_t stride, int64_t begin, int64_t end, uint64_t nan_key, void *out_) {
    const key_t *x = x_;
    key_t *out = out_;
    for (int64_t i = begin; i < end; i++) {
        __builtin_prefetch(x + place_in_stratum(i + 16, stride)); /* beyond the end it is a hint for nothing */
        out[i] = key_of(x[place_in_stratum(i, stride)], (key_t)nan_key);
    }
}

/* Digits of the keys in [base, base + 2^bits). Two rows of counters, so that equal neighbours do not wait for each other. */
static void FN(histogram)(const void *x_, int64_t n, uint64_t nan_key, uint64_t base, int bits, int shift, int64_t *bins) {
    const key_t *x = x_;
    uint32_t rows[2][BINS];
    for (int64_t done = 0; done < n; done += 1 << 30) {
        int64_t end = MIN(n, done + (1 << 30));
        memset(rows, 0, sizeof rows);
        for (int64_t i = done; i < end; i++) {
            uint64_t digit = (uint64_t)key_of(x[i], (key_t)nan_key) - base;
            SNAPSHOT(digit);
            if (digit >> bits == 0) rows[i & 1][digit >> shift]++;
        }
        for (int b = 0; b < BINS; b++) bins[b] += (int64_t)rows[0][b] + rows[1][b];
    }
}

/* The rank-th largest key, by bisection of the key's value: for what fits a cache, one SIMD pass a bit beats a histogram. */
static uint64_t FN(bisect)(const void *x_, int64_t n, uint64_t nan_key_, int64_t *rank) {
    const key_t *x = x_;
    key_t padded[WORD];
    vec nan_key = FN(splat)(nan_key_);
    uint64_t lo = 0, hi = nan_key_;
    int64_t above_hi = 0; /* keys > hi */
    while (lo < hi) {
        uint64_t middle = lo + (hi - lo + 1) / 2;
        vec below = FN(splat)(middle - 1);
        int64_t count = 0;
        for (int64_t i = 0; i < n; i += WORD) count += __builtin_popcountll(FN(greater_word)(FN(word_at)(x + i, n - i, padded), nan_key, below));
        if (count >= *rank) lo = middle;
        else hi = middle - 1, above_hi = count;
    }
    *rank -= above_hi;
    return lo;
}

static void FN(count)(const void *x_, int64_t n, uint64_t nan_key_, Bracket b, Chunk *c, void *room, int64_t room_n) {
    const key_t *x = x_;
    key_t padded[WORD], *out = room;
    vec nan_key = FN(splat)(nan_key_), lo = FN(splat)(b.lo), below_lo = FN(splat)(b.lo - 1), hi = FN(splat)(b.hi), below_hi = FN(splat)(b.hi - 1);
    int64_t above = 0, from_hi = 0, above_lo = 0, from_lo = 0, stored = 0;
    for (int64_t i = 0; i < n; i += WORD) {
        const key_t *word = FN(word_at)(x + i, n - i, padded);
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
        if (inside && room_n - stored >= WORD) EACH_STEP(s) {
            uint64_t m = inside >> s * LANES & low_bits(LANES);
            FN(compact)(out + stored, FN(keys)(FN(load)(word + s * LANES), nan_key), m);
            stored += __builtin_popcountll(m);
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
static void FN(pack_first)(const key_t *x, int64_t n, int64_t count, key_t *out, uint8_t *mask) {
    memcpy(out, x, (size_t)count * sizeof *x);
    memset(mask, 0, (size_t)(n + 7) / 8);
    memset(mask, 0xff, (size_t)count / 8);
    if (count % 8) mask[count / 8] = (uint8_t)low_bits(count % 8);
}

static void FN(pack)(const void *x_, int64_t n, uint64_t nan_key_, uint64_t t, const Chunk *c, void *out_, uint8_t *mask) {
    const key_t *x = x_;
    key_t padded[WORD], *out = out_, *end = out + c->emitted;
    int64_t ties = c->ties;
    int some_ties = ties > 0 && ties < c->tied;
    vec nan_key = FN(splat)(nan_key_), threshold = FN(splat)(t), cut = FN(splat)(ties ? t - 1 : t);
    for (int64_t i = 0; i < n; i += WORD) {
        const key_t *word = FN(word_at)(x + i, n - i, padded);
        uint64_t keep = FN(greater_word)(word, nan_key, cut);
        if (some_ties) {
            uint64_t above = FN(greater_word)(word, nan_key, threshold), tied = within(keep & ~above, n - i, ties);
            ties -= __builtin_popcountll(tied);
            keep = above | tied;
        }
        keep = within(keep, n - i, end - out);
        memcpy(mask + i / 8, &keep, n - i >= WORD ? 8 : (size_t)(n - i + 7) / 8);
        if (end - out >= WORD) { /* a wide store past the end would hit the next chunk's output */
            EACH_STEP(s) {
                uint64_t m = keep >> s * LANES & low_bits(LANES);
                FN(compact)(out, FN(load)(word + s * LANES), m);
                out += __builtin_popcountll(m);
            }
        } else
            for (; keep; keep &= keep - 1) *out++ = word[__builtin_ctzll(keep)];
    }
    if (out != end) FN(pack_first)(x, n, c->emitted, out_, mask); /* x has changed since it was counted */
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
                uint64_t m = keep >> s * LANES & low_bits(LANES);
                vec v = FN(expand_lanes)(values, m);
                if (stream) FN(stream)(out + i + s * LANES, v);
                else FN(store)(out + i + s * LANES, v);
                values += __builtin_popcountll(m);
            }
        } else {
            memset(out + i, 0, (size_t)MIN(WORD, n - i) * sizeof *out);
            for (; keep; keep &= keep - 1) out[i + __builtin_ctzll(keep)] = *values++;
        }
    }
#ifdef SFX_X86
    if (stream) _mm_sfence();
#endif
}

static void FN(sign)(const void *x_, int64_t n, uint64_t nan_key_, uint8_t *bits) {
    const key_t *x = x_;
    key_t padded[WORD];
    vec zero = FN(splat)(0), inf = FN(splat)(nan_key_ - 1), nan_key = FN(splat)(nan_key_);
    for (int64_t i = 0; i < n; i += WORD) {
        const key_t *word = FN(word_at)(x + i, n - i, padded);
        uint64_t set = 0;
        EACH_STEP(s) {
            vec v = FN(load)(word + s * LANES);
            set |= (FN(greater)(v, zero) | FN(greater)(FN(keys)(v, nan_key), inf)) << s * LANES;
        }
        memcpy(bits + i / 8, &set, n - i >= WORD ? 8 : (size_t)(n - i + 7) / 8);
    }
}

#undef key_t
#undef key_of
#undef ABS_BITS
#undef vec
#undef LANES
#undef EACH_STEP
#undef SFX_WIDTH
