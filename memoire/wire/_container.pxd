"""Layouts of containers, and those that a server holds."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

# Numbers of the wire. `container` has them from here.

cdef enum:
    HEAD_BYTES = 64
    ROW_BYTES = 32
    MAX_PARTS = 32
    ZERO_FRAME = 0xFFFFFFFF  # container has its own: exported it would be a C int, -1

cpdef enum:
    ALIGNMENT = 64
    BOOKKEEPING = 0xFFFF

cpdef enum:  # what a container holds
    KIND_CACHE = 1
    KIND_EPISODE = 2
    KIND_FEEDBACK = 3
    KIND_DRAWN = 4
    KIND_SEQUENCES = 5
    KIND_DRAWN_SEQUENCES = 6
    KIND_ROWS = 7

cpdef enum:  # what a block holds; docs/wire.md says shape and range of each
    PART_PREV = 1
    PART_NEXT = 2
    PART_FRAMES = 3
    PART_PREV_INDEX = 4
    PART_NEXT_INDEX = 5
    PART_PREV_LENGTHS = 6
    PART_NEXT_LENGTHS = 7
    PART_PREV_FRAMES = 8
    PART_NEXT_FRAMES = 9
    PART_FRAMES_LENGTHS = 10
    PART_ENTRIES = 12
    PART_ENTRY_INDEX = 13
    PART_BURN_IN = 14
    PART_ENTRIES_LENGTHS = 15
    PART_NUMBER = 16
    PART_WEIGHT = 17
    PART_REWARD_SUM = 18
    PART_DISCOUNT = 19
    PART_STEPS = 20
    PART_AGE = 21
    PART_MODEL = 22
    PART_CHANCE = 23
    PART_POPULATION = 24
    PART_OWNER = 25
    PART_OWNERS = 26
    PART_INIT_WEIGHT = 27
    PART_FINAL = 28
    PART_TD_ERROR = 29

cpdef enum:  # how many rows a block has
    PER_SAMPLE = 0
    PER_FRAME = 1
    PER_OWNER = 2
    SINGLE = 3
    PER_ENTRY = 4

cdef enum:
    EXTENTS = 5

cdef enum:  # in place of the block of a column's lengths
    FIXED = -1

cpdef enum:
    WHOLE = -2

cdef struct Block:
    uint16_t column
    uint8_t part
    uint8_t extent
    int lengths  # of a ragged column: the block of its values' lengths; FIXED: it is not ragged; WHOLE: it holds one value
    uint64_t row_bytes  # of a ragged column: of one element

cdef struct Field:
    int block       # where its rows are
    int index       # block of the u32 indices into them, -1: row i is sample i's
    size_t each     # indices of one sample
    size_t frames   # rows of one sample: row j is the one at index j / stack + j % stack, so that stacks of a sequence overlap
    size_t stack
    size_t size     # bytes of one row, of a ragged column those of an element


cdef class Layout:
    cdef Block* block
    cdef Field* field  # those of ragged columns behind the others
    cdef int of_part[MAX_PARTS]  # block of each bookkeeping part, -1: not there
    cdef readonly int kind, blocks, fields, frame_stack, reward_size, length, ragged_fields
    cdef bint is_cache, is_drawn  # has sums of its own; has chances and owners in their place
    cdef int otherwise  # the kind where transitions are sequences, and the other way round; 0: there is none


cdef struct View:
    # What kernels need of a held cache; it lives as long as its HeldCache.
    const uint8_t** block   # begin of each block's raw bytes
    uint64_t** begins       # of each block of a ragged column: where its values begin, and where the last one ends; else NULL
    uint32_t samples
    double total_weight     # S_k, N_k
    double positives
    double arrived          # by the pool's clock


cdef class HeldCache:
    cdef Py_buffer buffer
    cdef bint is_held
    cdef View view
    cdef list unpacked
    # Samples are drawn in the order in which they lie; once some were passed over (they are too old) or used up, in that of `left`.
    cdef uint32_t used            # samples already drawn, of `count`
    cdef uint32_t count
    cdef uint32_t* left           # [count] the samples that are left, drawn ones included; NULL: all
    cdef uint32_t* times          # with reuse and a limit: how often each sample was drawn; NULL: none yet
    cdef int64_t again            # how often its samples may be drawn yet, all together, with such a limit
    cdef double eldest            # least moment at which a sample's entry was recorded, or before; by the pool's clock
    cdef int64_t least_model      # least version of the models that made its samples, or less
    cdef double whole             # N_k, while `view.positives` is that of what is not passed over
    cdef readonly Layout layout
    cdef readonly Py_ssize_t nbytes
    cdef readonly uint64_t making
    cdef readonly double made_at, minimum
    cdef readonly int multi_step

    cdef _sum_lengths(self, const uint8_t* source, int i)
    cdef _locate(self, const uint8_t* source, unpack)
    cdef int list_left(self) except -1
    cdef uint32_t pass_over(self, double oldest, int64_t oldest_model) except? 0xFFFFFFFF


cdef inline uint32_t sample_at(HeldCache cache, uint32_t place) noexcept nogil:
    """The sample in this place of those that are left."""
    return cache.left[place] if cache.left != NULL else place
