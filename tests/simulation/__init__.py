"""A cluster in one thread: real clients, proxies, servers, readers and state folders under a scheduler that owns time,
chance, the network and who is killed when.

    world      tasks (what threads are elsewhere), virtual time, one random generator, a trace of all that happens
    threads    locks, conditions, events and threads made of tasks
    network    sockets, connections and what becomes of them
    installed  puts these in the place of the real ones, for as long as a trial runs
    trial      the trials of tests/history, with these processes
"""
