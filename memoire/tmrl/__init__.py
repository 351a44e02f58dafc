"""The names of TMRL over memoire: a script for `tmrl` runs after one substitution, `tmrl` by `memoire.tmrl`.

    util                 partial, prod, cached_property
    config               constants out of a file, read when they are used
    envs, rtgym          environments: with float32 observations; under a real clock
    actor, nn            networks that act; need torch
    memory_dataloading   the trainer's memory: MemoryDataloading, which a user completes
    memory               TorchMemory, the same with six parts, and one that is complete
    networking           Server, RolloutWorker, Trainer
    training             TrainingAgent
    custom               an agent, networks and a memory that are complete; need torch
    training_offline     TrainingOffline

docs/tmrl.md has each name with its behaviour and its test. Importing this makes no file and asks nobody.
"""
