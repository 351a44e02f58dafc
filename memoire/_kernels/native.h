/* C functions that all kernels share: copies of rows, prefetching, and the index check of the checked build. */

#ifndef MEMOIRE_NATIVE_H
#define MEMOIRE_NATIVE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef MEMOIRE_CHECKED
#define MEMOIRE_IS_CHECKED 1
#else
#define MEMOIRE_IS_CHECKED 0
#endif

/* Bounds of all model versions. */
#define MEMOIRE_LATEST INT64_MAX
#define MEMOIRE_EARLIEST (-INT64_MAX)

#if defined(__GNUC__) || defined(__clang__)
#define memoire_prefetch(address) __builtin_prefetch(address)
#else
#define memoire_prefetch(address) ((void)(address))
#endif

/* Returns an index that must lie in [0, size). Cython does not check bounds of pointers, so the checked build does it here. */
#ifdef MEMOIRE_CHECKED
static inline int64_t memoire_inside(int64_t index, int64_t size, const char *file, int line) {
    if (index < 0 || index >= size) {
        fprintf(stderr, "memoire: index %lld outside [0, %lld), line %d of %s\n",
                (long long)index, (long long)size, line, file);
        abort();
    }
    return index;
}
#define memoire_index(index, size) memoire_inside(index, size, __FILE__, __LINE__)
#else
#define memoire_index(index, size) (index)
#endif

/* memcpy for rows: most have a few to a few hundred bytes, for which the call and its dispatch cost more than the copy.
   The last piece may overlap the piece before it; source and target never overlap. */
static inline void memoire_copy_row(char *to, const char *from, size_t size) {
    size_t done;
    if (size >= 16) {
        if (size > 1024) {
            memcpy(to, from, size);
            return;
        }
        for (done = 0; done + 64 <= size; done += 64) memcpy(to + done, from + done, 64);
        for (; done + 16 <= size; done += 16) memcpy(to + done, from + done, 16);
        if (done < size) memcpy(to + size - 16, from + size - 16, 16);
    } else if (size >= 8) {
        memcpy(to, from, 8);
        memcpy(to + size - 8, from + size - 8, 8);
    } else if (size >= 4) {
        memcpy(to, from, 4);
        memcpy(to + size - 4, from + size - 4, 4);
    } else if (size) {
        to[0] = from[0];
        if (size > 1) memcpy(to + size - 2, from + size - 2, 2);
    }
}

/* Prefetches the cache lines of a row that is read soon; the hardware fetches the rest of a long row itself. */
static inline void memoire_prefetch_row(const char *row, size_t size) {
    size_t done, most = size < 512 ? size : 512;
    for (done = 0; done < most; done += 64) memoire_prefetch(row + done);
    if (most) memoire_prefetch(row + most - 1);
}

#endif
