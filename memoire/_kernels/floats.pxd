"""Declarations of floats.h: kernels over the eight numbers of a tree's node, checks for finite floats, and the clock."""

from libc.stdint cimport int64_t

cdef extern from "floats.h":
    double sum8 "memoire_sum8"(const double* children) noexcept nogil
    double least8 "memoire_least8"(const double* children) noexcept nogil
    double least_positive8 "memoire_least_positive8"(const double* children) noexcept nogil
    ctypedef int (*Check "memoire_check")(const char* source, int64_t size) noexcept nogil
    Check check_of "memoire_check_of"(int width, int64_t size) noexcept nogil
    int64_t pick "memoire_pick"(const double* children, double* mass) noexcept nogil
    double now_seconds "memoire_now"() noexcept nogil
