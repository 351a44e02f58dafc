"""The protocol between clients and servers, checked over all orders of events of small worlds.

canonical  one name for all equivalent states of an object
ends       a client and a server: the product's own deciding classes, driven by events
replays    the next state of a client or server: reached by replaying its events, and remembered
rules      conditions on clients and servers after each event and in each final state
worlds     the worlds that are searched: their events and faults
explore    the search over all orders, breadth first
mutations  rules of the protocol taken out, one at a time
run        the command: every world, and a counterexample for every mutation
"""
