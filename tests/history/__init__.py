"""A cluster of real processes under load, faults from a seed, a history of what everyone was told, and its checks.

schedule.py  seed ──▶ which process is killed, stopped or ended, and when
trial.py     starts servers, proxies, actors and a learner, does all that to them, and heals
actor.py, learner.py  write down what they do before they do it, and what they were told afterwards
checks.py    reads only that, the servers' last words and the log files: what was promised, and does not hold
plants.py    faults to plant into a node or an actor: each must make a check fail
"""
