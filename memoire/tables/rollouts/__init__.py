"""Tables of rollouts: fragments that are handed out once."""
