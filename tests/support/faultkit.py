"""Faults at the steps of a write, by the argument `at` of whatever writes: an error, or the end of the process."""

import errno
import os
import signal


class FailAt:
    """Raises at the nth step, and at all behind it if `stays`; counts them."""

    def __init__(self, number=-1, error=None, *, stays=False):
        self.number, self.stays, self.steps = number, stays, []
        self.error = error or OSError(errno.ENOSPC, "No space left on device")

    def __call__(self, step):
        self.steps.append(step)
        if len(self.steps) == self.number or (self.stays and 0 < self.number < len(self.steps)):
            raise self.error


class KillAt(FailAt):
    """Kills the process at the nth step, or at the first one of a name."""

    def __call__(self, step):
        self.steps.append(step)
        if self.number in (len(self.steps), step):
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(function):
    """Run it in a forked child; returns how that ended: 0 if it returned."""
    child = os.fork()
    if not child:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
