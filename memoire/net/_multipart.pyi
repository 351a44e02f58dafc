"""Sending and receiving of whole messages over a ZeroMQ socket, frame by frame, by the socket's own methods."""

from collections.abc import Sequence
from typing import Any

import zmq

def send(made: Any, frames: Sequence[Any], copy_below: int) -> None: ...
def receive(made: Any, most: int, wait: bool) -> list[zmq.Frame]: ...
