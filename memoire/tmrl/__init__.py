"""TMRL's names over memoire: a script for `tmrl` runs after replacing `tmrl` by `memoire.tmrl`.

    util                 partial, prod, cached_property
    config               constants of a file, read when they are used
    envs, rtgym          environments: with float32 observations; in real time
    actor, nn            policy networks and tools for networks; need torch
    memory_dataloading   base class of the trainer's memory: MemoryDataloading
    memory               TorchMemory, with samples of six parts, and GenericMemory, which is complete
    networking           Server, RolloutWorker, Trainer
    training             TrainingAgent
    custom               a complete agent, networks and memory; need torch
    training_offline     TrainingOffline

docs/tmrl.md describes what differs. Importing this package makes no file and no request.
"""
