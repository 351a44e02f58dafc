"""Child process for tests of the launcher: performs the actions that its arguments name, in order."""

import os
import signal
import sys
import threading

from memoire.nodes.supervision import LauncherLine


def main() -> int:
    if sys.argv[1] == "die-early":
        print("I cannot find my feet")
        print("so I leave", end="")
        return 3
    with LauncherLine() as tether:
        for action in sys.argv[1:]:
            if action == "ready":
                tether.ready(pid=os.getpid(), threads=os.environ["OMP_NUM_THREADS"])
            elif action == "wait":
                while tether.wait(1.0):
                    pass
                print("finishing" if tether.finishing else "stopping")
            elif action == "report":
                while tether.wait(0.01):
                    tether.report(number=1)
                print("stopping")
            elif action == "hang":
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
                threading.Event().wait()
            elif action == "chatter":
                for _ in range(20_000):
                    print("x" * 60)
            elif action == "abort":
                print("something is very wrong")
                os.abort()
    return 0


if __name__ == "__main__":
    sys.exit(main())
