"""The way to a peer: names that hang or move, addresses that fail, calls that are sent again, and a node's feed."""
