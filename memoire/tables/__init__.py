"""Tables of a server: named memories, their pools, and the registered kinds of tables."""
