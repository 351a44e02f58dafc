"""A peer's process: makes sides of a comparison and takes their turns, as lines of JSON ask for."""

import importlib
import json
import os
import sys

from tasks import clock


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    module = importlib.import_module(sys.argv[1])
    sides = []
    for line in sys.stdin:
        what, *given = json.loads(line)
        answer = None
        if what == "make":
            sides.append(getattr(module, given[0])(*given[1]))
            answer = len(sides) - 1
        elif what == "clock":
            answer = clock(sides[given[0]], given[1])
        elif what == "times":
            answer = sides[given[0]].times
        print(json.dumps(answer), file=answers, flush=True)
    for side in sides:
        getattr(side, "close", lambda: None)()
    os._exit(0)  # a server that somebody still draws from would wait for ever


if __name__ == "__main__":
    main()
