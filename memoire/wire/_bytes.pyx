"""Kernels over bytes: checksum and header of messages, shape of msgpack values, packed counts."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

# Checksum of every message: XXH3, by the fastest implementation that this processor supports (xxh3.h).

cdef extern from "xxh3.h":
    ctypedef void (*Way "memoire_stripes")(uint64_t*, const uint8_t*, size_t, const uint8_t*, uint8_t*, int) noexcept nogil
    Way _way "memoire_xxh3_way"(int number) noexcept nogil
    uint64_t _xxh3 "memoire_xxh3"(Way way, const uint8_t* source, size_t size, uint64_t seed, uint8_t* target) noexcept nogil

cdef extern from "Python.h":
    bytes PyBytes_FromStringAndSize(const char* source, Py_ssize_t size)
    char* PyBytes_AsString(object data) except NULL

cdef enum:
    HEADER_SIZE = 96  # bytes of frame 0 of a message, before its tail
    CLIENT_SIZE = 16

cdef Way FASTEST = _way(0)


cdef uint64_t xxh3(const uint8_t* source, size_t size, uint64_t seed, uint8_t* target) noexcept nogil:
    """Return the XXH3 of `size` bytes at any alignment, and copy them to `target` in the same pass unless it is NULL."""
    return _xxh3(FASTEST, source, size, seed, target)


cdef uint64_t _checksum(const Py_buffer* view, uint64_t seed):
    cdef uint64_t total
    if view.len < 4096:
        return xxh3(<const uint8_t*>view.buf, view.len, seed, NULL)
    with nogil:
        total = xxh3(<const uint8_t*>view.buf, view.len, seed, NULL)
    return total


def checksum(data, uint64_t seed=0):
    """Return the XXH3 (64 bits) of a buffer's bytes. The GIL is released for 4096 bytes and more."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return _checksum(&view, seed)
    finally:
        PyBuffer_Release(&view)


def copied(data):
    """Return a copy of a buffer's bytes, and their XXH3, in one pass. The GIL is released meanwhile."""
    cdef Py_buffer view
    cdef uint64_t total
    cdef uint8_t* target
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        made = PyBytes_FromStringAndSize(NULL, view.len)
        target = <uint8_t*>PyBytes_AsString(made)
        with nogil:
            total = xxh3(<const uint8_t*>view.buf, view.len, 0, target)
        return made, total
    finally:
        PyBuffer_Release(&view)


def checksums(data, uint64_t seed=0):
    """Return `checksum` by each implementation that this processor supports, the fastest first; all must be equal."""
    cdef Py_buffer view
    cdef int number = 0
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        found = []
        while _way(number) != NULL:
            found.append(_xxh3(_way(number), <const uint8_t*>view.buf, view.len, seed, NULL))
            number += 1
        return found
    finally:
        PyBuffer_Release(&view)


def copies(data):
    """Return (checksum, copy) by each implementation that this processor supports; all must be equal.

    Each implementation copies twice: to a target aligned to a cache line, whose stores may bypass the cache, and to another.
    """
    cdef Py_buffer view
    cdef uint8_t* room = NULL
    cdef uint8_t* target
    cdef uint64_t total
    cdef int number = 0, shift
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        found = []
        room = <uint8_t*>malloc(view.len + 128)
        if room == NULL:
            raise MemoryError()
        while _way(number) != NULL:
            for shift in (0, 16):
                target = room + (-<size_t>room & 63) + shift
                total = _xxh3(_way(number), <const uint8_t*>view.buf, view.len, 0, target)
                found.append((total, (<const char*>target)[:view.len]))
            number += 1
        return found
    finally:
        free(room)
        PyBuffer_Release(&view)


def header_checksum(frame):
    """Return the checksum for bytes 88 to 95 of frame 0: XXH3 of the bytes behind them, seeded with XXH3 of the bytes before."""
    cdef Py_buffer view
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    try:
        if view.len < HEADER_SIZE:
            raise ValueError(f"a header has {HEADER_SIZE} bytes, got {view.len}")
        return _header_checksum(<const uint8_t*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


# Frame 0 of a message; docs/development/wire.md has the layout bit by bit. Python checks an invalid frame again, to find the reason.

cdef packed struct Header:
    uint8_t magic[4]
    uint16_t version
    uint16_t type
    uint32_t flags
    uint32_t table
    uint8_t client[CLIENT_SIZE]
    uint64_t run
    uint64_t home
    uint64_t sequence
    uint64_t fingerprint
    uint64_t payload_bytes
    uint64_t payload_checksum
    uint32_t tail_bytes
    uint32_t reserved
    uint64_t checksum


cdef uint64_t _header_checksum(const uint8_t* frame, Py_ssize_t size) noexcept nogil:
    return xxh3(frame + HEADER_SIZE, size - HEADER_SIZE, xxh3(frame, HEADER_SIZE - 8, 0, NULL), NULL)


def write_header(bytes magic not None, uint16_t version, uint16_t type, uint32_t table, bytes client not None, uint64_t run, uint64_t home,
                 uint64_t sequence, uint64_t fingerprint, payload, payload_checksum, bytes tail not None):
    """Return frame 0 of a message as bytes: the header, with its checksum, and the tail.

    Args:
        payload: A buffer, or None.
        payload_checksum: Checksum of the payload if the caller knows it; None computes it.

    Raises OverflowError if a number does not fit its field, ValueError unless `magic` has 4 bytes and `client` 16.
    """
    cdef Header header
    cdef Py_buffer view
    cdef Py_ssize_t tail_bytes = len(tail)
    cdef bytes frame
    cdef uint8_t* target
    if len(magic) != 4 or len(client) != CLIENT_SIZE:
        raise ValueError(f"magic has {len(magic)} bytes and client {len(client)}, expected 4 and {CLIENT_SIZE}")
    memset(&header, 0, sizeof(Header))
    memcpy(header.magic, PyBytes_AsString(magic), 4)
    memcpy(header.client, PyBytes_AsString(client), CLIENT_SIZE)
    header.version, header.type, header.table = version, type, table
    header.run, header.home, header.sequence, header.fingerprint = run, home, sequence, fingerprint
    header.tail_bytes = tail_bytes
    if payload is not None:
        PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
        header.payload_bytes = view.len
        if view.len and payload_checksum is None:
            header.payload_checksum = _checksum(&view, 0)
        PyBuffer_Release(&view)
    if payload_checksum is not None:
        header.payload_checksum = payload_checksum
    frame = PyBytes_FromStringAndSize(NULL, HEADER_SIZE + tail_bytes)
    target = <uint8_t*>PyBytes_AsString(frame)
    memcpy(target, &header, HEADER_SIZE)
    memcpy(target + HEADER_SIZE, PyBytes_AsString(tail), tail_bytes)
    header.checksum = _header_checksum(target, HEADER_SIZE + tail_bytes)
    memcpy(target + HEADER_SIZE - 8, &header.checksum, 8)
    return frame


cdef tuple _header_in(const Py_buffer* view, bytes magic, uint16_t version, uint64_t most):
    """Return the fields of a header, as `read_header`."""
    cdef Header header
    if view.len < HEADER_SIZE or len(magic) != 4:
        return None
    memcpy(&header, view.buf, HEADER_SIZE)
    if memcmp(header.magic, PyBytes_AsString(magic), 4) or header.version != version or header.flags or header.reserved:
        return None
    if header.tail_bytes > most or <uint64_t>view.len != HEADER_SIZE + <uint64_t>header.tail_bytes:
        return None
    if _header_checksum(<const uint8_t*>view.buf, view.len) != header.checksum:
        return None
    return (header.type, header.table, PyBytes_FromStringAndSize(<const char*>header.client, CLIENT_SIZE), header.run, header.home,
            header.sequence, header.fingerprint, header.payload_bytes, header.payload_checksum)


def read_header(frame, bytes magic not None, uint16_t version, uint64_t most):
    """Return a header's fields: type, table, client, run, home, sequence, fingerprint, bytes and checksum of the payload.

    Return None if magic, version, flags, reserved bits or checksum are wrong, if the tail has more than `most` bytes, or if its size
    differs from the header's.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    try:
        return _header_in(&view, magic, version, most)
    finally:
        PyBuffer_Release(&view)


def read_message(frame, payload, bytes magic not None, uint16_t version, uint64_t most, uint64_t most_payload):
    """Return the header's fields, as `read_header`, and the tail, bytes, of a message with a payload; check all of it.

    Return None if the header is invalid, the payload's size or checksum differs from the header's, the payload is empty or longer than
    `most_payload`, or the tail is not one plain msgpack value.
    """
    cdef Py_buffer view
    cdef tuple found
    cdef bytes tail
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    try:
        found = _header_in(&view, magic, version, most)
        if found is None or not _scan_msgpack(<const uint8_t*>view.buf + HEADER_SIZE, view.len - HEADER_SIZE):
            return None
        tail = PyBytes_FromStringAndSize(<const char*>view.buf + HEADER_SIZE, view.len - HEADER_SIZE)
    finally:
        PyBuffer_Release(&view)
    PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
    try:
        if not 0 < <uint64_t>view.len <= most_payload or found[7] != view.len or found[8] != _checksum(&view, 0):
            return None
    finally:
        PyBuffer_Release(&view)
    return found, tail


def renumbered(bytes frame not None, uint64_t sequence, bytes payload not None):
    """Return a copy of frame 0 of a message, bytes, with another sequence number, payload size and checksums."""
    cdef Header* header
    cdef bytes made
    if len(frame) < HEADER_SIZE:
        raise ValueError(f"a header has {HEADER_SIZE} bytes, got {len(frame)}")
    made = PyBytes_FromStringAndSize(PyBytes_AsString(frame), len(frame))
    header = <Header*>PyBytes_AsString(made)
    header.sequence, header.payload_bytes = sequence, len(payload)
    header.payload_checksum = xxh3(<const uint8_t*>PyBytes_AsString(payload), len(payload), 0, NULL)
    header.checksum = _header_checksum(<const uint8_t*>header, len(made))
    return made


def is_answer(frame, payload, bytes expected not None, uint64_t sequence, uint64_t most):
    """Return True if two frames are a valid message with this sequence number and the magic, version, type, client and fingerprint of
    the header `expected`.

    Args:
        expected: Header, 96 bytes.
        most: Most bytes of the tail.
    """
    cdef Header wanted, header
    cdef Py_buffer view
    if len(expected) < HEADER_SIZE:
        raise ValueError(f"a header has {HEADER_SIZE} bytes, got {len(expected)}")
    memcpy(&wanted, PyBytes_AsString(expected), HEADER_SIZE)
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    try:
        if view.len < HEADER_SIZE:
            return False
        memcpy(&header, view.buf, HEADER_SIZE)
        if memcmp(&header, &wanted, 8) or memcmp(header.client, wanted.client, CLIENT_SIZE) or header.flags or header.reserved:
            return False
        if header.sequence != sequence or header.fingerprint != wanted.fingerprint or header.tail_bytes > most:
            return False
        if <uint64_t>view.len != HEADER_SIZE + <uint64_t>header.tail_bytes:
            return False
        if _header_checksum(<const uint8_t*>view.buf, view.len) != header.checksum:
            return False
        if not _scan_msgpack(<const uint8_t*>view.buf + HEADER_SIZE, view.len - HEADER_SIZE):
            return False
    finally:
        PyBuffer_Release(&view)
    PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE)
    try:
        return header.payload_bytes == <uint64_t>view.len and header.payload_checksum == _checksum(&view, 0)
    finally:
        PyBuffer_Release(&view)


# Shape of a msgpack message, checked before decoding: a container may not declare more elements than bytes follow, no value nests
# deeper than SCAN_DEPTH, no byte follows the first value. So a decoder never allocates memory for a size that is only declared.

cdef enum:
    SCAN_DEPTH = 12


cdef uint64_t _big_endian(const uint8_t* source, int width) noexcept nogil:
    cdef uint64_t word = 0
    cdef int i
    for i in range(width):
        word = (word << 8) | source[i]
    return word


cdef uint64_t _scan_msgpack(const uint8_t* source, uint64_t size) noexcept nogil:
    """Return the number of values within the one msgpack value in `source`, itself included; 0 if the shape is invalid."""
    cdef uint64_t values = 0
    cdef uint64_t waiting[SCAN_DEPTH + 1]  # elements still to come at each depth
    cdef uint64_t at = 0, skip, elements
    cdef int depth = 0, width
    cdef uint8_t tag
    waiting[0] = 1
    while True:
        while waiting[depth] == 0:
            if depth == 0:
                return values if at == size else 0
            depth -= 1
        waiting[depth] -= 1
        values += 1
        if at >= size:
            return 0
        tag = source[at]
        at += 1
        skip = elements = 0
        width = 0
        if tag < 0x80 or tag >= 0xE0 or tag == 0xC0 or tag == 0xC2 or tag == 0xC3:
            continue
        elif tag < 0x90:
            elements = 2 * <uint64_t>(tag & 15)
        elif tag < 0xA0:
            elements = tag & 15
        elif tag < 0xC0:
            skip = tag & 31
        elif 0xC4 <= tag <= 0xC6:
            width = 1 << (tag - 0xC4)
        elif tag == 0xCA or tag == 0xCE or tag == 0xD2:
            skip = 4
        elif tag == 0xCB or tag == 0xCF or tag == 0xD3:
            skip = 8
        elif tag == 0xCC or tag == 0xD0:
            skip = 1
        elif tag == 0xCD or tag == 0xD1:
            skip = 2
        elif 0xD9 <= tag <= 0xDB:
            width = 1 << (tag - 0xD9)
        elif tag >= 0xDC:
            width = 2 << (tag & 1)
        else:
            return 0  # reserved tag, or an extension, which messages do not use
        if width:
            if <uint64_t>width > size - at:
                return 0
            skip = _big_endian(source + at, width)
            at += width
            if tag >= 0xDC:
                elements = skip * 2 if tag >= 0xDE else skip
                skip = 0
        if skip > size - at or elements > size - at:
            return 0
        at += skip
        if elements:
            if depth == SCAN_DEPTH:
                return 0
            depth += 1
            waiting[depth] = elements


cdef uint64_t _values_of(data):
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return _scan_msgpack(<const uint8_t*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


def is_plain_msgpack(data):
    """Return True if `data` is one msgpack value without extensions, and its declared sizes fit into its bytes."""
    return _values_of(data) != 0


def count_values(data):
    """Return the number of msgpack values within `data`, with itself and the keys of maps; 0 unless `is_plain_msgpack`."""
    return _values_of(data)


# Packed counts: one bit for each count, 1 if it is above 0; then the counts above 0, seven bits a byte, lowest first.
#
#     0, 300, 0, 5    0b1010  0xAC 0x02  0x05         300 = 0b10_0101100: seven low bits with a "more" bit, then the rest

cdef enum:
    MAX_COUNTS = 64
    VARINT_BYTES = 10  # most bytes of a count of 64 bits


cdef Py_ssize_t _unpack_counts(const uint8_t* source, Py_ssize_t size, uint64_t* counts, int number) noexcept nogil:
    """Unpack `number` counts; return the bytes that they take, or -1 if they are truncated, too large or not canonical."""
    cdef Py_ssize_t at = (number + 7) // 8
    cdef int place, shift
    cdef uint64_t count
    cdef uint8_t byte
    if size < at:
        return -1
    for place in range(number):
        counts[place] = 0
        if not (source[place >> 3] >> (place & 7)) & 1:
            continue
        count, shift = 0, 0
        while True:
            if at >= size or shift > 63:
                return -1
            byte = source[at]
            at += 1
            if shift == 63 and byte > 1:
                return -1
            count |= <uint64_t>(byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if count == 0:
            return -1  # its bit says that it is above 0: `pack_counts` never writes this
        counts[place] = count
    if number & 7 and source[number >> 3] >> (number & 7):
        return -1
    return at


def pack_counts(counts):
    """Pack at most 64 integers from 0 to 2**64 - 1 as bytes for `unpack_counts`.

    Raises OverflowError for a number outside of that range, ValueError for more than 64 numbers.
    """
    cdef uint8_t packed[8 + MAX_COUNTS * VARINT_BYTES]
    cdef int number = len(counts), place = 0
    cdef Py_ssize_t at = (number + 7) // 8
    cdef uint64_t count
    if number > MAX_COUNTS:
        raise ValueError(f"{number} counts; at most {MAX_COUNTS} are packed together")
    memset(packed, 0, 8)
    for given in counts:
        count = given
        if count:
            packed[place >> 3] |= <uint8_t>(1 << (place & 7))
        while count:
            packed[at] = <uint8_t>(count & 127) | (128 if count > 127 else 0)
            count >>= 7
            at += 1
        place += 1
    return (<char*>packed)[:at]


def unpack_counts(packed, int number):
    """Return `number` counts from the beginning of `packed`, as a list, and the number of bytes that they take.

    Raises ValueError for bytes that `pack_counts` does not write.
    """
    cdef uint64_t counts[MAX_COUNTS]
    cdef Py_buffer view
    cdef Py_ssize_t used
    cdef int place
    if not 0 <= number <= MAX_COUNTS:
        raise ValueError(f"{number} counts; at most {MAX_COUNTS} are packed together")
    PyObject_GetBuffer(packed, &view, PyBUF_SIMPLE)
    try:
        used = _unpack_counts(<const uint8_t*>view.buf, view.len, counts, number)
    finally:
        PyBuffer_Release(&view)
    if used < 0:
        raise ValueError("the packed counts are truncated, or not in the form that pack_counts writes")
    return [counts[place] for place in range(number)], used
