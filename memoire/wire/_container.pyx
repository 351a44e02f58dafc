"""Kernels for containers: write a payload in place, and check a received one completely before any value is used."""

cimport cython
cimport numpy as cnp
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport INFINITY, isfinite
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from memoire._kernels.arrays cimport target_of
from memoire._kernels.floats cimport Check, check_of
from memoire._kernels.native cimport EARLIEST, LATEST, MAX_VALUE_BYTES
from ._bytes cimport read16, read32, read64, read_double, read_float, xxh3

import numpy as np

from memoire._core import empty
from memoire.errors import ProtocolError as _ProtocolError

cnp.import_array()

cdef extern from "Python.h":
    bytes PyBytes_FromStringAndSize(const char* source, Py_ssize_t size)
    char* PyBytes_AsString(object data) except NULL

# A container: head (64 bytes), block table (32 bytes a block), blocks at multiples of 64, zeros between blocks, no byte behind the last.
# docs/development/wire.md describes every bit. Schema and parameters alone determine the blocks. So a container is compared with a
# `ContainerLayout`, the list of blocks that it must have, and any difference is refused.
#
#     head | table: (0xFFFF PREV_INDEX) (0xFFFF WEIGHT) (0 FRAMES) (1 PREV) | 0 0 | index | 0 0 | weights | frames of column 0 | ...

cdef struct Fault:
    int status
    int block
    uint64_t found
    uint64_t expected

cdef enum:
    GOOD = 0
    BAD_CHECKSUM
    BAD_SIZE
    BAD_HEAD
    BAD_KIND
    BAD_BLOCKS
    BAD_STACK
    BAD_STEPS
    BAD_CUT
    BAD_LENGTH
    BAD_TOTAL
    BAD_POSITIVE
    BAD_MINIMUM
    BAD_TIME
    BAD_ENTRY
    BAD_CODEC
    BAD_ROWS
    BAD_RAW
    BAD_STORED
    BAD_OFFSET
    BAD_END
    BAD_PADDING
    BAD_EXPANSION
    BAD_INDEX
    BAD_VALUE
    BAD_LENGTHS

_FAULTS = {
    BAD_CHECKSUM: ("payload", "the payload's checksum is {found:#x}, but its header says {expected:#x}; it changed on the way"),
    BAD_SIZE: ("container", "{found} bytes are too few for a head and its table, which need {expected}"),
    BAD_HEAD: ("container", "bytes of the head that must be 0 are {found:#x}"),
    BAD_KIND: ("container", "kind {found}, expected {expected}"),
    BAD_BLOCKS: ("parameters", "the container has {found} blocks, but this node's schema and parameters require {expected}"),
    BAD_STACK: ("parameters", "frame_stack is {found}, but this node's parameters say {expected}"),
    BAD_STEPS: ("container", "multi_step is {found}, expected at least 1 (exactly 1 in a container without windows)"),
    BAD_CUT: ("parameters", "kind {found}, but this node's parameters require {expected} (1 and 4: transitions, 5 and 6: sequences)"),
    BAD_LENGTH: ("parameters", "sequences have {found} entries, but this node's sequence_length is {expected}"),
    BAD_TOTAL: ("value", "the total weight must be finite and positive (0 in a container other than a cache)"),
    BAD_POSITIVE: ("value", "{found} entries of positive weight, expected at least {expected}"),
    BAD_MINIMUM: ("value", "the smallest weight must be positive and at most the total weight"),
    BAD_TIME: ("value", "the time of packing must be finite and not negative"),
    BAD_ENTRY: ("parameters", "block {block} is {found:#x} (column * 256 + part), expected {expected:#x}"),
    BAD_CODEC: ("codec", "block {block} has codec {found}, expected at most {expected}"),
    BAD_ROWS: ("container", "block {block} has {found} rows, expected {expected} (blocks of frames, entries and owners: 1 to {expected})"),
    BAD_RAW: ("schema", "block {block} has {found} raw bytes, but the schema requires {expected}"),
    BAD_STORED: ("container", "block {block} is stored in {found} bytes, expected {expected}"),
    BAD_OFFSET: ("container", "block {block} begins at byte {found}, expected {expected}"),
    BAD_END: ("container", "block {block} does not end at the end of the payload: {found} bytes, expected {expected}"),
    BAD_PADDING: ("container", "the padding in front of block {block} must be 0"),
    BAD_EXPANSION: ("too_large", "the unpacked container has {found} bytes; the limit is {expected} (message_bytes)"),
    BAD_INDEX: ("index", "block {block} holds {found}, expected less than {expected}"),
    BAD_VALUE: ("value", "the value in row {found} of block {block} is out of range"),
    BAD_LENGTHS: ("index", "values of block {block} take {found} bytes by their lengths; the block has {expected} (a value at most 2**26)"),
}


_OTHERWISE = {
    KIND_CACHE: KIND_SEQUENCES, KIND_SEQUENCES: KIND_CACHE, KIND_DRAWN: KIND_DRAWN_SEQUENCES, KIND_DRAWN_SEQUENCES: KIND_DRAWN,
}


@cython.auto_pickle(False)
cdef class Layout:
    """Blocks that a container must have, and the arrays of a batch of its samples. Unchangeable; created by layout.py.

    Args:
        blocks: (column, part, extent, bytes of a row) in the order of the container; for ragged columns the bytes of an element.
        fields: (block, index block or -1, rows of a sample, of these side by side in the index, bytes of a row) for each array of a batch.
        length: Entries of a sequence; 0: samples are transitions.
        ragged: Block of a ragged column's values -> block of their lengths, or WHOLE, -2.
        ragged_fields: Like fields, for the arrays of ragged columns.
    """

    def __cinit__(self, int kind, int frame_stack, int reward_size, list blocks, list fields, int length, dict ragged, list ragged_fields):
        cdef int i
        self.kind, self.frame_stack, self.reward_size, self.length = kind, frame_stack, reward_size, length
        self.is_cache = kind == KIND_CACHE or kind == KIND_SEQUENCES
        self.is_drawn = kind == KIND_DRAWN or kind == KIND_DRAWN_SEQUENCES
        self.otherwise = _OTHERWISE.get(kind, 0)
        self.blocks, self.fields, self.ragged_fields = len(blocks), len(fields), len(ragged_fields)
        self.block = <Block*>calloc(max(1, self.blocks), sizeof(Block))
        self.field = <Field*>calloc(max(1, self.fields + self.ragged_fields), sizeof(Field))
        if self.block == NULL or self.field == NULL:
            raise MemoryError()
        for i in range(MAX_PARTS):
            self.of_part[i] = -1
        for i, (column, part, extent, row_bytes) in enumerate(blocks):
            self.block[i] = Block(column, part, extent, ragged.get(i, FIXED), row_bytes)
            if not WHOLE <= self.block[i].lengths < self.blocks:
                raise IndexError(f"block {i} has its lengths in block {self.block[i].lengths} of {self.blocks}")
            if column == BOOKKEEPING:
                self.of_part[<int>part] = i
        for i, (block, index, frames, stack, size) in enumerate(fields + ragged_fields):
            if not (0 <= block < self.blocks and -1 <= index < self.blocks):
                raise IndexError(f"field {i} refers to blocks {block} and {index} of {self.blocks}")
            each = self.block[<int>index].row_bytes // 4 if index >= 0 else 1
            if frames < 1 or frames % stack or frames // stack + stack - 1 > each:
                raise IndexError(f"field {i} has more rows for each sample than its index block {index}")
            self.field[i] = Field(block, index, each, frames, stack, size)

    def __dealloc__(self):
        free(self.block)
        free(self.field)


cdef uint64_t _end_of(Layout layout, const uint64_t* of_extent, dict packed, dict elements) except 0:
    """Return the bytes of a container with these numbers of rows, by extent."""
    cdef uint64_t stored, at = HEAD_BYTES + <uint64_t>ROW_BYTES * layout.blocks
    cdef int i
    for i in range(EXTENTS):
        if of_extent[i] > ZERO_FRAME:
            raise ValueError(f"{of_extent[i]} rows are more than an index of 32 bits can tell apart")
    for i in range(layout.blocks):
        stored = layout.block[i].row_bytes
        stored *= of_extent[layout.block[i].extent] if layout.block[i].lengths == FIXED else <uint64_t>elements[i]
        at = _block_begin(at) + (stored if i not in packed else <uint64_t>len(packed[i][1]))
        if at >> 40:
            raise MemoryError(f"a container of {at} bytes")
    return at


def container_bytes(
    Layout layout not None, uint64_t samples, uint64_t frames, uint64_t owners, uint64_t entries, dict elements
):
    """Return the bytes of the payload that `container` allocates for these numbers of rows without compression."""
    cdef uint64_t of_extent[EXTENTS]
    of_extent[PER_SAMPLE], of_extent[PER_FRAME], of_extent[PER_OWNER], of_extent[SINGLE] = samples, frames, owners, 1
    of_extent[PER_ENTRY] = entries
    return _end_of(layout, of_extent, {}, elements)


def container(Layout layout not None, uint64_t samples, uint64_t frames, uint64_t owners, uint64_t entries, dict packed, dict elements):
    """Allocate a payload, uint8 [n] aligned to 64 bytes, and write block table, padding and packed blocks; the caller writes the rest.

    packed: block -> (codec, bytes) for the compressed blocks. `fill` writes the others.
    elements: block -> number of elements of all its values, for each block of a ragged column's values.
    """
    cdef uint64_t of_extent[EXTENTS]
    cdef uint64_t rows, raw, stored, at, end = HEAD_BYTES + <uint64_t>ROW_BYTES * layout.blocks
    cdef cnp.ndarray payload
    cdef uint8_t* begin
    cdef uint8_t* row
    cdef const Block* block
    cdef bytes data
    cdef int i, codec
    of_extent[PER_SAMPLE], of_extent[PER_FRAME], of_extent[PER_OWNER], of_extent[SINGLE] = samples, frames, owners, 1
    of_extent[PER_ENTRY] = entries
    at = _end_of(layout, of_extent, packed, elements)
    payload = empty((at + ALIGNMENT,), np.dtype(np.uint8))
    payload = payload[-<size_t>cnp.PyArray_DATA(payload) & (ALIGNMENT - 1):][:at]
    begin = <uint8_t*>cnp.PyArray_DATA(payload)
    for i in range(layout.blocks):
        block = &layout.block[i]
        at, rows = _block_begin(end), of_extent[block.extent]
        raw, codec = block.row_bytes * (rows if block.lengths == FIXED else <uint64_t>elements[i]), 0
        stored = raw
        memset(begin + end, 0, at - end)
        if i in packed:
            codec, data = packed[i]
            stored = len(data)
            memcpy(begin + at, <const char*>data, stored)
        row = begin + HEAD_BYTES + ROW_BYTES * i
        memcpy(row, &block.column, 2)
        row[2], row[3] = block.part, <uint8_t>codec
        memcpy(row + 4, &rows, 4)
        memcpy(row + 8, &at, 8)
        memcpy(row + 16, &stored, 8)
        memcpy(row + 24, &raw, 8)
        end = at + stored
    return payload


def fill(Layout layout not None, cnp.ndarray payload not None, dict arrays):
    """Copy contiguous arrays into blocks of a payload that `container` allocated: block -> array of exactly its bytes."""
    cdef cnp.ndarray array
    cdef uint8_t* begin = <uint8_t*>target_of(payload, payload.size)
    cdef const uint8_t* row
    cdef uint64_t at, stored
    cdef int i
    for i, array in arrays.items():
        if not 0 <= i < layout.blocks:
            raise IndexError(i)
        row = begin + HEAD_BYTES + ROW_BYTES * i
        at, stored = read64(row + 8), read64(row + 16)
        if <uint64_t>cnp.PyArray_NBYTES(array) != stored or not cnp.PyArray_IS_C_CONTIGUOUS(array):
            raise ValueError(f"block {i} takes {stored} contiguous bytes, got {cnp.PyArray_NBYTES(array)}")
        if at > <uint64_t>payload.size or stored > payload.size - at:
            raise ValueError(f"block {i} is outside of its payload")
        memcpy(begin + at, cnp.PyArray_DATA(array), stored)


cdef inline bint _may_be_packed(int kind, int part) noexcept nogil:
    """Return True if a block may be compressed: frames, and an episode's columns."""
    if kind == KIND_EPISODE:
        return part == PART_PREV
    return part == PART_FRAMES or part == PART_PREV_FRAMES or part == PART_NEXT_FRAMES


cdef inline uint64_t _block_begin(uint64_t at) noexcept nogil:
    return (at + ALIGNMENT - 1) & ~<uint64_t>(ALIGNMENT - 1)


cdef inline int _fail(Fault* fault, int status, int block, uint64_t found, uint64_t expected) noexcept nogil:
    fault.status, fault.block, fault.found, fault.expected = status, block, found, expected
    return status


cdef int _check_head(Layout layout, const uint8_t* source, uint64_t size, Fault* fault) noexcept nogil:
    cdef double total, minimum, made_at
    cdef uint64_t positives
    cdef uint32_t kind
    if size < HEAD_BYTES:
        return _fail(fault, BAD_SIZE, -1, size, HEAD_BYTES)
    kind = read32(source + 44)
    if kind != <uint32_t>layout.kind:
        if layout.otherwise and kind == <uint32_t>layout.otherwise:
            return _fail(fault, BAD_CUT, -1, kind, layout.kind)
        return _fail(fault, BAD_KIND, -1, kind, layout.kind)
    if read64(source + 56):
        return _fail(fault, BAD_HEAD, -1, read64(source + 56), 0)
    if read32(source) < 1:
        return _fail(fault, BAD_ROWS, -1, 0, 1)
    if read16(source + 4) != layout.frame_stack:
        return _fail(fault, BAD_STACK, -1, read16(source + 4), layout.frame_stack)
    if layout.length and read16(source + 6) != layout.length:
        return _fail(fault, BAD_LENGTH, -1, read16(source + 6), layout.length)
    if read16(source + 6) < 1 or (not (layout.is_cache or layout.is_drawn) and read16(source + 6) != 1):
        return _fail(fault, BAD_STEPS, -1, read16(source + 6), 1)
    total, positives, minimum = read_double(source + 8), read64(source + 16), read_double(source + 24)
    if layout.is_cache:
        if not (isfinite(total) and total > 0.0):
            return _fail(fault, BAD_TOTAL, -1, 0, 0)
        if positives < 1 or positives >> 53:
            return _fail(fault, BAD_POSITIVE, -1, positives, 1)
        if not (0.0 < minimum <= total):
            return _fail(fault, BAD_MINIMUM, -1, 0, 0)
    elif read64(source + 8) or positives or read64(source + 24):
        return _fail(fault, BAD_TOTAL, -1, 0, 0)
    made_at = read_double(source + 48)
    if not (isfinite(made_at) and made_at >= 0.0):
        return _fail(fault, BAD_TIME, -1, 0, 0)
    if read32(source + 40) != <uint32_t>layout.blocks:
        return _fail(fault, BAD_BLOCKS, -1, read32(source + 40), layout.blocks)
    if size < HEAD_BYTES + <uint64_t>ROW_BYTES * layout.blocks:
        return _fail(fault, BAD_SIZE, -1, size, HEAD_BYTES + <uint64_t>ROW_BYTES * layout.blocks)
    return GOOD


cdef int _check_table(Layout layout, const uint8_t* source, uint64_t size, uint64_t limit, Fault* fault) noexcept nogil:
    """Check every row of the block table against the layout and the size of the payload."""
    cdef uint64_t at = HEAD_BYTES + <uint64_t>ROW_BYTES * layout.blocks, begin, stored, raw, rows, most
    cdef uint64_t samples = read32(source), frames = 0, entries = 0, unpacked = size
    cdef const uint8_t* row
    cdef const Block* block
    cdef int i, codec
    for i in range(layout.blocks):
        row = source + HEAD_BYTES + ROW_BYTES * i
        block = &layout.block[i]
        codec = row[3]
        rows, begin, stored, raw = read32(row + 4), read64(row + 8), read64(row + 16), read64(row + 24)
        if read16(row) != block.column or row[2] != block.part:
            return _fail(fault, BAD_ENTRY, i, (read16(row) << 8) | row[2], (<uint64_t>block.column << 8) | block.part)
        if codec > 2 or (codec and not _may_be_packed(layout.kind, block.part)):
            return _fail(fault, BAD_CODEC, i, codec, 2 if _may_be_packed(layout.kind, block.part) else 0)
        if block.extent == PER_FRAME:
            most = frames if frames else samples * <uint64_t>(layout.frame_stack + layout.length if layout.length else 2 * layout.frame_stack)
            if rows < 1 or rows > most or (frames and rows != frames):
                return _fail(fault, BAD_ROWS, i, rows, most)
            frames = rows
        elif block.extent == PER_ENTRY:
            most = entries if entries else samples * <uint64_t>layout.length
            if rows < 1 or rows > most or (entries and rows != entries):
                return _fail(fault, BAD_ROWS, i, rows, most)
            entries = rows
        elif block.extent == PER_OWNER:
            if rows < 1 or rows > samples:
                return _fail(fault, BAD_ROWS, i, rows, samples)
        else:
            most = 1 if block.extent == SINGLE else samples
            if rows != most:
                return _fail(fault, BAD_ROWS, i, rows, most)
        # rows < 2**32 and a row has less than 2**27 bytes: the product cannot overflow
        if block.lengths != FIXED:
            if raw % block.row_bytes or raw >> 48:
                return _fail(fault, BAD_RAW, i, raw, block.row_bytes)
        elif raw != rows * block.row_bytes:
            return _fail(fault, BAD_RAW, i, raw, rows * block.row_bytes)
        if codec == 0 and stored != raw:
            return _fail(fault, BAD_STORED, i, stored, raw)
        if begin != _block_begin(at):
            return _fail(fault, BAD_OFFSET, i, begin, _block_begin(at))
        if begin > size or stored > size - begin:
            return _fail(fault, BAD_END, i, stored, size - begin if begin <= size else 0)
        while at < begin:
            if source[at]:
                return _fail(fault, BAD_PADDING, i, 0, 0)
            at += 1
        at = begin + stored
        if codec:
            unpacked += raw
            if unpacked > limit:
                return _fail(fault, BAD_EXPANSION, i, unpacked, limit)
    if at != size:
        return _fail(fault, BAD_END, layout.blocks - 1, size, at)
    return GOOD


cdef int _check_words(const uint8_t* words, uint64_t count, uint32_t bound, bint zero, int block, Fault* fault) noexcept nogil:
    """Check that all u32 are below `bound`, or ZERO_FRAME if `zero` allows it."""
    cdef uint64_t i
    cdef uint32_t word
    for i in range(count):
        word = read32(words + 4 * i)
        if word >= bound and not (zero and word == ZERO_FRAME):
            return _fail(fault, BAD_INDEX, block, word, bound)
    return GOOD


cdef int _check_doubles(const uint8_t* values, uint64_t count, double low, double high, int block, Fault* fault) noexcept nogil:
    """Check that all float64 are in (low, high] and finite."""
    cdef uint64_t i
    cdef double value
    for i in range(count):
        value = read_double(values + 8 * i)
        if not (low < value <= high) or not isfinite(value):
            return _fail(fault, BAD_VALUE, block, i, 0)
    return GOOD


cdef int _check_floats(const uint8_t* values, uint64_t count, double low, double high, int block, Fault* fault) noexcept nogil:
    """Check that all float32 are in [low, high] and finite."""
    cdef uint64_t i
    cdef double value
    for i in range(count):
        value = read_float(values + 4 * i)
        if not (low <= value <= high) or not isfinite(value):
            return _fail(fault, BAD_VALUE, block, i, 0)
    return GOOD


cdef int _check_part(Layout layout, const uint8_t* source, int i, const uint32_t* of_extent, Fault* fault) noexcept nogil:
    """Check the values of bookkeeping block `i`."""
    cdef const uint8_t* row = source + HEAD_BYTES + ROW_BYTES * i
    cdef const uint8_t* data = source + read64(row + 8)
    cdef uint64_t samples = read32(row + 4), each = layout.block[i].row_bytes, j
    cdef int part = layout.block[i].part
    cdef double total = read_double(source + 8)
    if part == PART_PREV_INDEX or part == PART_NEXT_INDEX:
        return _check_words(data, samples * (each >> 2), of_extent[PER_FRAME], True, i, fault)
    if part == PART_ENTRY_INDEX:
        return _check_words(data, samples * (each >> 2), of_extent[PER_ENTRY], True, i, fault)
    if part == PART_OWNER:
        return _check_words(data, samples, of_extent[PER_OWNER], False, i, fault)
    if part == PART_BURN_IN:
        return _check_words(data, samples, layout.length, False, i, fault)
    if part == PART_STEPS:
        for j in range(samples):
            if not 1 <= read32(data + 4 * j) <= <uint32_t>read16(source + 6):
                return _fail(fault, BAD_INDEX, i, read32(data + 4 * j), <uint64_t>read16(source + 6) + 1)
    if part == PART_NUMBER:
        for j in range(samples):
            if data[8 * j + 7] & 0x80:
                return _fail(fault, BAD_VALUE, i, j, 0)
    if part == PART_MODEL:
        for j in range(samples):
            if read64(data + 8 * j) >> 53:
                return _fail(fault, BAD_VALUE, i, j, 0)
    # A weight is a summand of the total; summing in another order may round by a few units in the last place.
    if part == PART_WEIGHT:
        return _check_doubles(data, samples, 0.0, total * (1.0 + 1e-9) if layout.is_cache else INFINITY, i, fault)
    if part == PART_CHANCE:
        return _check_doubles(data, samples, 0.0, 1.0 + 1e-9, i, fault)
    if part == PART_POPULATION:
        return _check_doubles(data, samples, 0.0, 9007199254740992.0, i, fault)
    if part == PART_DISCOUNT:
        return _check_floats(data, samples * (each >> 2), 0.0, 1.0, i, fault)
    if part == PART_AGE or part == PART_INIT_WEIGHT:
        return _check_floats(data, samples, 0.0, INFINITY, i, fault)
    if part == PART_TD_ERROR:
        return _check_floats(data, samples, -INFINITY, INFINITY, i, fault)
    return GOOD


cdef int _check_lengths(Layout layout, const uint8_t* source, int i, Fault* fault) noexcept nogil:
    """Check that the lengths of a ragged column's values add up to the size of block `i`, and that no value exceeds MAX_VALUE_BYTES."""
    cdef const Block* block = &layout.block[i]
    cdef const uint8_t* row = source + HEAD_BYTES + ROW_BYTES * i
    cdef const uint8_t* words
    cdef uint64_t raw = read64(row + 24), total = 0, length, j
    if block.lengths == WHOLE:
        return _fail(fault, BAD_LENGTHS, i, raw, MAX_VALUE_BYTES) if raw > MAX_VALUE_BYTES else GOOD
    words = source + read64(source + HEAD_BYTES + ROW_BYTES * block.lengths + 8)
    for j in range(read32(row + 4)):
        length = read32(words + 4 * j) * block.row_bytes
        # fewer than 2**32 values of less than 2**27 bytes: the sum cannot overflow
        if length > MAX_VALUE_BYTES:
            return _fail(fault, BAD_LENGTHS, i, length, raw)
        total += length
    return _fail(fault, BAD_LENGTHS, i, total, raw) if total != raw else GOOD


cdef int _check_container(Layout layout, const uint8_t* source, uint64_t size, uint64_t limit, Fault* fault) noexcept nogil:
    cdef uint32_t of_extent[EXTENTS]  # rows of the blocks, by extent
    cdef int i
    fault.status = GOOD
    memset(of_extent, 0, sizeof(of_extent))
    if _check_head(layout, source, size, fault) or _check_table(layout, source, size, limit, fault):
        return fault.status
    for i in range(layout.blocks):
        of_extent[layout.block[i].extent] = read32(source + HEAD_BYTES + ROW_BYTES * i + 4)
    for i in range(layout.blocks):
        if layout.block[i].column == BOOKKEEPING and _check_part(layout, source, i, of_extent, fault):
            return fault.status
        if layout.block[i].lengths != FIXED and _check_lengths(layout, source, i, fault):
            return fault.status
    return GOOD


cdef inline bint _is_within(const View* view, const uint8_t* age, const uint8_t* model, uint32_t sample, double oldest, int64_t oldest_model) noexcept nogil:
    if view.arrived - read_float(age + 4 * <size_t>sample) < oldest:
        return False
    return <int64_t>read64(model + 8 * <size_t>sample) >= oldest_model


@cython.auto_pickle(False)
cdef class HeldCache:
    """Received container, checked completely; batches gather rows in place.

    Args:
        payload: Object with the buffer protocol and contiguous bytes.
        expected: XXH3 of the payload, which is compared while the payload is copied. None if the caller has compared it: a reference is
            kept, and the payload must not change afterwards. The copy costs nothing beside the checksum, and frees the receive buffer,
            which is in the processor's cache, for the next message.
        limit: Most bytes of payload and unpacked blocks together.
        unpack: Called as unpack(codec, stored bytes, raw size) for each packed block; returns bytes of the raw size.

    Raises:
        ProtocolError: the container is invalid. No bytes raise any other error.
    """

    def __cinit__(self, payload, Layout layout not None, expected, uint64_t limit, unpack):
        cdef Fault fault
        cdef uint64_t found, wanted
        cdef const uint8_t* source
        cdef uint8_t* target
        cdef cnp.ndarray copy
        self.layout = layout
        self.unpacked = []
        PyObject_GetBuffer(payload, &self.buffer, PyBUF_SIMPLE)
        self.is_held = True
        source = <const uint8_t*>self.buffer.buf
        if expected is not None:
            wanted = expected
            copy = empty((self.buffer.len,), np.dtype(np.uint8))
            target = <uint8_t*>cnp.PyArray_DATA(copy)
            with nogil:
                found = xxh3(source, self.buffer.len, 0, target)
            if found != wanted:
                _fail(&fault, BAD_CHECKSUM, -1, found, wanted)
                _refuse(&fault)
            PyBuffer_Release(&self.buffer)
            self.is_held = False
            PyObject_GetBuffer(copy, &self.buffer, PyBUF_SIMPLE)
            self.is_held = True
            source = target
        with nogil:
            _check_container(layout, source, self.buffer.len, limit, &fault)
        if fault.status != GOOD:
            _refuse(&fault)
        self.view.samples = read32(source)
        self.view.total_weight, self.view.positives = read_double(source + 8), <double>read64(source + 16)
        self.count, self.whole = self.view.samples, self.view.positives
        self.eldest, self.least_model = -INFINITY, EARLIEST
        self.multi_step, self.minimum = read16(source + 6), read_double(source + 24)
        self.making, self.made_at = read64(source + 32), read_double(source + 48)
        self.nbytes = self.buffer.len
        self._locate(source, unpack)

    def __dealloc__(self):
        cdef int i
        free(self.view.block)
        free(self.left)
        free(self.times)
        if self.view.begins != NULL:
            for i in range(self.layout.blocks):
                free(self.view.begins[i])
        free(self.view.begins)
        if self.is_held:
            PyBuffer_Release(&self.buffer)

    cdef _sum_lengths(self, const uint8_t* source, int i):
        """Record the offset of each value of a ragged column's block."""
        cdef const uint8_t* row = source + HEAD_BYTES + ROW_BYTES * i
        cdef const Block* block = &self.layout.block[i]
        cdef uint64_t rows = read32(row + 4), j
        cdef uint64_t* begins = <uint64_t*>malloc((rows + 1) * sizeof(uint64_t))
        if begins == NULL:
            raise MemoryError()
        self.view.begins[i] = begins
        self.nbytes += (rows + 1) * sizeof(uint64_t)
        begins[0] = 0
        if block.lengths == WHOLE:
            begins[1] = read64(row + 24)
            return
        for j in range(rows):
            begins[j + 1] = begins[j] + block.row_bytes * read32(self.view.block[block.lengths] + 4 * j)

    cdef _locate(self, const uint8_t* source, unpack):
        """Record the address of each block's raw bytes, and unpack packed blocks."""
        cdef const uint8_t* row
        cdef Py_ssize_t stored, raw
        cdef int i
        self.view.block = <const uint8_t**>calloc(max(1, self.layout.blocks), sizeof(uint8_t*))
        self.view.begins = <uint64_t**>calloc(max(1, self.layout.blocks), sizeof(uint64_t*))
        if self.view.block == NULL or self.view.begins == NULL:
            raise MemoryError()
        for i in range(self.layout.blocks):
            row = source + HEAD_BYTES + ROW_BYTES * i
            self.view.block[i] = source + read64(row + 8)
            if row[3]:
                stored, raw = read64(row + 16), read64(row + 24)
                data = unpack(row[3], self.view.block[i][:stored], raw)
                if type(data) is not bytes or len(data) != raw:
                    raise ValueError(f"unpack must return {raw} bytes for block {i}, got another size or type")
                self.unpacked.append(data)
                self.nbytes += raw
                self.view.block[i] = <const uint8_t*><const char*>data
        for i in range(self.layout.blocks):
            if self.layout.block[i].lengths != FIXED:
                self._sum_lengths(source, i)

    @property
    def samples(self):
        """Samples in the container, drawn ones included."""
        return self.view.samples

    @property
    def drawn(self):
        """Number of the first sample that was neither drawn nor passed over."""
        if self.used == self.count:
            return self.view.samples
        return self.left[self.used] if self.left != NULL else self.used

    @property
    def arrived(self):
        """Time at which the cache arrived, by the pool's clock."""
        return self.view.arrived

    @arrived.setter
    def arrived(self, double seconds):
        self.view.arrived = seconds

    @property
    def payload(self):
        """Bytes of the container as received."""
        return memoryview(<object>self.buffer.obj).toreadonly()

    def go_on_at(self, uint32_t drawn):
        """Mark the first `drawn` samples as drawn, to restore a cache before it is added to a pool."""
        if drawn > self.view.samples:
            raise ValueError(f"drawn is {drawn}, but the cache has {self.view.samples} samples")
        self.used = drawn

    def left_over(self):
        """Return the remaining samples for `go_on_with`: (samples uint32, times uint32, eldest, least_model, positives).

        times: draws of each sample, or empty. The last three are bounds from `pass_over`. None if no sample was passed over or used up.
        """
        if self.left == NULL:
            return None
        samples = (<const uint8_t*>(self.left + self.used))[: (self.count - self.used) * sizeof(uint32_t)]
        times = b"" if self.times == NULL else (<const uint8_t*>self.times)[: self.view.samples * sizeof(uint32_t)]
        return samples, times, self.eldest, self.least_model, self.view.positives

    def go_on_with(self, bytes samples not None, bytes times not None, double eldest, int64_t least_model, double positives):
        """Restore the state from `left_over` before the cache is added to a pool. Raises ValueError for an invalid state."""
        cdef uint32_t i
        cdef size_t size = len(samples)
        if size % sizeof(uint32_t) or size > self.view.samples * sizeof(uint32_t):
            raise ValueError(f"{size} bytes of remaining samples, expected at most {self.view.samples} numbers of 4 bytes")
        if len(times) not in (0, self.view.samples * sizeof(uint32_t)) or not 1.0 <= positives <= 9007199254740992.0 or eldest != eldest:
            raise ValueError("the draws, positives or eldest of the remaining samples are invalid")
        self.list_left()
        memcpy(self.left, <const char*>samples, size)
        self.used, self.count = 0, <uint32_t>(size // sizeof(uint32_t))
        for i in range(self.count):
            if self.left[i] >= self.view.samples:
                raise ValueError(f"sample {self.left[i]} remains, but the cache has {self.view.samples} samples")
        if times:
            self.times = <uint32_t*>malloc(len(times))
            if self.times == NULL:
                raise MemoryError()
            memcpy(self.times, <const char*>times, len(times))
        self.eldest, self.least_model, self.view.positives = eldest, least_model, positives

    @property
    def total_weight(self):
        """S_k: total weight of the client's memory at the draw of the cache."""
        return self.view.total_weight

    @property
    def positives(self):
        """N_k: entries of positive weight in the client's memory at the draw of the cache."""
        return <uint64_t>self.whole

    cdef int list_left(self) except -1:
        """Allocate `left`, the list of remaining samples, if it is still NULL."""
        cdef uint32_t i
        if self.left == NULL:
            self.left = <uint32_t*>malloc(max(1, self.view.samples) * sizeof(uint32_t))
            if self.left == NULL:
                raise MemoryError()
            for i in range(self.count):
                self.left[i] = i
        return 0

    cdef uint32_t pass_over(self, double oldest, int64_t oldest_model) except? 0xFFFFFFFF:
        """Drop samples whose entries were recorded before `oldest`, or by a model before `oldest_model`.

        Return the number of dropped samples that were not drawn yet. The remaining samples represent the client's entries within the
        limits. Their share of S_k and N_k is estimated from the samples: of S_k by the number of samples, of N_k by their sum of 1 / w.
        """
        cdef const uint8_t* age = self.view.block[self.layout.of_part[PART_AGE]]
        cdef const uint8_t* model = self.view.block[self.layout.of_part[PART_MODEL]]
        cdef const uint8_t* weight = self.view.block[self.layout.of_part[PART_WEIGHT]]
        cdef double born, most = 0.0, fresh = 0.0, each
        cdef int64_t version
        cdef uint32_t i, sample, kept = 0, alive = 0, before = self.count - self.used
        if self.eldest >= oldest and self.least_model >= oldest_model:
            return 0
        self.list_left()
        self.eldest, self.least_model = INFINITY, LATEST
        for i in range(self.view.samples):
            each = 1.0 / read_double(weight + 8 * <size_t>i)
            most += each
            if _is_within(&self.view, age, model, i, oldest, oldest_model):
                fresh += each
                alive += 1
        for i in range(self.used, self.count):
            sample = self.left[i]
            if not _is_within(&self.view, age, model, sample, oldest, oldest_model):
                continue
            born, version = self.view.arrived - read_float(age + 4 * <size_t>sample), <int64_t>read64(model + 8 * <size_t>sample)
            self.eldest, self.least_model = min(self.eldest, born), min(self.least_model, version)
            self.left[kept] = sample
            kept += 1
        self.used, self.count = 0, kept
        if alive:
            self.view.positives = max(1.0, self.whole * (fresh / most) / (<double>alive / self.view.samples))
        return before - kept

    def part(self, int part):
        """Return a copy of the bytes of a bookkeeping block, or None if the layout does not have it."""
        cdef int i = self.layout.of_part[part] if 0 <= part < MAX_PARTS else -1
        return None if i < 0 else self.block(i)

    def block(self, int i):
        """Return a copy of the raw bytes of block `i`."""
        if not 0 <= i < self.layout.blocks:
            raise IndexError(i)
        cdef const uint8_t* row = <const uint8_t*>self.buffer.buf + HEAD_BYTES + ROW_BYTES * i
        return self.view.block[i][:<Py_ssize_t>read64(row + 24)]


# Containers of one schema and number of rows differ in the bytes of the columns alone.
#
#     head, table | obs  0.1 0.2 | padding | action  3 | padding
#     -- known -- |              | -known- |           | -known-

cdef enum:
    MAX_ROW_AXES = 32

cdef struct RowColumn:
    int64_t begin                       # first byte in the container
    int64_t size
    int number                          # NumPy's number of its dtype
    int axes
    cnp.npy_intp shape[MAX_ROW_AXES]    # [rows, *F]
    Check check                         # returns True if its values are finite; NULL: they need not be


@cython.auto_pickle(False)
cdef class RowForm:
    """Form of containers of one schema without ragged columns and one number of rows: packs and unpacks without a layout.

    Args:
        blank: Container of the form, not compressed, with zeros in its columns.
        columns: (name, first byte, dtype, shape [rows, *F], True if it must be finite) of each column, in the order of their bytes.

    Raises:
        ValueError: a column has an unsupported dtype or number of axes.
    """
    cdef bytes blank
    cdef list names
    cdef RowColumn* column
    cdef int columns

    def __cinit__(self, bytes blank not None, list columns not None):
        cdef int i, axis
        cdef RowColumn* column
        self.blank, self.names, self.columns = blank, [], len(columns)
        self.column = <RowColumn*>calloc(max(1, self.columns), sizeof(RowColumn))
        if self.column == NULL:
            raise MemoryError()
        for i, (name, begin, dtype, shape, is_finite) in enumerate(columns):
            if dtype.kind not in "biuf" or not dtype.isnative or not 1 <= len(shape) <= MAX_ROW_AXES or shape[0] < 1:
                raise ValueError(f"a form does not support column {name!r} of {dtype}{list(shape)}")
            column = &self.column[i]
            column.begin, column.number, column.axes, column.size = begin, dtype.num, len(shape), dtype.itemsize
            for axis in range(column.axes):
                column.shape[axis] = shape[axis]
                column.size *= column.shape[axis]
            if is_finite and dtype.kind == "f" and column.size:
                column.check = check_of(dtype.itemsize, column.size)
            if begin < (self.column[i - 1].begin + self.column[i - 1].size if i else 0) or begin + column.size > len(blank):
                raise ValueError(f"column {name!r} overlaps another column or the end of the container")
            self.names.append(name)

    def __dealloc__(self):
        free(self.column)

    def pack(self, dict columns not None, int64_t first=-1):
        """Return the container, bytes, or None if a value is not an array of exactly its dtype and shape, or not finite as required.

        Args:
            columns: Arrays [rows, *F]; or longer arrays, of which the rows from `first` on are packed.
        """
        cdef bytes made
        cdef uint8_t* target
        cdef const char* source
        cdef int i
        if len(columns) != self.columns:
            return None
        made = PyBytes_FromStringAndSize(PyBytes_AsString(self.blank), len(self.blank))
        target = <uint8_t*>PyBytes_AsString(made)
        for i in range(self.columns):
            source = _rows_in(columns.get(self.names[i]), &self.column[i], first)
            if source == NULL:
                return None
            memcpy(target + self.column[i].begin, source, self.column[i].size)
        return made

    def unpack(self, payload):
        """Return copies of the columns, arrays [rows, *F], or None if a container has another form or values that are not finite."""
        cdef Py_buffer view
        PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
        try:
            return self._columns_in(<const uint8_t*>view.buf) if self._fits(<const uint8_t*>view.buf, view.len) else None
        finally:
            PyBuffer_Release(&view)

    cdef bint _fits(self, const uint8_t* source, int64_t size):
        """Return True if the bytes are a container of this form."""
        cdef const uint8_t* blank = <const uint8_t*>PyBytes_AsString(self.blank)
        cdef int64_t end = 0
        cdef int i
        if size != len(self.blank):
            return False
        for i in range(self.columns):
            if memcmp(source + end, blank + end, self.column[i].begin - end):
                return False
            end = self.column[i].begin + self.column[i].size
        return memcmp(source + end, blank + end, size - end) == 0

    cdef _columns_in(self, const uint8_t* source):
        cdef dict found = {}
        cdef cnp.ndarray made
        cdef RowColumn* column
        cdef int i
        for i in range(self.columns):
            column = &self.column[i]
            made = cnp.PyArray_SimpleNew(column.axes, column.shape, column.number)
            memcpy(<void*>cnp.PyArray_DATA(made), source + column.begin, column.size)
            if column.check != NULL and not column.check(<const char*>cnp.PyArray_DATA(made), column.size):
                return None
            found[self.names[i]] = made
        return found


cdef const char* _rows_in(value, const RowColumn* column, int64_t first) except? NULL:
    """Return the address of the rows of one column, or NULL if the value is not an array of exactly its dtype and shape."""
    cdef cnp.ndarray array
    cdef const char* source
    cdef int axis
    if type(value) is not cnp.ndarray:
        return NULL
    array = value
    if cnp.PyArray_TYPE(array) != column.number or cnp.PyArray_NDIM(array) != column.axes:
        return NULL
    if not cnp.PyArray_IS_C_CONTIGUOUS(array) or cnp.PyArray_ISBYTESWAPPED(array):
        return NULL
    for axis in range(column.axes):
        if axis == 0 and first >= 0:
            if first + column.shape[0] > cnp.PyArray_DIM(array, 0):
                return NULL
        elif cnp.PyArray_DIM(array, axis) != column.shape[axis]:
            return NULL
    source = <const char*>cnp.PyArray_DATA(array)
    if first > 0:
        source += first * (column.size // column.shape[0])
    return NULL if column.check != NULL and not column.check(source, column.size) else source


cdef _refuse(Fault* fault):
    code, text = _FAULTS[fault.status]
    raise _ProtocolError(code, text.format(block=fault.block, found=fault.found, expected=fault.expected))
