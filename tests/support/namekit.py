"""A name server for tests."""

import threading


class Book:
    """A name server: what it knows, how often it was asked, and names on which it hangs."""

    def __init__(self, **known):
        self.known, self.asked, self.hanging = known, [], set()
        self.released = threading.Event()

    def __call__(self, host):
        self.asked.append(host)
        if host in self.hanging:
            self.released.wait(100.0)
        if host not in self.known:
            raise OSError(-2, "Name or service not known")
        return list(self.known[host])
