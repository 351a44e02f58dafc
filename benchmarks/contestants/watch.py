"""The dashboard's verdicts of a run, a line of JSON every few seconds: python watch.py http://127.0.0.1:8080"""

import json
import sys
import time

from memoire.dashboard.collect.aggregator import Aggregator
from memoire.dashboard.collect.history import History
from memoire.dashboard.settings import Settings

INTERVAL = 2.0
"""Seconds between two looks: rates are of the newest ten."""


def main() -> None:
    aggregator = Aggregator(Settings(nodes=(sys.argv[1],), poll_every=INTERVAL), History(None))
    aggregator.look_up()
    while True:
        overview = aggregator.turn(INTERVAL)
        shares = [each.waiting_share for each in overview.learners if each.waiting_share is not None]
        print(json.dumps([max(shares, default=None), *(each.code for each in overview.verdicts)]), flush=True)
        time.sleep(INTERVAL)


if __name__ == "__main__":
    main()
