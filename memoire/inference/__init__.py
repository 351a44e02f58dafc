"""Batched inference: one call of a function for the observations of many clients, with named outputs."""
