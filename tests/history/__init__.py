"""A cluster of real processes under load, faults from a seed, a history of what everyone was told, and its checks.

players.py   an actor and a learner, which write down what they do before they do it, and what they were told afterwards
trial.py     starts servers, proxies, actors and a learner; kills, stops and ends them as a seed says, and heals
checks.py    reads only the histories, the servers' last words and the log files: what was promised, and does not hold
ports.py     ports of a test's own
"""
