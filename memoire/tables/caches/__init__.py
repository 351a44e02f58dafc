"""Tables of caches: samples that actors made."""
