"""Tables of a server: what they are, and their kinds."""
