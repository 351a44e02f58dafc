"""Keys, who may do what, and tokens."""
