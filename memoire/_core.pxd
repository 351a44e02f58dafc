"""What draws over held caches take from the memory's engine."""

cdef double weigh(double* value, Py_ssize_t size, double exponent, double rarest, float* importance) noexcept nogil
