/* torch's large CPU blocks in mappings of their own, so that freed activations leave the process.
 *
 * posix_memalign and free are replaced in the import table of libc10, where torch allocates tensors; nobody else's
 * allocations are touched, nor is any setting of malloc. Requests of FROM_BYTES and more get a mapping each; the rest,
 * and whatever else libc10 frees, goes to malloc as before. A mapping begins with a header, and the header's mark alone
 * decides what is ours (`header_of`): the bytes it names are the bytes that are counted in and out.
 *
 * Fresh mappings are faulted in page by page, which would be most of the price of returning memory. So what is freed is kept
 * for the next requests, under one rule: bytes in use and bytes kept together never exceed what was in use at the highest
 * moment of the last PERIODS periods between trims (or FLOOR_BYTES more than was in use at the last trim), nor three quarters
 * of what the system once refused. So the peak of a process that does the same again and again stays what it would be if every
 * block went back at once; FLOOR_BYTES matter only to steps that need no more.
 *
 * Kept blocks that lie side by side become one extent, and a request is cut from the smallest that is large enough: sizes
 * need not come again, as those of pruned tensors do not where ratios follow the data. What the rule does not allow goes back
 * oldest extent first, no more than that. At a trim everything kept goes back, or all but a few bytes that the caller still
 * needs; everything before a fork, when the system refuses memory, and, by a thread that lives only while something is kept,
 * once nothing has happened for IDLE_MS (or SOON_MS, where the caller expects to be done); then malloc is asked for what it
 * has free, too.
 *
 * Refusals are also caught where libtorch_cpu and libstdc++ allocate. What they get stays malloc's; it is merely asked for
 * once more, after what is kept and a small reserve have been given up. oneDNN needs that: after one refusal it was seen to
 * fail at every later primitive ("could not create a primitive"), with memory to spare.
 */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "scratch.h"

#define EXPORT __attribute__((visibility("default")))

/* What sfx_blocks_install returns. */
enum { INSTALLED, NOT_SUPPORTED, NO_LIBC10, NOT_IMPORTED, TAKEN, REFUSED };

#if defined(__linux__) && defined(__GLIBC__) && defined(__LP64__)
#include <dlfcn.h>
#include <errno.h>
#include <gnu/libc-version.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    FROM_BYTES = 256 << 10,  /* smaller blocks stay with malloc */
    MALLOC_BYTES = 1 << 20,  /* smaller ones go to malloc where no mapping is to be had */
    LEAST_REST = 32 << 10,   /* less is not cut off from what serves a request */
    FLOOR_BYTES = 16 << 20,
    EXTENTS_MOST = 1024,
    PERIODS = 8,             /* several steps: what they need varies with the data */
    IDLE_MS = 1000,
    SOON_MS = 50,
    RESERVE_BYTES = 8 << 20, /* of address space */
    WATCHER_STACK = 512 << 10,
    MAPPED_CHUNK = 2,        /* malloc's flag of a block that is a mapping */
};

/* At the start of a mapping, in front of the pointer that is handed out. It ends as the header of a mapped malloc block
 * does, so that whoever gets at the pointer past our `free` (a profiler that replaces ours, say) can free it too. */
typedef struct {
    uint64_t mark[2]; /* made from a secret, the address and `bytes` */
    size_t bytes;     /* of the whole mapping */
    size_t unused[3];
    size_t malloc_offset, malloc_size;
} Header;
_Static_assert(sizeof(Header) == 64, "the alignment of what follows it");

/* Kept memory: no neighbour of it is kept. */
typedef struct {
    char *start;
    size_t bytes;
    int64_t freed; /* the last of its blocks was the so-manieth that was freed */
} Extent;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows */
static Extent extents[EXTENTS_MOST]; /* what is kept, by address */
static int extent_count;
static int64_t frees;         /* so far */
static int64_t used, kept;    /* bytes */
static int64_t used_at_trim;
static int64_t most[PERIODS]; /* of `used`: since the last trim, between that and the one before, ... */
static int64_t ceiling = INT64_MAX; /* of both together, once the system has refused */
static void *reserve;         /* for those that must not be refused; NULL once given up */
static int active;            /* whether a block came since the last trim */
static int64_t last_ms;       /* when one came or went */
static int64_t idle_ms = IDLE_MS;
static int forking;           /* threads about to fork: no watcher starts */
static int watching;          /* whether a thread waits for an idle moment, */
static pthread_t watcher;     /* which, */
static pthread_cond_t wake;   /* and what calls it off */
static uint64_t secret[2];
static size_t page;

/* ---- what is ours ---- */

static void mark_used(Header *h) {
    h->mark[0] = secret[0] ^ (uintptr_t)h;
    h->mark[1] = secret[1] ^ h->bytes;
    h->malloc_offset = offsetof(Header, malloc_offset);
    h->malloc_size = (h->bytes - h->malloc_offset) | MAPPED_CHUNK;
}

static void mark_kept(Header *h) { h->mark[0] = h->mark[1] = h->malloc_size = 0; }

/* The header of a block in use, or NULL if the pointer is not ours. What stands in front of any pointer at this offset of a
 * page is in the same page, so it may be read. */
static Header *header_of(void *p) {
    if ((uintptr_t)p % page != sizeof(Header)) return NULL;
    Header *h = (Header *)p - 1;
    int ours = h->mark[0] == (secret[0] ^ (uintptr_t)h) && h->mark[1] == (secret[1] ^ h->bytes);
    return ours && h->malloc_size == ((h->bytes - h->malloc_offset) | MAPPED_CHUNK) ? h : NULL;
}

/* ---- freed memory that waits for reuse; with the lock held ---- */

static void unmap(void *start, size_t bytes) {
    if (munmap(start, bytes)) madvise(start, bytes, MADV_DONTNEED); /* at the limit of mappings a hole cannot be made: empty it */
}

static void remove_extent(int i) { memmove(&extents[i], &extents[i + 1], (size_t)(--extent_count - i) * sizeof *extents); }

/* Gives the oldest memory back, so many bytes of it or all there is. */
static void give_back(int64_t bytes) {
    while (bytes > 0 && extent_count) {
        int oldest = 0;
        for (int i = 1; i < extent_count; i++)
            if (extents[i].freed < extents[oldest].freed) oldest = i;
        Extent *e = &extents[oldest];
        size_t some = ((size_t)bytes + page - 1) / page * page, part = e->bytes < some ? e->bytes : some;
        e->bytes -= part;
        kept -= (int64_t)part;
        bytes -= (int64_t)part;
        unmap(e->start + e->bytes, part);
        if (!e->bytes) remove_extent(oldest);
    }
}

static void keep(void *start_, size_t bytes) {
    char *start = start_;
    int at = 0, end = extent_count;
    while (at < end) { /* extents before `at` begin before the new one */
        int middle = (at + end) / 2;
        if (extents[middle].start < start) at = middle + 1;
        else end = middle;
    }
    kept += (int64_t)bytes;
    if (at < extent_count && start + bytes == extents[at].start) {
        bytes += extents[at].bytes;
        remove_extent(at);
    }
    if (at && extents[at - 1].start + extents[at - 1].bytes == start) {
        extents[at - 1].bytes += bytes;
        extents[at - 1].freed = ++frees;
        return;
    }
    if (extent_count == EXTENTS_MOST) {
        kept -= (int64_t)bytes;
        unmap(start, bytes);
        return;
    }
    memmove(&extents[at + 1], &extents[at], (size_t)(extent_count++ - at) * sizeof *extents);
    extents[at] = (Extent){start, bytes, ++frees};
}

/* Gives back what the rule does not allow, with so many bytes more in use. */
static void evict(size_t wanted) {
    int64_t allowed = used_at_trim + FLOOR_BYTES;
    for (int i = 0; i < PERIODS; i++)
        if (allowed < most[i]) allowed = most[i];
    if (allowed > ceiling) allowed = ceiling;
    give_back(used + (int64_t)wanted + kept - allowed);
}

/* Gives all back but the newest `spared` bytes; a period ends. */
static int64_t release(int64_t spared) {
    int64_t bytes = kept;
    give_back(kept - spared);
    bytes -= kept;
    used_at_trim = used;
    if (active) {
        memmove(most + 1, most, (PERIODS - 1) * sizeof *most);
        most[0] = used;
        active = 0;
    }
    return bytes;
}

/* ---- the idle moment ---- */

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void *watch(void *unused) {
    (void)unused;
    int idle = 0;
    pthread_mutex_lock(&lock);
    while (watching && extent_count) {
        int64_t until_ms = last_ms + idle_ms;
        struct timespec until = {until_ms / 1000, until_ms % 1000 * 1000000};
        if (now_ms() >= until_ms) release(0), idle = 1;
        else pthread_cond_timedwait(&wake, &lock, &until);
    }
    if (watching) pthread_detach(watcher); /* else it is waited for */
    watching = 0;
    pthread_mutex_unlock(&lock);
    if (idle) malloc_trim(0); /* scratch of the kernels, and what else malloc has free */
    return NULL;
}

/* With the lock held. Where no thread is to be had, the next trim gives back what is kept. */
static void start_watching(void) {
    pthread_attr_t attributes;
    if (watching || forking || !extent_count || pthread_attr_init(&attributes)) return;
    pthread_attr_setstacksize(&attributes, WATCHER_STACK);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    watching = !pthread_create(&watcher, &attributes, watch, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

/* A child must find the lock free, no thread missing, and nothing kept that nobody would give back. */
static void before_fork(void) {
    pthread_mutex_lock(&lock);
    forking++;
    while (watching) {
        pthread_t waiting = watcher;
        watching = 0;
        pthread_cond_signal(&wake);
        pthread_mutex_unlock(&lock);
        pthread_join(waiting, NULL);
        pthread_mutex_lock(&lock);
    }
    release(0);
}

static void after_fork(void) {
    forking--;
    pthread_mutex_unlock(&lock);
}

static void after_fork_in_child(void) {
    forking = 0; /* other threads were left behind */
    pthread_mutex_unlock(&lock);
}

/* ---- in the place of posix_memalign and free ---- */

static Header *map(size_t bytes) {
    Header *h = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (h == MAP_FAILED) return NULL;
    h->bytes = bytes;
    return h;
}

/* From the smallest extent that serves, or a new mapping. NULL if the system refuses. */
static Header *take(size_t bytes) {
    int best = -1;
    for (int i = 0; i < extent_count; i++)
        if (extents[i].bytes >= bytes && (best < 0 || extents[i].bytes < extents[best].bytes)) best = i;
    if (best < 0) {
        evict(bytes); /* before the new one comes */
        return map(bytes);
    }
    Extent *e = &extents[best];
    Header *h = (Header *)e->start;
    h->bytes = e->bytes - bytes < LEAST_REST ? e->bytes : bytes;
    kept -= (int64_t)h->bytes;
    e->start += h->bytes;
    e->bytes -= h->bytes;
    if (!e->bytes) remove_extent(best);
    return h;
}

/* What to do when the system refuses: give everything back, malloc's free memory too, and stay clear of that level from now
 * on. With the lock held. Whether anything went back. */
static int respect_limit(size_t refused) {
    int64_t reached = used + kept, level = (reached + (int64_t)(refused < PTRDIFF_MAX / 2 ? refused : PTRDIFF_MAX / 2)) / 4 * 3;
    if (ceiling > level) ceiling = level;
    int64_t bytes = release(0);
    return malloc_trim(0) || bytes;
}

static void set_reserve(void) {
    if (reserve) return;
    reserve = mmap(NULL, RESERVE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserve == MAP_FAILED) reserve = NULL;
}

/* Whether something was given up, so that it is worth to ask once more. */
static int make_room(size_t refused) {
    pthread_mutex_lock(&lock);
    int some = respect_limit(refused);
    if (reserve && refused < RESERVE_BYTES) {
        munmap(reserve, RESERVE_BYTES);
        reserve = NULL;
        some = 1;
    }
    pthread_mutex_unlock(&lock);
    return some;
}

static int retrying_memalign(void **out, size_t alignment, size_t bytes) {
    int error = posix_memalign(out, alignment, bytes);
    return error == ENOMEM && make_room(bytes) ? posix_memalign(out, alignment, bytes) : error;
}

static void *retrying_malloc(size_t bytes) {
    void *p = malloc(bytes);
    return !p && make_room(bytes) ? malloc(bytes) : p;
}

static void *retrying_mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset) {
    void *p = mmap(address, bytes, protection, flags, file, offset);
    return p == MAP_FAILED && errno == ENOMEM && make_room(bytes) ? mmap(address, bytes, protection, flags, file, offset) : p;
}

static int own_memalign(void **out, size_t alignment, size_t bytes) {
    if (bytes < FROM_BYTES || bytes > PTRDIFF_MAX / 2 || alignment > sizeof(Header)) return retrying_memalign(out, alignment, bytes);
    size_t whole = (bytes + sizeof(Header) + page - 1) / page * page;
    pthread_mutex_lock(&lock);
    Header *h = take(whole);
    if (!h) {
        respect_limit(whole);
        h = map(whole);
    }
    if (h) {
        mark_used(h);
        used += (int64_t)h->bytes;
        if (most[0] < used) most[0] = used;
        active = 1;
        last_ms = now_ms();
        idle_ms = IDLE_MS;
    }
    pthread_mutex_unlock(&lock);
    if (!h && bytes < MALLOC_BYTES) return retrying_memalign(out, alignment, bytes);
    if (!h) return ENOMEM; /* malloc is not asked: for want of room it would set up another arena, 64 MiB of addresses for good */
    *out = h + 1;
    return 0;
}

static void own_free(void *p) {
    Header *h = header_of(p);
    if (!h) {
        free(p);
        return;
    }
    pthread_mutex_lock(&lock);
    mark_kept(h);
    used -= (int64_t)h->bytes;
    keep(h, h->bytes);
    evict(0);
    last_ms = now_ms();
    start_watching();
    pthread_mutex_unlock(&lock);
}

/* ---- import tables ---- */

enum { SYMBOLS_MOST = 3, SLOTS = 8 };
typedef struct {
    const char *name;
    void *original, *own;
    void **slots[SLOTS];
    int count;
} Import;
typedef struct {
    const char *library;
    int seen, symbols;
    Import imports[SYMBOLS_MOST];
} Imports;

static const void *table(const struct dl_phdr_info *object, const ElfW(Dyn) *entry) {
    ElfW(Addr) at = entry->d_un.d_ptr; /* most systems have added the load address in place */
    return (const void *)(at < object->dlpi_addr ? at + object->dlpi_addr : at);
}

static int collect_imports(struct dl_phdr_info *object, size_t unused, void *imports_) {
    (void)unused;
    Imports *found = imports_;
    const char *slash = strrchr(object->dlpi_name, '/'), *file = slash ? slash + 1 : object->dlpi_name;
    if (strcmp(file, found->library)) return 0;
    found->seen = 1;
    const ElfW(Dyn) *d = NULL;
    for (int i = 0; i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_DYNAMIC) d = (const ElfW(Dyn) *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
    const ElfW(Rela) *relocations[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    for (; d && d->d_tag != DT_NULL; d++) {
        if (d->d_tag == DT_JMPREL) relocations[0] = table(object, d);
        if (d->d_tag == DT_PLTRELSZ) sizes[0] = d->d_un.d_val;
        if (d->d_tag == DT_RELA) relocations[1] = table(object, d);
        if (d->d_tag == DT_RELASZ) sizes[1] = d->d_un.d_val;
        if (d->d_tag == DT_SYMTAB) symbols = table(object, d);
        if (d->d_tag == DT_STRTAB) names = table(object, d);
    }
    for (int t = 0; symbols && names && t < 2; t++)
        for (size_t i = 0; relocations[t] && i < sizes[t] / sizeof(ElfW(Rela)); i++) {
            const ElfW(Rela) *r = &relocations[t][i];
            size_t symbol = ELF64_R_SYM(r->r_info);
            if (!symbol || r->r_addend || symbols[symbol].st_shndx != SHN_UNDEF) continue;
            for (int s = 0; s < found->symbols; s++) {
                Import *import = &found->imports[s];
                if (!strcmp(names + symbols[symbol].st_name, import->name) && import->count < SLOTS)
                    import->slots[import->count++] = (void **)(object->dlpi_addr + r->r_offset);
            }
        }
    return 1;
}

static const void *object_of(const void *address) {
    Dl_info info;
    return dladdr(address, &info) ? info.dli_fbase : NULL;
}

/* Whether a slot holds the C library's function, and not a stub yet to be resolved or somebody's replacement. A program at
 * a fixed address may stand in for it with an entry of its own. */
static int is_original(const Import *import, void *target) {
    const void *object = object_of(target);
    if (!object) return 0;
    return object == object_of((void *)gnu_get_libc_version) ||
           (target == import->original && object == object_of((void *)getauxval(AT_PHDR)));
}

typedef struct { uintptr_t address; int read_only; } Protection;

/* The loader protects whole pages alone: one that relocations share with data at its end stays writable. */
static int find_protection(struct dl_phdr_info *object, size_t unused, void *wanted_) {
    (void)unused;
    Protection *wanted = wanted_;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &object->dlpi_phdr[i];
        uintptr_t begin = object->dlpi_addr + p->p_vaddr, end = begin + p->p_memsz;
        if (p->p_type == PT_GNU_RELRO && wanted->address >= begin / page * page && wanted->address < end / page * page) wanted->read_only = 1;
    }
    return wanted->read_only;
}

static int set_slot(void **slot, void *target) {
    Protection at = {(uintptr_t)slot, 0};
    dl_iterate_phdr(find_protection, &at);
    void *start = (void *)((uintptr_t)slot / page * page);
    if (at.read_only && mprotect(start, page, PROT_READ | PROT_WRITE)) return 0;
    __atomic_store_n(slot, target, __ATOMIC_SEQ_CST);
    if (at.read_only) mprotect(start, page, PROT_READ);
    return 1;
}

/* What is to be taken over; `free` first, so that no block of ours can meet malloc's. */
static int find_imports(Imports *found) {
    *found = (Imports){"libc10.so", 0, 2, {{"free", (void *)free, (void *)own_free, {NULL}, 0},
                                           {"posix_memalign", (void *)posix_memalign, (void *)own_memalign, {NULL}, 0}}};
    dl_iterate_phdr(collect_imports, found);
    if (!found->seen) return NO_LIBC10;
    for (int s = 0; s < found->symbols; s++)
        if (!found->imports[s].count) return NOT_IMPORTED;
    for (int s = 0; s < found->symbols; s++)
        for (int i = 0; i < found->imports[s].count; i++)
            if (!is_original(&found->imports[s], *found->imports[s].slots[i])) return TAKEN;
    return INSTALLED;
}

/* Nothing depends on these: each that cannot be had is left as it is. */
static void retry_in(const char *library) {
    Imports found = {library, 0, 3, {{"posix_memalign", (void *)posix_memalign, (void *)retrying_memalign, {NULL}, 0},
                                     {"malloc", (void *)malloc, (void *)retrying_malloc, {NULL}, 0},
                                     {"mmap", (void *)mmap, (void *)retrying_mmap, {NULL}, 0}}};
    dl_iterate_phdr(collect_imports, &found);
    for (int s = 0; s < found.symbols; s++)
        for (int i = 0; i < found.imports[s].count; i++) {
            void **slot = found.imports[s].slots[i];
            if (is_original(&found.imports[s], *slot) || object_of(*slot) == object_of(slot)) set_slot(slot, found.imports[s].own);
        }
}

/* Both symbols or neither. */
static int install(void) {
    Imports found;
    int reason = find_imports(&found);
    if (reason) return reason;
    for (int s = 0; s < found.symbols; s++)
        for (int i = 0; i < found.imports[s].count; i++)
            if (!set_slot(found.imports[s].slots[i], found.imports[s].own)) {
                for (i = 0; i < found.imports[0].count; i++) set_slot(found.imports[0].slots[i], found.imports[0].original);
                return REFUSED;
            }
    set_reserve();
    retry_in("libtorch_cpu.so");
    retry_in("libstdc++.so.6");
    return INSTALLED;
}

static int outcome = NOT_IMPORTED; /* of the installation; until then nothing is served */
static void install_once(void) {
    pthread_condattr_t attributes;
    page = (size_t)sysconf(_SC_PAGESIZE);
    memcpy(secret, (const void *)getauxval(AT_RANDOM), sizeof secret);
    if (pthread_condattr_init(&attributes) || pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) ||
        pthread_cond_init(&wake, &attributes) || pthread_atfork(before_fork, after_fork, after_fork_in_child))
        outcome = REFUSED;
    else __atomic_store_n(&outcome, install(), __ATOMIC_RELEASE);
}

/* What an installation would come to. */
EXPORT int sfx_blocks_check(void) {
    Imports found;
    return find_imports(&found);
}

/* Serves torch's large blocks from now on. The first call decides; returns INSTALLED, or why not. */
EXPORT int sfx_blocks_install(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install_once);
    return outcome;
}

/* Any pointer may be given back once torch's blocks are served: what is not ours is malloc's. */
static int is_serving(void) { return __atomic_load_n(&outcome, __ATOMIC_ACQUIRE) == INSTALLED; }

void *take_scratch(size_t bytes) {
    void *p;
    if (!is_serving()) return malloc(bytes);
    return own_memalign(&p, sizeof(Header), bytes) ? NULL : p;
}

void give_scratch(void *scratch) {
    if (is_serving()) own_free(scratch);
    else free(scratch);
}

static void expect_pause(void) {
    last_ms = now_ms();
    idle_ms = SOON_MS;
    if (watching) pthread_cond_signal(&wake);
}

/* Whether what the system once refused is near what is needed. */
static int is_short(void) {
    int64_t needed = used;
    for (int i = 0; i < PERIODS; i++)
        if (needed < most[i]) needed = most[i];
    return ceiling / 2 < needed;
}

/* Gives blocks that wait for reuse back, all but so many bytes, and these once the process pauses. Returns how many bytes
 * went. */
EXPORT int64_t sfx_blocks_trim(int64_t spared) {
    pthread_mutex_lock(&lock);
    int64_t bytes = release(is_short() ? 0 : spared);
    if (ceiling != INT64_MAX) set_reserve();
    if (extent_count) expect_pause();
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* Gives all of them back SOON_MS from now, unless a block is asked for before. */
EXPORT void sfx_blocks_trim_soon(void) {
    pthread_mutex_lock(&lock);
    expect_pause();
    pthread_mutex_unlock(&lock);
}

/* Bytes of blocks in use, and of those kept. */
EXPORT void sfx_blocks_count(int64_t *in_use, int64_t *waiting) {
    pthread_mutex_lock(&lock);
    *in_use = used;
    *waiting = kept;
    pthread_mutex_unlock(&lock);
}
#else
void *take_scratch(size_t bytes) { return malloc(bytes); }
void give_scratch(void *scratch) { free(scratch); }
EXPORT int sfx_blocks_check(void) { return NOT_SUPPORTED; }
EXPORT int sfx_blocks_install(void) { return NOT_SUPPORTED; }
EXPORT int64_t sfx_blocks_trim(int64_t spared) { return spared * 0; }
EXPORT void sfx_blocks_trim_soon(void) {}
EXPORT void sfx_blocks_count(int64_t *in_use, int64_t *waiting) { *in_use = *waiting = 0; }
#endif
