"""Faults at the steps of a write, by the argument `at` of whatever writes: an error, or the end of the process."""

import errno
import os
import signal
import sys


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
    """Kills the process at the nth step, or at the first one, or the given hit, of a name."""

    def __init__(self, number, hit=1):
        super().__init__(number)
        self.hit = hit

    def __call__(self, step):
        self.steps.append(step)
        if self.number == len(self.steps) or (self.number == step and self.steps.count(step) == self.hit):
            os.kill(os.getpid(), signal.SIGKILL)


def forked(function):
    """Run it in a forked child, which ends with status 0 if it returns; returns the child's number."""
    child = os.fork()
    if child:
        return child
    try:
        function()
    except BaseException as error:  # the parent looks at the status
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def in_child(function):
    """Run it in a forked child; returns how that ended."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(function), 0)[1])
