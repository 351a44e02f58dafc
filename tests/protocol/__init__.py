"""The protocol between clients and servers, checked over all orders of events of small worlds.

canonical  when two states of an object are the same one
ends       a client and a server: the product's own deciding classes, driven by events
replays    what an end does next: reached by replaying its events, and remembered
worlds     which events there are, in which worlds, and what has to be true after each of them
explore    the search over all orders, breadth first
mutations  rules of the protocol taken out, one at a time
run        the command: every world, and a counterexample for every mutation
"""
