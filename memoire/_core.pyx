"""The loops: entry store, trees, TD(lambda), windows, cache building, draws over held caches, gathering, checksum."""

cimport numpy as cnp
from libc.stdint cimport int64_t

import numpy as np

cnp.import_array()

cdef extern from *:
    """
    #ifdef MEMOIRE_CHECKED
    #define MEMOIRE_IS_CHECKED 1
    #else
    #define MEMOIRE_IS_CHECKED 0
    #endif
    """
    int MEMOIRE_IS_CHECKED

CHECKED = MEMOIRE_IS_CHECKED == 1
# ------------------------------------------------------------------------------------------------------------ shared

cdef extern from *:
    """
    #include <stdint.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>

    #if defined(__GNUC__) || defined(__clang__)
    #define memoire_prefetch(address) __builtin_prefetch(address)
    #else
    #define memoire_prefetch(address) ((void)(address))
    #endif

    /* An index that must lie in [0, size). Pointers escape Cython's bounds checks, so the checked build looks here. */
    #ifdef MEMOIRE_CHECKED
    static inline int64_t memoire_inside(int64_t index, int64_t size, int line) {
        if (index < 0 || index >= size) {
            fprintf(stderr, "memoire._core: index %lld outside [0, %lld), line %d of the C file\\n",
                    (long long)index, (long long)size, line);
            abort();
        }
        return index;
    }
    #define memoire_index(index, size) memoire_inside(index, size, __LINE__)
    #else
    #define memoire_index(index, size) (index)
    #endif

    /* memcpy for rows: most are a few bytes to a few hundred, where the call and its dispatch cost more than the copy.
       The last piece may overlap the one before it; source and target never overlap. */
    static inline void memoire_copy_row(char *to, const char *from, size_t size) {
        size_t done;
        if (size >= 16) {
            if (size > 1024) {
                memcpy(to, from, size);
                return;
            }
            for (done = 0; done + 16 <= size; done += 16) memcpy(to + done, from + done, 16);
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

    /* Ask for the cache lines of a row that will be read soon; the hardware fetches the rest of a long one itself. */
    static inline void memoire_prefetch_row(const char *row, size_t size) {
        size_t done, most = size < 512 ? size : 512;
        for (done = 0; done < most; done += 64) memoire_prefetch(row + done);
        if (most) memoire_prefetch(row + most - 1);
    }
    """
    void prefetch "memoire_prefetch"(const void *address) noexcept nogil
    int64_t inside "memoire_index"(int64_t index, int64_t size) noexcept nogil
    void copy_row "memoire_copy_row"(char *to, const char *source, size_t size) noexcept nogil
    void prefetch_row "memoire_prefetch_row"(const char *row, size_t size) noexcept nogil

# ---------------------------------------------------------------------------------------------------------- engine


# ----------------------------------------------------------------------------------------------------- wire and pool

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

# Checksum of every message: XXH64, written from the public description of the algorithm. Four running products take stripes
# of 32 bytes, are merged, then come the bytes left over and an avalanche. Multiplications wrap around on purpose.

cdef extern from *:
    """
    #define MEMOIRE_PRIME_1 0x9E3779B185EBCA87ULL
    #define MEMOIRE_PRIME_2 0xC2B2AE3D27D4EB4FULL
    #define MEMOIRE_PRIME_3 0x165667B19E3779F9ULL
    #define MEMOIRE_PRIME_4 0x85EBCA77C2B2AE63ULL
    #define MEMOIRE_PRIME_5 0x27D4EB2F165667C5ULL
    """
    const uint64_t PRIME_1 "MEMOIRE_PRIME_1"
    const uint64_t PRIME_2 "MEMOIRE_PRIME_2"
    const uint64_t PRIME_3 "MEMOIRE_PRIME_3"
    const uint64_t PRIME_4 "MEMOIRE_PRIME_4"
    const uint64_t PRIME_5 "MEMOIRE_PRIME_5"


cdef inline uint64_t _read64(const uint8_t* source) noexcept nogil:
    cdef uint64_t word
    memcpy(&word, source, 8)
    return word


cdef inline uint32_t _read32(const uint8_t* source) noexcept nogil:
    cdef uint32_t word
    memcpy(&word, source, 4)
    return word


cdef inline uint64_t _rotate(uint64_t word, int bits) noexcept nogil:
    return (word << bits) | (word >> (64 - bits))


cdef inline uint64_t _xxh_round(uint64_t lane, uint64_t word) noexcept nogil:
    return _rotate(lane + word * PRIME_2, 31) * PRIME_1


cdef inline uint64_t _xxh_merge(uint64_t total, uint64_t lane) noexcept nogil:
    return (total ^ _xxh_round(0, lane)) * PRIME_1 + PRIME_4


cdef uint64_t _checksum(const uint8_t* source, size_t size, uint64_t seed) noexcept nogil:
    """XXH64 of `size` bytes; `source` may have any alignment."""
    cdef const uint8_t* end = source + size
    cdef const uint8_t* stripes = source + (size & ~<size_t>31)
    cdef uint64_t a, b, c, d, total
    if size >= 32:
        a = seed + PRIME_1 + PRIME_2
        b = seed + PRIME_2
        c = seed
        d = seed - PRIME_1
        while source < stripes:
            a = _xxh_round(a, _read64(source))
            b = _xxh_round(b, _read64(source + 8))
            c = _xxh_round(c, _read64(source + 16))
            d = _xxh_round(d, _read64(source + 24))
            source += 32
        total = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        total = _xxh_merge(_xxh_merge(_xxh_merge(_xxh_merge(total, a), b), c), d)
    else:
        total = seed + PRIME_5
    total += <uint64_t>size
    while end - source >= 8:
        total = _rotate(total ^ _xxh_round(0, _read64(source)), 27) * PRIME_1 + PRIME_4
        source += 8
    if end - source >= 4:
        total = _rotate(total ^ (<uint64_t>_read32(source) * PRIME_1), 23) * PRIME_2 + PRIME_3
        source += 4
    while source < end:
        total = _rotate(total ^ (<uint64_t>source[0] * PRIME_5), 11) * PRIME_1
        source += 1
    total = (total ^ (total >> 33)) * PRIME_2
    total = (total ^ (total >> 29)) * PRIME_3
    return total ^ (total >> 32)


def checksum(data, uint64_t seed=0):
    """XXH64 of a buffer's bytes. The GIL is released for anything longer than a few kilobytes."""
    cdef Py_buffer view
    cdef uint64_t total
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len < 4096:
            return _checksum(<const uint8_t*>view.buf, view.len, seed)
        with nogil:
            total = _checksum(<const uint8_t*>view.buf, view.len, seed)
        return total
    finally:
        PyBuffer_Release(&view)


# Shape of a msgpack message, before any decoder sees it: a container may not declare more elements than bytes are left, nothing
# nests deeper than SCAN_DEPTH, nothing follows the first value. A decoder then never allocates for a size nobody sent.

cdef enum:
    SCAN_DEPTH = 12


cdef uint64_t _big_endian(const uint8_t* source, int width) noexcept nogil:
    cdef uint64_t word = 0
    cdef int i
    for i in range(width):
        word = (word << 8) | source[i]
    return word


cdef bint _scan_msgpack(const uint8_t* source, uint64_t size) noexcept nogil:
    """Whether the bytes are exactly one msgpack value of sane shape."""
    cdef uint64_t waiting[SCAN_DEPTH + 1]  # elements still to come at each depth
    cdef uint64_t at = 0, skip, elements
    cdef int depth = 0, width
    cdef uint8_t tag
    waiting[0] = 1
    while True:
        while waiting[depth] == 0:
            if depth == 0:
                return at == size
            depth -= 1
        waiting[depth] -= 1
        if at >= size:
            return False
        tag = source[at]
        at += 1
        skip = elements = 0
        width = 0
        if tag < 0x80 or tag >= 0xE0 or tag == 0xC0 or tag == 0xC2 or tag == 0xC3:
            continue
        elif tag < 0x90:
            elements = 2 * <uint64_t>(tag & 15)
        elif tag < 0xA0:
            elements = tag & 15
        elif tag < 0xC0:
            skip = tag & 31
        elif 0xC4 <= tag <= 0xC6:
            width = 1 << (tag - 0xC4)
        elif tag == 0xCA or tag == 0xCE or tag == 0xD2:
            skip = 4
        elif tag == 0xCB or tag == 0xCF or tag == 0xD3:
            skip = 8
        elif tag == 0xCC or tag == 0xD0:
            skip = 1
        elif tag == 0xCD or tag == 0xD1:
            skip = 2
        elif 0xD9 <= tag <= 0xDB:
            width = 1 << (tag - 0xD9)
        elif tag >= 0xDC:
            width = 2 << (tag & 1)
        else:
            return False  # reserved, or an extension: no message has one
        if width:
            if <uint64_t>width > size - at:
                return False
            skip = _big_endian(source + at, width)
            at += width
            if tag >= 0xDC:
                elements = skip * 2 if tag >= 0xDE else skip
                skip = 0
        if skip > size - at or elements > size - at:
            return False
        at += skip
        if elements:
            if depth == SCAN_DEPTH:
                return False
            depth += 1
            waiting[depth] = elements


def is_plain_msgpack(data):
    """Whether `data` is one msgpack value without extensions whose declared sizes its bytes can hold."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return _scan_msgpack(<const uint8_t*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
