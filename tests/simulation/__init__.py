"""A simulated cluster in one thread: real clients, proxies, servers, readers and state folders under a scheduler that
controls time, chance, the network and kills.

world      tasks (in place of threads), virtual time, one random generator, a trace of all events
threads    locks, conditions, events and threads made of tasks
network    sockets, connections and their faults
installed  replacement of the real ones while a trial runs
trial      the trials of tests/history, with these processes
"""
