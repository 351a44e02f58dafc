"""Faults at the steps of a write, for its argument `at`: an error, or the end of the process."""

import errno
import os
import signal
import sys


class FailAt:
    """Records steps; raises at the nth step, and at each later one if `stays`."""

    def __init__(self, number=-1, error=None, *, stays=False):
        self.number, self.stays, self.steps = number, stays, []
        self.error = error or OSError(errno.ENOSPC, "No space left on device")

    def __call__(self, step):
        self.steps.append(step)
        if len(self.steps) == self.number or (self.stays and 0 < self.number < len(self.steps)):
            raise self.error


class KillAt(FailAt):
    """Kills the process at the nth step; or, if `number` is a name, at the step of that name, counted by `hit`."""

    def __init__(self, number, hit=1):
        super().__init__(number)
        self.hit = hit

    def __call__(self, step):
        self.steps.append(step)
        if self.number == len(self.steps) or (self.number == step and self.steps.count(step) == self.hit):
            os.kill(os.getpid(), signal.SIGKILL)


def forked(function):
    """Run the function in a forked child, which exits with 0 if the function returns; return the child's process id."""
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
    """Run the function in a forked child; return the child's exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(function), 0)[1])
