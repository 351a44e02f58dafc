"""Layouts of containers, and received containers."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

# Numbers of the wire, which `parts` imports.

cdef enum:
    HEAD_BYTES = 64
    ROW_BYTES = 32
    MAX_PARTS = 32
    ZERO_FRAME = 0xFFFFFFFF  # `parts` has its own: exported it would be a C int, -1

cpdef enum:
    ALIGNMENT = 64
    BOOKKEEPING = 0xFFFF

cpdef enum:  # kinds of containers
    KIND_CACHE = 1
    KIND_EPISODE = 2
    KIND_FEEDBACK = 3
    KIND_DRAWN = 4
    KIND_SEQUENCES = 5
    KIND_DRAWN_SEQUENCES = 6
    KIND_ROWS = 7

cpdef enum:  # parts: contents of blocks; docs/development/wire.md has the shape and range of each
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

cpdef enum:  # extents: numbers of rows of a block
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
    int lengths  # for a ragged column, the block of its values' lengths; FIXED: not ragged; WHOLE: the block is one value
    uint64_t row_bytes  # for a ragged column, bytes of one element

cdef struct Field:
    int block       # block of its rows
    int index       # block of the u32 indices into the rows, -1: row i belongs to sample i
    size_t each     # indices of one sample
    size_t frames   # rows of one sample: row j has index number j / stack + j % stack, so that stacks of a sequence overlap
    size_t stack
    size_t size     # bytes of one row; for a ragged column, of one element


cdef class Layout:
    cdef Block* block
    cdef Field* field  # fields of ragged columns come last
    cdef int of_part[MAX_PARTS]  # block of each bookkeeping part, -1: no such block
    cdef readonly int kind, blocks, fields, frame_stack, reward_size, length, ragged_fields
    cdef bint is_cache, is_drawn  # containers with sums in the head; containers with chances and owners instead
    cdef int otherwise  # kind for sequences instead of transitions, or the reverse; 0: no such kind


cdef struct View:
    # Data of a held cache for kernels; it lives as long as its HeldCache.
    const uint8_t** block   # begin of each block's raw bytes
    uint64_t** begins       # for a block of a ragged column, offsets of its values and of the end; else NULL
    uint32_t samples
    double total_weight     # S_k, N_k
    double positives
    double arrived          # by the pool's clock


cdef class HeldCache:
    cdef Py_buffer buffer
    cdef bint is_held
    cdef View view
    cdef list unpacked
    # Samples are drawn in their order in the container; once some were passed over (too old) or used up, in the order of `left`.
    cdef uint32_t used            # samples already drawn, of `count`
    cdef uint32_t count
    cdef uint32_t* left           # [count] remaining samples, drawn ones included; NULL: all samples
    cdef uint32_t* times          # with reuse and a limit: number of draws of each sample; NULL: all 0
    cdef int64_t again            # with reuse and a limit: further draws of all its samples together
    cdef double eldest            # lower bound of the times at which the samples' entries were recorded, by the pool's clock
    cdef int64_t least_model      # lower bound of the model versions of its samples
    cdef double whole             # N_k of the whole cache; `view.positives` is that of the samples not passed over
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
    """Return the number of the remaining sample in this place."""
    return cache.left[place] if cache.left != NULL else place
