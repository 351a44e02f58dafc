"""Batched inference: observations of many clients in, one call of a function, named outputs back."""
