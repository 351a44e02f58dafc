/* Allocation of megabytes: huge pages for arrays, and freed memory that the C library keeps. */

#ifndef MEMOIRE_ALLOCATION_H
#define MEMOIRE_ALLOCATION_H

#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif
/* Ask for huge pages, as NumPy does: fewer pages, and so a faster first access. */
static inline void memoire_advise(void *block, size_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    size_t skip = -(size_t)block & 4095;
    if (size >= (size_t)4 << 20) (void)madvise((char *)block + skip, size - skip, MADV_HUGEPAGE);
#else
    (void)block;
    (void)size;
#endif
}

#if defined(__GLIBC__)
#include <malloc.h>
/* Allocate up to 32 MiB, the largest threshold, from an arena, and keep at most 128 MiB of free memory in it, unless environment
 * variables set other bounds. The arena of a thread consists of heaps of 64 MiB, which hold two messages of 23 MiB each. An empty
 * heap goes back to the system whatever the bounds are, unless less than M_TOP_PAD is free in the heap before it. */
static int memoire_keep_freed(void) {
    const char *tunables = getenv("GLIBC_TUNABLES");
    if (getenv("MALLOC_MMAP_THRESHOLD_") || getenv("MALLOC_TRIM_THRESHOLD_") || getenv("MALLOC_TOP_PAD_") ||
        (tunables && strstr(tunables, "glibc.malloc")))
        return 0;
    return mallopt(M_MMAP_THRESHOLD, 32 << 20) && mallopt(M_TRIM_THRESHOLD, 128 << 20) && mallopt(M_TOP_PAD, 48 << 20);
}
#else
static int memoire_keep_freed(void) { return 0; }
#endif

#endif
