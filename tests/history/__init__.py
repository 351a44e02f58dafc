"""A cluster of real processes under load, faults from a seed, and a history of its events with checks.

players.py   an actor and a learner, which record their actions before they happen, and the answers afterwards
trial.py     starts servers, proxies, actors and a learner; kills, stops and ends them by a schedule, and heals
checks.py    compares the histories, the servers' last reports and the log files with the promises
ports.py     ports reserved for a test
"""
