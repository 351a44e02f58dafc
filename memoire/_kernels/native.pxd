"""Declarations of native.h: functions and bounds that all kernels share."""

from libc.stdint cimport int64_t

cdef enum:
    MAX_VALUE_BYTES = 1 << 26  # most bytes of a ragged column's value, the limit of `schema` for an entry

cdef extern from "native.h":
    const bint IS_CHECKED "MEMOIRE_IS_CHECKED"
    const int64_t LATEST "MEMOIRE_LATEST"
    const int64_t EARLIEST "MEMOIRE_EARLIEST"
    void prefetch "memoire_prefetch"(const void* address) noexcept nogil
    int64_t inside "memoire_index"(int64_t index, int64_t size) noexcept nogil
    void copy_row "memoire_copy_row"(char* to, const char* source, size_t size) noexcept nogil
    void prefetch_row "memoire_prefetch_row"(const char* row, size_t size) noexcept nogil
