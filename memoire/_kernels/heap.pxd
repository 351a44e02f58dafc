"""Heap for the values of ragged columns: contiguous values in segments that are allocated and freed."""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

# Heap: the values of a ragged column, each of them contiguous. A row holds a pointer to its value; NULL is a value without elements.
#
#     oldest segment            segment                newest segment
#     | 7: xxx | -: yyyyy |     | 9: z | 3: xxxxx |    | 12: xx |   room   |      7: owner of the value; -: no owner any more
#
# A value is stored behind the newest value. A segment is freed when none of its values has an owner: episodes leave oldest first. If
# segments take more than one and a half times the bytes of the values (and a few segments more), since some values stay for long,
# the oldest segments are cleaned: values with an owner move behind the newest value. Large values have a segment each.

cdef enum:
    NOTHING = -1  # frame code of zeros. For a code below, -(code + 2) is a row of the final states

cdef enum:
    SEGMENT_BYTES = 1 << 18
    ALONE_BYTES = 1 << 15  # larger values have a segment each; so a full segment has at most this many unused bytes
    SPARE_SEGMENTS = 4

cdef struct Value:  # in front of a value's elements
    int64_t owner  # frame code of the row or final state that has the value; NOTHING: no owner
    int32_t length  # elements, 1 or more
    int32_t at  # bytes from the begin of its segment

cdef struct Segment:  # in front of its values
    Segment* older
    Segment* newer
    int64_t size  # bytes for values
    int32_t used
    int32_t living  # values that have not been dropped; one more while the segment is cleaned

cdef struct Heap:
    Segment* oldest
    Segment* newest
    Segment* alone  # list of the segments with a single large value
    int64_t element  # bytes of one element
    int64_t held  # bytes of all segments
    int64_t live  # bytes of values that have not been dropped


cdef inline int64_t heap_bytes(const Heap* heap, int64_t length) noexcept nogil:
    """Return the bytes that a value of `length` elements takes in a segment."""
    return sizeof(Value) + ((length * heap.element + 7) & ~<int64_t>7)


cdef inline Segment* heap_segment(Heap* heap, int64_t size) noexcept nogil:
    """Allocate a segment with room for `size` bytes, in no list; return NULL if memory is short."""
    cdef Segment* segment = <Segment*>malloc(sizeof(Segment) + size)
    if segment != NULL:
        segment.older = segment.newer = NULL
        segment.size, segment.used, segment.living = size, 0, 0
        heap.held += sizeof(Segment) + size
    return segment


cdef inline void heap_release(Heap* heap, Segment* segment) noexcept nogil:
    """Free a segment if it has no living values and is not the newest."""
    if segment.living > 0 or segment == heap.newest:
        return
    if segment.older != NULL:
        segment.older.newer = segment.newer
    elif segment == heap.alone:
        heap.alone = segment.newer
    else:
        heap.oldest = segment.newer
    if segment.newer != NULL:
        segment.newer.older = segment.older
    heap.held -= <int64_t>sizeof(Segment) + segment.size
    free(segment)


cdef inline Segment* heap_room(Heap* heap, int64_t size) noexcept nogil:
    """Return the segment for a new value of `size` bytes, or NULL if memory is short."""
    cdef Segment* full = heap.newest
    cdef Segment* segment
    if size > ALONE_BYTES:
        segment = heap_segment(heap, size)
        if segment != NULL:
            segment.newer = heap.alone
            if heap.alone != NULL:
                heap.alone.older = segment
            heap.alone = segment
        return segment
    if full != NULL and full.used + size <= full.size:
        return full
    segment = heap_segment(heap, SEGMENT_BYTES)
    if segment != NULL:
        segment.older = full
        heap.newest = segment
        if full == NULL:
            heap.oldest = segment
        else:
            full.newer = segment
            heap_release(heap, full)
    return segment


cdef inline bint heap_put(Heap* heap, const char* source, int64_t length, Value** place) noexcept nogil:
    """Store a value without an owner, and point `place` at it. Return False if memory is short."""
    cdef int64_t size = heap_bytes(heap, length)
    cdef Segment* segment
    place[0] = NULL
    if length == 0:
        return True
    segment = heap_room(heap, size)
    if segment == NULL:
        return False
    place[0] = <Value*>(<char*>(segment + 1) + segment.used)
    place[0].owner, place[0].length, place[0].at = NOTHING, <int32_t>length, <int32_t>sizeof(Segment) + segment.used
    memcpy(<char*>(place[0] + 1), source, length * heap.element)
    segment.used += <int32_t>size
    segment.living += 1
    heap.live += size
    return True


cdef inline void heap_drop(Heap* heap, Value** place) noexcept nogil:
    """Drop the value that `place` points at, if any, and set `place` to NULL."""
    cdef Value* value = place[0]
    cdef Segment* segment
    if value == NULL:
        return
    segment = <Segment*>(<char*>value - value.at)
    place[0] = NULL
    heap.live -= heap_bytes(heap, value.length)
    value.owner = NOTHING
    segment.living -= 1
    heap_release(heap, segment)


cdef inline bint heap_is_loose(const Heap* heap) noexcept nogil:
    """Return True if segments take much more than the values need. Cleaning then frees segments that few values occupy."""
    return heap.held - heap.live > heap.live // 2 + SPARE_SEGMENTS * <int64_t>SEGMENT_BYTES and heap.oldest != heap.newest


cdef inline void heap_free(Heap* heap) noexcept nogil:
    cdef Segment* segment
    while heap.oldest != NULL:
        segment = heap.oldest
        heap.oldest = segment.newer
        free(segment)
    while heap.alone != NULL:
        segment = heap.alone
        heap.alone = segment.newer
        free(segment)
