/* A thread rewrites the input of `compress`, then the masks of `decompress` and of a weight gradient, between values that
 * every count of an earlier pass is wrong for. Run under the address sanitizer.
 *
 * Usage: changing_input ISA ROUNDS */
#include "common.h"

#include <pthread.h>
#include <stdio.h>

/* The kernels' parallel loops, on the one thread that is asked for. */
void GOMP_parallel(void (*run)(void *), void *data, unsigned count, unsigned flags) { (void)count, (void)flags, run(data); }
int omp_get_thread_num(void) { return 0; }
int omp_get_num_threads(void) { return 1; }

typedef struct { void *at; int64_t n; int stop; } Target;

/* Few large elements, then none but large ones. */
static void *rewrite_input(void *target_) {
    Target *t = target_;
    float *x = t->at;
    while (!__atomic_load_n(&t->stop, __ATOMIC_RELAXED)) {
        for (int64_t i = 0; i < t->n; i++) x[i] = 1e-3f * (float)(i % 1000);
        for (int64_t i = 0; i < t->n; i++) x[i] = 5;
    }
    return NULL;
}

/* The same number of bits, now in the first bytes, now in the last. */
static void *reverse_mask(void *target_) {
    Target *t = target_;
    uint8_t *mask = t->at;
    while (!__atomic_load_n(&t->stop, __ATOMIC_RELAXED))
        for (int64_t i = 0; i < t->n / 2; i++) {
            uint8_t v = mask[i];
            mask[i] = mask[t->n - 1 - i], mask[t->n - 1 - i] = v;
        }
    return NULL;
}

static pthread_t start(void *(*run)(void *), Target *t) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, t)) abort();
    return thread;
}

static void stop(Target *t, pthread_t thread) {
    __atomic_store_n(&t->stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
}

/* Of a strided convolution, whose places are of several classes, cut into several chunks of rows: the bits are now in the
 * first rows, now in the last. */
static void take_weight_grad(int64_t stride, int64_t size) {
    int64_t out = (size - 1) / stride + 1, bytes = size * size / 8, kept = 8 * (bytes / 4);
    int64_t sizes[26] = {1, 1, 1, 16, size, out, 3, stride, 1, 1, 1, 1, 1, 1, 0, 1, size, out, 3, stride, 1, 1};
    float *g = calloc((size_t)(16 * out * out), 4), *values = malloc((size_t)kept * 4), *dw = malloc(16 * 9 * 4);
    uint8_t *mask = calloc((size_t)bytes, 1);
    for (int64_t i = 0; i < kept; i++) values[i] = 1;
    memset(mask, 0xff, (size_t)bytes / 4);
    Target bits = {mask, bytes, 0};
    pthread_t thread = start(reverse_mask, &bits);
    for (int i = 0; i < 200; i++) (void)sfx_weight_grad(g, values, kept, mask, sizes, dw, 1);
    stop(&bits, thread);
    free(g), free(values), free(dw), free(mask);
}

int main(int argc, char **argv) {
    if (argc < 3 || sfx_set_isa(argv[1])) return 2;
    for (long round = 0, rounds = atol(argv[2]); round < rounds; round++) {
        int64_t n = 8 * (200 + round * 997 % 20000), kept = n / 8;
        float *x = malloc((size_t)n * 4), *values = malloc((size_t)kept * 4);
        uint8_t *mask = malloc((size_t)n / 8);
        for (int64_t i = 0; i < n; i++) x[i] = (float)(i % 977);
        Target input = {x, n, 0}, bits = {mask, n / 8, 0};
        pthread_t thread = start(rewrite_input, &input);
        for (int i = 0; i < 10; i++) sfx_compress(x, n, 4, 0x7f800000, kept, values, mask, 1);
        stop(&input, thread);
        memset(mask, 0, (size_t)n / 8), memset(mask, 0xff, (size_t)kept / 8), mask[n / 8 - 1] |= (uint8_t)((1 << kept % 8) - 1);
        thread = start(reverse_mask, &bits);
        for (int i = 0; i < 40; i++) (void)sfx_decompress(values, kept, mask, n, 4, x, 1);
        stop(&bits, thread);
        free(x), free(values), free(mask);
        take_weight_grad(2 + round % 3, 32 + 8 * (round % 7));
    }
    return puts("done"), 0;
}
