/* Random calls of every kernel, on exactly sized heap blocks so that a sanitizer sees any overrun; results are held
 * against what they mean, element by element.
 *
 * Usage: fuzz ISA CASES SEED [racing]
 * racing: another thread writes to the input while the kernel runs. Results are then unspecified, but what `compress`
 * returns must still go together, and nothing may be read or written out of bounds. */
#include "common.h"

#include <pthread.h>
#include <stdio.h>

/* The kernels' parallel loops on plain threads, which a thread sanitizer can follow; GNU's runtime it cannot. */
static _Thread_local int thread_number, thread_count = 1;
typedef struct { void (*run)(void *); void *data; int number, count; } Share;

static void *run_share(void *share_) {
    Share *s = share_;
    thread_number = s->number, thread_count = s->count;
    s->run(s->data);
    return NULL;
}

void GOMP_parallel(void (*run)(void *), void *data, unsigned count, unsigned flags) {
    (void)flags;
    pthread_t threads[64];
    Share shares[64];
    for (unsigned i = 0; i < count; i++) {
        shares[i] = (Share){run, data, (int)i, (int)count};
        if (i && pthread_create(&threads[i], NULL, run_share, &shares[i])) abort();
    }
    run_share(&shares[0]);
    for (unsigned i = 1; i < count; i++) pthread_join(threads[i], NULL);
    thread_number = 0, thread_count = 1;
}
int omp_get_thread_num(void) { return thread_number; }
int omp_get_num_threads(void) { return thread_count; }

static uint64_t seed;
static uint64_t random_bits(void) {
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed;
}
static int64_t below(int64_t n) { return (int64_t)(random_bits() >> 1) % n; }

static void fill(uint8_t *x, int64_t n, int64_t width, int kind) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t v = random_bits();
        if (kind == 1) v = v >> 63 ? v : 0;              /* half zeros */
        if (kind == 2) v = 0x3c003c003c003c00;           /* all equal */
        if (kind == 3) v &= 0x8000800080038003;          /* few distinct, many subnormal */
        if (kind == 4 && v & 3) v = 0x7fffffffffffffff;  /* mostly NaN */
        memcpy(x + i * width, &v, (size_t)width);
    }
}

/* What the racing thread writes to. */
typedef struct { uint8_t *bytes; int64_t n; int stop; } Target;

static void *disturb(void *target_) {
    Target *t = target_;
    uint64_t s = 88172645463325252ull;
    while (!__atomic_load_n(&t->stop, __ATOMIC_RELAXED)) {
        int64_t begin = (int64_t)(s >> 20) % t->n, most = MIN(t->n - begin, 1 + (int64_t)(s >> 50));
        memset(t->bytes + begin, (int)(s & 1 ? 0xff : s >> 8 & 1 ? 0 : s >> 16), (size_t)most);
        s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    }
    return NULL;
}

/* Swaps bytes: a mask keeps its number of bits, so that it is not refused at once, and has them elsewhere at each look. */
static void *permute(void *target_) {
    Target *t = target_;
    uint64_t s = 88172645463325252ull;
    while (!__atomic_load_n(&t->stop, __ATOMIC_RELAXED)) {
        uint8_t *a = t->bytes + (int64_t)(s >> 20) % t->n, *b = t->bytes + (int64_t)(s >> 33) % t->n, v = *a;
        *a = *b, *b = v;
        s ^= s << 13, s ^= s >> 7, s ^= s << 17;
    }
    return NULL;
}

static pthread_t start(void *(*run)(void *), Target *t) {
    pthread_t thread;
    t->stop = 0;
    if (pthread_create(&thread, NULL, run, t)) abort();
    return thread;
}
static pthread_t start_disturbing(Target *t) { return start(disturb, t); }

static void stop_disturbing(Target *t, pthread_t thread) {
    __atomic_store_n(&t->stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
}

static uint64_t element(const uint8_t *x, int64_t i, int64_t width) {
    uint64_t v = 0;
    memcpy(&v, x + i * width, (size_t)width);
    return v;
}
static int bit(const uint8_t *mask, int64_t i) { return mask[i / 8] >> i % 8 & 1; }
static uint64_t key(uint64_t v, int64_t width, uint64_t inf) { return MIN(v & low_bits(8 * width - 1), inf + 1); }

/* The largest are kept, in order, ties by index, and the bits say which. */
static const char *check_compressed(const uint8_t *x, int64_t n, int64_t width, uint64_t inf, int64_t kept, const uint8_t *values, const uint8_t *mask) {
    uint64_t smallest = ~0ull;
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++)
        if (bit(mask, i)) {
            if (at == kept || element(values, at++, width) != element(x, i, width)) return "values";
            smallest = MIN(smallest, key(element(x, i, width), width, inf));
        }
    if (at != kept || has_stray_bits(mask, n)) return "bits of the mask";
    for (int64_t i = 0, dropped_tie = 0; i < n; i++) {
        uint64_t k = key(element(x, i, width), width, inf);
        if (!bit(mask, i) && k > smallest) return "a larger one was dropped";
        if (!bit(mask, i) && k == smallest) dropped_tie = 1;
        if (bit(mask, i) && k == smallest && dropped_tie) return "an earlier tie was dropped";
    }
    return NULL;
}

static int close_to(double a, double b, double scale) { return fabs(a - b) <= 1e-4 * (scale + 1); }

/* dx, dw and db of both norms, against sums in double over the restored input. */
static const char *check_norms(const float *g, const float *hat, const float *values, int64_t kept, const uint8_t *mask, int64_t batch, int64_t channels, int64_t plane, int threads) {
    int64_t rows = batch * channels, n = rows * plane, widest = MAX(rows, plane);
    float *dx = malloc((size_t)n * 4), *dw = malloc((size_t)widest * 4), *db = malloc((size_t)widest * 4), *scale = malloc((size_t)widest * 4);
    const char *wrong = NULL;
    for (int64_t i = 0; i < widest; i++) scale[i] = 0.5f + (float)(i % 7) / 8;
    if (sfx_batch_norm_grad(g, values, kept, mask, batch, channels, plane, scale, dx, dw, db, threads)) wrong = "a batch norm's mask was refused";
    for (int64_t c = 0; c < channels && !wrong; c++) {
        double sum = 0, dot = 0, size = (double)(batch * plane), all = 0;
        for (int64_t i = 0; i < n; i++)
            if (i / plane % channels == c) sum += (double)g[i], dot += (double)g[i] * (double)hat[i], all += fabs((double)g[i]) * (1 + fabs((double)hat[i]));
        if (!close_to(dw[c], dot, all) || !close_to(db[c], sum, all)) wrong = "a batch norm's weight gradient";
        for (int64_t i = 0; i < n && !wrong; i++)
            if (i / plane % channels == c && !close_to(dx[i], (double)scale[c] * ((double)g[i] - sum / size - (double)hat[i] * dot / size), 8 + all / size)) wrong = "a batch norm's input gradient";
    }
    if (!wrong && sfx_layer_norm_grad(g, values, kept, mask, rows, plane, scale, scale, dx, dw, db, threads)) wrong = "a layer norm's mask was refused";
    for (int64_t r = 0; r < rows && !wrong; r++) {
        double sum = 0, dot = 0, all = 0, size = (double)plane;
        for (int64_t i = 0; i < plane; i++) {
            double gw = (double)g[r * plane + i] * (double)scale[i], h = (double)hat[r * plane + i];
            sum += gw, dot += gw * h, all += fabs(gw) * (1 + fabs(h));
        }
        for (int64_t i = 0; i < plane && !wrong; i++) {
            double gw = (double)g[r * plane + i] * (double)scale[i], h = (double)hat[r * plane + i];
            if (!close_to(dx[r * plane + i], (double)scale[r] * (gw - sum / size - h * dot / size), 8 + all / size)) wrong = "a layer norm's input gradient";
        }
    }
    for (int64_t i = 0; i < plane && !wrong; i++) {
        double dot = 0, sum = 0, all = 0;
        for (int64_t r = 0; r < rows; r++) {
            double one = (double)g[r * plane + i], h = (double)hat[r * plane + i];
            sum += one, dot += one * h, all += fabs(one) * (1 + fabs(h));
        }
        if (!close_to(dw[i], dot, all) || !close_to(db[i], sum, all)) wrong = "a layer norm's weight gradient";
    }
    free(dx), free(dw), free(db), free(scale);
    return wrong;
}

/* Statistics and output of a batch norm, against sums in double, one element after the other. */
static const char *check_batch_norm(const float *x, int64_t batch, int64_t channels, int64_t plane, int threads) {
    int64_t n = batch * channels * plane, size = batch * plane, each = channels * 4;
    float *mean = malloc((size_t)each), *rstd = malloc((size_t)each), *scale = malloc((size_t)each), *running = malloc((size_t)(2 * each)), *y = malloc((size_t)n * 4);
    const char *wrong = NULL;
    int fused = (int)below(8), with_weight = (int)below(2), with_running = (int)below(2);
    for (int64_t c = 0; c < channels; c++) scale[c] = 0.5f + (float)(c % 7) / 8, running[c] = running[channels + c] = 1;
    sfx_batch_norm(x, batch, channels, plane, with_weight ? scale : NULL, with_weight ? scale : NULL, with_running ? running : NULL, with_running ? running + channels : NULL, 0.25f, 1e-5, fused, mean, rstd, y, threads);
    for (int64_t c = 0; c < channels && !wrong; c++) {
        double sum = 0, squares = 0, w = with_weight ? (double)scale[c] : 1, b = with_weight ? w : 0;
        for (int64_t i = 0; i < n; i++)
            if (i / plane % channels == c) sum += (double)x[i];
        for (int64_t i = 0; i < n; i++) {
            float from_mean = x[i] - mean[c], square = from_mean * from_mean;
            if (i / plane % channels == c) squares += (double)square;
        }
        float total = (float)squares, variance = total / (float)size;
        if (mean[c] != (float)(sum / (double)size) || rstd[c] != (float)(1 / sqrt((double)variance + 1e-5))) wrong = "a batch norm's statistics";
        for (int64_t i = 0; i < n && !wrong; i++)
            if (i / plane % channels == c && !close_to(y[i], ((double)x[i] - (double)mean[c]) * (double)rstd[c] * w + b, 1e3)) wrong = "a batch norm's output";
        if (with_running && size > 1 && (!close_to(running[c], 0.75 + 0.25 * (double)mean[c], 1) || !close_to(running[channels + c], 0.75 + 0.25 * squares / (double)(size - 1), 1))) wrong = "a batch norm's running statistics";
    }
    free(mean), free(rstd), free(scale), free(running), free(y);
    return wrong;
}

/* Most cases are small; some are large enough for several threads, a few of those for the count of bits too. */
static int64_t plane_size(int64_t rows) {
    if (below(24)) return 1 + below(below(2) ? 20 : 300);
    return ((below(4) ? PARALLEL_FROM : 8 * PARALLEL_FROM) + below(1000)) / rows + 1;
}

static const char *norm_case(int racing) {
    int64_t batch = 1 + below(3), channels = 1 + below(5), plane = plane_size(batch * channels), n = batch * channels * plane, bytes = (n + 7) / 8;
    if (n < 2) return NULL;
    int64_t kept = 1 + below(n - 1);
    int threads = 1 + (int)below(4);
    float *g = malloc((size_t)n * 4), *hat = malloc((size_t)n * 4), *values = malloc((size_t)kept * 4), out[8];
    uint8_t *mask = malloc((size_t)bytes);
    for (int64_t i = 0; i < n; i++) g[i] = (float)below(2000) / 1000 - 1, hat[i] = (float)below(4000) / 1000 - 2;
    const char *wrong = NULL;
    if (sfx_compress(hat, n, 4, 0x7f800000, kept, values, mask, threads) || sfx_decompress(values, kept, mask, n, 4, hat, threads)) abort();
    if (!racing) {
        wrong = check_norms(g, hat, values, kept, mask, batch, channels, plane, threads);
        if (!wrong) wrong = check_batch_norm(g, batch, channels, plane, threads);
    } else {
        Target targets[] = {{mask, MAX(1, n / 8), 0}, {(uint8_t *)values, kept * 4, 0}, {(uint8_t *)g, n * 4, 0}};
        float *dx = malloc((size_t)n * 4), *sums = malloc((size_t)n * 4);
        for (int i = 0; i < 6; i++) {
            pthread_t thread = start(i % 3 ? disturb : permute, &targets[i % 3]);
            (void)sfx_batch_norm_grad(g, values, kept, mask, batch, channels, plane, g, i & 1 ? dx : NULL, sums, sums, threads);
            (void)sfx_layer_norm_grad(g, values, kept, mask, batch * channels, plane, NULL, g, dx, i & 1 ? sums : NULL, sums, threads);
            stop_disturbing(&targets[i % 3], thread);
        }
        free(dx), free(sums);
    }
    mask[0] ^= 1;
    if (!racing && (sfx_batch_norm_grad(g, values, kept, mask, batch, channels, plane, g, hat, out, out, 1) != 1 ||
                    sfx_layer_norm_grad(g, values, kept, mask, batch * channels, plane, NULL, g, hat, NULL, NULL, 1) != 1))
        wrong = "a norm did not refuse a flipped bit";
    if (wrong) printf("%s: batch %lld, channels %lld, plane %lld, kept %lld, threads %d\n", wrong, (long long)batch, (long long)channels, (long long)plane, (long long)kept, threads);
    free(g), free(hat), free(values), free(mask);
    return wrong;
}

/* `compress` of a normalised input, against what it makes of the dense one. */
static const char *normalised_case(int racing) {
    int64_t batch = 1 + below(3), groups = 1 + below(5), length = plane_size(batch * groups), n = batch * groups * length, bytes = (n + 7) / 8;
    if (!below(4)) batch *= length, groups = 1 + below(100), length = 1, batch = MAX(1, batch / groups), n = batch * groups, bytes = (n + 7) / 8; /* channels last */
    if (n < 2) return NULL;
    int64_t kept = 1 + below(below(4) ? n - 1 : MIN(n - 1, 70));
    int threads = 1 + (int)below(4), kind = (int)below(6);
    float *x = malloc((size_t)n * 4), *hat = malloc((size_t)n * 4), *values = malloc((size_t)kept * 4), *mean = malloc((size_t)groups * 4), *rstd = malloc((size_t)groups * 4);
    uint8_t *mask = malloc((size_t)bytes);
    if (kind < 5) fill((uint8_t *)x, n, 4, kind);
    else for (int64_t i = 0; i < n; i++) x[i] = (float)below(4000) / 1000 - 2;
    for (int64_t i = 0; i < groups; i++) mean[i] = (float)below(2000) / 1000 - 1, rstd[i] = below(16) ? (float)below(2000) / 100 : INFINITY;
    for (int64_t i = 0; i < n; i++) hat[i] = (x[i] - mean[i / length % groups]) * rstd[i / length % groups];
    const char *wrong = NULL;
    if (!racing) {
        if (sfx_compress_normalised(x, n, mean, rstd, length, groups, kept, values, mask, threads)) abort();
        for (int64_t i = 0, at = 0; i < n; i++) { /* which NaN comes out of an operation is up to the compiler */
            if (!bit(mask, i) || at == kept) continue;
            if (isnan(hat[i]) && isnan(values[at])) values[at] = hat[i];
            at++;
        }
        wrong = check_compressed((const uint8_t *)hat, n, 4, 0x7f800000, kept, (const uint8_t *)values, mask);
    } else {
        Target targets[] = {{(uint8_t *)x, n * 4, 0}, {(uint8_t *)mean, groups * 4, 0}, {(uint8_t *)rstd, groups * 4, 0}};
        for (int i = 0; i < 6; i++) {
            pthread_t thread = start(i % 2 ? disturb : permute, &targets[i % 3]);
            if (sfx_compress_normalised(x, n, mean, rstd, length, groups, kept, values, mask, threads)) abort();
            stop_disturbing(&targets[i % 3], thread);
            if (sfx_decompress(values, kept, mask, n, 4, hat, threads)) wrong = "parts of a normalised input do not go together";
        }
    }
    if (wrong) printf("normalised, %s: batch %lld, groups %lld, length %lld, kept %lld, kind %d, threads %d\n", wrong, (long long)batch, (long long)groups, (long long)length, (long long)kept, kind, threads);
    free(x), free(hat), free(values), free(mean), free(rstd), free(mask);
    return wrong;
}

/* A weight gradient, against sums in double over the restored input, place by place. */
static const char *check_weight_grad(const int64_t *z, const float *x, const float *g, const float *dw) {
    int64_t batch = z[0], groups = z[1], in = z[2], out = z[3], transposed = z[22], places = z[4] * z[10] * z[16], g_places = z[5] * z[11] * z[17], taps = z[6] * z[12] * z[18];
    for (int64_t group = 0; group < groups; group++)
        for (int64_t k = 0; k < out; k++)
            for (int64_t c = 0; c < in; c++)
                for (int64_t tap = 0; tap < taps; tap++) {
                    double sum = 0, all = 0;
                    for (int64_t i = 0; i < batch * places; i++) {
                        int64_t n = i / places, p = i % places, q = 0, inside = 1, at[3] = {p / (z[10] * z[16]), p / z[16] % z[10], p % z[16]};
                        int64_t t[3] = {tap / (z[12] * z[18]), tap / z[18] % z[12], tap % z[18]};
                        for (int d = 0; d < 3; d++) {
                            const int64_t *dim = z + 4 + 6 * d;
                            int64_t o = transposed ? at[d] * dim[3] - dim[4] + t[d] * dim[5] : at[d] + dim[4] - t[d] * dim[5];
                            if (!transposed) inside &= o % dim[3] == 0, o /= dim[3];
                            inside &= o >= 0 && o < dim[1];
                            q = q * dim[1] + o;
                        }
                        if (!inside) continue;
                        int64_t channel = group * in + c, output = group * out + k;
                        double a = (double)x[z[23] ? (n * places + p) * groups * in + channel : (n * groups * in + channel) * places + p];
                        double b = (double)g[z[24] ? (n * g_places + q) * groups * out + output : (n * groups * out + output) * g_places + q];
                        sum += a * b, all += fabs(a * b);
                    }
                    int64_t at = transposed ? ((group * in + c) * out + k) * taps + tap : ((group * out + k) * in + c) * taps + tap;
                    if (!close_to((double)dw[at], sum, all)) return "a weight gradient";
                }
    return NULL;
}

static const char *weight_grad_case(int racing) {
    int64_t z[26] = {1 + below(3), 1 + below(2), 1 + below(4), below(6) ? 1 + below(40) : 64 * (2 + below(2))}, places = 1, g_places = 1, taps = 1, transposed = below(4) == 0;
    for (int d = 0; d < 3; d++) {
        int64_t *dim = z + 4 + 6 * d;
        dim[0] = d == 1 && below(3) ? 1 : 1 + below(below(4) ? 7 : 40), dim[2] = 1 + below(3), dim[3] = 1 + below(3), dim[4] = below(4), dim[5] = 1 + below(2);
        int64_t reach = dim[5] * (dim[2] - 1) + 1, size = transposed ? (dim[0] - 1) * dim[3] - 2 * dim[4] + reach : (dim[0] + 2 * dim[4] - reach) / dim[3] + 1;
        if (size < 1 || (!transposed && dim[0] + 2 * dim[4] < reach)) return NULL;
        dim[1] = size;
        places *= dim[0], g_places *= size, taps *= dim[2];
    }
    z[22] = transposed, z[23] = below(2), z[24] = below(2), z[25] = 0;
    int64_t n = z[0] * z[1] * z[2] * places, g_n = z[0] * z[1] * z[3] * g_places, weights = z[1] * z[2] * z[3] * taps, bytes = (n + 7) / 8;
    if (n < 2 || n * z[3] * taps > 200000 || g_n > 200000) return NULL;
    int64_t kept = 1 + below(n - 1);
    int threads = 1 + (int)below(4);
    float *x = malloc((size_t)n * 4), *g = malloc((size_t)g_n * 4), *values = malloc((size_t)kept * 4), *dw = malloc((size_t)weights * 4);
    uint8_t *mask = malloc((size_t)bytes);
    for (int64_t i = 0; i < n; i++) x[i] = (float)below(4000) / 1000 - 2;
    for (int64_t i = 0; i < g_n; i++) g[i] = (float)below(2000) / 1000 - 1;
    const char *wrong = NULL;
    if (sfx_compress(x, n, 4, 0x7f800000, kept, values, mask, threads) || sfx_decompress(values, kept, mask, n, 4, x, threads)) abort();
    if (racing) {
        Target marks = {mask, bytes, 0};
        pthread_t thread = start_disturbing(&marks);
        for (int i = 0; i < 4; i++) (void)sfx_weight_grad(g, values, kept, mask, z, dw, threads);
        stop_disturbing(&marks, thread);
    } else if (sfx_weight_grad(g, values, kept, mask, z, dw, threads)) wrong = "a weight gradient's mask was refused";
    else wrong = check_weight_grad(z, x, g, dw);
    mask[0] ^= 1;
    if (!racing && sfx_weight_grad(g, values, kept, mask, z, dw, 1) != 1) wrong = "a weight gradient did not refuse a flipped bit";
    mask[0] ^= 1;
    values[0] = INFINITY;
    if (sfx_weight_grad(g, values, kept, mask, z, dw, 1) != 2) wrong = "a value that is not finite was taken";
    if (wrong) {
        printf("%s: kept %lld, threads %d, sizes", wrong, (long long)kept, threads);
        for (int i = 0; i < 26; i++) printf(" %lld", (long long)z[i]);
        printf("\n");
    }
    free(x), free(g), free(values), free(dw), free(mask);
    return wrong;
}

static const char *one_case(int racing) {
    static const uint64_t infs[] = {0x7c00, 0x7f80, 0x7f800000, 0x7ff0000000000000};
    static const int64_t widths[] = {2, 2, 4, 8};
    int type = (int)below(4), kind = (int)below(5), threads = 1 + (int)below(4);
    int64_t sizes[] = {2 + below(200), 2 + below(3000), 2 + below(20000), 60000 + below(140000)};
    int64_t width = widths[type], n = sizes[below(64) ? below(64) ? below(2) : 2 : 3], bytes = (n + 7) / 8;
    int64_t kept = 1 + below(below(4) ? n - 1 : MIN(n - 1, 70));
    int64_t shift = below(4) ? 0 : width * below(64 / width); /* of outputs, from the allocator's alignment */
    uint64_t inf = infs[type], value = random_bits();
    uint8_t *x = malloc((size_t)(n * width)), *values = malloc((size_t)(kept * width)), *mask = malloc((size_t)bytes), *bits = malloc((size_t)bytes);
    uint8_t *room = malloc((size_t)(n * width + shift)), *out = room + shift;
    const char *wrong = NULL;
    fill(x, n, width, kind);

    Target input = {x, n * width, 0}, marks = {mask, bytes, 0}, signs = {bits, bytes, 0};
    pthread_t thread;
    if (racing) thread = start_disturbing(&input);
    if (sfx_compress(x, n, width, inf, kept, values, mask, threads)) abort();
    sfx_pack_sign(x, n, width, inf, bits, threads);
    if (racing) stop_disturbing(&input, thread);
    else wrong = check_compressed(x, n, width, inf, kept, values, mask);

    if (sfx_decompress(values, kept, mask, n, width, out, threads)) wrong = "compressed parts do not go together";
    for (int64_t i = 0, at = 0; !wrong && !racing && i < n; i++)
        if (element(out, i, width) != (bit(mask, i) ? element(values, at++, width) : 0)) wrong = "restored";
    if (!racing && (sfx_pick(x, n, width, mask, kept, out, threads) || memcmp(out, values, (size_t)(kept * width)))) wrong = "picked";
    for (int64_t i = 0; !wrong && !racing && i < n; i++) {
        uint64_t v = element(x, i, width);
        int positive = !(v >> (8 * width - 1)) && v, nan = key(v, width, inf) > inf;
        if (bit(bits, i) != (positive || nan)) wrong = "signs";
    }

    if (racing) thread = start_disturbing(&signs);
    int refused = sfx_select(bits, n, width, NULL, value, out, threads);
    if (racing) stop_disturbing(&signs, thread);
    else for (int64_t i = 0; !wrong && i < n; i++)
        if (refused || element(out, i, width) != (bit(bits, i) ? value & low_bits(8 * width) : 0)) wrong = "unpacked value";
    if (racing) thread = start_disturbing(&signs);
    refused = sfx_select(bits, n, width, x, 0, out, threads);
    if (racing) stop_disturbing(&signs, thread);
    else for (int64_t i = 0; !wrong && i < n; i++)
        if (refused || element(out, i, width) != (bit(bits, i) ? element(x, i, width) : 0)) wrong = "masked by bits";
    if (racing) thread = start_disturbing(&signs);
    refused = sfx_unpack_bits(bits, n, out, threads);
    if (racing) stop_disturbing(&signs, thread);
    else for (int64_t i = 0; !wrong && i < n; i++)
        if (refused || out[i] != bit(bits, i)) wrong = "unpacked bits";
    if (!wrong && !racing) {
        sfx_pack_bits(out, n, bits, threads);
        for (int64_t i = 0; !wrong && i < n; i++)
            if (out[i] != bit(bits, i)) wrong = "packed bits";
    }

    /* A mask that does not go with the values: flipped, or with bits behind the last element. */
    int64_t flipped = below(n);
    mask[flipped / 8] ^= (uint8_t)(1 << flipped % 8);
    if (sfx_decompress(values, kept, mask, n, width, out, threads) != 1) wrong = "a flipped bit was not refused";
    if (sfx_pick(x, n, width, mask, kept, out, threads) != 1) wrong = "a flipped bit was not refused";
    mask[flipped / 8] ^= (uint8_t)(1 << flipped % 8);
    if (n % 8) {
        mask[bytes - 1] |= 0x80, bits[bytes - 1] |= 0x80;
        if (sfx_decompress(values, kept, mask, n, width, out, threads) != 1) wrong = "a stray bit was not refused";
        if (sfx_unpack_bits(bits, n, out, threads) != 1 || sfx_select(bits, n, width, NULL, value, out, threads) != 1) wrong = "a stray bit was not refused";
        mask[bytes - 1] &= 0x7f;
    }
    if (racing) {
        marks.n = MAX(1, n / 8); /* the last byte's place is not for any byte */
        for (int i = 0; i < 4; i++) {
            thread = start(i % 2 ? disturb : permute, &marks);
            (void)sfx_decompress(values, kept, mask, n, width, out, threads);
            (void)sfx_pick(x, n, width, mask, kept, out, threads);
            stop_disturbing(&marks, thread);
        }
    }
    if (wrong) printf("%s: n %lld, width %lld, inf %llx, kept %lld, kind %d, threads %d, shift %lld\n", wrong, (long long)n, (long long)width,
                      (unsigned long long)inf, (long long)kept, kind, threads, (long long)shift);
    free(x), free(values), free(mask), free(bits), free(room);
    return wrong;
}

int main(int argc, char **argv) {
    if (argc < 4 || sfx_set_isa(argv[1])) return printf("usage: fuzz ISA CASES SEED [racing], and the ISA must be this machine's\n"), 2;
    int racing = argc > 4;
    long cases = atol(argv[2]), failures = 0;
    for (long i = 0; i < cases && failures < 5; i++) {
        seed = ((uint64_t)atol(argv[3]) + (uint64_t)i) * 0x9e3779b97f4a7c15ull | 1;
        for (int warm = 0; warm < 4; warm++) random_bits();
        if (one_case(racing) || norm_case(racing) || normalised_case(racing) || weight_grad_case(racing)) failures++, printf("  case %ld of seed %s\n", i, argv[3]);
    }
    printf("%s: %ld cases%s, %ld wrong\n", argv[1], cases, racing ? " with changing inputs" : "", failures);
    return failures != 0;
}
