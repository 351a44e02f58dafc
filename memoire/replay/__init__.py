"""Replay memory in one process: schemas, memories, writers, samplers, batches."""
