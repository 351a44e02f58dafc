"""How whole messages leave a ZeroMQ socket, and come out of one: frame by frame, by the socket's own methods."""

from collections.abc import Sequence
from typing import Any

import zmq

def send(made: Any, frames: Sequence[Any], copy_below: int) -> None: ...
def receive(made: Any, most: int, wait: bool) -> list[zmq.Frame]: ...
