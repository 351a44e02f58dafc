"""`memoire top` and `memoire logs`."""
