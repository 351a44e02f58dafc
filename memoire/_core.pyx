"""Kernels of a memory: large arrays, priority trees, entry store, TD(lambda), windows, importance, locks."""

cimport cython
cimport numpy as cnp
from cpython.float cimport PyFloat_AsDouble, PyFloat_Check
from cpython.object cimport PyObject_GenericSetAttr
from cpython.unicode cimport PyUnicode_ReadChar
from libc.float cimport DBL_MIN, FLT_MAX
from libc.math cimport INFINITY, NAN, fabs, isfinite, pow, powf, sqrt
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memmove, memset

from memoire._kernels.arrays cimport doubles_of
from memoire._kernels.floats cimport Check, check_of, now_seconds
from memoire._kernels.heap cimport (
    NOTHING, Heap, Segment, Value, heap_bytes, heap_drop, heap_free, heap_is_loose, heap_put, heap_release,
)
from memoire._kernels.native cimport (
    EARLIEST, IS_CHECKED, LATEST, MAX_VALUE_BYTES, copy_row, inside, prefetch, prefetch_row,
)
from memoire._kernels.order cimport (
    ORDER_BLOCK, Order, order_find, order_insert, order_leaf, order_rank, order_remove, order_set_alpha, order_sum,
    order_take,
)
from memoire._kernels.tree cimport CHUNK, Tree, tree_find, tree_least, tree_put, tree_settle, tree_total

import os
import threading
import time

import numpy as np

cnp.import_array()

CHECKED = bool(IS_CHECKED)

# Large arrays. A batch of stacked frames has megabytes. The C library returns them to the system when the caller drops the batch, and
# the system maps zeroed pages for the next batch: that takes three times as long as gathering the batch (measured). So the memory of
# a dropped array is kept for the next array of its size, up to SPARE_BYTES in all; the oldest block is freed first.

cdef extern from "allocation.h":
    void advise "memoire_advise"(void *block, size_t size) noexcept nogil

cdef enum:
    LARGE_BYTES = 1 << 15  # NumPy and the C library keep the memory of smaller arrays themselves
    SPARE_BYTES = 1 << 27
    MAX_SPARE = 64
    MAX_AXES = 32

cdef struct Spare:
    void* block
    size_t size

cdef Spare spares[MAX_SPARE]  # the longest unused first; guarded by the GIL
cdef int spare_count = 0
cdef size_t spare_bytes_ = 0


cdef void* _drop_spare(int i) noexcept:
    """Remove block `i` from the list of spare blocks, and return its address."""
    global spare_count, spare_bytes_
    cdef void* block = spares[i].block
    spare_count -= 1
    spare_bytes_ -= spares[i].size
    memmove(&spares[i], &spares[i + 1], (spare_count - i) * sizeof(Spare))
    return block


@cython.auto_pickle(False)
cdef class Room:
    """Memory of one large array, as the array's base; on deallocation the block is kept for the next array."""

    cdef void* block
    cdef size_t size

    def __cinit__(self, size_t size):
        cdef int i
        for i in range(spare_count - 1, -1, -1):
            if spares[i].size == size:
                self.block, self.size = _drop_spare(i), size
                return
        self.block = malloc(size)
        if self.block == NULL:
            raise MemoryError(f"no memory for an array of {size} bytes")
        self.size = size
        advise(self.block, size)

    def __dealloc__(self):
        global spare_count, spare_bytes_
        if self.block == NULL:
            return
        if self.size > SPARE_BYTES:
            free(self.block)
            return
        while spare_count == MAX_SPARE or spare_bytes_ + self.size > SPARE_BYTES:
            free(_drop_spare(0))
        spares[spare_count].block, spares[spare_count].size = self.block, self.size
        spare_count += 1
        spare_bytes_ += self.size


def spare_bytes():
    """Return the bytes of freed blocks that are kept for new arrays."""
    return spare_bytes_


# ZeroMQ allocates memory from the C library for every received message, and frees it afterwards. glibc returns large blocks to the
# system, which clears and maps pages again for the next message. With messages of megabytes that costs a server much of its time.
# So glibc is told to keep some freed memory.

cdef extern from "allocation.h":
    bint c_keep_freed "memoire_keep_freed"() noexcept nogil


def keep_freed_memory():
    """Make the C library keep freed blocks of megabytes for later allocations, in the whole process.

    Return True if it does; False for a library other than glibc, or if environment variables of glibc set its bounds.
    """
    return c_keep_freed()


def empty(tuple shape not None, dtype):
    """Return an uninitialized array, as `numpy.empty`; a large array reuses the memory of a dropped one of about its size."""
    cdef cnp.npy_intp axes[MAX_AXES]
    cdef int i, count = <int>len(shape)
    cdef int64_t size = dtype.itemsize
    cdef size_t room
    cdef cnp.ndarray made
    if count > MAX_AXES or dtype.kind not in "biuf" or not dtype.isnative:
        return np.empty(shape, dtype)
    for i in range(count):
        axes[i] = shape[i]
        if not 0 < axes[i] <= (<int64_t>1 << 40) // size:
            return np.empty(shape, dtype)
        size *= axes[i]
    if size < LARGE_BYTES:
        return np.empty(shape, dtype)
    # Round up by an eighth at most, so that arrays of nearly the same size, such as caches, can reuse each other's memory.
    room = LARGE_BYTES
    while room < <size_t>size:
        room *= 2
    room = (<size_t>size + room // 16 - 1) // (room // 16) * (room // 16)
    owner = Room(room + 64)
    made = cnp.PyArray_SimpleNewFromData(count, axes, dtype.num, <char*>(<Room>owner).block + (-<size_t>(<Room>owner).block & 63))
    cnp.set_array_base(made, owner)
    return made


# In C, because counters are attributes, and a client sets several of them at each step of its environment.
@cython.auto_pickle(False)
cdef class Guarded:
    """Base class of `memoire.replay.parameters.StrictAttributes`: calls `_check_public(name)` before an attribute is set, unless the
    name begins with "_"."""

    def __setattr__(self, name, value):
        if not name or PyUnicode_ReadChar(name, 0) != 95:
            self._check_public(name)
        PyObject_GenericSetAttr(self, name, value)


def is_finite(cnp.ndarray numbers not None):
    """Return True if all numbers of an array are finite; fast for contiguous floats."""
    cdef Check check
    if not cnp.PyArray_ISFLOAT(numbers):
        return True
    if not (cnp.PyArray_IS_C_CONTIGUOUS(numbers) and cnp.PyArray_ISNOTSWAPPED(numbers)):
        return bool(np.isfinite(numbers).all())
    check = check_of(<int>cnp.PyArray_ITEMSIZE(numbers), cnp.PyArray_NBYTES(numbers))
    return check(<const char*>cnp.PyArray_DATA(numbers), cnp.PyArray_NBYTES(numbers)) != 0


cdef extern from "Python.h":
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1


cdef enum:
    AHEAD = 12  # rows between prefetching a cache line and using it


cdef cnp.ndarray _aligned(int64_t count, object dtype):
    """Return zeros [count] of dtype, aligned to a cache line. Runs no Python code, so that no interrupt can come."""
    dtype = np.dtype(dtype)
    room = np.zeros(count * dtype.itemsize + 64, np.uint8)
    return np.ndarray(count, dtype, room, -<int64_t><size_t>cnp.PyArray_DATA(room) & 63)


cdef list _make_tree(Tree* tree, int64_t size):
    """Allocate a tree of `size` leaves of weight 0; return its arrays, which the caller has to keep alive."""
    cdef list rooms = []
    cdef cnp.ndarray room
    cdef int64_t count = size, padded
    cdef int level = 0
    tree.size = size
    tree.positive = tree.dirties = tree.stales = 0
    while True:
        padded = (count + 7) // 8 * 8
        room = _aligned(padded, np.float64)
        rooms.append(room)
        tree.sums[level] = <double*>cnp.PyArray_DATA(room)
        if level > 0:
            room = _aligned(padded, np.float64)
            room.fill(np.inf)
            rooms.append(room)
            tree.least[level] = <double*>cnp.PyArray_DATA(room)
            room = _aligned(padded, np.uint8)
            rooms.append(room)
            tree.marks[level] = <uint8_t*>cnp.PyArray_DATA(room)
            if count == 1:
                break
        count = (count + 7) // 8
        level += 1
    tree.levels = level + 1
    room = _aligned((size + 7) // 8, np.int64)
    rooms.append(room)
    tree.dirty = <int64_t*>cnp.PyArray_DATA(room)
    room = _aligned((size + 7) // 8, np.int64)
    rooms.append(room)
    tree.stale = <int64_t*>cnp.PyArray_DATA(room)
    return rooms


cdef list _make_order(Order* order, int64_t size):
    """Allocate an empty order with room for `size` leaves; return its arrays, which the caller has to keep alive."""
    cdef int64_t blocks = 8 * size // (3 * ORDER_BLOCK) + 4  # two neighbours hold more than three quarters of a block
    cdef cnp.ndarray weights = _aligned(blocks * ORDER_BLOCK, np.float64), leaves = _aligned(blocks * ORDER_BLOCK, np.int32)
    cdef cnp.ndarray used = _aligned(blocks, np.int32), sequence = _aligned(blocks, np.int32)
    cdef cnp.ndarray free_blocks = np.ascontiguousarray(np.arange(blocks)[::-1], np.int32), before = _aligned(blocks, np.int64)
    order.weights, order.leaves = <double*>cnp.PyArray_DATA(weights), <int32_t*>cnp.PyArray_DATA(leaves)
    order.used, order.sequence = <int32_t*>cnp.PyArray_DATA(used), <int32_t*>cnp.PyArray_DATA(sequence)
    order.free_blocks, order.before = <int32_t*>cnp.PyArray_DATA(free_blocks), <int64_t*>cnp.PyArray_DATA(before)
    order.free_count, order.count, order.settled = blocks, 0, True
    order.blocks = 1
    order_take(order, 0)
    return [weights, leaves, used, sequence, free_blocks, before]


cdef cnp.ndarray _vector(object values, int kind, str name):
    """Return `values` as a contiguous array [B] of a NumPy type, without a copy if it is one. Does not convert floats to integers."""
    cdef cnp.ndarray array
    if type(values) is cnp.ndarray and cnp.PyArray_TYPE(values) == kind and cnp.PyArray_NDIM(values) == 1 \
            and cnp.PyArray_ISCARRAY_RO(values):
        return values
    array = np.asarray(values)
    if cnp.PyArray_SIZE(array) == 0:
        array = array.astype(np.int8)  # an empty list has no kind of its own
    array = cnp.PyArray_FROMANY(array, kind, 0, 0, cnp.NPY_ARRAY_CARRAY_RO)
    if cnp.PyArray_NDIM(array) != 1:
        raise ValueError(f"{name} must have one dimension, got shape {np.shape(values)}")
    return array


cdef int64_t _first_outside(const int64_t* indices, int64_t count, int64_t low, int64_t high) noexcept nogil:
    """Return the position of the first index outside [low, high), or -1."""
    cdef int64_t i
    for i in range(count):
        if indices[i] < low or indices[i] >= high:
            return i
    return -1


cdef int64_t _first_bad_weight(const double* weights, int64_t count, double high) noexcept nogil:
    """Return the position of the first number outside [0, high), NaN included, or -1."""
    cdef int64_t i
    for i in range(count):
        if not (weights[i] >= 0.0 and weights[i] < high):
            return i
    return -1


@cython.auto_pickle(False)
cdef class PriorityTree:
    """Sum tree over the float64 weights of `size` leaves, to draw leaves in proportion to their weights. All weights begin with 0.

    Nodes have eight children; sums do not drift; loops release the GIL. Thread-safe. Memory: 9.2 bytes a leaf for sums, 1.3 for the rest.
    """

    cdef Tree tree
    cdef list rooms
    cdef object lock

    def __cinit__(self, int64_t size):
        if not 1 <= size < 1 << 40:
            raise ValueError(f"size must be from 1 to 2**40, got {size}")
        self.rooms = _make_tree(&self.tree, size)
        self.lock = threading.Lock()

    @property
    def size(self):
        """Number of leaves."""
        return self.tree.size

    @property
    def total(self):
        """Sum of all weights."""
        return tree_total(&self.tree)

    @property
    def positive(self):
        """Number of leaves with a weight above 0."""
        return self.tree.positive

    @property
    def minimum(self):
        """Least weight above 0; infinity if all weights are 0. Cost: proportional to the changes since the last access."""
        cdef double least
        with self.lock:
            with nogil:
                least = tree_least(&self.tree)
        return least

    def set(self, indices, weights):
        """Set the weights of leaves: int64 [B] and float64 [B] (or one number), finite and not negative. Of duplicates the last counts.

        Raises IndexError or ValueError, which names the first wrong value; then nothing was changed. Cost: recomputes each node above
        the leaves once.
        """
        cdef cnp.ndarray at = _vector(indices, cnp.NPY_INT64, "indices")
        if type(weights) is not cnp.ndarray and np.ndim(weights) == 0:
            weights = np.full(cnp.PyArray_SIZE(at), weights, np.float64)
        cdef cnp.ndarray what = _vector(weights, cnp.NPY_FLOAT64, "weights")
        cdef int64_t i, bad, worse, count = cnp.PyArray_SIZE(at)
        cdef int64_t* leaf = <int64_t*>cnp.PyArray_DATA(at)
        cdef double* weight = <double*>cnp.PyArray_DATA(what)
        if cnp.PyArray_SIZE(what) != count:
            raise ValueError(f"got {count} indices and {cnp.PyArray_SIZE(what)} weights; the numbers must be equal")
        with self.lock:
            with nogil:
                bad = _first_outside(leaf, count, 0, self.tree.size)
                worse = _first_bad_weight(weight, count, INFINITY)
                if bad < 0 and worse < 0:
                    for i in range(count):
                        if i + AHEAD < count:
                            prefetch(self.tree.sums[0] + leaf[i + AHEAD])
                        tree_put(&self.tree, leaf[i], weight[i])
                    tree_settle(&self.tree)
        if bad >= 0:
            raise IndexError(f"index {leaf[bad]} at position {bad} is outside [0, {self.tree.size}). Nothing was changed.")
        if worse >= 0:
            raise ValueError(f"weight {weight[worse]} at position {worse} is not finite and at least 0. Nothing was changed.")

    def get(self, indices):
        """Return the weights of leaves: int64 [B] -> float64 [B]. Raises IndexError."""
        cdef cnp.ndarray at = _vector(indices, cnp.NPY_INT64, "indices")
        cdef int64_t i, bad, count = cnp.PyArray_SIZE(at)
        cdef int64_t* leaf = <int64_t*>cnp.PyArray_DATA(at)
        cdef cnp.ndarray result = np.empty(count, np.float64)
        cdef double* weight = <double*>cnp.PyArray_DATA(result)
        with self.lock:
            with nogil:
                bad = _first_outside(leaf, count, 0, self.tree.size)
                if bad < 0:
                    for i in range(count):
                        weight[i] = self.tree.sums[0][leaf[i]]
        if bad >= 0:
            raise IndexError(f"index {leaf[bad]} at position {bad} is outside [0, {self.tree.size})")
        return result

    def find(self, masses):
        """Return the leaves whose intervals of cumulative weight hold the masses: float64 [B], at least 0 -> int64 [B].

        Never returns a leaf of weight 0: a mass of the total or above gives the last positive leaf. Raises ValueError if a mass is
        negative or not finite, or all weights are 0.
        """
        cdef cnp.ndarray what = _vector(masses, cnp.NPY_FLOAT64, "masses")
        return self._find(what, 1.0, INFINITY, "masses must be finite and at least 0")

    def draw(self, fractions):
        """Return the leaves at fractions of the total weight: float64 [B] in [0, 1) -> int64 [B]. Never returns a leaf of weight 0.

        Raises ValueError if a fraction is outside of [0, 1), or all weights are 0.
        """
        cdef cnp.ndarray what = _vector(fractions, cnp.NPY_FLOAT64, "fractions")
        return self._find(what, -1.0, 1.0, "fractions must lie in [0, 1)")

    cdef cnp.ndarray _find(self, cnp.ndarray what, double scale, double high, str expected):
        """Check masses and find their leaves; the masses are multiplied by `scale`, or by the total if it is negative."""
        cdef int64_t i, bad, count = cnp.PyArray_SIZE(what)
        cdef double* given = <double*>cnp.PyArray_DATA(what)
        cdef cnp.ndarray found = np.empty(count, np.int64)
        cdef int64_t* leaf = <int64_t*>cnp.PyArray_DATA(found)
        cdef double total
        cdef double masses[CHUNK]
        cdef int64_t start, size
        with self.lock:
            total = tree_total(&self.tree)
            with nogil:
                bad = _first_bad_weight(given, count, high)
                if bad < 0 and total > 0.0:
                    if scale < 0.0:
                        scale = total
                    start = 0
                    while start < count:
                        size = min(<int64_t>CHUNK, count - start)
                        for i in range(size):
                            masses[i] = given[start + i] * scale
                        tree_find(&self.tree, masses, size, leaf + start)
                        start += CHUNK
        if bad >= 0:
            raise ValueError(f"{expected}, got {given[bad]} at position {bad}")
        if count > 0 and not total > 0.0:
            raise ValueError("all weights are 0: there is nothing to draw")
        return found


# Entry store: rows, pages and episodes.
#
# Rows are grouped in pages of a power of two rows (the last page is short). A lane writes into the page that it holds, then takes
# the page whose episodes were closed longest ago. Pages link to the page before and after in their lane, so that an episode's
# rows can be followed both ways. Old entries are evicted lazily: a whole episode at a time, when its first row is needed:
#
#     pages of 4, capacity 10   | a a a b | b b b c | c . |     a, b closed; c open in lane 0, which goes on here ^ and then
#                                 0 1 2 3   4 5 6 7   8 9       takes page 0 again: writing row 0 evicts a, row 3 evicts b
#
# With one lane the pages are a ring buffer in which exactly `capacity` entries fit: an open episode that began inside a page may
# come round to that page's first rows (`wrapped`).
#
# Row r holds entry number n with n % capacity == r. Each write adds capacity to the row's number, so that no number is used twice,
# and `meta[row].number != number` means that the entry is gone.

cdef struct Meta:  # one cache line for each row
    int64_t number  # newest entry number of the row; stays when the entry leaves
    double born  # unix seconds
    int64_t model_version
    int64_t position  # position in its episode
    float init_w
    float priority  # below 0: no priority, the weight has no such factor
    int32_t episode  # slot in `episodes`; below 0: the row has no entry
    uint8_t learned  # a learner set the priority, which closing keeps
    uint32_t drawn  # number of draws
    uint8_t spare[12]


cdef enum:
    FREE = 0
    OPEN = 1
    CLOSED = 2


cdef struct Episode:  # 64 bytes
    int64_t first_row
    int64_t last_row
    int64_t length
    int64_t final  # row in the final states; below 0: no final state
    double multiplier
    int32_t lane
    int32_t older  # the closed episode before it; in a free slot the next free slot
    int32_t newer
    int8_t state
    int8_t ended  # its end is known: windows may reach it
    int8_t terminated
    int8_t update_value
    int8_t update_weight
    uint8_t spare[7]


cdef struct Lane:
    int32_t episode  # open episode; below 0: none is open
    int32_t page  # page that the lane holds; below 0: no page
    int64_t offset  # next row in that page
    int64_t first_offset  # offset of the open episode's first row in its first page
    int64_t ripe  # live: row of the newest entry with a complete window; below 0: no such entry yet
    int8_t wrapped  # the open episode came round to its first page
    int8_t named  # scratch of `_rooms_for`: the lane occurred already


cdef struct Page:
    int32_t before  # neighbours among the pages of one lane, in the order of writing
    int32_t after
    int32_t older  # neighbours among the pages without open episodes, in the order of taking: last closed, last taken
    int32_t newer
    int32_t lane  # lane that took the page last
    int8_t is_open  # the page holds a row of an open episode


cdef struct Column:
    char* data
    char* finals  # rows of final states; NULL for other columns
    int64_t size  # bytes of a row; in a ragged column, of a pointer to a value
    int type_num
    int dimensions
    int role
    bint is_ragged
    int64_t shape[8]  # -1: a ragged column's free axis
    Heap heap  # values of a ragged column
    Value* made  # stored value of a ragged column for the entry that is being added


cdef struct Finite:  # a column whose values must be finite
    Check check
    int64_t size  # bytes of a value; in a ragged column, of an element
    int given  # index of the column's value among an entry's values
    bint is_ragged


cdef inline bint are_finite(const Finite* finite, int columns, const char** sources, const int64_t** lengths,
                            int64_t count) noexcept nogil:
    """Return True if the values of `count` entries at `sources` are finite in all columns that must be."""
    cdef int64_t i, values
    cdef int k
    for k in range(columns):
        values = count
        if finite[k].is_ragged:
            values = 0
            for i in range(count):
                values += lengths[finite[k].given][i]
        if not finite[k].check(sources[finite[k].given], values * finite[k].size):
            return False
    return True


cdef enum:
    PLAIN = 0
    STATE = 1
    REWARD = 2
    VALUE = 3
    RETURN = 4

cpdef enum:  # status that `_add_exact` and similar methods return in place of an entry number
    NOT_OPEN = -1
    TOO_LONG = -2
    NOT_EXACT = -3  # a value needs a conversion, or an error that explains it
    NOT_FINITE = -4
    BAD_WEIGHT = -5
    REPEATED = -6
    NO_MEMORY = -7
    TOO_MANY_BYTES = -8

cdef enum:
    SKIP = 0
    REPEAT = 1
    ZERO = 2

cdef enum:  # rules by which probabilities follow from weights
    PROPORTIONAL = 0
    BY_RANK = 1
    GREEDY = 2

cdef uint32_t MAX_COUNTED = 0xFFFFFFFF  # draws of an entry; further ones are not counted
cdef int64_t MAX_VERSION = (1 << 53) - 1  # highest version of a model
cdef double LEAST_WEIGHT = 1.1754943508222875e-38  # least number that float32 holds with all its digits


cdef inline bint is_weight(double init_w) noexcept nogil:
    """Return True if `init_w` is a valid factor of an entry's weight: 0, or a number that float32 holds with all digits."""
    return init_w == 0.0 or LEAST_WEIGHT <= init_w <= FLT_MAX

cdef struct Copy:  # one column of a batch to be filled
    Column* column
    char* out

META = np.dtype({
    "names": ["number", "born", "model_version", "position", "init_w", "priority", "episode", "learned", "drawn"],
    "formats": ["i8", "f8", "i8", "i8", "f4", "f4", "i4", "u1", "u4"],
    "offsets": [0, 8, 16, 24, 32, 36, 40, 44, 48],
    "itemsize": 64,
})
EPISODE = np.dtype({
    "names": ["first_row", "last_row", "length", "final", "multiplier", "lane", "older", "newer", "state", "ended", "terminated",
              "update_value", "update_weight"],
    "formats": ["i8", "i8", "i8", "i8", "f8", "i4", "i4", "i4", "i1", "i1", "i1", "i1", "i1"],
    "offsets": [0, 8, 16, 24, 32, 40, 44, 48, 52, 53, 54, 55, 56],
    "itemsize": 64,
})
LANE = np.dtype({
    "names": ["episode", "page", "offset", "first_offset", "ripe", "wrapped"],
    "formats": ["i4", "i4", "i8", "i8", "i8", "i1"],
    "offsets": [0, 4, 8, 16, 24, 32],
    "itemsize": 40,
})
PAGE = np.dtype({
    "names": ["before", "after", "older", "newer", "lane", "is_open"],
    "formats": ["i4", "i4", "i4", "i4", "i4", "i1"],
    "offsets": [0, 4, 8, 12, 16, 20],
    "itemsize": 24,
})
assert (sizeof(Meta), sizeof(Episode), sizeof(Lane), sizeof(Page)) == (64, 64, 40, 24)


@cython.auto_pickle(False)
cdef class EntryStore:
    """Base class of `memoire.replay.memory.Memory` with the loops; use `Memory`, which checks arguments and explains errors.

    Every method is safe to call from several threads: methods that release the GIL hold the lock and keep `busy` above 0 meanwhile;
    methods that neither release the GIL nor wait check `busy` first.
    """

    cdef Tree tree
    cdef Order order  # allocated while probabilities follow from ranks
    cdef Meta* meta
    cdef Episode* episodes
    cdef Lane* lanes
    cdef Page* pages
    cdef Column* columns
    cdef const char** sources  # addresses of the next entry's values, one for each column
    cdef const int64_t** lengths  # addresses of their numbers of elements, for ragged columns
    cdef int64_t* single_lengths  # buffer for the lengths of one entry
    cdef int64_t ragged_limit  # most bytes of the values of ragged columns; 0: no limit
    cdef Finite* finite  # [finite_count]
    cdef int finite_count
    cdef Copy* copies  # columns of the batch that is being gathered; guarded by the lock
    cdef double* numbers  # buffer for a plain number of each column
    cdef float* bootstraps  # [episode slots, dimensions]
    cdef float* final_values  # [final rows, dimensions]: copies of the bootstrap values, by row of their final states
    cdef int64_t* free_finals
    cdef double* gamma
    cdef double* coeff
    cdef double* work  # [4, dimensions], scratch; guarded by the lock

    cdef int64_t capacity_, entries, generated_, page_rows, page_shift, page_count, takeable_pages, takeable_rows
    cdef int64_t episode_slots, lane_count, closed, final_rows, free_final_count, dimensions, most_episodes
    cdef int64_t frame_stack, multi_step  # with sequences, multi_step is their length
    cdef int64_t stride, overlap, burn_in  # entries between begins of sequences, and shared by neighbours; stride 0: no sequences
    cdef int32_t free_episode, oldest, newest, first_page, last_page
    cdef int column_count, entry_columns, reward_column, value_column, return_column, start, prioritization
    cdef int busy, has_lock_waiters
    cdef bint is_live, is_stratified, is_ordered, has_ragged
    cdef double alpha  # parameter alpha: exponent of priorities, or of ranks
    cdef double exponent  # exponent of priorities
    cdef double powered, power  # the last priority that was raised to the exponent, and the result
    cdef double lambda_, max_priority_, fixed_now, max_share
    cdef uint64_t random[4]
    # Limits: entries that were drawn `most_drawn` times, added before `oldest_born` or recorded by a model before `oldest_model` have
    # weight 0. `page_born` and `page_model` are lower bounds of both facts over a page's rows with a weight, `eldest` and
    # `least_model` over all pages: only pages with entries to expire are searched.
    cdef bint is_limited
    cdef int64_t most_drawn, draws_left_  # 0: no limit; further draws of all rows with a weight together
    cdef double most_age, oldest_born, eldest  # most_age 0: no limit
    cdef int64_t most_lag, newest_model_, oldest_model, least_model  # most_lag below 0: no limit
    cdef double* page_born
    cdef int64_t* page_model
    cdef object lock
    cdef dict arrays
    cdef list rooms, order_rooms, data_arrays, final_arrays

    def __cinit__(self, *args, **kwargs):
        self.lock = threading.RLock()
        self.arrays = {}
        self.max_priority_ = 1.0
        self.fixed_now = -1.0
        self.most_lag = -1
        self.oldest = self.newest = self.free_episode = -1
        self.first_page = self.last_page = -1
        self.reward_column = self.value_column = self.return_column = -1

    def __dealloc__(self):
        cdef int c
        for c in range(self.column_count if self.columns != NULL else 0):
            heap_free(&self.columns[c].heap)
        free(self.columns)
        free(self.sources)
        free(self.lengths)
        free(self.single_lengths)
        free(self.finite)
        free(self.copies)
        free(self.numbers)
        free(self.gamma)
        free(self.coeff)
        free(self.work)

    def _setup(self, list columns, int64_t capacity, int64_t page_rows, int64_t dimensions, bint live, list seeds):
        """Set up the store, once, before any other call. columns: (data uint8 [capacity, bytes], dtype, shape, role, True if it must be
        finite); a ragged column has zeros of 8 bytes for each row and a shape that begins with None. seeds: four 64-bit numbers."""
        cdef int c
        cdef int64_t page, i
        cdef Column* column
        cdef Finite* one
        if self.columns != NULL:
            raise RuntimeError("this memory is set up already")
        self.capacity_, self.page_rows, self.dimensions, self.is_live = capacity, page_rows, dimensions, live
        self.page_shift = page_rows.bit_length() - 1
        self.page_count = (capacity + page_rows - 1) // page_rows
        self.takeable_pages, self.takeable_rows = self.page_count, capacity
        self.column_count = len(columns)
        self.columns = <Column*>calloc(self.column_count, sizeof(Column))
        self.sources = <const char**>calloc(self.column_count, sizeof(char*))
        self.lengths = <const int64_t**>calloc(self.column_count, sizeof(int64_t*))
        self.single_lengths = <int64_t*>calloc(self.column_count, sizeof(int64_t))
        self.finite = <Finite*>calloc(self.column_count, sizeof(Finite))
        self.copies = <Copy*>calloc(2 * self.column_count, sizeof(Copy))
        self.numbers = <double*>calloc(self.column_count, sizeof(double))
        self.gamma = <double*>calloc(dimensions + 1, sizeof(double))
        self.coeff = <double*>calloc(dimensions + 1, sizeof(double))
        self.work = <double*>calloc(4 * dimensions + 1, sizeof(double))
        if not (self.columns and self.sources and self.copies and self.numbers and self.gamma and self.coeff and self.work):
            raise MemoryError()
        if not (self.lengths and self.single_lengths and self.finite):
            raise MemoryError()
        self.data_arrays = []
        self.final_arrays = []
        for c, (data, dtype, shape, role, must_be_finite) in enumerate(columns):
            column = &self.columns[c]
            column.data = <char*>cnp.PyArray_DATA(data)
            column.size = data.shape[1]
            column.type_num = dtype.num
            column.dimensions = len(shape)
            column.is_ragged = column.dimensions > 0 and shape[0] is None
            self.has_ragged = self.has_ragged or column.is_ragged
            column.heap.element = dtype.itemsize
            for i in range(column.dimensions):
                column.shape[i] = -1 if i == 0 and column.is_ragged else shape[i]
                if column.shape[i] >= 0:
                    column.heap.element *= column.shape[i]
            column.role = ("plain", "state", "reward", "value", "return").index(role)
            if column.role == REWARD:
                self.reward_column = c
            elif column.role == VALUE:
                self.value_column = c
            elif column.role == RETURN:
                self.return_column = c
            if must_be_finite and column.role != RETURN:
                one = &self.finite[self.finite_count]
                one.given, one.is_ragged = c - (0 <= self.return_column < c), column.is_ragged
                one.size = column.heap.element if column.is_ragged else column.size
                one.check = check_of(dtype.itemsize, 32 if column.is_ragged else column.size)
                self.finite_count += 1
            self.data_arrays.append(data)
            self.final_arrays.append(None)
        self.entry_columns = self.column_count - (self.return_column >= 0)
        self._keep("meta", _aligned(capacity, META))
        self.arrays["meta"]["number"] = np.arange(-capacity, 0)
        self.arrays["meta"]["episode"] = -1
        self._keep("pages", _aligned(self.page_count, PAGE))
        self.arrays["pages"]["lane"] = self.arrays["pages"]["before"] = self.arrays["pages"]["after"] = -1
        for page in range(self.page_count):
            self.pages[page].older, self.pages[page].newer = page - 1, page + 1
        self.pages[self.page_count - 1].newer = -1
        self.first_page, self.last_page = 0, self.page_count - 1
        self._keep("page_born", _aligned(self.page_count, np.float64))
        self._keep("page_model", _aligned(self.page_count, np.int64))
        self._keep("lanes", _aligned(0, LANE))
        self._keep("episodes", _aligned(0, EPISODE))
        self._keep("bootstraps", _aligned(0, np.float32))
        self._keep("free_finals", _aligned(0, np.int64))
        self._keep("final_values", _aligned(0, np.float32))
        self._seed(seeds)
        self.rooms = _make_tree(&self.tree, capacity)  # last: `_hold` checks by the tree that the setup is complete

    def _seed(self, list seeds):
        """Seed the random numbers of draws with four 64-bit numbers."""
        cdef int i
        for i in range(4):
            self.random[i] = seeds[i]

    cdef _keep(self, str name, cnp.ndarray array):
        """Keep an array that the loops work on, and set the pointer to its memory."""
        self.arrays[name] = array
        if name == "meta":
            self.meta = <Meta*>cnp.PyArray_DATA(array)
        elif name == "pages":
            self.pages = <Page*>cnp.PyArray_DATA(array)
        elif name == "page_born":
            self.page_born = <double*>cnp.PyArray_DATA(array)
        elif name == "page_model":
            self.page_model = <int64_t*>cnp.PyArray_DATA(array)
        elif name == "lanes":
            self.lanes = <Lane*>cnp.PyArray_DATA(array)
        elif name == "episodes":
            self.episodes = <Episode*>cnp.PyArray_DATA(array)
        elif name == "bootstraps":
            self.bootstraps = <float*>cnp.PyArray_DATA(array)
        elif name == "final_values":
            self.final_values = <float*>cnp.PyArray_DATA(array)
        elif name == "free_finals":
            self.free_finals = <int64_t*>cnp.PyArray_DATA(array)

    cdef _grow(self, str name, int64_t count):
        """Replace an array by a longer one with the same values at its beginning."""
        cdef cnp.ndarray old = self.arrays[name], new = _aligned(count, (<object>old).dtype)
        memcpy(cnp.PyArray_DATA(new), cnp.PyArray_DATA(old), cnp.PyArray_NBYTES(old))
        self._keep(name, new)

    # Threads

    def held(self):
        """Return a context, for `with`, in which no other thread changes the memory: other threads wait. Re-entrant; keep it short."""
        return Moment(self)

    cdef _hold(self):
        """Take the lock, so that no other thread changes the memory, and wait for other threads. Re-entrant."""
        if self.tree.levels == 0:
            raise RuntimeError("this memory was never set up: call Memory.__init__ first")
        self.lock.acquire()
        self.busy += 1

    cdef _release(self):
        """Release the lock once, after `_hold`."""
        self.busy -= 1
        self.lock.release()

    cdef double _now(self) noexcept nogil:
        return self.fixed_now if self.fixed_now >= 0.0 else now_seconds()

    # Pages and rows

    cdef inline int64_t _page_size(self, int64_t page) noexcept nogil:
        return min(self.page_rows, self.capacity_ - page * self.page_rows)

    cdef inline int64_t _after(self, int64_t row) noexcept nogil:
        """Return the row that the same lane wrote next."""
        cdef int64_t next_row = row + 1
        if next_row & (self.page_rows - 1) == 0 or next_row == self.capacity_:
            next_row = <int64_t>self.pages[row >> self.page_shift].after * self.page_rows
        return inside(next_row, self.capacity_)

    cdef inline int64_t _before(self, int64_t row) noexcept nogil:
        """Return the row that the same lane wrote before."""
        cdef int64_t page
        if row & (self.page_rows - 1):
            return row - 1
        page = self.pages[row >> self.page_shift].before
        return inside(page * self.page_rows + self._page_size(page) - 1, self.capacity_)

    cdef void _unlink_page(self, int32_t page) noexcept nogil:
        cdef Page* it = &self.pages[page]
        if it.older >= 0:
            self.pages[it.older].newer = it.newer
        else:
            self.first_page = it.newer
        if it.newer >= 0:
            self.pages[it.newer].older = it.older
        else:
            self.last_page = it.older

    cdef void _link_page(self, int32_t page, int32_t older) noexcept nogil:
        """Insert a page behind the page `older` in the order of taking; below 0: in front of all pages."""
        cdef Page* it = &self.pages[page]
        it.older = older
        it.newer = self.pages[older].newer if older >= 0 else self.first_page
        if older >= 0:
            self.pages[older].newer = page
        else:
            self.first_page = page
        if it.newer >= 0:
            self.pages[it.newer].older = page
        else:
            self.last_page = page

    cdef void _set_page_open(self, int64_t page, bint is_open) noexcept nogil:
        """Mark a page as open or not. Open pages are not in the list, so that taking a page has constant cost."""
        if self.pages[page].is_open == is_open:
            return
        if is_open:
            self._unlink_page(<int32_t>page)
        else:
            self._link_page(<int32_t>page, self.last_page)
        self.pages[page].is_open = is_open
        self.takeable_pages += -1 if is_open else 1
        self.takeable_rows += -self._page_size(page) if is_open else self._page_size(page)

    cdef bint _take_page(self, int32_t index) noexcept nogil:
        """Give a lane its next page. Return False if every page holds rows of open episodes."""
        cdef Lane* lane = &self.lanes[index]
        cdef Episode* episode = &self.episodes[lane.episode]
        cdef int32_t owner, page = self.first_page
        if lane.wrapped:
            return False
        if page < 0:
            if episode.length == 0 or lane.first_offset == 0:
                return False
            page = <int32_t>(episode.first_row >> self.page_shift)
            lane.wrapped = True
        owner = self.pages[page].lane
        if owner >= 0 and owner != index and self.lanes[owner].page == page:
            self.lanes[owner].page = -1
        if lane.page >= 0:
            self.pages[lane.page].after = page
        self.pages[page].before = lane.page
        self.pages[page].lane = index
        lane.page = page
        lane.offset = 0
        return True

    cdef int64_t _reserve(self, int32_t index) noexcept nogil:
        """Return the row for the open episode's next entry, after evicting its old entry, or a status below 0 if no row is free."""
        cdef Lane* lane = &self.lanes[index]
        cdef Episode* episode = &self.episodes[lane.episode]
        cdef int64_t row
        if lane.page < 0 or lane.offset >= (lane.first_offset if lane.wrapped else self._page_size(lane.page)):
            if not self._take_page(index):
                return TOO_LONG
        row = inside(lane.page * self.page_rows + lane.offset, self.capacity_)
        if self.meta[row].episode >= 0:
            self._evict(self.meta[row].episode)
        if episode.length == 0:
            lane.first_offset = lane.offset
            episode.first_row = row
            while self.most_episodes > 0 and self.closed >= self.most_episodes:
                self._evict(self.oldest)
        if not self.pages[lane.page].is_open:
            self._set_page_open(lane.page, True)
        lane.offset += 1
        episode.last_row = row
        return row

    cdef int64_t _place(self, int32_t index, double init_w, int64_t model_version, double now) noexcept nogil:
        """Add the entry whose values lie at `sources` to a lane's open episode. Return its row, or a status below 0."""
        cdef int64_t row
        cdef Column* column
        cdef int c, given = 0
        if self.has_ragged and not self._make_values():
            return NO_MEMORY
        row = self._reserve(index)
        if row < 0:
            if self.has_ragged:
                self._drop_made()
            return row
        for c in range(self.column_count):
            column = &self.columns[c]
            if c == self.return_column:
                memset(column.data + row * column.size, 0, column.size)
            elif column.is_ragged:
                self._own_value(column, row, column.made)
                given += 1
            else:
                copy_row(column.data + row * column.size, self.sources[given], column.size)
                given += 1
        self._note(index, row, init_w, model_version, now)
        return row

    cdef inline void _note(self, int32_t index, int64_t row, double init_w, int64_t model_version, double now) noexcept nogil:
        """Write the facts of a lane's new entry into its reserved row, and count the entry."""
        cdef Episode* episode = &self.episodes[self.lanes[index].episode]
        cdef Meta* meta = &self.meta[row]
        meta.number += self.capacity_
        meta.born = now
        meta.model_version = model_version
        meta.position = episode.length
        meta.init_w = <float>init_w
        meta.priority = -1.0
        meta.episode = self.lanes[index].episode
        meta.learned = 0
        meta.drawn = 0
        self.newest_model_ = max(self.newest_model_, model_version)
        episode.length += 1
        self.entries += 1
        self.generated_ += 1
        if self.is_live and episode.length > self.multi_step:
            self._ripen(index)

    # Values of ragged columns

    cdef bint _make_values(self) noexcept nogil:
        """Store the next entry's values of ragged columns, still without owners. Return False, and store none, if memory is short."""
        cdef Column* column
        cdef int c, given = 0
        for c in range(self.column_count):
            column = &self.columns[c]
            column.made = NULL
        for c in range(self.column_count):
            column = &self.columns[c]
            if column.is_ragged and not heap_put(&column.heap, self.sources[given], self.lengths[given][0], &column.made):
                self._drop_made()
                return False
            given += c != self.return_column
        return True

    cdef int64_t _ragged_live(self) noexcept nogil:
        """Return the bytes of all values of ragged columns."""
        cdef int64_t total = 0
        cdef int c
        for c in range(self.column_count):
            total += self.columns[c].heap.live
        return total

    cdef bint _fit_values(self, int64_t count) noexcept nogil:
        """Evict the oldest episodes until the values of the next `count` entries fit. Return False if they do not fit even then."""
        cdef int64_t i, wanted = 0
        cdef int c, given = 0
        if self.ragged_limit == 0 or not self.has_ragged:
            return True
        for c in range(self.column_count):
            if self.columns[c].is_ragged:
                for i in range(count):
                    if self.lengths[given][i] > 0:
                        wanted += heap_bytes(&self.columns[c].heap, self.lengths[given][i])
            given += c != self.return_column
        while self.closed > 0 and self._ragged_live() + wanted > self.ragged_limit:
            self._evict(self.oldest)
        return self._ragged_live() + wanted <= self.ragged_limit

    def _limit_ragged(self, int64_t limit):
        """Limit the bytes of the values of ragged columns (0: no limit), and evict the oldest closed episodes beyond the limit."""
        self._hold()
        try:
            self.ragged_limit = limit
            while 0 < limit < self._ragged_live() and self.closed > 0:
                self._evict(self.oldest)
            tree_settle(&self.tree)
        finally:
            self._release()

    cdef void _drop_made(self) noexcept nogil:
        cdef int c
        for c in range(self.column_count):
            if self.columns[c].is_ragged:
                heap_drop(&self.columns[c].heap, &self.columns[c].made)

    cdef inline Value** _value(self, const Column* column, int64_t code) noexcept nogil:
        """Return the address of the pointer to the value of a frame code other than NOTHING."""
        if code >= 0:
            return <Value**>column.data + inside(code, self.capacity_)
        return <Value**>column.finals + inside(-(code + 2), self.final_rows)

    cdef void _own_value(self, Column* column, int64_t code, Value* value) noexcept nogil:
        """Assign a stored value to its row or final state, and clean a few segments if the heap is loose."""
        cdef int segments = 0
        self._value(column, code)[0] = value
        if value != NULL:
            value.owner = code
        # A few segments at a time, so that no entry waits long; a pass over all segments frees more than it fills.
        while segments < 4 and heap_is_loose(&column.heap) and self._clean_segment(column):
            segments += 1

    cdef bint _clean_segment(self, Column* column) noexcept nogil:
        """Move values with an owner out of the oldest segment, and free the segment. Return False if memory is short."""
        cdef Heap* heap = &column.heap
        cdef Segment* segment = heap.oldest
        cdef Value* value
        cdef Value* moved
        cdef int64_t at = 0, size, owner
        segment.living += 1  # keeps the segment until all of its values have moved
        while at < segment.used:
            value = <Value*>(<char*>(segment + 1) + at)
            size = heap_bytes(heap, value.length)
            owner = value.owner
            if owner != NOTHING:
                if not heap_put(heap, <const char*>(value + 1), value.length, &moved):
                    segment.living -= 1
                    return False
                heap_drop(heap, self._value(column, owner))
                moved.owner = owner
                self._value(column, owner)[0] = moved
            at += size
        segment.living -= 1
        heap_release(heap, segment)
        return True

    cdef void _drop_values(self, int64_t code) noexcept nogil:
        """Drop the values of a row or final state in all ragged columns."""
        cdef int c
        for c in range(self.column_count):
            if self.columns[c].is_ragged and (code >= 0 or self.columns[c].role == STATE):
                heap_drop(&self.columns[c].heap, self._value(&self.columns[c], code))

    cdef void _ripen(self, int32_t index) noexcept nogil:
        """Live: weigh the next entry of the open episode, whose window is complete now, so that it can be drawn."""
        cdef Lane* lane = &self.lanes[index]
        cdef Meta* meta
        lane.ripe = self.episodes[lane.episode].first_row if lane.ripe < 0 else self._after(lane.ripe)
        meta = &self.meta[lane.ripe]
        if meta.priority < 0.0:
            meta.priority = <float>self.max_priority_
        self._put(lane.ripe, self._weight(lane.ripe))

    cdef inline void _put(self, int64_t row, double weight) noexcept nogil:
        """Set the weight of a row in the tree and, if it is in use, in the order; count the limits."""
        cdef double former = self.tree.sums[0][row]
        if self.is_ordered and weight != former:
            if former > 0.0:
                order_remove(&self.order, row, former)
            if weight > 0.0:
                order_insert(&self.order, row, weight)
        if self.is_limited:
            if former > 0.0:
                self.draws_left_ -= self._left_of(row)
            if weight > 0.0:
                self._watch(row)
        tree_put(&self.tree, row, weight)

    # Limits

    cdef inline int64_t _left_of(self, int64_t row) noexcept nogil:
        """Return the number of further draws of an entry, if draws are limited."""
        return max(self.most_drawn - <int64_t>self.meta[row].drawn, 0)

    cdef inline bint _is_fresh(self, const Meta* meta) noexcept nogil:
        """Return True if an entry is within the limits, as `_expire` computed them last."""
        if self.most_drawn > 0 and meta.drawn >= self.most_drawn:
            return False
        return meta.born >= self.oldest_born and meta.model_version >= self.oldest_model

    cdef void _watch(self, int64_t row) noexcept nogil:
        """Count the further draws of a row that has a weight now, and lower the bounds of its page for `_expire`."""
        cdef const Meta* meta = &self.meta[row]
        cdef int64_t page = inside(row >> self.page_shift, self.page_count)
        self.draws_left_ += self._left_of(row)
        self.page_born[page] = min(self.page_born[page], meta.born)
        self.page_model[page] = min(self.page_model[page], meta.model_version)
        self.eldest = min(self.eldest, meta.born)
        self.least_model = min(self.least_model, meta.model_version)

    cdef void _expire(self) noexcept nogil:
        """Set the weight of entries that are too old to 0. Cost: O(1) if no entry can be, else O(pages) and the rows of some pages."""
        cdef int64_t page, row, begin
        if self.most_age > 0.0:
            self.oldest_born = self._now() - self.most_age  # follows a clock that goes back, so that new entries are fresh
        if self.most_lag >= 0:
            self.oldest_model = self.newest_model_ - self.most_lag
        if self.eldest >= self.oldest_born and self.least_model >= self.oldest_model:
            return
        self.eldest, self.least_model = INFINITY, LATEST
        for page in range(self.page_count):
            if self.page_born[page] < self.oldest_born or self.page_model[page] < self.oldest_model:
                self.page_born[page], self.page_model[page] = INFINITY, LATEST
                begin = page * self.page_rows
                for row in range(begin, begin + self._page_size(page)):
                    if self.tree.sums[0][row] <= 0.0:
                        continue
                    if not self._is_fresh(&self.meta[row]):
                        self._put(row, 0.0)
                        continue
                    self.page_born[page] = min(self.page_born[page], self.meta[row].born)
                    self.page_model[page] = min(self.page_model[page], self.meta[row].model_version)
            self.eldest = min(self.eldest, self.page_born[page])
            self.least_model = min(self.least_model, self.page_model[page])

    cdef void _watch_anew(self) noexcept nogil:
        """Recompute the further draws and the bounds of all pages, after the limits or weights have changed."""
        cdef int64_t page, row
        self.draws_left_ = 0
        self.eldest, self.least_model = INFINITY, LATEST
        for page in range(self.page_count):
            self.page_born[page], self.page_model[page] = INFINITY, LATEST
        for row in range(self.capacity_ if self.is_limited else 0):
            if self.tree.sums[0][row] > 0.0:
                self._watch(row)

    def _limit(self, int64_t most_drawn, double most_age, int64_t most_lag):
        """Set limits (0, 0 and below 0: no limit) before `_configure`, which applies them. Return True if the limits have changed."""
        self._hold()
        try:
            if (most_drawn, most_age, most_lag) == (self.most_drawn, self.most_age, self.most_lag):
                return False
            self.is_limited = False  # until `_configure` has weighed all entries and calls `_watch_anew`
            self.most_drawn, self.most_age, self.most_lag = most_drawn, most_age, most_lag
            self.oldest_born, self.oldest_model = -INFINITY, EARLIEST
            if most_age > 0.0:
                self.oldest_born = self._now() - most_age
            if most_lag >= 0:
                self.oldest_model = self.newest_model_ - most_lag
            return True
        finally:
            self._release()

    def saw_model(self, int64_t version):
        """Report that a model of this version exists. `Parameters.max_model_lag` counts from the highest version."""
        self._hold()
        self.newest_model_ = max(self.newest_model_, version)
        self._release()

    @property
    def newest_model(self):
        """Highest model version of any entry or any call of `saw_model`."""
        return self.newest_model_

    @property
    def draws_left(self):
        """Further draws of all entries together; -1 if draws are not limited."""
        self._hold()
        try:
            with nogil:
                self._expire()
            return self.draws_left_ if self.most_drawn > 0 else -1
        finally:
            self._release()

    cdef inline double _mass(self, int64_t row) noexcept nogil:
        """Return the number that a row's probability is proportional to: its weight, or a function of its rank."""
        cdef double weight = self.tree.sums[0][row]
        if self.prioritization == PROPORTIONAL or weight <= 0.0:
            return weight
        if self.prioritization == GREEDY:
            return 1.0
        return pow(<double>order_rank(&self.order, row, weight), -self.alpha)

    cdef double _total(self) noexcept nogil:
        """Return the sum of `_mass` over all rows; the tree must be settled."""
        if self.prioritization == PROPORTIONAL:
            return tree_total(&self.tree)
        return <double>self.order.count if self.prioritization == GREEDY else order_sum(&self.order, self.order.count)

    cdef double _least(self) noexcept nogil:
        """Return the least positive `_mass`, or infinity."""
        if self.prioritization == PROPORTIONAL:
            return tree_least(&self.tree)
        if self.order.count == 0:
            return INFINITY
        return 1.0 if self.prioritization == GREEDY else pow(<double>self.order.count, -self.alpha)

    def _order_anew(self):
        """Rebuild the order from all positive rows, under the lock. Cost: one sort."""
        cdef cnp.ndarray rows
        cdef int32_t* row
        cdef int64_t i
        weights = self.rooms[0][:self.capacity_]
        positive = np.flatnonzero(weights > 0.0)
        rows = positive[np.lexsort((positive, -weights[positive]))].astype(np.int32)
        self.order_rooms = _make_order(&self.order, self.capacity_)
        order_set_alpha(&self.order, self.alpha)
        row = <int32_t*>cnp.PyArray_DATA(rows)
        with nogil:
            for i in range(cnp.PyArray_SIZE(rows)):
                order_insert(&self.order, row[i], self.tree.sums[0][row[i]])

    def _ranked(self):
        """Return the rows int64 of all entries that can be drawn, the heaviest first, by the order, for checks."""
        cdef cnp.ndarray result = np.empty(self.order.count if self.prioritization != PROPORTIONAL else 0, np.int64)
        cdef int64_t* row = <int64_t*>cnp.PyArray_DATA(result)
        cdef int64_t i
        for i in range(cnp.PyArray_SIZE(result)):
            row[i] = order_leaf(&self.order, i + 1)
            assert order_rank(&self.order, row[i], self.tree.sums[0][row[i]]) == i + 1
        return result

    cdef inline double _weight(self, int64_t row) noexcept nogil:
        """Return the weight by which a row is drawn or ranked: init_w * multiplier * priority ** exponent, or 0 if its window is
        incomplete or beyond the limits."""
        cdef Meta* meta = &self.meta[row]
        cdef Episode* episode = &self.episodes[meta.episode]
        cdef double weight, priority = meta.priority
        if episode.state == OPEN and not self.is_live:
            return 0.0
        if self.start == SKIP and meta.position < self.frame_stack - 1:
            return 0.0
        if not self._is_fresh(meta):
            return 0.0
        if not episode.ended and meta.position + self.multi_step >= episode.length:
            return 0.0
        if self.stride > 0:
            if meta.position % self.stride != 0:
                return 0.0
            if meta.position > 0 and meta.position + self.overlap >= episode.length and episode.state != OPEN:
                return 0.0  # the sequence before contains all of it
        weight = meta.init_w * episode.multiplier
        if weight <= 0.0 or priority < 0.0 or self.exponent == 0.0:
            return min(max(weight, 0.0), 1e280)
        if priority == 0.0 and self.prioritization == PROPORTIONAL:
            return 0.0
        if self.exponent == 1.0:
            weight *= priority
        elif self.exponent == 0.5:
            weight *= sqrt(priority)
        else:
            if priority != self.powered:  # all entries that no learner has seen have the same priority
                self.powered, self.power = priority, pow(priority, self.exponent)
            weight *= self.power
        # Sums of any number of weights stay finite, and a positive weight does not become 0.
        return min(max(weight, 1e-280), 1e280)

    # Episodes

    cdef void _evict(self, int32_t index) noexcept nogil:
        """Remove a closed episode from the memory, with its rows and final state."""
        cdef Episode* episode = &self.episodes[index]
        self._clear_rows(episode)
        if episode.older >= 0:
            self.episodes[episode.older].newer = episode.newer
        else:
            self.oldest = episode.newer
        if episode.newer >= 0:
            self.episodes[episode.newer].older = episode.older
        else:
            self.newest = episode.older
        self._drop_final(episode)
        episode.state = FREE
        episode.older = self.free_episode
        self.free_episode = index
        self.closed -= 1

    cdef void _drop_final(self, Episode* episode) noexcept nogil:
        """Free the row of an episode's final state, if it has one."""
        if episode.final < 0:
            return
        if self.has_ragged:
            self._drop_values(-(episode.final + 2))
        self.free_finals[self.free_final_count] = episode.final
        self.free_final_count += 1
        episode.final = -1

    cdef void _clear_rows(self, Episode* episode) noexcept nogil:
        cdef int64_t row = episode.first_row, left = episode.length
        while left > 0:
            self.meta[row].episode = -1
            self._put(row, 0.0)
            if self.has_ragged:
                self._drop_values(row)
            left -= 1
            if left > 0:
                row = self._after(row)
        self.entries -= episode.length

    cdef void _close_pages(self, Episode* episode) noexcept nogil:
        """Mark the pages of an episode as not open."""
        cdef int64_t page = episode.first_row >> self.page_shift
        cdef int64_t left = episode.length + (episode.first_row - page * self.page_rows)
        while left > 0:
            self._set_page_open(page, False)
            left -= self._page_size(page)
            page = self.pages[page].after

    cdef void _discard(self, int32_t index) noexcept nogil:
        """Remove the entries of a lane's open episode, and free its pages so that they are taken first and in the same order."""
        cdef Lane* lane = &self.lanes[index]
        cdef Episode* episode = &self.episodes[lane.episode]
        cdef int64_t first = episode.first_row >> self.page_shift, page, left
        cdef int32_t behind = -1
        if episode.length > 0:
            self._clear_rows(episode)
            self._close_pages(episode)
            page = first
            left = episode.length + lane.first_offset
            while left > 0:
                if page != first or lane.first_offset == 0:
                    self._unlink_page(<int32_t>page)
                    self._link_page(<int32_t>page, behind)
                    behind = <int32_t>page
                    self.pages[page].lane = -1
                left -= self._page_size(page)
                page = self.pages[page].after
                if page == first:  # wrapped
                    break
            lane.page = <int32_t>first if lane.first_offset > 0 else -1
            lane.offset = lane.first_offset
        episode.length = 0
        lane.wrapped = False
        lane.ripe = -1

    def _open(self, int64_t index):
        """Open an episode in a lane; discard the entries of an episode that is still open."""
        cdef int32_t slot
        cdef Episode* episode
        self._hold()
        try:
            if index >= self.lane_count:
                self._grow("lanes", max(index + 1, 2 * self.lane_count))
                for slot in range(<int32_t>self.lane_count, <int32_t>self.arrays["lanes"].shape[0]):
                    self.lanes[slot].episode = self.lanes[slot].page = -1
                self.lane_count = self.arrays["lanes"].shape[0]
            if self.lanes[index].episode >= 0:
                with nogil:
                    self._discard(<int32_t>index)
                return
            if self.free_episode < 0:
                self._grow_episodes()
            slot = self.free_episode
            episode = &self.episodes[slot]
            self.free_episode = episode.older
            memset(episode, 0, sizeof(Episode))
            episode.state = OPEN
            episode.multiplier = 1.0
            episode.lane = <int32_t>index
            episode.final = episode.older = episode.newer = -1
            self.lanes[index].episode = slot
            self.lanes[index].wrapped = False
            self.lanes[index].ripe = -1
        finally:
            self._release()

    cdef _grow_episodes(self):
        cdef int64_t slot, old = self.episode_slots
        self.episode_slots = max(<int64_t>16, 2 * old)
        self._grow("episodes", self.episode_slots)
        self._grow("bootstraps", self.episode_slots * self.dimensions)
        for slot in range(self.episode_slots - 1, old - 1, -1):
            self.episodes[slot].older = self.free_episode
            self.free_episode = <int32_t>slot

    cdef _grow_finals(self):
        cdef int64_t row, old = self.final_rows
        cdef int c
        self.final_rows = max(<int64_t>16, 2 * old)
        for c in range(self.column_count):
            if self.columns[c].role == STATE:
                new = _aligned(self.final_rows * self.columns[c].size, np.uint8)
                if old:
                    new[:old * self.columns[c].size] = self.final_arrays[c]
                self.final_arrays[c] = new
                self.columns[c].finals = <char*>cnp.PyArray_DATA(new)
        self._grow("free_finals", self.final_rows)
        self._grow("final_values", self.final_rows * self.dimensions)
        for row in range(self.final_rows - 1, old - 1, -1):
            self.free_finals[self.free_final_count] = row
            self.free_final_count += 1

    def _open_length(self, int64_t index):
        """Return the number of entries of a lane's open episode, or -1 if no episode is open."""
        if index < 0 or index >= self.lane_count or self.lanes[index].episode < 0:
            return -1
        return self.episodes[self.lanes[index].episode].length

    def _open_return(self, int64_t index, double[::1] out):
        """Fill `out`, float64 [dimensions], with the sums of the rewards of a lane's open episode; zeros if it has no entries."""
        cdef const char* rewards
        cdef Episode* episode
        cdef int64_t row, left, d
        out[:] = 0.0
        if self._open_length(index) <= 0 or self.reward_column < 0:
            return
        assert out.shape[0] == self.dimensions
        episode = &self.episodes[self.lanes[index].episode]
        rewards = self.columns[self.reward_column].data
        row, left = episode.first_row, episode.length
        with nogil:
            while left > 0:
                for d in range(self.dimensions):
                    out[d] += (<const float*>(rewards + row * 4 * self.dimensions))[d]
                left -= 1
                if left > 0:
                    row = self._after(row)

    def _close(self, int64_t index, double multiplier, bint update_value, bint update_weight, bint ended, bint terminated,
               final_states, bootstrap):
        """Close a lane's open episode, which must have entries. final_states: exact arrays of the state columns, or None; bootstrap:
        float32 [dimensions]."""
        self._hold()
        try:
            self._close_held(index, multiplier, update_value, update_weight, ended, terminated, final_states, bootstrap)
        finally:
            self._release()

    cdef _close_held(self, int64_t index, double multiplier, bint update_value, bint update_weight, bint ended, bint terminated,
                     final_states, bootstrap):
        cdef Lane* lane = &self.lanes[inside(index, self.lane_count)]
        cdef int32_t slot = lane.episode
        cdef Episode* episode = &self.episodes[inside(slot, self.episode_slots)]
        self._keep_end(slot, final_states, bootstrap)
        with nogil:
            episode.multiplier = multiplier
            episode.update_value = update_value
            episode.update_weight = update_weight
            episode.ended = ended
            episode.terminated = terminated
            self._close_pages(episode)
            episode.state = CLOSED
            episode.older = self.newest
            episode.newer = -1
            if self.newest >= 0:
                self.episodes[self.newest].newer = slot
            else:
                self.oldest = slot
            self.newest = slot
            self.closed += 1
            lane.episode = -1
            lane.wrapped = False
            lane.ripe = -1
            if update_value and self.value_column >= 0:
                self._compute_returns(episode, self.bootstraps + slot * self.dimensions)
            self._prioritize(episode)
            self._weigh(episode)
            while self.most_episodes > 0 and self.closed > self.most_episodes:
                self._evict(self.oldest)
            while self.closed > 1 and 0 < self.ragged_limit < self._ragged_live():  # the final state took bytes
                self._evict(self.oldest)
            tree_settle(&self.tree)

    cdef _keep_end(self, int32_t slot, final_states, cnp.ndarray boot):
        """Store the final state and bootstrap value of an open episode, the arguments of `_close`."""
        cdef Episode* episode = &self.episodes[inside(slot, self.episode_slots)]
        cdef cnp.ndarray array
        cdef Column* column
        cdef int c, at = 0
        assert cnp.PyArray_NBYTES(boot) == 4 * self.dimensions
        memcpy(self.bootstraps + slot * self.dimensions, cnp.PyArray_DATA(boot), 4 * self.dimensions)
        episode.final = -1
        if final_states is not None:
            if self.free_final_count == 0:
                self._grow_finals()
            self.free_final_count -= 1
            episode.final = self.free_finals[self.free_final_count]
            memcpy(self.final_values + episode.final * self.dimensions, cnp.PyArray_DATA(boot), 4 * self.dimensions)
            for c in range(self.column_count):
                column = &self.columns[c]
                if column.role == STATE and column.is_ragged:
                    array = final_states[at]
                    assert _is_exact(column, array, 0)
                    if not heap_put(&column.heap, <const char*>cnp.PyArray_DATA(array), cnp.PyArray_DIM(array, 0), &column.made):
                        self._drop_values(-(episode.final + 2))
                        self.free_final_count += 1  # its number is still at this place of the list
                        episode.final = -1
                        raise MemoryError()
                    self._own_value(column, -(episode.final + 2), column.made)
                    at += 1
                elif column.role == STATE:
                    array = final_states[at]
                    assert cnp.PyArray_NBYTES(array) == column.size
                    memcpy(column.finals + episode.final * column.size, cnp.PyArray_DATA(array), column.size)
                    at += 1

    def _end_for_now(self, int64_t index, final_states, bootstrap):
        """Live: treat a lane's open episode as truncated in this state, so that its newest entries can be drawn. Call `_end_no_more`
        before any other change of the episode."""
        cdef int32_t slot = self.lanes[inside(index, self.lane_count)].episode
        cdef Episode* episode = &self.episodes[inside(slot, self.episode_slots)]
        self._keep_end(slot, final_states, bootstrap)
        episode.ended = True
        self._weigh_newest(episode)

    def _end_no_more(self, int64_t index):
        """Undo `_end_for_now`, so that a lane's open episode can continue."""
        cdef Episode* episode = &self.episodes[inside(self.lanes[inside(index, self.lane_count)].episode, self.episode_slots)]
        episode.ended = False
        self._drop_final(episode)
        self._weigh_newest(episode)

    cdef void _weigh_newest(self, Episode* episode) noexcept nogil:
        """Weigh the entries of an open episode whose windows reach its end."""
        cdef int64_t row = episode.last_row, left = min(episode.length, self.multi_step)
        while left > 0:
            if not self.meta[row].learned:  # if the episode goes on, `_ripen` sets the priority once the window is complete
                self.meta[row].priority = <float>self.max_priority_ if episode.ended else -1.0
            self._put(row, self._weight(row))
            left -= 1
            if left > 0:
                row = self._before(row)
        tree_settle(&self.tree)

    cdef void _compute_returns(self, Episode* episode, const float* bootstrap) noexcept nogil:
        """Compute TD(lambda) returns backwards: q_T = r_T + gamma b; q_t = r_t + gamma (lambda q_{t+1} + (1 - lambda) v_{t+1})."""
        cdef const char* rewards = self.columns[self.reward_column].data
        cdef const char* values = self.columns[self.value_column].data
        cdef char* returns = self.columns[self.return_column].data
        cdef int64_t row = episode.last_row, left = episode.length, d, size = 4 * self.dimensions
        cdef double* ahead = self.work  # lambda q_{t+1} + (1 - lambda) v_{t+1}
        cdef double q
        for d in range(self.dimensions):
            ahead[d] = bootstrap[d]
        while left > 0:
            for d in range(self.dimensions):
                q = (<const float*>(rewards + row * size))[d] + self.gamma[d] * ahead[d]
                (<float*>(returns + row * size))[d] = _float(q)
                ahead[d] = self.lambda_ * q + (1.0 - self.lambda_) * (<const float*>(values + row * size))[d]
            left -= 1
            if left > 0:
                row = self._before(row)

    cdef void _prioritize(self, Episode* episode) noexcept nogil:
        """Set the priorities of an episode's entries, except priorities that a learner has set."""
        cdef int64_t row = episode.first_row, left = episode.length
        cdef Meta* meta
        while left > 0:
            meta = &self.meta[row]
            if meta.learned:
                pass
            elif not episode.update_weight:
                meta.priority = -1.0
            elif self.value_column >= 0:
                meta.priority = self._surprise(row) if self.stride == 0 else self._sequence_surprise(row, episode.length - left, left)
                self.max_priority_ = max(self.max_priority_, <double>meta.priority)
            elif meta.priority < 0.0:
                meta.priority = <float>self.max_priority_
            left -= 1
            if left > 0:
                row = self._after(row)

    cdef float _surprise(self, int64_t row) noexcept nogil:
        """Return the priority of an entry, sum_j coeff_j |qvest_j - value_j|."""
        cdef const float* q = <const float*>(self.columns[self.return_column].data + row * 4 * self.dimensions)
        cdef const float* v = <const float*>(self.columns[self.value_column].data + row * 4 * self.dimensions)
        cdef double surprise = 0.0
        cdef int64_t d
        for d in range(self.dimensions):
            surprise += self.coeff[d] * fabs(<double>q[d] - <double>v[d])
        return _float(surprise)

    cdef float _sequence_surprise(self, int64_t row, int64_t position, int64_t left) noexcept nogil:
        """Return max_share * maximum + (1 - max_share) * mean of `_surprise` over the sequence that begins in this row, without its
        burn-in; the episode has `left` entries from this row on. Kapturowski et al., ICLR 2019, section 2.3."""
        cdef int64_t steps = min(self.multi_step, left), j, first = self.burn_in if position > 0 else 0
        cdef double most = 0.0, total = 0.0, surprise
        if position % self.stride != 0 or steps <= first:
            return 0.0
        for j in range(steps):
            if j > 0:
                row = self._after(row)
            if j >= first:
                surprise = self._surprise(row)
                most = max(most, surprise)
                total += surprise
        return _float(self.max_share * most + (1.0 - self.max_share) * total / <double>(steps - first))

    cdef void _weigh(self, Episode* episode) noexcept nogil:
        cdef int64_t row = episode.first_row, left = episode.length
        while left > 0:
            self._put(row, self._weight(row))
            left -= 1
            if left > 0:
                row = self._after(row)

    def _configure(self, double alpha, double lambda_, int64_t frame_stack, int64_t multi_step, int start, int64_t most_episodes,
                   list gamma, list coeff, int prioritization, bint stratified, int64_t stride, int64_t burn_in, double max_share,
                   bint are_limits_new):
        """Set the parameters of weights and windows, and recompute the weights of all entries if they have changed."""
        cdef int64_t d
        cdef int32_t index
        cdef bint values, weights, is_order_new = False
        cdef double exponent = alpha if prioritization == PROPORTIONAL else 1.0
        cdef Episode* episode
        assert len(gamma) == len(coeff) == self.dimensions
        self._hold()
        try:
            values = lambda_ != self.lambda_
            weights = are_limits_new or exponent != self.exponent or frame_stack != self.frame_stack or multi_step != self.multi_step or start != self.start
            for d in range(self.dimensions):
                values = values or gamma[d] != self.gamma[d]
                weights = weights or coeff[d] != self.coeff[d]
                self.gamma[d], self.coeff[d] = gamma[d], coeff[d]
            weights = weights or stride != self.stride or burn_in != self.burn_in or max_share != self.max_share
            self.stride, self.burn_in, self.max_share = stride, burn_in, max_share
            self.overlap = multi_step - stride
            weights = weights or (prioritization == PROPORTIONAL) != (self.prioritization == PROPORTIONAL)
            is_order_new = prioritization != PROPORTIONAL and (weights or values or self.prioritization == PROPORTIONAL)
            # No row is ordered while all weights are recomputed; afterwards all rows are sorted at once.
            self.is_ordered = self.is_ordered and not is_order_new and prioritization != PROPORTIONAL
            self.prioritization, self.is_stratified = prioritization, stratified
            self.exponent, self.powered = exponent, NAN
            self.alpha, self.lambda_, self.start = alpha, lambda_, start
            self.frame_stack, self.multi_step, self.most_episodes = frame_stack, multi_step, most_episodes
            with nogil:
                while self.most_episodes > 0 and self.closed > self.most_episodes:
                    self._evict(self.oldest)
                index = self.oldest if values or weights else -1
                while index >= 0:
                    episode = &self.episodes[index]
                    if values and episode.update_value and self.value_column >= 0:
                        self._compute_returns(episode, self.bootstraps + index * self.dimensions)
                    self._prioritize(episode)
                    self._weigh(episode)
                    index = episode.newer
                if weights and self.is_live:
                    for index in range(<int32_t>self.lane_count):
                        if self.lanes[index].episode >= 0:
                            self._ripen_again(index)
                if are_limits_new:
                    self.is_limited = self.most_drawn > 0 or self.most_age > 0.0 or self.most_lag >= 0
                    self._watch_anew()
                tree_settle(&self.tree)
            if is_order_new:
                self._order_anew()
            elif prioritization == PROPORTIONAL:
                self.order_rooms = None
            else:
                order_set_alpha(&self.order, alpha)
            self.is_ordered = prioritization != PROPORTIONAL
        finally:
            self._release()

    cdef void _ripen_again(self, int32_t index) noexcept nogil:
        """Live, after a change of parameters: weigh again the entries of an open episode whose windows are complete."""
        cdef Lane* lane = &self.lanes[index]
        cdef Episode* episode = &self.episodes[lane.episode]
        cdef int64_t left = episode.length - self.multi_step
        self._weigh(episode)
        lane.ripe = -1
        while left > 0:
            self._ripen(index)
            left -= 1

    # Adding

    def add(self, int64_t lane, values, double init_w=1.0, model_version=0):
        """Add one entry to a lane's open episode and return its number.

        Args:
            lane: Number of the lane with the open episode; 0 if the memory has one lane.
            values: A tuple: a value for each column but the return column, in the schema's order. Arrays of exactly the
                column's dtype and shape are copied directly, and plain numbers into scalar columns; other values are
                converted, which is slower, if their kind can be kept.
            init_w: Factor of the entry's weight, finite and at least 0; an entry with 0 is never drawn.
            model_version: Version of the model that acted, below 2**53; 0 is unknown, which `max_model_lag` refuses.

        Raises:
            EntryError: a value does not fit its column, or a reward, value or state is not finite; nothing was added.
            EpisodeClosedError: no episode is open in this lane.
            EpisodeTooLong: the open episodes leave no room; they stay as they were.

        Cost: one copy of the entry; the oldest episode is evicted when its row is needed. Waits only for a draw, gather
        or cache of another thread.
        """
        cdef int64_t number, version = self._version_of(model_version)
        if self.busy == 0 and type(values) is tuple and version >= 0:
            number = self._add_exact(lane, <tuple>values, init_w, version)
            if number >= 0:
                return number
        return self._add_slowly(lane, values, init_w, model_version)

    def _add_status(self, int64_t lane, tuple values, double init_w, int64_t model_version):
        """Add an entry, as `add`, but return a status below 0 instead of raising an error."""
        return self._add_exact(lane, values, init_w, model_version)

    cdef inline int64_t _version_of(self, object version) except? -2:
        """Return the model version of a new entry as a number, or -1 if it needs a conversion or is invalid."""
        cdef int overflow = 0
        cdef long long number
        if type(version) is not int:
            return -1
        number = PyLong_AsLongLongAndOverflow(version, &overflow)
        if overflow or not (number > 0 or (number == 0 and self.most_lag < 0)) or number > MAX_VERSION:
            return -1
        return number

    cdef int64_t _add_exact(self, int64_t lane, tuple values, double init_w, int64_t model_version):
        """Add an entry whose values need no conversion. Return its number, or a status below 0 if it was not added. Holds the GIL."""
        cdef int64_t row
        cdef int c, given = 0
        if lane < 0 or lane >= self.lane_count or self.lanes[lane].episode < 0:
            return NOT_OPEN
        if not is_weight(init_w):
            return BAD_WEIGHT
        if len(values) != self.entry_columns:
            return NOT_EXACT
        for c in range(self.column_count):
            if c != self.return_column:
                if not self._find_source(c, given, values[given]):
                    return NOT_EXACT
                given += 1
        if not are_finite(self.finite, self.finite_count, self.sources, self.lengths, 1):
            return NOT_FINITE
        if not self._fit_values(1):
            return TOO_MANY_BYTES
        row = self._place(<int32_t>lane, init_w, model_version, self._now())
        return self.meta[row].number if row >= 0 else row

    cdef bint _find_source(self, int c, int given, object value):
        """Point `sources[given]` at a value of exactly the column's dtype and shape. Return False for another value."""
        cdef Column* column = &self.columns[c]
        if type(value) is cnp.ndarray:
            if not _is_exact(column, <cnp.ndarray>value, 0):
                return False
            self.sources[given] = <const char*>cnp.PyArray_DATA(<cnp.ndarray>value)
            if column.is_ragged:
                self.single_lengths[given] = cnp.PyArray_DIM(<cnp.ndarray>value, 0)
                self.lengths[given] = &self.single_lengths[given]
                return _is_storable(column, self.single_lengths[given])
            return True
        self.sources[given] = <const char*>&self.numbers[given]
        return column.dimensions == 0 and _number(column.type_num, value, &self.numbers[given])

    def _add_many(self, cnp.ndarray lanes, list arrays, cnp.ndarray init_w, cnp.ndarray numbers, int64_t model_version):
        """Add one entry to each of several different lanes, or none at all, from exact arrays [n, ...]. Raises NotAdded."""
        cdef int64_t status, bad = -1, count = cnp.PyArray_SIZE(lanes)
        cdef const int64_t* lane = <const int64_t*>cnp.PyArray_DATA(lanes)
        cdef const float* weight = <const float*>cnp.PyArray_DATA(init_w)
        cdef int64_t* number = <int64_t*>cnp.PyArray_DATA(numbers)
        assert cnp.PyArray_SIZE(init_w) == cnp.PyArray_SIZE(numbers) == count
        self._hold()
        try:
            status = self._rooms_for(lane, count, &bad)
            if status == 0:
                self._find_sources(arrays, count)
                with nogil:
                    status = self._place_all(lane, 1, count, weight, number, model_version)
                bad = lane[0]
            if status < 0:
                raise NotAdded(status, bad, arrays)
        finally:
            self._release()

    def _add_one(self, int64_t lane, tuple values, double init_w, int64_t model_version):
        """Add one entry to a lane from exact arrays [*F]. Raises NotAdded."""
        self._hold()
        try:
            status = self._add_exact(lane, values, init_w, model_version)
            if status < 0:
                raise NotAdded(status, lane, values)
        finally:
            self._release()

    def _extend(self, int64_t lane, list arrays, cnp.ndarray init_w, cnp.ndarray numbers, int64_t model_version, bint is_checked=False):
        """Add several entries to one lane, or none at all, from exact arrays [T, ...]. is_checked: they are known to be finite. Return
        0, or a status below 0."""
        cdef int64_t status, count = cnp.PyArray_SIZE(init_w)
        cdef const float* weight = <const float*>cnp.PyArray_DATA(init_w)
        cdef int64_t* number = <int64_t*>cnp.PyArray_DATA(numbers)
        assert cnp.PyArray_SIZE(numbers) == count
        self._hold()
        try:
            if self._open_length(lane) < 0:
                return NOT_OPEN
            if count > self._room_of(<int32_t>lane):
                return TOO_LONG
            self._find_sources(arrays, count)
            with nogil:
                status = self._place_all(&lane, 0, count, weight, number, model_version, is_checked)
            return status
        finally:
            self._release()

    def _tell(self, int64_t lane, cnp.ndarray model_version, cnp.ndarray age):
        """Set the model versions, int64 [T], of the entries of a lane's open episode, and subtract their ages in seconds, float32 [T],
        from their times."""
        cdef const int64_t* model = <const int64_t*>cnp.PyArray_DATA(model_version)
        cdef const float* seconds = <const float*>cnp.PyArray_DATA(age)
        cdef int64_t i, row, count = self._open_length(lane)
        assert cnp.PyArray_TYPE(model_version) == cnp.NPY_INT64 and cnp.PyArray_ISCARRAY_RO(model_version)
        assert cnp.PyArray_TYPE(age) == cnp.NPY_FLOAT32 and cnp.PyArray_ISCARRAY_RO(age)
        assert cnp.PyArray_SIZE(model_version) == cnp.PyArray_SIZE(age) == count > 0
        self._hold()
        try:
            row = self.episodes[self.lanes[lane].episode].first_row
            for i in range(count):
                self.meta[row].model_version = model[i]
                self.meta[row].born -= seconds[i]
                self.newest_model_ = max(self.newest_model_, model[i])
                if i + 1 < count:
                    row = self._after(row)
        finally:
            self._release()

    cdef int64_t _place_all(self, const int64_t* lane, int stride, int64_t count, const float* init_w, int64_t* numbers,
                            int64_t model_version, bint is_checked=False) noexcept nogil:
        """Add `count` entries from `sources` on, which must fit: one to each lane (stride 1), or all to one lane (stride 0). Return 0, or
        a status below 0."""
        cdef int64_t i, row
        cdef double now
        if not is_checked and not are_finite(self.finite, self.finite_count, self.sources, self.lengths, count):
            return NOT_FINITE
        if not self._fit_values(count):
            return TOO_MANY_BYTES
        now = self._now()
        if stride == 0 and not self.has_ragged:
            return self._place_run(<int32_t>lane[0], count, init_w, numbers, model_version, now)
        for i in range(count):
            row = self._place(<int32_t>lane[i * stride], init_w[i], model_version, now)
            if row < 0:
                return row
            numbers[i] = self.meta[row].number
            self._next_sources()
        return 0

    cdef int64_t _place_run(self, int32_t index, int64_t count, const float* init_w, int64_t* numbers, int64_t model_version,
                            double now) noexcept nogil:
        """Add entries as `_place_all` to one lane, and copy consecutive rows together. The lock keeps readers out until the copies."""
        cdef int64_t i, row = 0, first = 0, run = 0
        for i in range(count):
            row = self._reserve(index)
            if row < 0:
                break
            self._note(index, row, init_w[i], model_version, now)
            numbers[i] = self.meta[row].number
            if row != first + run:
                self._copy_run(first, run)
                first, run = row, 0
            run += 1
        self._copy_run(first, run)
        return min(row, <int64_t>0)

    cdef void _copy_run(self, int64_t first, int64_t count) noexcept nogil:
        """Fill `count` rows from `first` on with the next values of `sources`, and advance `sources`."""
        cdef Column* column
        cdef int c, given = 0
        if count == 0:
            return
        inside(first + count - 1, self.capacity_)
        for c in range(self.column_count):
            column = &self.columns[c]
            if c == self.return_column:
                memset(column.data + first * column.size, 0, count * column.size)
            else:
                copy_row(column.data + first * column.size, self.sources[given], count * column.size)
                self.sources[given] += count * column.size
                given += 1

    cdef _find_sources(self, list arrays, int64_t count):
        """Point `sources` at exact arrays of `count` values each, or `Ragged` objects for ragged columns. Raises AssertionError."""
        cdef int c, given = 0
        cdef int64_t i, left
        cdef cnp.ndarray array, lengths
        for c in range(self.column_count):
            if self.columns[c].is_ragged:
                array, lengths = arrays[given].values, arrays[given].lengths
                if not (_is_exact(&self.columns[c], array, 0) and cnp.PyArray_TYPE(lengths) == cnp.NPY_INT64 and
                        cnp.PyArray_SIZE(lengths) == count and cnp.PyArray_ISCARRAY_RO(lengths)):
                    raise AssertionError("ragged columns must be exact here")
                self.sources[given] = <const char*>cnp.PyArray_DATA(array)
                self.lengths[given] = <const int64_t*>cnp.PyArray_DATA(lengths)
                left = cnp.PyArray_DIM(array, 0)
                for i in range(count):
                    if not _is_storable(&self.columns[c], self.lengths[given][i]) or self.lengths[given][i] > left:
                        raise AssertionError("lengths must be those of the values")
                    left -= self.lengths[given][i]
                if left:
                    raise AssertionError("lengths must be those of the values")
                given += 1
            elif c != self.return_column:
                array = arrays[given]
                if not (_is_exact(&self.columns[c], array, 1) and cnp.PyArray_DIM(array, 0) == count):
                    raise AssertionError("columns must be exact arrays here")
                self.sources[given] = <const char*>cnp.PyArray_DATA(array)
                given += 1

    cdef void _next_sources(self) noexcept nogil:
        cdef int c, given = 0
        for c in range(self.column_count):
            if self.columns[c].is_ragged:
                self.sources[given] += self.lengths[given][0] * self.columns[c].heap.element
                self.lengths[given] += 1
                given += 1
            elif c != self.return_column:
                self.sources[given] += self.columns[c].size
                given += 1

    cdef int64_t _room_of(self, int32_t index) noexcept nogil:
        """Return the number of entries that still fit into a lane's open episode."""
        cdef Lane* lane = &self.lanes[index]
        cdef int64_t length = self.episodes[lane.episode].length
        if length == 0:
            return self.takeable_rows
        if lane.wrapped:
            return lane.first_offset - lane.offset
        return self._page_size(lane.page) - lane.offset + self.takeable_rows + lane.first_offset

    cdef int64_t _rooms_for(self, const int64_t* index, int64_t count, int64_t* bad) noexcept:
        """Return 0 if one entry fits into each of several lanes, or a status below 0 for the lane `bad`."""
        cdef int64_t i, left = self.takeable_pages
        cdef Lane* lane
        cdef bint has_row
        for i in range(count):
            bad[0] = index[i]
            if index[i] < 0 or index[i] >= self.lane_count or self.lanes[index[i]].episode < 0:
                return NOT_OPEN
            self.lanes[index[i]].named = False
        for i in range(count):
            bad[0] = index[i]
            lane = &self.lanes[index[i]]
            if lane.named:
                return REPEATED
            lane.named = True
            has_row = lane.page >= 0 and lane.offset < (lane.first_offset if lane.wrapped else self._page_size(lane.page))
            if self.episodes[lane.episode].length > 0:
                if has_row or (left == 0 and not lane.wrapped and lane.first_offset > 0):
                    continue
                if lane.wrapped:
                    return TOO_LONG
            # Another lane can take the page that a lane holds between two episodes, but then that lane takes another page.
            left -= 1
            if left < 0:
                return TOO_LONG
        return 0

    # Drawing

    @property
    def capacity(self):
        """Most entries that the memory can hold."""
        return self.capacity_

    @property
    def num_entries(self):
        """Entries stored now, with those of open episodes."""
        return self.entries

    @property
    def num_episodes(self):
        """Number of closed episodes stored now."""
        return self.closed

    @property
    def generated(self):
        """Number of all entries ever added."""
        return self.generated_

    @property
    def max_priority(self):
        """Largest priority so far, at least 1."""
        return self.max_priority_

    def _sums(self, bint with_least=True):
        """Return (total weight, entries with positive weight, least positive weight or infinity), consistent with each other. Entries
        that are too old by now have weight 0.

        The cost of the least weight is proportional to the changes since the last call; with_least=False returns 0 for it.
        """
        cdef double least
        self._hold()
        try:
            with nogil:
                if self.is_limited:
                    self._expire()
                tree_settle(&self.tree)
                least = self._least() if with_least else 0.0
            return self._total(), self.tree.positive, least
        finally:
            self._release()

    cdef double _random(self) noexcept nogil:
        """Return a random fraction in [0, 1): the upper 53 bits of xoshiro256++ (Blackman and Vigna, 2019)."""
        cdef uint64_t* s = self.random
        cdef uint64_t mixed = s[0] + s[3], shifted = s[1] << 17
        mixed = ((mixed << 23) | (mixed >> 41)) + s[0]
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted
        s[3] = (s[3] << 45) | (s[3] >> 19)
        return <double>(mixed >> 11) * (1.0 / 9007199254740992.0)

    def _draw(self, int64_t count, fractions, cnp.ndarray weights=None):
        """Draw entries with replacement by their probabilities; return their numbers, int64 [count]. Return None if all weights are 0,
        or the entries together have fewer further draws. Greedy: the heaviest entries, each once before any is repeated.

        fractions: checked float64 [count], or None for random ones. weights: filled with the weights of the draws, which the
        probabilities were proportional to; see `_draw_limited` if draws are limited.
        """
        cdef cnp.ndarray given = fractions
        cdef cnp.ndarray result = np.empty(count, np.int64)
        cdef cnp.ndarray shares = np.empty(count, np.float64) if weights is None else weights
        cdef int64_t* number = <int64_t*>cnp.PyArray_DATA(result)
        cdef double* weight = <double*>cnp.PyArray_DATA(shares)
        cdef const double* fraction = NULL if fractions is None else <const double*>cnp.PyArray_DATA(given)
        cdef bint is_possible
        assert fractions is None or cnp.PyArray_SIZE(given) == count
        assert cnp.PyArray_SIZE(shares) == count
        self._hold()
        try:
            with nogil:
                if self.is_limited:
                    self._expire()
                tree_settle(&self.tree)
                is_possible = self._total() > 0.0 and (self.most_drawn == 0 or self.draws_left_ >= count)
                if is_possible:
                    if self.most_drawn > 0:
                        self._draw_limited(count, fraction, number, weight)
                    else:
                        self._draw_any(count, fraction, number, weight)
                    if fraction == NULL and (self.is_stratified or self.prioritization == GREEDY):
                        self._shuffle(number, weight, count)
            return result if is_possible else None
        finally:
            self._release()

    cdef void _draw_any(self, int64_t count, const double* fraction, int64_t* number, double* weight) noexcept nogil:
        """Draw samples that all have the same probabilities, since no weight changes meanwhile."""
        cdef double masses[CHUNK]
        cdef double total = self._total()
        cdef int64_t i, start = 0, size
        cdef Meta* meta
        while start < count:
            size = min(<int64_t>CHUNK, count - start)
            for i in range(size):
                masses[i] = self._fraction(start + i, count, fraction) * total
            if self.prioritization == PROPORTIONAL:
                tree_find(&self.tree, masses, size, number + start)
            else:
                self._find_ranked(masses, size, number + start)
            for i in range(start, start + size):
                prefetch(&self.meta[number[i]])
            for i in range(start, start + size):
                meta = &self.meta[inside(number[i], self.capacity_)]
                weight[i] = self._mass(number[i])
                meta.drawn += meta.drawn < MAX_COUNTED
                number[i] = meta.number
            start += CHUNK

    cdef void _draw_limited(self, int64_t count, const double* fraction, int64_t* number, double* weight) noexcept nogil:
        """Draw one sample after the other; an entry at its limit of draws has weight 0 for the samples after it.

        `weight` is w S / S_j N_j / N, with S, N before the draw and S_j, N_j before this sample. So N weight / S is the probability
        times the number of entries at this sample, from which importance is computed as in a draw without limits.
        """
        cdef double mass, left, total = self._total(), entries = <double>self.tree.positive
        cdef int64_t i, row, at = 0
        cdef Meta* meta
        for i in range(count):
            left = self._total()
            if self.prioritization == GREEDY:
                at = 0 if at >= self.order.count else at
                row = order_leaf(&self.order, at + 1)
                at += 1
            else:
                mass = self._fraction(i, count, fraction) * left
                if self.prioritization == PROPORTIONAL:
                    tree_find(&self.tree, &mass, 1, &row)
                else:
                    self._find_ranked(&mass, 1, &row)
            meta = &self.meta[inside(row, self.capacity_)]
            weight[i] = self._mass(row) * (total / left) * (<double>self.tree.positive / entries)
            number[i] = meta.number
            meta.drawn += 1
            self.draws_left_ -= 1
            if meta.drawn >= self.most_drawn:
                self._put(row, 0.0)
                tree_settle(&self.tree)
                at -= 1

    cdef double _fraction(self, int64_t i, int64_t count, const double* given) noexcept nogil:
        """Return the fraction in [0, 1) at which the i-th of `count` samples is drawn."""
        if given != NULL:
            return given[i]
        if self.prioritization == GREEDY:
            return (<double>(i % self.order.count) + 0.5) / <double>self.order.count
        if self.is_stratified:
            return min((<double>i + self._random()) / <double>count, 1.0 - 1.1102230246251565e-16)
        return self._random()

    cdef void _find_ranked(self, const double* masses, int64_t count, int64_t* rows) noexcept nogil:
        cdef int64_t i, rank
        for i in range(count):
            if self.prioritization == GREEDY:
                rank = min(<int64_t>masses[i] + 1, self.order.count)
            else:
                rank = order_find(&self.order, masses[i], self.order.count)
            rows[i] = order_leaf(&self.order, rank)

    cdef void _shuffle(self, int64_t* numbers, double* weights, int64_t count) noexcept nogil:
        """Shuffle both arrays in place, by the algorithm of Fisher and Yates."""
        cdef int64_t i, other, number
        cdef double weight
        for i in range(count - 1, 0, -1):
            other = min(<int64_t>(self._random() * <double>(i + 1)), i)
            number, weight = numbers[i], weights[i]
            numbers[i], weights[i] = numbers[other], weights[other]
            numbers[other], weights[other] = number, weight

    cdef int64_t _rows_of(self, const int64_t* numbers, int64_t count, int64_t* rows) noexcept nogil:
        """Find the rows of entries. Return the position of the first entry that the memory does not have (any more), or -1."""
        cdef int64_t i
        for i in range(count):
            if numbers[i] < 0:
                return i
            rows[i] = numbers[i] % self.capacity_
            prefetch(&self.meta[rows[i]])
        for i in range(count):
            if self.meta[rows[i]].number != numbers[i] or self.meta[rows[i]].episode < 0:
                return i
        return -1

    def _weights(self, cnp.ndarray numbers, cnp.ndarray weights):
        """Fill `weights`, float64 [B], for entries. Return the position of the first missing entry, or -1."""
        cdef int64_t i, bad, count = cnp.PyArray_SIZE(numbers)
        cdef cnp.ndarray rows_ = np.empty(count, np.int64)
        cdef int64_t* row = <int64_t*>cnp.PyArray_DATA(rows_)
        cdef double* weight = <double*>cnp.PyArray_DATA(weights)
        assert cnp.PyArray_SIZE(weights) == count
        self._hold()
        try:
            with nogil:
                bad = self._rows_of(<int64_t*>cnp.PyArray_DATA(numbers), count, row)
                if bad < 0:
                    for i in range(count):
                        weight[i] = self._mass(row[i])
            return bad
        finally:
            self._release()

    def _update_priorities(self, cnp.ndarray numbers, cnp.ndarray td_errors, double epsilon):
        """Set the priorities of the stored entries to abs(td) + epsilon. Return (applied, stale), or (-1, position) of the first TD error
        that is not finite; then no priority was set."""
        cdef int64_t i, row, begin, end = 0, applied = 0, count = cnp.PyArray_SIZE(numbers)
        cdef int64_t* number = <int64_t*>cnp.PyArray_DATA(numbers)
        cdef double* td = <double*>cnp.PyArray_DATA(td_errors)
        cdef float largest = 0.0
        cdef Meta* meta
        assert cnp.PyArray_SIZE(td_errors) == count
        self._hold()
        try:
            with nogil:
                for i in range(count):
                    if not isfinite(td[i]):
                        applied = -1
                        row = i
                        break
            if applied < 0:
                return -1, row
            with nogil:
                while end < count:  # as many at a time as fit into the nearest cache
                    begin, end = end, min(end + CHUNK, count)
                    for i in range(begin, end):
                        if number[i] >= 0:
                            prefetch(&self.meta[number[i] % self.capacity_])
                            prefetch(self.tree.sums[0] + number[i] % self.capacity_)
                    for i in range(begin, end):
                        if number[i] < 0:
                            continue
                        row = number[i] % self.capacity_
                        meta = &self.meta[row]
                        if meta.number == number[i] and meta.episode >= 0:
                            meta.priority = _float(fabs(td[i]) + epsilon)
                            meta.learned = 1
                            largest = max(largest, meta.priority)
                            self._put(row, self._weight(row))
                            applied += 1
                self.max_priority_ = max(self.max_priority_, <double>largest)
                tree_settle(&self.tree)
            return applied, count - applied
        finally:
            self._release()

    def _count_replaced(self, cnp.ndarray numbers, double seconds):
        """Return the number of entries that were replaced: another entry was written to their row more than `seconds` ago."""
        cdef int64_t i, row, replaced = 0, count = cnp.PyArray_SIZE(numbers)
        cdef int64_t* number = <int64_t*>cnp.PyArray_DATA(numbers)
        cdef double since = self._now() - seconds
        self._hold()
        try:
            with nogil:
                for i in range(count):
                    row = number[i] % self.capacity_ if number[i] >= 0 else 0
                    replaced += number[i] < 0 or (self.meta[row].number > number[i] and self.meta[row].born < since)
            return replaced
        finally:
            self._release()

    def _set_facts(self, cnp.ndarray numbers, cnp.ndarray priorities, cnp.ndarray learned, cnp.ndarray born, cnp.ndarray drawn=None):
        """Set facts of entries from another memory: priority float32 [B] (below 0: none yet), learned uint8 [B] (1: a learner set it),
        Unix time of adding float64 [B], and draws uint32 [B] (None leaves them). Return the position of the first missing entry, or -1."""
        cdef int64_t i, bad, count = cnp.PyArray_SIZE(numbers)
        cdef cnp.ndarray rows_ = np.empty(count, np.int64)
        cdef int64_t* rows = <int64_t*>cnp.PyArray_DATA(rows_)
        cdef float* priority = <float*>_data(priorities, count)
        cdef uint8_t* is_learned = <uint8_t*>_data(learned, count)
        cdef double* since = <double*>_data(born, count)
        cdef uint32_t* times = <uint32_t*>_data(drawn, count)
        cdef Meta* meta
        self._hold()
        try:
            with nogil:
                bad = self._rows_of(<int64_t*>cnp.PyArray_DATA(numbers), count, rows)
                for i in range(count if bad < 0 else 0):
                    meta = &self.meta[rows[i]]
                    self._put(rows[i], 0.0)  # uses the former facts
                    meta.priority, meta.learned, meta.born = priority[i], is_learned[i], since[i]
                    if times != NULL:
                        meta.drawn = times[i]
                    self.max_priority_ = max(self.max_priority_, <double>priority[i])
                    self._put(rows[i], self._weight(rows[i]))
                tree_settle(&self.tree)
            return bad
        finally:
            self._release()

    def _count_draws(self, cnp.ndarray numbers, bint is_back=False):
        """Count one more draw of each of these entries, int64 [B], which the caller drew itself; or with is_back one draw less, since it
        was cancelled. Return the position of the first missing entry, or -1."""
        cdef int64_t i, bad, count = cnp.PyArray_SIZE(numbers)
        cdef cnp.ndarray rows_ = np.empty(count, np.int64)
        cdef int64_t* rows = <int64_t*>cnp.PyArray_DATA(rows_)
        cdef Meta* meta
        self._hold()
        try:
            with nogil:
                bad = self._rows_of(<int64_t*>cnp.PyArray_DATA(numbers), count, rows)
                for i in range(count if bad < 0 else 0):
                    meta = &self.meta[rows[i]]
                    if self.most_drawn == 0:
                        if is_back:
                            meta.drawn -= 0 < meta.drawn < MAX_COUNTED
                        else:
                            meta.drawn += meta.drawn < MAX_COUNTED
                        continue
                    self._put(rows[i], 0.0)  # uses the former number of draws
                    meta.drawn += -1 if is_back else 1
                    self._put(rows[i], self._weight(rows[i]))
                tree_settle(&self.tree)
            return bad
        finally:
            self._release()

    # Windows and gathering

    cdef inline void _fill_back(self, int64_t row, int64_t position, int64_t* codes, int64_t count) noexcept nogil:
        """Write the codes of `count` frames, the newest (last) at `row`; before the episode's first frame as the parameter `start`."""
        cdef int64_t i = count - 1
        while i >= 0:
            codes[i] = row
            i -= 1
            if position == 0:
                break
            position -= 1
            if i >= 0:
                row = self._before(row)
        while i >= 0:
            codes[i] = NOTHING if self.start == ZERO else row
            i -= 1

    cdef void _window(self, int64_t row, int64_t* prev_codes, int64_t* next_codes, int64_t* next_row, int32_t* steps,
                      float* reward, float* discount) noexcept nogil:
        """Compute both ends of an entry's window and the discounted rewards between them. An output that is NULL is left out.

        The window of the entry at position t, in an episode of length L, ends s = min(multi_step, L - t) steps later; t + s == L is the
        final state. If the final state is unknown (such entries have weight 0), its frames are zeros and the discount is 0.
        """
        cdef Meta* meta = &self.meta[inside(row, self.capacity_)]
        cdef Episode* episode = &self.episodes[inside(meta.episode, self.episode_slots)]
        cdef int64_t s = min(self.multi_step, episode.length - meta.position), j, d, last = row, code, dimensions = self.dimensions
        cdef bint at_end = meta.position + s == episode.length
        cdef double* total = self.work
        cdef double* power = self.work + dimensions
        cdef const char* rewards = self.columns[self.reward_column].data if self.reward_column >= 0 else NULL
        if reward != NULL:
            for d in range(dimensions):
                total[d] = 0.0
                power[d] = 1.0
        for j in range(s):
            if j > 0:
                last = self._after(last)
            if reward != NULL:
                for d in range(dimensions):
                    if rewards != NULL:
                        total[d] += power[d] * (<const float*>(rewards + last * 4 * dimensions))[d]
                    power[d] *= self.gamma[d]
        if at_end:
            code = -(episode.final + 2) if episode.final >= 0 else NOTHING
        else:
            code = self._after(last)
        if prev_codes != NULL:
            self._fill_back(row, meta.position, prev_codes, self.frame_stack)
        if next_codes != NULL:
            if at_end:
                next_codes[self.frame_stack - 1] = code
                self._fill_back(last, episode.length - 1, next_codes, self.frame_stack - 1)
            else:
                self._fill_back(code, meta.position + s, next_codes, self.frame_stack)
        if next_row != NULL:
            next_row[0] = code
        if steps != NULL:
            steps[0] = <int32_t>s
        if reward != NULL:
            for d in range(dimensions):
                reward[d] = _float(total[d])
                discount[d] = 0.0 if at_end and (episode.terminated or episode.final < 0) else <float>power[d]

    cdef void _copy_codes(self, const Column* column, const int64_t* codes, int64_t count, char* out) noexcept nogil:
        """Fill `count` rows of a batch by code: rows of the column, final states (bootstrap values for a value column), or zeros."""
        cdef int64_t size = column.size, i, code
        cdef const char* data = column.data
        for i in range(count):
            if i + AHEAD < count and codes[i + AHEAD] >= 0:
                prefetch_row(data + codes[i + AHEAD] * size, size)
            code = codes[i]
            if code >= 0:
                copy_row(out, data + inside(code, self.capacity_) * size, size)
            elif code != NOTHING and column.finals != NULL:
                copy_row(out, column.finals + inside(-(code + 2), self.final_rows) * size, size)
            elif code != NOTHING and column.role == VALUE:
                memcpy(out, self.final_values + inside(-(code + 2), self.final_rows) * self.dimensions, size)
            else:
                memset(out, 0, size)
            out += size

    def _gather(self, cnp.ndarray numbers, list prev, list next, cnp.ndarray reward, cnp.ndarray discount, cnp.ndarray steps,
                cnp.ndarray weights, cnp.ndarray ages, cnp.ndarray versions):
        """Fill a batch. prev, next: lists of (column, array [B, ...]). Return the position of the first missing entry, or -1."""
        cdef int64_t count = cnp.PyArray_SIZE(numbers), k = self.frame_stack, start, size, i, bad = -1, dimensions = self.dimensions
        cdef int64_t* number = <int64_t*>cnp.PyArray_DATA(numbers)
        cdef cnp.ndarray scratch = np.empty(min(count, CHUNK) * (2 * k + 2), np.int64)
        cdef int64_t* rows = <int64_t*>cnp.PyArray_DATA(scratch)
        cdef int64_t* next_rows = rows + min(count, CHUNK)
        cdef int64_t* prev_codes = next_rows + min(count, CHUNK)
        cdef int64_t* next_codes = prev_codes + min(count, CHUNK) * k
        cdef float* total = <float*>cnp.PyArray_DATA(reward)
        cdef float* factor = <float*>cnp.PyArray_DATA(discount)
        cdef int32_t* step = <int32_t*>cnp.PyArray_DATA(steps)
        cdef float* weight = <float*>cnp.PyArray_DATA(weights)
        cdef float* age = <float*>cnp.PyArray_DATA(ages)
        cdef int64_t* version = <int64_t*>cnp.PyArray_DATA(versions)
        cdef const char* rewards = self.columns[self.reward_column].data if self.reward_column >= 0 else NULL
        cdef int job, jobs, prevs = len(prev)
        cdef Column* column
        cdef const int64_t* codes
        cdef int64_t frames
        cdef double now
        assert cnp.PyArray_SIZE(steps) == cnp.PyArray_SIZE(weights) == cnp.PyArray_SIZE(ages) == cnp.PyArray_SIZE(versions) == count
        assert cnp.PyArray_SIZE(reward) == cnp.PyArray_SIZE(discount) == count * dimensions
        self._hold()
        try:
            jobs = self._plan_copies(prev, next, count)
            with nogil:
                now = self._now()
                start = 0
                while start < count:
                    size = min(<int64_t>CHUNK, count - start)
                    bad = self._rows_of(number + start, size, rows)
                    if bad >= 0:
                        bad += start
                        break
                    for i in range(size):
                        prefetch(self.tree.sums[0] + rows[i])
                        if rewards != NULL:
                            prefetch(rewards + rows[i] * 4 * dimensions)
                    for i in range(size):
                        if k == 1:
                            self._window(rows[i], NULL, NULL, next_rows + i, step + start + i, total + (start + i) * dimensions,
                                         factor + (start + i) * dimensions)
                        else:
                            self._window(rows[i], prev_codes + i * k, next_codes + i * k, next_rows + i, step + start + i,
                                         total + (start + i) * dimensions, factor + (start + i) * dimensions)
                        weight[start + i] = _float(self._mass(rows[i]))
                        age[start + i] = <float>max(now - self.meta[rows[i]].born, 0.0)
                        version[start + i] = self.meta[rows[i]].model_version
                    for job in range(jobs):
                        column = self.copies[job].column
                        if k == 1 or column.role != STATE:
                            codes = rows if job < prevs else next_rows
                            frames = size
                        else:
                            codes = prev_codes if job < prevs else next_codes
                            frames = size * k
                        self._copy_codes(column, codes, frames, self.copies[job].out)
                        self.copies[job].out += frames * column.size
                    start += CHUNK
            return bad
        finally:
            self._release()

    cdef int _plan_copies(self, list prev, list next, int64_t count):
        """Set `copies` to the columns of a batch and their arrays; return their number."""
        cdef int job = 0
        cdef cnp.ndarray out
        cdef Column* column
        assert len(prev) <= self.column_count and len(next) <= self.column_count
        for index, out in prev + next:
            column = &self.columns[inside(index, self.column_count)]
            assert not column.is_ragged
            assert cnp.PyArray_NBYTES(out) == count * column.size * (self.frame_stack if column.role == STATE else 1)
            self.copies[job].column = column
            self.copies[job].out = <char*>cnp.PyArray_DATA(out)
            job += 1
        return job

    def _windows(self, cnp.ndarray rows, cnp.ndarray prev_codes, cnp.ndarray next_codes, cnp.ndarray next_rows, cnp.ndarray steps,
                 cnp.ndarray reward, cnp.ndarray discount):
        """Fill the windows of rows that hold entries: codes int64 [B, K], next_rows int64 [B], steps int32 [B]; reward and discount
        float32 [B, dimensions], both or neither. None leaves an output out. Return the position of the first row without entry, or -1."""
        cdef int64_t count = cnp.PyArray_SIZE(rows), i, bad = -1, k = self.frame_stack, dimensions = self.dimensions
        cdef int64_t* row = <int64_t*>cnp.PyArray_DATA(rows)
        cdef int64_t* prevs = <int64_t*>_data(prev_codes, count * k)
        cdef int64_t* nexts = <int64_t*>_data(next_codes, count * k)
        cdef int64_t* next_row = <int64_t*>_data(next_rows, count)
        cdef int32_t* step = <int32_t*>_data(steps, count)
        cdef float* total = <float*>_data(reward, count * dimensions)
        cdef float* factor = <float*>_data(discount, count * dimensions)
        self._hold()
        try:
            with nogil:
                for i in range(count):
                    if row[i] < 0 or row[i] >= self.capacity_ or self.meta[row[i]].episode < 0:
                        bad = i
                        break
                    if i + AHEAD < count and 0 <= row[i + AHEAD] < self.capacity_:
                        prefetch(&self.meta[row[i + AHEAD]])
                    self._window(row[i], prevs + i * k if prevs else NULL, nexts + i * k if nexts else NULL, next_row + i if next_row else NULL,
                                 step + i if step else NULL, total + i * dimensions if total else NULL,
                                 factor + i * dimensions if total else NULL)
            return bad
        finally:
            self._release()

    def _sequences(self, cnp.ndarray numbers, int64_t m, cnp.ndarray state_codes, cnp.ndarray codes, cnp.ndarray steps,
                   cnp.ndarray discount, cnp.ndarray positions):
        """Fill sequences of M entries that begin with these entries: codes int64 [B, M] of the entries and [B, K + M] of their frames (K -
        1 before the first, and the state after the last), steps int32 [B] up to the episode's end, discount float32 [B, M, dimensions],
        position of the first entry in its episode int64 [B]. Return the position of the first missing entry, or -1."""
        cdef int64_t count = cnp.PyArray_SIZE(numbers), i, j, d, bad, row, s, k = self.frame_stack
        cdef int64_t dimensions = self.dimensions
        cdef cnp.ndarray rows_ = np.empty(count, np.int64)
        cdef int64_t* rows = <int64_t*>cnp.PyArray_DATA(rows_)
        cdef int64_t* frames = <int64_t*>_data(state_codes, count * (k + m))
        cdef int64_t* entries = <int64_t*>_data(codes, count * m)
        cdef int32_t* step = <int32_t*>_data(steps, count)
        cdef float* factor = <float*>_data(discount, count * m * dimensions)
        cdef int64_t* position = <int64_t*>_data(positions, count)
        cdef Episode* episode
        cdef bint is_end
        self._hold()
        try:
            with nogil:
                bad = self._rows_of(<int64_t*>cnp.PyArray_DATA(numbers), count, rows)
                for i in range(count if bad < 0 else 0):
                    row = rows[i]
                    position[i] = self.meta[row].position
                    episode = &self.episodes[inside(self.meta[row].episode, self.episode_slots)]
                    s = min(m, episode.length - position[i])
                    step[i] = <int32_t>s
                    self._fill_back(row, position[i], frames, k)
                    for j in range(m):
                        entries[j] = row if j < s else NOTHING
                        is_end = position[i] + j + 1 == episode.length
                        for d in range(dimensions):
                            factor[d] = 0.0 if j >= s or (is_end and (episode.terminated or episode.final < 0)) else <float>self.gamma[d]
                        if j >= s:
                            frames[k + j] = NOTHING
                        elif is_end:
                            frames[k + j] = -(episode.final + 2) if episode.final >= 0 else NOTHING
                        else:
                            row = self._after(row)
                            frames[k + j] = row
                        factor += dimensions
                    frames += k + m
                    entries += m
            return bad
        finally:
            self._release()

    def _copy_column(self, int index, cnp.ndarray codes, cnp.ndarray out):
        """Copy rows of a column by frame code, int64 [n], into `out`. Return the position of the first invalid code, or -1."""
        cdef int64_t count = cnp.PyArray_SIZE(codes), bad
        cdef int64_t* code = <int64_t*>cnp.PyArray_DATA(codes)
        cdef char* place = <char*>cnp.PyArray_DATA(out)
        cdef Column* column = &self.columns[inside(index, self.column_count)]
        if cnp.PyArray_NBYTES(out) != count * column.size or not cnp.PyArray_IS_C_CONTIGUOUS(out):
            raise ValueError(f"out must be contiguous and have {count * column.size} bytes for {count} rows, got {cnp.PyArray_NBYTES(out)}")
        self._hold()
        try:
            with nogil:
                bad = _first_outside(code, count, -1 - self.final_rows, self.capacity_)
                if bad < 0:
                    self._copy_codes(column, code, count, place)
            return bad
        finally:
            self._release()

    def _copy_ragged(self, int index, cnp.ndarray codes, cnp.ndarray lengths, cnp.ndarray out, int64_t longest):
        """Copy values of a ragged column by frame code, int64 [n]: their numbers of elements into `lengths`, int32 [n], and their elements
        into `out`, unless it is None: [n, longest, ...] padded with zeros, or with longest below 0 one value after the other. Return the
        position of the first invalid code, or -1. Raises ValueError if `out` has another size."""
        cdef int64_t count = cnp.PyArray_SIZE(codes), bad, i, size, room = 0, left = 0
        cdef int64_t* code = <int64_t*>cnp.PyArray_DATA(codes)
        cdef int32_t* length = <int32_t*>_data(lengths, count)
        cdef Column* column = &self.columns[inside(index, self.column_count)]
        cdef int64_t element = column.heap.element
        cdef char* place = NULL
        cdef bint is_padded = longest >= 0
        cdef const Value* value
        if not column.is_ragged:
            raise ValueError("a column of fixed shape has no lengths")
        if out is not None and not cnp.PyArray_ISCARRAY(out):
            raise ValueError("out must be writable and contiguous")
        self._hold()
        try:
            bad = _first_outside(code, count, -1 - self.final_rows, self.capacity_)
            if bad >= 0:
                return bad
            if out is not None:
                place, left = <char*>cnp.PyArray_DATA(out), cnp.PyArray_NBYTES(out)
                room = longest * element if is_padded else 0
                if is_padded and left != count * room:
                    raise ValueError("out does not have the size of these values")
            with nogil:
                for i in range(count):
                    value = NULL
                    if code[i] >= 0 or (code[i] != NOTHING and column.role == STATE):
                        value = self._value(column, code[i])[0]
                    length[i] = <int32_t>value.length if value != NULL else 0
                    if place == NULL:
                        continue
                    size = length[i] * element
                    if size > (room if is_padded else left):
                        bad = i
                        break
                    if value != NULL:
                        memcpy(place, value + 1, size)
                    if is_padded:
                        memset(place + size, 0, room - size)
                        size = room
                    place += size
                    left -= size
            if bad >= 0 or (out is not None and left):
                raise ValueError("out does not have the size of these values")
            return -1
        finally:
            self._release()

    def _heaps(self):
        """Return for each ragged column (column, bytes of its values, bytes held for them, values with an owner, values whose owner or
        length is wrong), for checks and statistics."""
        cdef int c
        cdef int64_t code, values, wrong
        cdef Column* column
        cdef const Value* value
        cdef list found = []
        self._hold()
        try:
            for c in range(self.column_count):
                column = &self.columns[c]
                if not column.is_ragged:
                    continue
                values = wrong = 0
                for code in range(-(self.final_rows + 1) if column.finals != NULL else 0, self.capacity_):
                    value = self._value(column, code)[0] if code != NOTHING else NULL
                    values += value != NULL
                    wrong += value != NULL and (value.owner != code or value.length < 1)
                found.append((c, column.heap.live, column.heap.held, values, wrong))
            return found
        finally:
            self._release()

    @property
    def ragged_bytes(self):
        """Bytes of the values of ragged columns, with a header of 16 bytes each, rounded up to 8 bytes."""
        return self._ragged_live()

    @property
    def ragged_room(self):
        """Bytes held for the values of ragged columns: at most about one and a half times `ragged_bytes` and one MiB for each."""
        cdef int c
        return sum([self.columns[c].heap.held for c in range(self.column_count)])

    def _facts(self, cnp.ndarray rows, cnp.ndarray ages, cnp.ndarray versions, cnp.ndarray weights):
        """Fill ages in seconds float32, model versions int64 and weights float64 of rows; None leaves an output out. Return the position of
        the first row outside of the memory, or -1."""
        cdef int64_t count = cnp.PyArray_SIZE(rows), i, bad
        cdef int64_t* row = <int64_t*>cnp.PyArray_DATA(rows)
        cdef float* age = <float*>_data(ages, count)
        cdef int64_t* version = <int64_t*>_data(versions, count)
        cdef double* weight = <double*>_data(weights, count)
        cdef double now
        self._hold()
        try:
            with nogil:
                now = self._now()
                bad = _first_outside(row, count, 0, self.capacity_)
                if bad < 0:
                    for i in range(count):
                        if age:
                            age[i] = <float>max(now - self.meta[row[i]].born, 0.0)
                        if version:
                            version[i] = self.meta[row[i]].model_version
                        if weight:
                            weight[i] = self._mass(row[i])
            return bad
        finally:
            self._release()

    def _open_entries(self, int64_t index):
        """Return rows int64, given weights float32, ages in seconds float32 and model versions int64, [T] each, of the T entries of a
        lane's open episode, in order. T is 0 if no episode is open."""
        cdef int64_t count, row, i
        cdef int64_t* rows
        cdef int64_t* versions
        cdef float* weights
        cdef float* ages
        cdef double now
        self._hold()
        try:
            count = max(self._open_length(index), 0)
            found = np.empty(count, np.int64), np.empty(count, np.float32), np.empty(count, np.float32), np.empty(count, np.int64)
            rows, versions = <int64_t*>_data(found[0], count), <int64_t*>_data(found[3], count)
            weights, ages = <float*>_data(found[1], count), <float*>_data(found[2], count)
            if count:
                now, row = self._now(), self.episodes[self.lanes[index].episode].first_row
                for i in range(count):
                    rows[i], weights[i], versions[i] = row, self.meta[row].init_w, self.meta[row].model_version
                    ages[i] = <float>max(now - self.meta[row].born, 0.0)
                    row = self._after(row) if i + 1 < count else row
            return found
        finally:
            self._release()

    def contents(self):
        """Return the arrays that the loops work on, for checks and snapshots: meta, pages, lanes, episodes, bootstraps, free_finals,
        final_values, weights; and the ends of lists and counters."""
        weights = self.rooms[0][:self.capacity_]
        state = {"closed": self.closed, "oldest": self.oldest, "newest": self.newest, "first_page": self.first_page,
                 "last_page": self.last_page, "free_episode": self.free_episode, "free_final_count": self.free_final_count,
                 "final_rows": self.final_rows, "takeable_pages": self.takeable_pages, "takeable_rows": self.takeable_rows,
                 "page_rows": self.page_rows}
        return {**self.arrays, "weights": weights, "columns": list(self.data_arrays), "finals": list(self.final_arrays), **state}

    def _counters(self):
        """Return the state beside the arrays: counters, ends of lists, current limits, and the state of the random numbers."""
        cdef int i
        return {"generated": self.generated_, "oldest": self.oldest, "newest": self.newest, "first_page": self.first_page,
                "last_page": self.last_page, "free_episode": self.free_episode, "free_final_count": self.free_final_count,
                "final_rows": self.final_rows, "newest_model": self.newest_model_, "oldest_model": self.oldest_model,
                "oldest_born": self.oldest_born, "max_priority": self.max_priority_, "random": [self.random[i] for i in range(4)]}

    def _take_over(self, dict arrays, dict counters, int64_t entries, int64_t closed):
        """Take over the state of another memory with the same settings: arrays from `contents` and counters from `_counters`, which the
        caller has checked. The caller then writes facts and values of entries, and calls `_set_weights` last."""
        cdef int64_t page
        cdef int c
        self._hold()
        try:
            for name in ("pages", "lanes", "episodes", "bootstraps", "free_finals", "final_values"):
                new = _aligned(len(arrays[name]), arrays[name].dtype)
                new[:] = arrays[name]
                self._keep(name, new)
            self.lane_count, self.episode_slots = len(arrays["lanes"]), len(arrays["episodes"])
            self.final_rows, self.free_final_count = counters["final_rows"], counters["free_final_count"]
            for c in range(self.column_count):
                if self.columns[c].role == STATE:
                    new = _aligned(self.final_rows * self.columns[c].size, np.uint8)
                    self.final_arrays[c] = new
                    self.columns[c].finals = <char*>cnp.PyArray_DATA(new)
            self.generated_, self.entries, self.closed = counters["generated"], entries, closed
            self.oldest, self.newest, self.free_episode = counters["oldest"], counters["newest"], counters["free_episode"]
            self.first_page, self.last_page = counters["first_page"], counters["last_page"]
            self.takeable_pages, self.takeable_rows = self.page_count, self.capacity_
            for page in range(self.page_count):
                if self.pages[page].is_open:
                    self.takeable_pages -= 1
                    self.takeable_rows -= self._page_size(page)
            self.newest_model_, self.oldest_model = counters["newest_model"], counters["oldest_model"]
            self.oldest_born, self.max_priority_ = counters["oldest_born"], counters["max_priority"]
            self._seed(counters["random"])
        finally:
            self._release()

    def _set_weights(self, const double[::1] weights):
        """Set the weights of all rows, float64 [capacity]."""
        cdef int64_t row
        self._hold()
        try:
            for row in range(self.capacity_):
                tree_put(&self.tree, row, weights[row])
            tree_settle(&self.tree)
            self._watch_anew()
            if self.is_ordered:
                self._order_anew()
        finally:
            self._release()

    def _go_on(self, double max_priority):
        """Raise `max_priority`, the priority of new entries, to that of the memory whose state was taken over."""
        self._hold()
        self.max_priority_ = max(self.max_priority_, max_priority)
        self._release()

    def _put_values(self, int index, const int64_t[::1] codes, const int64_t[::1] lengths, cnp.ndarray values):
        """Store values of a ragged column for rows or final states without values, by code; `values` has them one after the other."""
        cdef Column* column = &self.columns[index]
        cdef const char* source = <const char*>cnp.PyArray_DATA(values)
        cdef Value* value
        cdef int64_t i
        self._hold()
        try:
            for i in range(codes.shape[0]):
                if not heap_put(&column.heap, source, lengths[i], &value):
                    raise MemoryError()
                self._own_value(column, codes[i], value)
                source += lengths[i] * column.heap.element
        finally:
            self._release()

    def set_clock(self, seconds):
        """Fix the clock at `seconds` of Unix time, for tests; None restores the real clock."""
        self.fixed_now = -1.0 if seconds is None else seconds
        if self.most_age > 0.0:
            self.oldest_born = self._now() - self.most_age


# The usual step of a writer: no episode ends or is reset, and every value has its column's dtype and shape. One call does the whole
# work of `Writer.step` then; it leaves any other step to `Writer.step`, and changes nothing.

cdef enum:
    OBS = 0
    ACTION = 1
    GIVEN_REWARD = 2
    TERMINATED = 3
    TRUNCATED = 4
    EXTRA = 5

cdef enum:
    FEW_BYTES = 1 << 16  # copying them takes less time than releasing and taking the GIL


def same_place(one, two):
    """Return True if two values are the same array, or views at the same address; False for scalars."""
    return _is_same_place(one, two)


cdef bint _is_same_place(object one, object two):
    cdef object base
    if not cnp.PyArray_Check(one) or not cnp.PyArray_Check(two) or cnp.PyArray_NDIM(<cnp.ndarray>one) == 0:
        return False
    if one is two:
        return True
    if cnp.PyArray_DATA(<cnp.ndarray>one) != cnp.PyArray_DATA(<cnp.ndarray>two):
        return False
    base = one.base
    return base is not None and base is two.base


@cython.auto_pickle(False)
cdef class StepCounter:
    """State of a writer that changes with each step.

    Attributes:
        _inside: Lock of the writer's calls.
        _clock: Number of steps recorded.
        _room: Steps until one is checked in full; also a step after an end, an error or an interrupt is.
        _untold: Entries that were not reported to the observer yet.
        _last: Observation that the next step should start from, as it was given.
        _owned: True if it is an array of its own, which a reset does not overwrite.
        _apart: Last observation of each environment, in place of `_last`, once environments step separately.
        _pending: Mask of the environments whose next step is their reset.
        _answer: Answer of the observer that the writer has not acted on yet.
    """

    cdef public object _inside, _last, _apart, _pending, _answer
    cdef public int64_t _clock, _room, _untold
    cdef public bint _owned

    def _tell(self, on_entries):
        """Report the entries that were not reported yet to an observer, and keep its answer."""
        count, self._untold = self._untold, 0
        self._answer = on_entries(count) or ""


@cython.auto_pickle(False)
cdef class UsualSteps:
    """Fast path of a writer: adds usual steps to its lanes.

    Args:
        store: Memory without ragged columns.
        lanes: Numbers of the lanes, int64 [N].
        returns: float64 [N, *R], to which rewards are added as given, without rounding.
        sources: For each column but the return: name of the argument of `add`, or its name among the extras.
        is_single: True if values have no axis of environments.
        is_checked: True if obs must be the array that the last step returned.
    """

    cdef EntryStore store
    cdef cnp.ndarray lanes, returns, rewards, weights, numbers
    cdef tuple names
    cdef list arguments
    cdef int64_t count, entry_bytes
    cdef bint is_single, is_checked

    def __cinit__(self, EntryStore store not None, cnp.ndarray lanes not None, cnp.ndarray returns not None, tuple sources not None,
                  bint is_single, bint is_checked):
        cdef int c
        self.store, self.lanes, self.returns = store, lanes, returns
        self.is_single, self.is_checked = is_single, is_checked
        self.count = cnp.PyArray_SIZE(lanes)
        if store.has_ragged or len(sources) != store.entry_columns:
            raise AssertionError("sources must name each column, and no column may be ragged")
        if not cnp.PyArray_ISCARRAY(returns) or cnp.PyArray_TYPE(returns) != cnp.NPY_FLOAT64 or cnp.PyArray_TYPE(lanes) != cnp.NPY_INT64:
            raise AssertionError("returns must be float64, and lanes int64")
        places = ("obs", "action", "reward", "terminated", "truncated")
        self.names = sources
        self.arguments = [places.index(name) if name in places else EXTRA for name in sources]
        self.rewards = np.empty((<object>returns).shape, np.float32)
        self.weights = np.empty(self.count, np.float32)
        self.numbers = np.empty(self.count, np.int64)
        for c in range(store.column_count):
            self.entry_bytes += store.columns[c].size

    def add(self, StepCounter writer not None, obs, action, reward, terminated, truncated, next_obs, dict extras not None, init_w,
            model_version):
        """Record a step of every environment, with the arguments of `Writer.step`.

        Return True if the step was recorded. Return False, and change nothing, if the step is unusual or another thread uses the writer.
        """
        if writer._room <= 0 or writer._apart is not None or writer._pending is not None or not writer._inside.acquire(False):
            return False
        try:
            return self._take(writer, (obs, action, reward, terminated, truncated), next_obs, extras, init_w, model_version)
        finally:
            writer._inside.release()

    cdef bint _take(self, StepCounter writer, tuple given, next_obs, dict extras, init_w, model_version) except -1:
        cdef int status
        cdef int64_t version
        cdef bint is_large = self.entry_bytes * self.count > FEW_BYTES
        obs, last, terminated, truncated = given[OBS], writer._last, given[TERMINATED], given[TRUNCATED]
        if _is_same_place(obs, next_obs) or (self.is_checked and last is not None and obs is not last):
            return False
        version = self.store._version_of(model_version)
        if version < 0 or type(init_w) is not float or not is_weight(init_w):
            return False
        if not (self._goes_on(terminated) and self._goes_on(truncated)):
            return False
        # Small steps run without the lock, as `EntryStore.add`: they hold the GIL, and no other thread is in the memory.
        if is_large:
            self.store._hold()
        elif self.store.busy > 0:
            return False
        try:
            status = self._add(given, extras, init_w, version, is_large)
        finally:
            if is_large:
                self.store._release()
        if status < 0:
            return False
        writer._clock += 1
        writer._room -= 1
        writer._untold += self.count
        writer._owned = last is not None and not _is_same_place(last, next_obs)
        writer._last = next_obs
        return True

    cdef bint _goes_on(self, object ended) except -1:
        """Return True if `ended` is false for every environment, in a form that needs no conversion."""
        cdef const char* flags
        cdef int64_t i
        if self.is_single:
            return ended is False or ((type(ended) is int or cnp.PyArray_CheckScalar(ended)) and not ended)
        if type(ended) is not cnp.ndarray or not cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>ended):
            return False
        if cnp.PyArray_TYPE(<cnp.ndarray>ended) != cnp.NPY_BOOL or cnp.PyArray_SIZE(<cnp.ndarray>ended) != self.count:
            return False
        flags = <const char*>cnp.PyArray_DATA(<cnp.ndarray>ended)
        for i in range(self.count):
            if flags[i]:
                return False
        return True

    cdef int _add(self, tuple given, dict extras, double init_w, int64_t model_version, bint is_large) except -100:
        """Add one entry to each lane. Return 0, or a status below 0 if a value is unusual. No other thread may be in the memory."""
        cdef EntryStore store = self.store
        cdef const int64_t* lane = <const int64_t*>cnp.PyArray_DATA(self.lanes)
        cdef float* weights = <float*>cnp.PyArray_DATA(self.weights)
        cdef int64_t* numbers = <int64_t*>cnp.PyArray_DATA(self.numbers)
        cdef int64_t bad, i, status
        cdef double single = 0.0
        cdef const double* rewards = NULL
        cdef const float* rounded = NULL
        cdef cnp.ndarray array
        reward = given[GIVEN_REWARD]
        if type(reward) is cnp.ndarray:
            array = reward
            if not cnp.PyArray_ISCARRAY_RO(array) or cnp.PyArray_SIZE(array) != cnp.PyArray_SIZE(self.returns):
                return NOT_EXACT
            if cnp.PyArray_TYPE(array) == cnp.NPY_FLOAT64:
                rewards = <const double*>cnp.PyArray_DATA(array)
            elif cnp.PyArray_TYPE(array) == cnp.NPY_FLOAT32:
                rounded = <const float*>cnp.PyArray_DATA(array)
            else:
                return NOT_EXACT
        elif cnp.PyArray_SIZE(self.returns) == 1 and (PyFloat_Check(reward) or cnp.PyArray_CheckScalar(reward)):
            single = reward
            rewards = &single
        else:
            return NOT_EXACT
        if not self._find_sources(given, extras, rewards):
            return NOT_EXACT
        status = store._rooms_for(lane, self.count, &bad)
        if status < 0:
            return <int>status
        for i in range(self.count):
            weights[i] = <float>init_w
        if is_large:
            with nogil:
                status = store._place_all(lane, 1, self.count, weights, numbers, model_version)
        else:
            status = store._place_all(lane, 1, self.count, weights, numbers, model_version)
        if status == 0:
            for i in range(cnp.PyArray_SIZE(self.returns)):
                (<double*>cnp.PyArray_DATA(self.returns))[i] += rewards[i] if rewards != NULL else rounded[i]
        return <int>status

    cdef bint _find_sources(self, tuple given, dict extras, const double* rewards) except -1:
        """Point `sources` of the memory at the values. Return False if one needs a conversion other than of float64 rewards [N]."""
        cdef EntryStore store = self.store
        cdef Column* column
        cdef int c, at = 0, argument
        cdef int64_t i
        cdef float* rounded = <float*>cnp.PyArray_DATA(self.rewards)
        for c in range(store.column_count):
            if c == store.return_column:
                continue
            column = &store.columns[c]
            argument = self.arguments[at]
            value = extras[self.names[at]] if argument == EXTRA else given[argument]
            if self.is_single:
                if not store._find_source(c, at, value):
                    return False
            elif type(value) is not cnp.ndarray or cnp.PyArray_NDIM(<cnp.ndarray>value) != 1 + column.dimensions:
                return False
            elif cnp.PyArray_DIM(<cnp.ndarray>value, 0) != self.count:
                return False
            elif _is_exact(column, <cnp.ndarray>value, 1):
                store.sources[at] = <const char*>cnp.PyArray_DATA(<cnp.ndarray>value)
            elif argument == GIVEN_REWARD and rewards != NULL and (<object>value).shape == (<object>self.rewards).shape:
                for i in range(cnp.PyArray_SIZE(self.rewards)):
                    rounded[i] = <float>rewards[i]
                store.sources[at] = <const char*>rounded
            else:
                return False
            at += 1
        return True


# Changes that no interrupt splits
#
# An interrupt (KeyboardInterrupt, or an error from another signal handler) comes between two opcodes of Python, or in a C function
# that waits. So changes that belong together are prepared first, and then made by one call of this module. An interrupt may also
# leave a `with` between its last line and `__exit__`: then the deallocation of the context object releases the lock.


cdef enum:
    MAX_INTERRUPTS = 1000  # interrupts of one wait for a lock, after which it gives up


class NotAdded(Exception):
    """Entries were not added; args are (status, lane, values)."""


def at_once(calls not None):
    """Make calls, pairs of a C function and a tuple of its arguments, without Python code in between. No call may wait: the caller holds
    the locks that they take."""
    for function, arguments in calls:
        function(*arguments)


def setting(owner not None, **attributes):
    """Return the calls, for `at_once`, that set these attributes of an object. Code that runs at each step writes the list itself, which
    takes half as long."""
    return [(setattr, (owner, name, value)) for name, value in attributes.items()]


def while_more(owner, str name not None, function, *arguments):
    """Call a function and return its result; meanwhile the attribute `name` of the owner is greater by 1."""
    setattr(owner, name, getattr(owner, name) + 1)
    try:
        return function(*arguments)
    finally:
        setattr(owner, name, getattr(owner, name) - 1)


@cython.auto_pickle(False)
cdef class Held:
    """Context, for `with`, that holds a lock or a condition with its lock; deallocation releases the lock, too.

    Args:
        lock: Lock or condition to hold.
        refusal: A function and its arguments, called again while another thread holds the lock; it waits or raises an error. Without
            it, `with` waits for the lock.
    """

    cdef object lock
    cdef tuple refusal
    cdef object patience
    cdef int depth

    def __cinit__(self, lock, *refusal):
        self.lock, self.refusal = lock, refusal

    @staticmethod
    def within(lock, double seconds):
        """Return a context that waits at most `seconds` for the lock; `with ... as` gives True if the lock is held."""
        cdef Held made = Held(lock)
        made.patience = seconds
        return made

    def __dealloc__(self):
        while self.depth > 0:
            self.depth -= 1
            self.lock.release()

    def __enter__(self):
        if self.patience is not None:
            self.depth += bool(self.lock.acquire(True, self.patience) if self.patience > 0.0 else self.lock.acquire(False))
            return self.depth > 0
        if not self.refusal:
            self.lock.acquire()
        else:
            while not self.lock.acquire(False):
                self.refusal[0](*self.refusal[1:])
        self.depth += 1
        return self

    def __exit__(self, kind, error, trace):
        if self.depth > 0:
            self.depth -= 1
            self.lock.release()

    def wait(self, timeout=None):
        """Wait at most `timeout` seconds for the condition; return True if it was notified. Call it under the lock."""
        return self.lock.wait(timeout)

    def notify_all(self):
        """Wake all threads that wait for the condition. Call it under the lock."""
        self.lock.notify_all()


@cython.auto_pickle(False)
cdef class Condition:
    """Condition with a re-entrant lock, which `with condition.held():` takes.

    Unlike in `threading`, no line of Python runs between waking and taking the lock: an interrupted wait holds the lock again, too.
    """

    cdef object lock
    cdef list waiters  # a taken lock for each thread that waits; guarded by the lock
    cdef int depth  # number of times that the holder has taken the lock; guarded by the lock

    def __cinit__(self):
        self.lock, self.waiters = threading.RLock(), []

    def acquire(self, blocking=True, timeout=-1):
        """Take the lock; return True if it was taken within `timeout` seconds, or at once if `blocking` is false."""
        is_taken = bool(self.lock.acquire(blocking, timeout))
        self.depth += is_taken
        return is_taken

    def release(self):
        """Release the lock once, after one `acquire`."""
        self.depth -= 1
        self.lock.release()

    def wait(self, timeout=None):
        """Release the lock until `notify_all`, for at most `timeout` seconds, and take it again; return True if it was notified."""
        cdef int _i, depth = self.depth
        cdef bint is_notified = False
        waiter = threading.Lock()
        waiter.acquire()
        self.waiters.append(waiter)
        self.depth = 0
        for _i in range(depth):
            self.lock.release()
        try:
            is_notified = waiter.acquire(True, -1 if timeout is None else max(timeout, 0.0))
        finally:
            self._take_again(depth)
            if not is_notified and waiter in self.waiters:
                self.waiters.remove(waiter)
        return is_notified

    cdef _take_again(self, int depth):
        """Take the lock as many times as before, also if interrupts come; raise the last interrupt afterwards."""
        cdef int taken = 0, interrupts = 0
        error = None
        while taken < depth and interrupts < MAX_INTERRUPTS:
            try:
                self.lock.acquire()
                taken += 1
            except BaseException as interrupt:
                interrupts += 1
                error = interrupt
        self.depth = taken
        if error is not None:
            raise error

    def wait_for(self, is_done, timeout=None):
        """Wait until `is_done` returns a true value, for at most `timeout` seconds; return its last value."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (result := is_done()):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0.0:
                break
            self.wait(left)
        return result

    def held(self):
        """Return a context, for `with`, that holds the lock."""
        return Held(self)

    def notify_all(self):
        """Wake all threads that wait. Call it under the lock."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.release()


@cython.auto_pickle(False)
cdef class EntryCounts:
    """Counts of the entries that a client has recorded since it was created, and of those that may be inserts of the current run.

    Attributes:
        steps, generated_bytes: Entries recorded, and their bytes.
        passed: Steps that are no inserts.
        granted: Most entries of the run that may be inserts.
        _elsewhere: Inserts of other runs, less those that were counted for the run before.
    """

    cdef public int64_t steps, generated_bytes, passed, granted, _elsewhere

    @property
    def inserted(self):
        """Entries that are inserts of the current run."""
        return self.steps - self.passed - self._elsewhere


@cython.auto_pickle(False)
cdef class SampleDebt:
    """Samples that a client has to push as caches for the entries of its writers.

    Attributes:
        _held: Context that holds the lock of the counts.
        _counts: Counts of the client's entries.
        _schedule: Object whose `is_dirty` becomes True after a count.
        _owed: Samples that are to be pushed.
        _asked: Entries that wait until they may be inserts.
        _is_due: True if a cache is to be pushed now.
    """

    cdef public Held _held
    cdef public EntryCounts _counts
    cdef public object _schedule
    cdef public double _owed
    cdef public int64_t _asked
    cdef public bint _is_due

    def _take_granted(self, StepCounter writer not None, double samples, int64_t entry_bytes):
        """Count a writer's entries as inserts, with `samples` samples each. Return False, and change nothing, if entries wait or not all
        may be inserts now. Compiled, since an actor calls it at each step: in Python it takes as long as the rest of a step."""
        cdef int64_t count = writer._untold
        cdef EntryCounts counts = self._counts
        self._held.lock.acquire()
        try:
            if self._asked or counts.granted - (counts.steps - counts.passed - counts._elsewhere) < count:
                return False
            if not self._schedule.is_dirty:
                self._schedule.is_dirty = True
            counts.steps += count
            counts.generated_bytes += count * entry_bytes
            self._owed += count * samples
            writer._untold = 0
            return True
        finally:
            self._held.lock.release()


@cython.auto_pickle(False)
cdef class Moment:
    """Context of `EntryStore.held`, which holds the memory's lock; deallocation releases it, too."""

    cdef EntryStore store
    cdef int depth

    def __cinit__(self, EntryStore store not None):
        self.store = store

    def __dealloc__(self):
        while self.depth > 0:
            self.depth -= 1
            self.store._release()

    def __enter__(self):
        self.store._hold()
        self.depth += 1

    def __exit__(self, kind, error, trace):
        self.depth -= 1
        self.store._release()


cdef inline float _float(double number) noexcept nogil:
    """Return the nearest finite float32."""
    return <float>min(max(number, -3.4028234663852886e38), 3.4028234663852886e38)


cdef inline void* _data(cnp.ndarray array, int64_t count):
    """Return the address of an array of `count` numbers; NULL for None."""
    if array is None:
        return NULL
    assert cnp.PyArray_SIZE(array) == count
    return cnp.PyArray_DATA(array)


cdef bint _is_exact(const Column* column, cnp.ndarray array, int axes):
    """Return True if an array is contiguous, in the column's dtype and native byte order, with `axes` axes in front of its shape."""
    cdef int i
    if cnp.PyArray_TYPE(array) != column.type_num or cnp.PyArray_NDIM(array) != axes + column.dimensions:
        return False
    if not (cnp.PyArray_IS_C_CONTIGUOUS(array) and cnp.PyArray_ISNOTSWAPPED(array)):
        return False
    for i in range(column.dimensions):
        if cnp.PyArray_DIM(array, axes + i) != column.shape[i] and column.shape[i] >= 0:
            return False
    return True


cdef inline bint _is_storable(const Column* column, int64_t length) noexcept nogil:
    """Return True if a ragged column's value may have `length` elements."""
    return 0 <= length <= MAX_VALUE_BYTES and length * column.heap.element <= MAX_VALUE_BYTES


cdef bint _number(int type_num, object value, double* place):
    """Write a plain number as a column's scalar. Return False if the value is no number, does not fit, or needs a conversion."""
    cdef long long whole
    cdef int overflow = 0
    cdef double real
    if cnp.PyArray_CheckScalar(value) and not cnp.PyArray_Check(value) and cnp.PyArray_DescrFromScalar(value).type_num == type_num:
        cnp.PyArray_ScalarAsCtype(value, place)
        return True
    if type_num == cnp.NPY_BOOL:
        if type(value) is not bool:
            return False
        (<uint8_t*>place)[0] = value
        return True
    if type(value) is int:
        whole = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            return False
        if type_num == cnp.NPY_INT64:
            (<int64_t*>place)[0] = whole
            return True
        real = <double>whole
    elif PyFloat_Check(value):
        real = PyFloat_AsDouble(value)
    else:
        return False
    if type_num == cnp.NPY_FLOAT32:
        (<float*>place)[0] = <float>real
        return True
    if type_num == cnp.NPY_FLOAT64:
        place[0] = real
        return True
    return False


cdef inline uint64_t _slot_of(int64_t code, int64_t mask) noexcept nogil:
    """Return the first slot of a frame code in the hash table: multiplicative hashing, whose upper bits are well mixed."""
    return ((<uint64_t>code * <uint64_t>0x9E3779B97F4A7C15) >> 20) & <uint64_t>mask


cdef int64_t _index_frames(const int64_t* codes, int64_t count, uint32_t* index, int64_t* keys, uint32_t* places, int64_t mask,
                           int64_t* sources, int64_t found) noexcept nogil:
    """Number the distinct codes in the order of their first occurrence, from `found` on; return the number of codes so far."""
    cdef int64_t i, code
    cdef uint64_t slot
    for i in range(count):
        code = codes[i]
        if code == NOTHING:
            index[i] = <uint32_t>0xFFFFFFFF
            continue
        slot = _slot_of(code, mask)
        while keys[slot] != code and keys[slot] != NOTHING:
            slot = (slot + 1) & <uint64_t>mask
        if keys[slot] == NOTHING:
            keys[slot] = code
            places[slot] = <uint32_t>found
            sources[found] = code
            found += 1
        index[i] = places[slot]
    return found


cdef uint64_t scatter = int.from_bytes(os.urandom(8), "little") | 1  # odd and random: a peer cannot choose numbers that collide


def newest_of_each(cnp.ndarray numbers not None):
    """Return the row of the last occurrence of each number, in the order of first occurrences: int64 [N] -> int64 [U]."""
    cdef int64_t i, at, found = 0, count = cnp.PyArray_SIZE(numbers), size = 16
    cdef int shift = 60
    while size < 2 * count:
        size, shift = 2 * size, shift - 1
    cdef cnp.ndarray rows = np.empty(count, np.int64), places = np.full(size, -1, np.int32)
    cdef int64_t* row = <int64_t*>cnp.PyArray_DATA(rows)
    cdef int64_t* number = <int64_t*>_data(numbers, count)
    cdef int32_t* place = <int32_t*>cnp.PyArray_DATA(places)
    if count >= 0x7FFFFFFF:
        raise ValueError(f"{count} numbers are more than a table of 32-bit places can hold")
    with nogil:
        for i in range(count):
            at = <int64_t>((<uint64_t>number[i] * scatter) >> shift)
            while place[at] >= 0 and number[row[place[at]]] != number[i]:
                at = (at + 1) & (size - 1)
            if place[at] < 0:
                place[at] = <int32_t>found
                found += 1
            row[place[at]] = i
    return rows[:found]


cdef struct Id:  # `memoire.replay.batch.ID`
    uint64_t first
    uint64_t second
    int64_t number

cdef enum:
    MOST_OWNERS = 32  # most clients in a linear search for each id


def by_owner(cnp.ndarray ids not None):
    """Sort contiguous ids [B] by client, stably: return (rows int64 [B], first position of each client in the rows, int64 [C]), or None
    if there are more clients than MOST_OWNERS."""
    cdef int64_t i, count = cnp.PyArray_SIZE(ids), known = 0, owner = 0, at, begin = 0
    cdef Id* id = <Id*>_data(ids, count)
    cdef Id owners[MOST_OWNERS]
    cdef int64_t sizes[MOST_OWNERS]
    cdef int64_t sorted_[MOST_OWNERS]
    cdef cnp.ndarray rows = np.empty(count, np.int64), which = np.empty(count, np.uint8), begins
    cdef int64_t* row = <int64_t*>cnp.PyArray_DATA(rows)
    cdef int64_t* places
    cdef uint8_t* mine = <uint8_t*>cnp.PyArray_DATA(which)
    assert cnp.PyArray_ITEMSIZE(ids) == sizeof(Id)
    with nogil:
        for i in range(count):
            if known == 0 or owners[owner].first != id[i].first or owners[owner].second != id[i].second:
                owner = 0
                while owner < known and (owners[owner].first != id[i].first or owners[owner].second != id[i].second):
                    owner += 1
                if owner == MOST_OWNERS:
                    known = MOST_OWNERS + 1
                    break
                if owner == known:
                    owners[known], sizes[known] = id[i], 0
                    at = known
                    while at > 0 and (id[i].first < owners[sorted_[at - 1]].first or (
                            id[i].first == owners[sorted_[at - 1]].first and id[i].second < owners[sorted_[at - 1]].second)):
                        sorted_[at] = sorted_[at - 1]
                        at -= 1
                    sorted_[at] = known
                    known += 1
            mine[i] = <uint8_t>owner
            sizes[owner] += 1
    if known > MOST_OWNERS:
        return None
    begins = np.empty(known, np.int64)
    places = <int64_t*>cnp.PyArray_DATA(begins)
    for at in range(known):
        places[at] = begin
        begin += sizes[sorted_[at]]
        sizes[sorted_[at]] = places[at]
    with nogil:
        for i in range(count):
            row[sizes[mine[i]]] = i
            sizes[mine[i]] += 1
    return rows, begins


def unique_frames(prev_codes, next_codes, bint ordered):
    """Return the distinct frames of windows: int64 codes of any shape, or None -> (sources int64 [u], index of prev, index of next).

    Indices are uint32 in the shapes of the codes (None for None): positions in `sources`, or 0xFFFFFFFF for zeros (code -1).
    ordered: sources ascend, so that neighbours in the memory stay neighbours; else they are in the order of first occurrence.
    """
    cdef list given = [None if codes is None else np.ascontiguousarray(codes, np.int64) for codes in (prev_codes, next_codes)]
    cdef list indices = [None if codes is None else np.empty(codes.shape, np.uint32) for codes in given]
    cdef int64_t total = sum([codes.size for codes in given if codes is not None]), size = 16, found = 0, i
    while size < 2 * total:
        size *= 2
    cdef cnp.ndarray keys = np.full(size, NOTHING, np.int64), places = np.empty(size, np.uint32), sources = np.empty(total, np.int64)
    cdef cnp.ndarray codes_, index_, rank
    cdef int64_t* code
    cdef uint32_t* index
    cdef uint32_t* key_places = <uint32_t*>cnp.PyArray_DATA(places)
    cdef int64_t* key = <int64_t*>cnp.PyArray_DATA(keys)
    cdef int64_t* source = <int64_t*>cnp.PyArray_DATA(sources)
    cdef uint32_t* ranks
    if total >= 0xFFFFFFFF:
        raise ValueError(f"{total} frames are more than an index of 32 bits can tell apart")
    for codes_, index_ in zip(given, indices, strict=True):
        if codes_ is None:
            continue
        code = <int64_t*>cnp.PyArray_DATA(codes_)
        index = <uint32_t*>cnp.PyArray_DATA(index_)
        i = cnp.PyArray_SIZE(codes_)
        with nogil:
            found = _index_frames(code, i, index, key, key_places, size - 1, source, found)
    kept = sources[:found].copy()
    if ordered and found:
        order = np.argsort(kept)
        kept = kept[order]
        rank = np.empty(found, np.uint32)
        rank[order] = np.arange(found, dtype=np.uint32)
        ranks = <uint32_t*>cnp.PyArray_DATA(rank)
        for index_ in indices:
            if index_ is None:
                continue
            index = <uint32_t*>cnp.PyArray_DATA(index_)
            total = cnp.PyArray_SIZE(index_)
            with nogil:
                for i in range(total):
                    if index[i] != <uint32_t>0xFFFFFFFF:
                        index[i] = ranks[index[i]]
    return kept, indices[0], indices[1]


cdef double weigh(double* value, Py_ssize_t size, double exponent, double rarest, float* importance) noexcept nogil:
    """Compute value ** -exponent over a divisor, and return the divisor: the largest of them, or rarest ** -exponent if it is larger.

    `value`, N P(i) of each sample, is overwritten by its ratio to the least, whose power float32 holds. A probability that has
    underflowed to 0 counts as the smallest normal number. `rarest`: smallest possible N P(i); infinity to ignore it.
    """
    cdef double least = rarest if isfinite(rarest) else INFINITY
    cdef Py_ssize_t i
    for i in range(size):
        least = min(least, value[i])
    least = max(least, DBL_MIN)
    for i in range(size):
        value[i] = max(value[i], DBL_MIN) / least
        # At least 1, whose power float32 holds; float32 itself does not hold all of them.
        importance[i] = powf(<float>value[i], -<float>exponent) if value[i] <= FLT_MAX else <float>pow(value[i], -exponent)
    return pow(least, -exponent)


def importance(weight, double total, double population, double smallest, double exponent, bint by_largest):
    """Return (population * P) ** -exponent over a divisor, for P = weight / total: float64 [B] -> (float32 [B], divisor).

    The divisor is the largest of the batch, or with `by_largest` that of an entry of weight `smallest`, the least in the memory, if it
    is larger.
    """
    cdef Py_ssize_t i, size = len(weight)
    cdef const double* weights = doubles_of(weight, size)
    cdef cnp.ndarray result = np.empty(size, np.float32)
    cdef float* importance = <float*>cnp.PyArray_DATA(result)
    cdef double* value = <double*>malloc(max(1, size) * sizeof(double))
    cdef double divisor
    if value == NULL:
        raise MemoryError()
    with nogil:
        for i in range(size):
            value[i] = population * (weights[i] / total)
        divisor = weigh(value, size, exponent, population * (smallest / total) if by_largest else INFINITY, importance)
        free(value)
    return result, divisor
