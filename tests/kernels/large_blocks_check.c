/* Threads that install, allocate, check and free, a thread that trims, a thread that forks: what large_blocks.c must bear. */
#include "large_blocks.c"

#include <stdio.h>
#include <sys/wait.h>

enum { THREADS = 4, ROUNDS = 400, HELD = 6 };

static uint32_t draw(uint32_t *seed) { return *seed = *seed * 1664525u + 1013904223u, *seed >> 8; }

/* What is kept is counted, in order of address, and no two extents are neighbours. */
static void check_extents(void) {
    int64_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < extent_count; i++) {
        if (!extents[i].bytes || extents[i].bytes % page || (uintptr_t)extents[i].start % page) abort();
        if (i && extents[i - 1].start + extents[i - 1].bytes >= extents[i].start) abort();
        bytes += (int64_t)extents[i].bytes;
    }
    if (bytes != kept) abort();
    pthread_mutex_unlock(&lock);
}

static void *work(void *seed_) {
    if (sfx_blocks_install() != NO_LIBC10) abort(); /* sets up what the rest needs, once */
    uint32_t seed = (uint32_t)(uintptr_t)seed_;
    unsigned char *held[HELD] = {NULL};
    size_t sizes[HELD];
    for (int i = 0; i < ROUNDS; i++) {
        int at = (int)(draw(&seed) % HELD);
        for (size_t k = 0; held[at] && k < sizes[at]; k += 1 + sizes[at] / 64)
            if (held[at][k] != at) abort(); /* somebody else has it too */
        own_free(held[at]);
        sizes[at] = 1 + draw(&seed) % (4u << 20);
        if (own_memalign((void **)&held[at], 64, sizes[at]) || (uintptr_t)held[at] % 64) abort();
        memset(held[at], at, sizes[at]);
        check_extents();
    }
    for (int at = 0; at < HELD; at++) own_free(held[at]);
    return NULL;
}

static void *trim(void *unused) {
    (void)unused;
    for (int i = 0; i < 50; i++) sfx_blocks_trim(i % 2 << 20), usleep(2000);
    return NULL;
}

/* A fork waits for the thread that watches, and must not wait for one that others start meanwhile. */
static void *prepare_forks(void *unused) {
    (void)unused;
    for (int i = 0; i < 100; i++) {
        int64_t begin = now_ms();
        before_fork();
        if (watching || extent_count) abort();
        after_fork();
        if (now_ms() - begin >= IDLE_MS * 9 / 10) puts("a fork waits for an idle moment"), abort();
        usleep(1000);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS + 2];
    for (uintptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)(i + 1));
    pthread_create(&threads[THREADS], NULL, trim, NULL);
    pthread_create(&threads[THREADS + 1], NULL, prepare_forks, NULL);
#ifndef __SANITIZE_THREAD__ /* it does not follow children of a process with threads */
    for (int i = 0; i < 10; i++) {
        pid_t child = fork();
        if (!child) work((void *)99), _exit(0);
        int status;
        if (waitpid(child, &status, 0) != child || status) return puts("a child failed"), 1;
    }
#endif
    for (int i = 0; i <= THREADS + 1; i++) pthread_join(threads[i], NULL);
    int64_t in_use, waiting;
    sfx_blocks_count(&in_use, &waiting);
    if (in_use) return printf("%lld bytes are still counted\n", (long long)in_use), 1;
    usleep(1500000);
    sfx_blocks_count(&in_use, &waiting);
    if (waiting || watching) return puts("an idle process keeps blocks, or the thread"), 1;
    return puts("ok"), 0;
}
