/* Scratch of kernels, of hundreds of kilobytes and more: from torch's large blocks where those are served (large_blocks.c),
 * so that its pages are at hand and need not be faulted in at each call; else malloc's. */
#ifndef SFX_SCRATCH_H
#define SFX_SCRATCH_H

#include <stddef.h>

void *take_scratch(size_t bytes);
void give_scratch(void *scratch);

#endif
