"""Helpers for tests of the classic classes: templates, a cluster whose loops run in threads, and checks of batches."""

import contextlib
import threading

import numpy as np

import netkit
from history.ports import address
from memoire import ReplayMemoryClient, ReplayMemoryServer
from netkit import DEADLINE, until


def templates(state=(4,), reward=()):
    """Return templates of the seven buffers, in the order of the classic API."""
    of_reward = [(reward, np.float32)]
    forms = (state, np.float32), ((), np.int64), *of_reward, ((), np.float32), *2 * of_reward, ((2,), np.int32)
    return tuple(np.zeros(*form) for form in forms)


def tcp():
    """Return a TCP address with a free port."""
    return address(1)


class Cluster:
    """Server whose loops run in threads: proxies on TCP, and workers behind the proxies on inproc://.

    On exit the server closes; the test fails unless every loop ends.
    """

    def __init__(self, *, max_step=1000, n_caches=64, workers=2, buffers=None, seed=0, **parameters):
        self.sub, self.req, self.push = tcp(), tcp(), tcp()
        self.server = ReplayMemoryServer(*(buffers or templates()), max_step, self.sub, n_caches, seed=seed)
        self.threads, self.outcomes, self.clients = [], [], []
        for name, value in parameters.items():
            setattr(self.server.rem, name, value)
        mark = f"{id(self):x}"
        self.loop("rep_proxy_main", self.req, f"inproc://rep{mark}")
        self.loop("pull_proxy_main", self.push, f"inproc://pull{mark}")
        for _ in range(workers):
            self.loop("rep_worker_main", f"inproc://rep{mark}", "Conn")
            self.loop("pull_worker_main", f"inproc://pull{mark}", "Conn")

    def loop(self, name, *arguments):
        thread, outcome = netkit.in_thread(getattr(self.server, name), *arguments)
        thread.name = name
        self.threads.append(thread)
        self.outcomes.append(outcome)

    def client(self, input_uuid=0, **options):
        """Return a new client of the three endpoints; the cluster closes the client at its end."""
        client = ReplayMemoryClient(self.sub, self.req, self.push, input_uuid, **options)
        self.clients.append(client)
        return client

    def held(self, caches):
        """Wait until the server has accepted so many caches."""
        until(lambda: self.server.total_caches >= caches)

    def __enter__(self):
        return self

    def __exit__(self, kind, problem, trace):
        for client in self.clients:
            client.close(timeout=1.0)
        self.server.close()
        for thread in self.threads:
            thread.join(DEADLINE)
        if kind is None:
            assert not [each.name for each in self.threads if each.is_alive()], "loops did not end on close"
            assert not any("error" in outcome for outcome in self.outcomes), self.outcomes


def play(client, owner, length=10, start=0, **how):
    """Record one closed episode whose states hold [owner, position, 2 * position, 1]."""
    rem = client.rem
    rem.new_episode()
    for t in range(start, start + length):
        state = np.array([owner, t, 2 * t, 1], np.float32)
        rem.add_entry(state, 1000 * owner + t, float(t % 3), 0.5, 0.25, np.array([owner, t], np.int32), 1.0)
    rem.close_episode(**how)


def check_content(batch, steps=1, stack=1):
    """Assert that each sample holds the fields of one entry, and the state `steps` later."""
    prev, following, weight = batch
    owner, position = prev.info[:, 0], prev.info[:, 1]
    np.testing.assert_array_equal(prev.action, 1000 * owner + position)
    np.testing.assert_array_equal(prev.reward, position % 3)
    window = np.arange(stack)[None, :] - (stack - 1)
    for side, shift in ((prev, 0), (following, steps)):
        newest = (position + shift)[:, None] + window
        np.testing.assert_array_equal(side.state[..., 0], np.repeat(owner[:, None], stack, axis=1))
        np.testing.assert_array_equal(side.state[..., 1], newest)
        np.testing.assert_array_equal(side.state[..., 2], 2 * newest)
    np.testing.assert_array_equal(following.action, prev.action + steps)
    assert (weight > 0).all()


@contextlib.contextmanager
def in_thread(target, *arguments):
    """Run a function in a thread beside the block; afterwards the dict holds "result" or "problem"."""
    outcome = {}

    def run():
        try:
            outcome["result"] = target(*arguments)
        except BaseException as problem:
            outcome["problem"] = problem

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield outcome
    thread.join(DEADLINE)
    assert not thread.is_alive(), f"{target} did not end"
