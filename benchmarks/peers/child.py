"""Process of a peer, which creates sides of a comparison and runs their turns on requests in lines of JSON."""

import importlib
import json
import os
import sys

from tasks import clock


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    module = importlib.import_module(sys.argv[1])
    sides = []
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        answer = None
        if what == "make":
            sides.append(getattr(module, arguments[0])(*arguments[1]))
            answer = len(sides) - 1
        elif what == "clock":
            answer = clock(sides[arguments[0]], arguments[1])
        elif what == "times":
            answer = sides[arguments[0]].times
        print(json.dumps(answer), file=answers, flush=True)
    for side in sides:
        getattr(side, "close", lambda: None)()
    os._exit(0)  # a server with open draws would never end


if __name__ == "__main__":
    main()
