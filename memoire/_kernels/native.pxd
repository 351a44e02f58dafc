"""What all kernels share, out of native.h."""

from libc.stdint cimport int64_t

cdef extern from "native.h":
    const bint IS_CHECKED "MEMOIRE_IS_CHECKED"
    void prefetch "memoire_prefetch"(const void* address) noexcept nogil
    int64_t inside "memoire_index"(int64_t index, int64_t size) noexcept nogil
    void copy_row "memoire_copy_row"(char* to, const char* source, size_t size) noexcept nogil
    void prefetch_row "memoire_prefetch_row"(const char* row, size_t size) noexcept nogil
