"""What does a checkpoint write, beside pickling all of a memory; and how long does it take to go on?

    .venv/bin/python benchmarks/checkpoint.py [SAMPLES]

A memory holds a million samples of a drone, of which one in a hundred is new. The baseline pickles the lists of parts
that the memory of TMRL's tutorial keeps. Exit status 1 if an aim is missed.
"""

import pickle
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from memoire.rl.memory import GenericMemory
from memoire.rl.sample_journal import SampleJournal

EPISODE = 100
AIMS = {"written": 1 / 50, "on disk": 1.3, "seconds": 60.0, "memory": 2.0}


def buffers(count, values):
    for _ in range(count // EPISODE):
        acts, obs = values.random((EPISODE, 2), np.float32), values.random((EPISODE, 4, 1), np.float32)
        rewards = values.random(EPISODE, np.float32)
        rows = [(acts[i], tuple(obs[i]), rewards[i], i == EPISODE - 1, {}) for i in range(EPISODE)]
        yield SimpleNamespace(memory=rows)


def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def pickled_bytes(samples):
    """Bytes of the lists of the tutorial's memory, counted for a tenth of them."""
    columns = [[] for _ in range(8)]
    for buffer in buffers(samples // 10, np.random.default_rng(0)):
        for act, obs, rew, done, info in buffer.memory:
            for column, value in zip(columns, (act, *obs, rew, done, info), strict=True):
                column.append(value)
    return 10 * len(pickle.dumps(columns))


def main():
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    values = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        journal = SampleJournal(folder, samples)
        for buffer in buffers(samples, values):
            journal.keep(buffer)
        journal.commit()
        before = journal.size
        began = time.perf_counter()
        for buffer in buffers(samples // 100, values):
            journal.keep(buffer)
        journal.commit()
        written, seconds = journal.size - before, time.perf_counter() - began
        on_disk, kept = journal.size, len(journal)
        del journal
        started, base = time.perf_counter(), resident()
        memory = GenericMemory(samples)
        for kept_buffer in SampleJournal(folder, samples).buffers():
            memory.append(kept_buffer.memory)
        resumed, held = time.perf_counter() - started, resident() - base
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base
    everything = pickled_bytes(samples)
    data = samples * (8 + 16 + 4 + 1)  # act, obs, rew, done
    found = {"written": written / everything, "on disk": on_disk / data, "seconds": resumed, "memory": peak / held}
    print(f"{samples} samples held of {data / samples:.0f} bytes each; {samples // 100} of them new")
    print(f"a checkpoint writes {written / 1e6:.2f} MB in {seconds:.2f} s; all of it pickled {everything / 1e6:.1f} MB")
    print(f"on disk {on_disk / 1e6:.1f} MB for {kept} samples; data {data / 1e6:.1f} MB")
    print(f"rebuilt in {resumed:.1f} s; memory {held / 1e6:.1f} MB, at most {peak / 1e6:.1f} MB")
    for name, aim in AIMS.items():
        print(f"{name:10} {found[name]:9.4f}   aim at most {aim:.4g}")
    return any(found[name] > aim for name, aim in AIMS.items())


if __name__ == "__main__":
    sys.exit(main())
