"""Reinforcement learning that shortens a quantum circuit: observers, start states, graphs, masks.

    python examples/search/circuits.py [--seconds 300] [--observers 2] [--goal 41]      needs torch: memoire-rl[rl]

The circuit is three Toffoli gates in the textbook's decomposition: 45 gates of H, T, S and CX on five qubits. An
action rewrites neighbouring gates: it cancels, merges or commutes two gates, moves one CX through another one, which
adds a third CX, or moves a gate past CX, phase, CX. The observers rewrite circuits. The agent, a graph network in this
process, chooses gate and rule for all observers, and learns by PPO. Episodes begin at the best circuits so far. The
program prints the result of greedy descent by the same rules, and compares the unitaries of the best and the first
circuit in exact integers. The program also prints the number of gates that an episode from the first circuit saves,
before learning and after.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import multiprocessing
import sys
import time

import numpy as np

from memoire import rl
from memoire.replay.columns import Column, Ragged

QUBITS = 5
H, CX = 8, 9
"""Kinds of gates. Kinds 1 to 7 are phases in eighths of a turn: T is 1, S is 2, Z is 4."""
PHASES = (1, 2, 4, 6, 7)
"""Phases that need only one gate: T, S, Z and the inverses of S and T."""
RULES = 10
"""Number of rewrite rules. Three rules (cancel or merge, commute, pass through) apply to the next gate on the first or
the second wire. The other rules move the gate after CX, phase, CX before these gates, or the gate before after these.
"""
STEPS = 40
"""Number of steps in an episode."""

STATE = {"gates": Column(np.int16, (None, 3), role="state")}  # kind and wires; the second is -1 for one qubit
INPUTS = {"gates": Column(np.int16, (None, 3)), "links": Column(np.int16, (None, 4))}
OUTPUTS = {"logits": Column(np.float32, (None, RULES)), "value": np.float32}
ENTRIES = {
    **STATE,
    "links": Column(np.int16, (None, 4)),
    "mask": Column(np.bool_, (None, RULES)),
    "action": np.int32,  # gate * RULES + rule
    "logp": np.float32,
    "critic": np.float32,
    "reward": np.float32,
}

Gate = tuple[int, int, int]


# The circuit and its rules


def toffoli(a: int, b: int, c: int) -> list[Gate]:
    """Return a Toffoli gate as 15 gates: Nielsen and Chuang, figure 4.9."""
    return [
        (H, c, -1), (CX, b, c), (7, c, -1), (CX, a, c), (1, c, -1), (CX, b, c), (7, c, -1), (CX, a, c), (1, b, -1),
        (1, c, -1), (H, c, -1), (CX, a, b), (1, a, -1), (7, b, -1), (CX, a, b),
    ]  # fmt: skip


FIRST = [*toffoli(0, 1, 3), *toffoli(3, 2, 4), *toffoli(0, 1, 3)]


def wires(gate: Gate) -> tuple[int, ...]:
    return gate[1:] if gate[0] == CX else gate[1:2]


def canonical(gates: list[Gate]) -> list[Gate]:
    """Return the gates layer by layer, the same for all orders of gates with the same graph."""
    depth, layers = [0] * QUBITS, []
    for gate in gates:
        layer = 1 + max(depth[wire] for wire in wires(gate))
        for wire in wires(gate):
            depth[wire] = layer
        layers.append((layer, gate[1:], gate))
    return [gate for _, _, gate in sorted(layers)]


def links(gates: list[Gate]) -> np.ndarray:
    """Return the previous and next gate on each gate's wires: [n, 4], counted from 1, with 0 for a missing gate."""
    near, last = np.zeros((len(gates), 4), np.int16), {}
    for i, gate in enumerate(gates):
        for side, wire in enumerate(wires(gate)):
            if wire in last:
                before, other = last[wire]
                near[i, 2 * side], near[before, 2 * other + 1] = before + 1, i + 1
            last[wire] = i, side
    return near


def later(gates: list[Gate], block: list[int], j: int) -> list[int] | None:
    """Return the gates between a block and gate j that have to come after the block.

    Return None if gate j has to come after one of those gates.
    """
    behind, between = set(wires(gates[block[0]])), []
    for k in range(block[0] + 1, j):
        if k not in block and behind & set(wires(gates[k])):
            behind |= set(wires(gates[k]))
            between.append(k)
    blocked = {wire for k in between for wire in wires(gates[k])}
    return None if blocked & set(wires(gates[j])) else between


def replaced(rule: int, one: Gate, two: Gate) -> list[Gate] | None:
    """Return the gates that replace two neighbouring gates by a rule; None if the rule does not apply."""
    phases = one[0] < H, two[0] < H
    if rule == 0:
        if all(phases):
            total = (one[0] + two[0]) % 8
            return [] if not total else [(total, one[1], -1)] if total in PHASES else None
        return [] if one == two and not any(phases) else None
    both_cx = one[0] == two[0] == CX
    if rule == 1:
        if both_cx and one != two:
            return [two, one] if one[1] != two[2] and one[2] != two[1] else None
        on_control = (phases[0] and two[0] == CX and two[1] == one[1]) or (
            phases[1] and one[0] == CX and one[1] == two[1]
        )
        return [two, one] if on_control else None
    if both_cx and one[2] == two[1] and one[1] != two[2]:
        return [two, (CX, one[1], two[2]), one]
    if both_cx and one[1] == two[2] and one[2] != two[1]:
        return [two, (CX, two[1], one[2]), one]
    return None


def gadget(gates: list[Gate], i: int, near: np.ndarray) -> list[int] | None:
    """Return the places of CX, phase on its target and the same CX, which rotate the parity of two wires, or None."""
    if gates[i][0] != CX or not near[i, 1] or not near[i, 3]:
        return None
    phase, end = int(near[i, 3]) - 1, int(near[i, 1]) - 1
    is_one = gates[phase][0] < H and int(near[phase, 1]) - 1 == end and gates[end] == gates[i]
    return [i, phase, end] if is_one else None


def planned(gates: list[Gate], i: int, rule: int, near: np.ndarray) -> tuple[list[int], int, list[Gate]] | None:
    """Return a block of gates, the next gate and their replacement by a rule; None if the rule does not apply."""
    kind, side = divmod(rule, 2)
    block: list[int] | None = [i] if kind < 3 else gadget(gates, i, near)
    if block is None or not (j := int(near[block[-1], 2 * side + 1])):
        return None
    j -= 1
    if kind < 3:
        gates_after = replaced(kind, gates[i], gates[j])
    else:
        moves = gates[j][0] < H or (
            gates[j][0] == CX and gates[j][1] == gates[i][1 + side] and gates[j][2] not in gates[i][1:]
        )
        gates_after = [gates[j], *(gates[k] for k in block)] if moves else None
    return None if gates_after is None else (block, j, gates_after)


def mirrored(gates: list[Gate], i: int, near: np.ndarray) -> tuple[list[Gate], int, np.ndarray] | None:
    """Return the reversed circuit, the place of the gadget at i in it, and its links; None without a gadget."""
    block = gadget(gates, i, near)
    if block is None:
        return None
    turned = gates[::-1]
    return turned, len(gates) - 1 - block[-1], links(turned)


def rewritten(gates: list[Gate], i: int, rule: int, near: np.ndarray) -> list[Gate] | None:
    """Return the circuit after an action; None if the action does not apply."""
    if rule >= 8:
        turned = mirrored(gates, i, near)
        replacement = None if turned is None else rewritten(turned[0], turned[1], rule - 2, turned[2])
        return None if replacement is None else canonical(replacement[::-1])
    plan = planned(gates, i, rule, near)
    after = None if plan is None else later(gates, plan[0], plan[1])
    if plan is None or after is None:
        return None
    block, j, replacement = plan
    before = [gates[k] for k in range(i + 1, j) if k not in after and k not in block]
    return canonical([*gates[:i], *before, *replacement, *(gates[k] for k in after), *gates[j + 1 :]])


def possible(gates: list[Gate], near: np.ndarray) -> np.ndarray:
    """Return a mask of the actions that apply: bool [n, RULES]."""
    mask = np.zeros((len(gates), RULES), np.bool_)
    for i in range(len(gates)):
        for rule in range(8):
            plan = planned(gates, i, rule, near)
            mask[i, rule] = plan is not None and later(gates, plan[0], plan[1]) is not None
        if gadget(gates, i, near) is not None:
            mask[i, 8:] = [rewritten(gates, i, rule, near) is not None for rule in (8, 9)]
    return mask


def greedy(gates: list[Gate]) -> list[Gate]:
    """Take the first rewrite that makes the circuit shorter, until no rewrite does."""
    while True:
        near = links(gates)
        rewrites = [rewritten(gates, int(i), int(rule), near) for i, rule in np.argwhere(possible(gates, near))]
        shorter = next((circuit for circuit in rewrites if circuit is not None and len(circuit) < len(gates)), None)
        if shorter is None:
            return gates
        gates = shorter


def unitary(gates: list[Gate]) -> tuple[np.ndarray, int]:
    """Return the circuit's exact matrix, and the number of factors sqrt(1/2) before it.

    The matrix has integers [32, 32, 4]: the factors of 1, w, w^2, w^3 with w = exp(i pi / 4).
    """
    size = 1 << QUBITS
    matrix, halves = np.zeros((size, size, 4), np.int64), 0
    matrix[np.arange(size), np.arange(size), 0] = 1
    index = np.arange(size)
    for kind, one, two in gates:
        bit = index >> one & 1
        if kind == CX:
            matrix = matrix[index ^ (bit << two)]
        elif kind == H:
            low, high = matrix[index & ~(1 << one)], matrix[index | 1 << one]
            matrix, halves = np.where(bit[:, None, None] == 0, low + high, low - high), halves + 1
        else:
            for _ in range(kind):
                matrix = np.where(bit[:, None, None] == 1, times_w(matrix), matrix)
    return matrix, halves


def times_w(numbers: np.ndarray) -> np.ndarray:
    """Return w times each number; w^4 is -1."""
    return np.concatenate([-numbers[..., 3:], numbers[..., :3]], -1)


def are_equal(one: list[Gate], two: list[Gate]) -> bool:
    """Return True if two circuits have exactly the same matrix."""
    (a, a_halves), (b, b_halves) = unitary(one), unitary(two)
    for _ in range(a_halves - b_halves):  # sqrt(2) is w - w^3
        b = times_w(b) - times_w(times_w(times_w(b)))
    for _ in range(b_halves - a_halves):
        a = times_w(a) - times_w(times_w(times_w(a)))
    return bool((a == b).all())


# An observer


def columns_of(gates: list[Gate]) -> dict[str, np.ndarray]:
    return {"gates": np.array(gates, np.int16).reshape(-1, 3)}


def run_episode(start, ask, options):
    """Rewrite the circuit for `STEPS` steps; the reward of a step is the number of gates that it removes."""
    rng = np.random.default_rng()
    gates = [tuple(gate) for gate in start["gates"].tolist()]
    for _ in range(STEPS):
        near = links(gates)
        mask = possible(gates, near)
        state = columns_of(gates) | {"links": near}
        answer = ask(state)
        choice, logp = rl.sample_masked(answer["logits"].ravel(), mask.ravel(), rng)
        circuit = rewritten(gates, *divmod(int(choice), RULES), near)
        reward = len(gates) - len(circuit)
        yield state | {"mask": mask, "action": choice, "logp": logp, "critic": answer["value"], "reward": float(reward)}
        gates = circuit
    return columns_of(gates)


def observe(url: str) -> None:
    with rl.Observer(url, run_episode) as observer:
        observer.run()


# The agent


def make_net():
    """Return a network that scores each action and values a circuit, after four rounds of messages between gates."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self, width: int = 64, rounds: int = 4) -> None:
            super().__init__()
            self.kinds = torch.nn.Embedding(CX + 1, width)
            self.rounds = torch.nn.ModuleList(torch.nn.Linear(5 * width, width) for _ in range(rounds))
            self.scores, self.value = torch.nn.Linear(width, RULES), torch.nn.Linear(width, 1)

        def forward(self, kinds, near, lengths):
            """Return scores [B, L, RULES] and values [B] of graphs: kinds [B, L], neighbours [B, L, 4]."""
            is_gate = (torch.arange(kinds.shape[1]) < lengths[:, None]).unsqueeze(-1)
            nodes = self.kinds(kinds) * is_gate
            index = near.flatten(1).unsqueeze(-1).expand(-1, -1, nodes.shape[-1])
            for layer in self.rounds:
                padded = torch.nn.functional.pad(nodes, (0, 0, 1, 0))  # a missing neighbour sends zeros
                messages = padded.gather(1, index).view(*near.shape[:2], -1)
                nodes = (nodes + torch.relu(layer(torch.cat([nodes, messages], -1)))) * is_gate
            return self.scores(nodes), self.value(nodes.sum(1) / lengths[:, None]).squeeze(-1)

    return Net()


def tensors(columns):
    """Return the network's inputs from padded columns: kinds, links and lengths."""
    import torch

    gates, near = (
        torch.from_numpy(columns["gates"].astype(np.int64)),
        torch.from_numpy(columns["links"].astype(np.int64)),
    )
    return gates[..., 0], near, torch.from_numpy(columns["gates_length"])


def act(columns, net):
    """Return the scores and values that observers ask for."""
    import torch

    with torch.no_grad():
        scores, values = net(*tensors(columns))
    lengths = columns["gates_length"]
    return {"logits": [each[:n] for each, n in zip(scores.numpy(), lengths, strict=True)], "value": values.numpy()}


def losses(net, batch, advantage, target, clip: float = 0.2):
    """Return PPO's loss of a batch (Schulman et al. 2017), from clipped ratio, value and entropy, and the entropy."""
    import torch

    scores, values = net(*tensors(batch))
    allowed = torch.from_numpy(batch["mask"]).flatten(1)
    logs = scores.flatten(1).masked_fill(~allowed, -1e9).log_softmax(-1)
    logp = logs.gather(1, torch.from_numpy(batch["action"]).long()[:, None]).squeeze(1)
    ratio = (logp - torch.from_numpy(batch["logp"])).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    entropy = -(logs.exp() * logs * allowed).sum(-1).mean()
    return -gain + 0.5 * (values - target).pow(2).mean() - 0.01 * entropy, float(entropy.detach())


def final_values(net, rollouts):
    """Return the critic's value of each episode's last state: [F]."""
    last = [[tuple(gate) for gate in value.tolist()] for value in rollouts.final["gates"]]
    graphs = {"gates": [columns_of(each)["gates"] for each in last], "links": [links(each) for each in last]}
    return act(
        rl.padded_columns(
            {name: Ragged.from_arrays(values, np.int16, values[0].shape[1:]) for name, values in graphs.items()}
        ),
        net,
    )["value"]


def learn(agent, net, seconds: float, goal: int, rate: float = 1e-3) -> None:
    """Collect and learn until a circuit has at most `goal` gates, or the time is up."""
    import torch

    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    rng, (starts,) = np.random.default_rng(0), agent.starts
    began, known = time.monotonic(), len(FIRST)
    agent.update(copy.deepcopy(net))
    for iteration in itertools.count(1):
        episodes = agent.collect(16, min_done=14, timeout=60.0)
        agent.keep(episodes)
        rollouts = agent.rollouts(episodes)
        advantages, returns = rollouts.gae(rollouts["critic"], final_values(net, rollouts), 0.99, 0.95)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        for index, batch in rl.ragged_minibatches(rollouts, 128, epochs=3, rng=rng):
            loss, entropy = losses(net, batch, *map(torch.from_numpy, (advantages[index], returns[index])))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        agent.update(copy.deepcopy(net))  # the former network acts until here
        spent, best = time.monotonic() - began, int(starts.best.cost)
        if best < known or iteration % 10 == 0:
            gain = np.mean([each.start_cost - each.cost for each in episodes])
            print(f"{spent:4.0f} s  iteration {iteration}: {best} gates, {len(starts)} starts, "
                  f"episodes save {gain:.2f}, entropy {entropy:.2f}", flush=True)  # fmt: skip
        known = best
        if best <= goal or spent >= seconds:
            return


def saved_from(agent, first: list[Gate], net, episodes: int = 32) -> float:
    """Return the mean number of gates that episodes from the first circuit save, each at its best step.

    The figure shows what the network has learned, without the help of start states.
    """
    agent.update(copy.deepcopy(net))
    futures = [agent.run_episode(columns_of(first)) for _ in range(episodes)]
    agent.wait(futures, timeout=120.0)
    return float(np.mean([max(0.0, np.cumsum(each.result(0.0).columns["reward"]).max()) for each in futures]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--observers", type=int, default=2)
    parser.add_argument("--goal", type=int, default=41, help="number of gates at which to stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rate", type=float, default=1e-3, help="learning rate of Adam; 0 for a comparison without learning"
    )
    args = parser.parse_args()

    import torch

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    first = canonical(FIRST)
    print(f"the textbook's circuit: {len(first)} gates; greedy descent: {len(greedy(first))}", flush=True)
    net = make_net()
    starts = rl.StartStates("three toffolis", STATE, columns_of(first), key=lambda state: len(state["gates"]),
                            action=["action"], seed=args.seed)  # fmt: skip
    make = multiprocessing.get_context("spawn").Process
    options = {"starts": [starts], "max_lag": 1, "max_wait": 0.002}
    with rl.Agent("tcp://127.0.0.1:*", INPUTS, OUTPUTS, act, ENTRIES, **options) as agent:
        children = [make(target=observe, args=(agent.endpoint,), daemon=True) for _ in range(args.observers)]
        for child in children:
            child.start()
        before = saved_from(agent, first, net)
        learn(agent, net, args.seconds, args.goal, args.rate)
        print(f"an episode from the first circuit saves {before:.2f} gates before learning, and "
              f"{saved_from(agent, first, net):.2f} after it", flush=True)  # fmt: skip
        for child in children:
            child.terminate()
            child.join(10.0)
    best = [tuple(gate) for gate in starts.best.columns["gates"].tolist()]
    path = starts.lineage()
    is_equal = are_equal(first, best)
    print(f"the best circuit: {len(best)} gates, {len(path) - 1} rewrites from the first one; the unitaries are "
          f"{'equal' if is_equal else 'NOT EQUAL'}")  # fmt: skip
    return 0 if is_equal and len(best) <= args.goal and len(best) < len(greedy(first)) else 1


if __name__ == "__main__":
    sys.exit(main())
