"""Sending and receiving of whole messages over a ZeroMQ socket, frame by frame, by the socket's own methods."""

cdef enum:
    NOBLOCK = 1
    MORE = 2


def send(made, frames, Py_ssize_t copy_below):
    """Send a whole message without waiting. Raises ZMQError of the socket; Again if the socket has no room.

    Args:
        frames: Buffers. `bytes` of less than `copy_below` bytes are copied, which is quicker than a `zmq.Frame` for each.
    """
    cdef Py_ssize_t last = len(frames) - 1, place = 0
    send_frame = made.send
    for frame in frames:
        is_small = type(frame) is bytes and len(<bytes>frame) < copy_below
        send_frame(frame, NOBLOCK | MORE if place < last else NOBLOCK, is_small)
        place += 1


def receive(made, Py_ssize_t most, bint wait):
    """Return the next whole message, a list of frames as they arrived, at most one more than `most`. Raises ZMQError.

    Args:
        wait: True waits for the first frame, as long as the socket's RCVTIMEO says.
    """
    receive_frame = made.recv
    frame = receive_frame(0 if wait else NOBLOCK, False)
    cdef list frames = [frame]
    while frame.more:
        frame = receive_frame(NOBLOCK, False)
        if len(frames) <= most:
            frames.append(frame)
    return frames
