"""Readers: remote learners that draw batches over the network."""
