"""Checks of arrays that Python passes to kernels as inputs and outputs."""

cimport numpy as cnp


cdef inline char* target_of(array, Py_ssize_t size) except? NULL:
    """Return the address of an array's memory. Raises ValueError unless it is writable, contiguous and of `size` bytes."""
    if not cnp.PyArray_Check(array) or not cnp.PyArray_ISCARRAY(<cnp.ndarray>array):
        raise ValueError("outputs must be writable C-contiguous arrays")
    if cnp.PyArray_NBYTES(<cnp.ndarray>array) != size:
        raise ValueError(f"an output of {array.nbytes} bytes, expected {size}")
    return <char*>cnp.PyArray_DATA(<cnp.ndarray>array)


cdef inline const double* doubles_of(array, Py_ssize_t size) except? NULL:
    """Return the address of a C-contiguous float64 array of `size` elements. Raises ValueError for another array."""
    if not cnp.PyArray_Check(array) or cnp.PyArray_TYPE(<cnp.ndarray>array) != cnp.NPY_FLOAT64:
        raise ValueError("expected an array of float64")
    if not cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>array) or cnp.PyArray_SIZE(<cnp.ndarray>array) != size:
        raise ValueError(f"expected {size} contiguous values")
    return <const double*>cnp.PyArray_DATA(<cnp.ndarray>array)
