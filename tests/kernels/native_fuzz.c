/* Random calls of every kernel, on exactly sized heap blocks so that a sanitizer sees any overrun; results are held
 * against what they mean, element by element.
 *
 * Usage: fuzz ISA CASES SEED [racing]
 * racing: another thread writes to the input while the kernel runs. Results are then unspecified, but what `compress`
 * returns must still go together, and nothing may be read or written out of bounds. */
#include "prune_pack.c"

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

static pthread_t start_disturbing(Target *t) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, disturb, t)) abort();
    return thread;
}

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
    for (int64_t i = 0; !wrong && !racing && i < n; i++) {
        uint64_t v = element(x, i, width);
        int positive = !(v >> (8 * width - 1)) && v, nan = key(v, width, inf) > inf;
        if (bit(bits, i) != (positive || nan)) wrong = "signs";
    }

    if (racing) thread = start_disturbing(&signs);
    int refused = sfx_unpack_value(bits, n, width, value, out, threads);
    if (racing) stop_disturbing(&signs, thread);
    else for (int64_t i = 0; !wrong && i < n; i++)
        if (refused || element(out, i, width) != (bit(bits, i) ? value & low_bits(8 * width) : 0)) wrong = "unpacked value";
    if (racing) signs.stop = 0, thread = start_disturbing(&signs);
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
    mask[flipped / 8] ^= (uint8_t)(1 << flipped % 8);
    if (n % 8) {
        mask[bytes - 1] |= 0x80, bits[bytes - 1] |= 0x80;
        if (sfx_decompress(values, kept, mask, n, width, out, threads) != 1) wrong = "a stray bit was not refused";
        if (sfx_unpack_bits(bits, n, out, threads) != 1 || sfx_unpack_value(bits, n, width, value, out, threads) != 1) wrong = "a stray bit was not refused";
        mask[bytes - 1] &= 0x7f;
    }
    if (racing) {
        thread = start_disturbing(&marks);
        for (int i = 0; i < 4; i++) (void)sfx_decompress(values, kept, mask, n, width, out, threads);
        stop_disturbing(&marks, thread);
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
        if (one_case(racing)) failures++, printf("  case %ld of seed %s\n", i, argv[3]);
    }
    printf("%s: %ld cases%s, %ld wrong\n", argv[1], cases, racing ? " with changing inputs" : "", failures);
    return failures != 0;
}
