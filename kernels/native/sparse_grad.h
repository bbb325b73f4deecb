/* What the two halves of the weight gradient share: sparse_lists.c makes the lists, sparse_grad.c sums along them. */
#ifndef SFX_SPARSE_GRAD_H
#define SFX_SPARSE_GRAD_H

#include "common.h"

/* One dimension. Input place i under tap t meets output place first(i) + shift(t), if their phases are equal. */
typedef struct {
    int64_t size, out, taps, stride, padding, dilation;
    int transposed;
    int64_t low, high; /* of the shifts */
} Dim;

typedef enum { FLOAT32, BFLOAT16, FLOAT16 } Type;

/* The kept elements of one channel, in one chunk and of one class. */
typedef struct {
    const int32_t *at;   /* where their output places start in the tile */
    const float *values;
    int64_t n;
    int32_t channel, class;
} List;

typedef struct {
    const void *g;
    const float *values;
    const uint8_t *mask;
    int64_t kept, batch, groups, in, out; /* in, out: channels of a group */
    Dim dim[3];
    int transposed, x_last, g_last;       /* last: channels are the last dimension */
    Type type;                            /* of g */
    int64_t places, g_places, classes, taps;
    int64_t width, tiles;                 /* output channels of a tile, tiles of a group */
    int64_t pitch[2], front, rows, tile_rows, samples, tile_places; /* of a chunk */
    int64_t chunk_places, row_chunks, chunks; /* chunks of a sample, chunks in all */
    int64_t parts, spans;                 /* that the input channels of a group, or all chunks, are cut into */
    int32_t *table;                       /* of each place of a chunk: where its output places start in the tile */
    int32_t *class_of;                    /* and its class: which taps it meets; `classes` if none */
    uint64_t *met;                        /* bits of the places of a sample's chunk that meet a tap */
    int64_t *tap_start, *tap_shift, *tap_index, *tap_place; /* the taps of each class, their shift in the tile, which they are; of each tap the place among these */
    int64_t *starts;                      /* of the values of each run: a sample's channel, or where x_last a place */
    List *made, *lists;                   /* by chunk, channel of all groups, and class; then each part of a chunk by length */
    int32_t *at;                          /* of all lists, with some to spare behind each */
    float *copied;                        /* their values, where they cannot stay where they are */
    void *block;                          /* the memory of all these */
} Grad;

/* The first input channel of a part of a group. */
INLINE int64_t part_begin(const Grad *j, int64_t part) { return share(j->in, part, j->parts); }

enum { LINE = 64 }; /* bytes of a cache line: a register that lies across two takes twice the time */

/* A piece of a block of memory, in whole cache lines; with no block, counts. */
INLINE void *piece(char *block, size_t *used, int64_t bytes) {
    void *at = block ? block + *used : NULL;
    *used += ((size_t)bytes + LINE - 1) / LINE * LINE;
    return at;
}

/* The first whole line of a block that is longer than needed by one. */
INLINE char *whole_lines(void *block) { return (char *)block + (LINE - (uintptr_t)block % LINE) % LINE; }

/* Fills in starts, lists and what they are made of; the caller frees `starts` and gives `block` back. Returns 0, 1 where mask and values
 * do not go together, 2 where a value is not finite, or -1 without memory. */
int make_lists(Grad *j, int threads);

#endif
