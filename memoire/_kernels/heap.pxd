"""Values of ragged columns, each in one piece, in segments that come and go."""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

# Heap: the values of a ragged column, each in one piece. A row holds a pointer to its value; NULL is one without elements.
#
#     oldest segment            segment                newest segment
#     | 7: xxx | -: yyyyy |     | 9: z | 3: xxxxx |    | 12: xx |   room   |      7: whose it is; -: nobody's any more
#
# A value is put behind the newest, and a segment goes when nothing in it is somebody's any more: episodes leave oldest first. Where
# segments take more than one and a half times what values need (and a few), since some values stay for long, the oldest are gone
# through: what is somebody's is put behind the newest, too. Large values have a segment each.

cdef enum:
    NOTHING = -1  # frame code: zeros. Below: -(code + 2) is a row of the final states

cdef enum:
    SEGMENT_BYTES = 1 << 18
    ALONE_BYTES = 1 << 15  # larger values have a segment each; so a full segment has no more than this unused
    SPARE_SEGMENTS = 4

cdef struct Value:  # in front of a value's elements
    int64_t owner  # frame code of the row or final state that it is the value of; NOTHING: nobody's
    int32_t length  # elements, 1 or more
    int32_t at  # bytes from the begin of its segment

cdef struct Segment:  # in front of its values
    Segment* older
    Segment* newer
    int64_t size  # bytes there are for values
    int32_t used
    int32_t living  # values that have not been dropped; one more while they are gone through

cdef struct Heap:
    Segment* oldest
    Segment* newest
    Segment* alone  # one of those with a single large value; they are linked, too
    int64_t element  # bytes of one
    int64_t held  # bytes of all segments
    int64_t live  # bytes of values that are somebody's


cdef inline int64_t heap_bytes(const Heap* heap, int64_t length) noexcept nogil:
    """What a value takes."""
    return sizeof(Value) + ((length * heap.element + 7) & ~<int64_t>7)


cdef inline Segment* heap_segment(Heap* heap, int64_t size) noexcept nogil:
    """A new segment with room for `size` bytes, in no list; NULL where memory is short."""
    cdef Segment* segment = <Segment*>malloc(sizeof(Segment) + size)
    if segment != NULL:
        segment.older = segment.newer = NULL
        segment.size, segment.used, segment.living = size, 0, 0
        heap.held += sizeof(Segment) + size
    return segment


cdef inline void heap_release(Heap* heap, Segment* segment) noexcept nogil:
    """Give a segment back if nothing lives in it and it is not the newest."""
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
    """The segment that a value of `size` bytes goes into; NULL where memory is short."""
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
    """Store a value, nobody's yet, and point `place` at it. False where memory is short."""
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
    """Let the value go that `place` points at, if any."""
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
    """Whether much more is held than needed. Without this, one value that stays could hold a segment for ever."""
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
