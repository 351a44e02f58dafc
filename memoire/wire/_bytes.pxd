"""Readers of numbers at any alignment in bytes, and the checksum of messages."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef uint64_t xxh3(const uint8_t* source, size_t size, uint64_t seed, uint8_t* target) noexcept nogil


cdef inline uint64_t read64(const uint8_t* source) noexcept nogil:
    cdef uint64_t word
    memcpy(&word, source, 8)
    return word


cdef inline uint32_t read32(const uint8_t* source) noexcept nogil:
    cdef uint32_t word
    memcpy(&word, source, 4)
    return word


cdef inline double read_double(const uint8_t* source) noexcept nogil:
    cdef double value
    memcpy(&value, source, 8)
    return value


cdef inline float read_float(const uint8_t* source) noexcept nogil:
    cdef float value
    memcpy(&value, source, 4)
    return value


cdef inline int read16(const uint8_t* source) noexcept nogil:
    return source[0] | (source[1] << 8)
