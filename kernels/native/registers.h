/* A register of one instruction set and one element width, included with SFX_ISA (portable, avx2, avx512, neon) and
 * SFX_WIDTH (16, 32, 64) set: see for_each_isa.h. */

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

/* The lanes of a register whose bit is set, zero in the others: all ones expanded are a mask. */
INLINE vec FN(keep_lanes)(vec v, uint64_t m) {
    static const uint64_t ones[8] = {~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull};
    vec mask = FN(expand_lanes)((const key_t *)ones, m);
#if ISA_ID(SFX_ISA) == IS_portable
    for (int i = 0; i < 8; i++) v.lane[i] &= mask.lane[i];
    return v;
#else
    return v & mask;
#endif
}

#define LANES FN(LANES)
#define EACH_STEP(s) for (int s = 0; s < WORD / LANES; s++)
