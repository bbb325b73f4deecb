/* Reuse of large freed blocks, between torch's CPU allocator and malloc.
 *
 * With a fixed mmap threshold every large block goes back to the system when it is freed, and the next one is faulted in
 * page by page: that is most of the price of returning memory. Activations come and go in a few sizes, so freed blocks
 * are kept for the next request of their size, under one rule: blocks in use and blocks kept together never exceed what
 * was in use at the highest moment since the last trim but one (or, early on, FLOOR_BYTES more than is in use). So the
 * peak of a process that does the same again and again, and trims in between, stays what it would be if every block went
 * back at once. A trim gives all of them back.
 *
 * Every block is an ordinary malloc block before, during and after its stay here, and its size is what malloc says: any
 * pointer may be freed by anyone, and nothing has to be undone to be safe. What is intercepted are posix_memalign and
 * free in the import table of libc10, which is where torch allocates tensors; no other code in the process is touched,
 * and `sfx_cache_remove` puts the entries back.
 */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

#if defined(__linux__) && defined(__GLIBC__) && defined(__LP64__)
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    FROM_BYTES = 1 << 20, /* smaller blocks stay with malloc */
    SLACK = 8,            /* a block may exceed the request by one part in so many */
    FLOOR_BYTES = 16 << 20,
    SLOTS = 256,
};

static struct { void *p; size_t bytes; } blocks[SLOTS]; /* oldest first */
static int count;
static int64_t kept, used; /* bytes; used may start below zero: blocks from before the install come back too */
static int64_t most, most_before; /* used at its highest since the last trim, and between that and the one before */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *take_at(int i) {
    void *p = blocks[i].p;
    kept -= (int64_t)blocks[i].bytes;
    memmove(&blocks[i], &blocks[i + 1], (size_t)(--count - i) * sizeof blocks[0]);
    return p;
}

/* Takes the oldest blocks out until the rule holds. Returns how many. */
static int evict(void **evicted, int slots) {
    int n = 0;
    int64_t allowed = most > most_before ? most : most_before;
    if (allowed < used + FLOOR_BYTES) allowed = used + FLOOR_BYTES;
    while (count && (count > slots || used + kept > allowed)) evicted[n++] = take_at(0);
    return n;
}

static int reusing_memalign(void **out, size_t alignment, size_t bytes) {
    if (bytes < FROM_BYTES) return posix_memalign(out, alignment, bytes);
    void *evicted[SLOTS], *found = NULL;
    int best = -1, n = 0;
    pthread_mutex_lock(&lock);
    for (int i = count - 1; i >= 0; i--)
        if (blocks[i].bytes >= bytes && blocks[i].bytes <= bytes + bytes / SLACK && (uintptr_t)blocks[i].p % alignment == 0 &&
            (best < 0 || blocks[i].bytes < blocks[best].bytes))
            best = i;
    if (best >= 0) bytes = blocks[best].bytes, found = take_at(best);
    used += (int64_t)bytes;
    if (used > most) most = used;
    n = evict(evicted, SLOTS);
    pthread_mutex_unlock(&lock);
    while (n) free(evicted[--n]);
    if (found) {
        *out = found;
        return 0;
    }
    int error = posix_memalign(out, alignment, bytes);
    pthread_mutex_lock(&lock); /* what will come back is what malloc says it is */
    used += error ? -(int64_t)bytes : (int64_t)malloc_usable_size(*out) - (int64_t)bytes;
    if (used > most) most = used;
    pthread_mutex_unlock(&lock);
    return error;
}

static void reusing_free(void *p) {
    size_t bytes = p ? malloc_usable_size(p) : 0;
    if (bytes < FROM_BYTES) {
        free(p);
        return;
    }
    void *evicted[SLOTS];
    pthread_mutex_lock(&lock);
    used -= (int64_t)bytes;
    int n = evict(evicted, SLOTS - 1);
    blocks[count].p = p;
    blocks[count++].bytes = bytes;
    kept += (int64_t)bytes;
    n += evict(evicted + n, SLOTS);
    pthread_mutex_unlock(&lock);
    while (n) free(evicted[--n]);
}

/* Gives every block back. Returns how many bytes that were. */
EXPORT int64_t sfx_cache_trim(void) {
    void *evicted[SLOTS];
    int n = 0;
    pthread_mutex_lock(&lock);
    int64_t bytes = kept;
    while (count) evicted[n++] = take_at(count - 1);
    most_before = most;
    most = used;
    pthread_mutex_unlock(&lock);
    while (n) free(evicted[--n]);
    return bytes;
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

struct imports { void *memalign, *free; int changed; };

/* Points the import-table slot of one symbol elsewhere; the page is made writable for the moment if it is not. */
static int set_slot(const struct dl_phdr_info *object, ElfW(Addr) address, void *target) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int read_only = 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &object->dlpi_phdr[i];
        ElfW(Addr) begin = object->dlpi_addr + p->p_vaddr;
        if (p->p_type == PT_GNU_RELRO && address >= begin && address < begin + p->p_memsz) read_only = 1;
    }
    void *start = (void *)(address / page * page);
    if (read_only && mprotect(start, page, PROT_READ | PROT_WRITE)) return 0;
    __atomic_store_n((void **)address, target, __ATOMIC_SEQ_CST);
    if (read_only) mprotect(start, page, PROT_READ);
    return 1;
}

static int set_imports(struct dl_phdr_info *object, size_t unused, void *data) {
    (void)unused;
    struct imports *wanted = data;
    const char *slash = strrchr(object->dlpi_name, '/'), *file = slash ? slash + 1 : object->dlpi_name;
    if (strcmp(file, "libc10.so")) return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    if (!dynamic) return 0;
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        if (dynamic->d_tag == DT_JMPREL) tables[0] = (const ElfW(Rela) *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_PLTRELSZ) sizes[0] = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_RELA) tables[1] = (const ElfW(Rela) *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_RELASZ) sizes[1] = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_STRTAB) names = (const char *)dynamic->d_un.d_ptr;
    }
    if (!symbols || !names) return 0;
    for (int t = 0; t < 2; t++)
        for (size_t i = 0; tables[t] && i < sizes[t] / sizeof(ElfW(Rela)); i++) {
            const ElfW(Rela) *r = &tables[t][i];
            const char *name = names + symbols[ELF64_R_SYM(r->r_info)].st_name;
            void *target = !strcmp(name, "free") ? wanted->free : !strcmp(name, "posix_memalign") ? wanted->memalign : NULL;
            if (target && ELF64_R_SYM(r->r_info) && !r->r_addend)
                wanted->changed += set_slot(object, object->dlpi_addr + r->r_offset, target);
        }
    return 0;
}

/* Keeps freed blocks from now on. Returns how many import slots it took over: 0 is failure. */
EXPORT int sfx_cache_install(void) {
    static int atfork_done;
    if (!atfork_done) atfork_done = !pthread_atfork(before_fork, after_fork, after_fork);
    struct imports wanted = {(void *)reusing_memalign, (void *)reusing_free, 0};
    dl_iterate_phdr(set_imports, &wanted);
    return wanted.changed;
}

EXPORT void sfx_cache_remove(void) {
    struct imports original = {(void *)posix_memalign, (void *)free, 0};
    dl_iterate_phdr(set_imports, &original);
    sfx_cache_trim();
}
#else
EXPORT int64_t sfx_cache_trim(void) { return 0; }
EXPORT int sfx_cache_install(void) { return 0; }
EXPORT void sfx_cache_remove(void) {}
#endif
