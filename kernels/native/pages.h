/* Pages of memory that is about to be written. */
#ifndef SFX_PAGES_H
#define SFX_PAGES_H

#include "common.h"
#if defined(__linux__)
#include <sys/mman.h>
#endif

enum { PAGE = 1 << 12 };

/* Whether memory from the allocator has yet to be faulted in, judged by the page in its middle. */
INLINE int is_fresh(const void *p, int64_t bytes) {
#if defined(__linux__)
    unsigned char resident = 1;
    uintptr_t middle = ((uintptr_t)p + (uintptr_t)bytes / 2) & ~(uintptr_t)(PAGE - 1);
    return bytes >= 16 * PAGE && mincore((void *)middle, 1, &resident) == 0 && !(resident & 1);
#else
    (void)p, (void)bytes;
    return 0;
#endif
}

/* Faults pages in, many to a system call and just before they are written: about two thirds of the price of faulting at
 * each. Huge pages would be cheaper still where the kernel has them at hand, and many times dearer where it has not. */
INLINE void fault_in(void *p, int64_t bytes) {
#if defined(__linux__)
    uintptr_t begin = ((uintptr_t)p + PAGE - 1) & ~(uintptr_t)(PAGE - 1), end = ((uintptr_t)p + (uintptr_t)bytes) & ~(uintptr_t)(PAGE - 1);
    if (end > begin) (void)madvise((void *)begin, end - begin, 23); /* MADV_POPULATE_WRITE: Linux 5.14; before it, refused */
#else
    (void)p, (void)bytes;
#endif
}

#endif
