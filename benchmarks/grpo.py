"""How many answers does GRPO need until it adds two digits, with TRL alone and with replay of informative groups?

    PYTHONPATH=... python benchmarks/grpo.py run --side memoire --rate 3e-4 --seed 0 --record build/grpo.jsonl
    python benchmarks/grpo.py show build/grpo.jsonl --write docs/benchmarks

The task is `a+b mod 10` (examples/language/sums.py). All sides are TRL's `GRPOTrainer`, same model, seeds and batch
(8 groups of 8 answers):

    trl        all 64 answers of a batch are made anew, by TRL's own generation
    direct     the same, made by the generator of memoire's side: so that seconds can be compared
    memoire    half of the answers are made anew; groups without signal are dropped, and the batch is filled up with
               informative groups that were trained on before

The measure is how many answers the model has made until it is right for 90 of the 100 prompts: with a real model,
generation costs most. Steps and seconds are beside it; with so small a model a training step costs most of these. Each
side is shown at each learning rate that was tried. At its best rate TRL alone gets there with every seed, so what
replay can win here is that the goal is reached sooner.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import measure

GOAL, EVERY, GROUP, GROUPS = 0.9, 25, 8, 8
FRESH = 4
"""Groups that are made anew for a batch with memoire; fewer informative ones are filled up by replay."""
KEPT = 2000
"""Groups that can be replayed."""
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "language"))


def run(options) -> None:
    """One learning run; its curve becomes a line of the record."""
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    import sums
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    learned = sums.model(options.seed)
    set_seed(options.seed)

    class Curve(TrainerCallback):
        """Notes the accuracy every few steps, and ends the run at the goal."""

        rows, began, answers = [], time.perf_counter(), lambda step: step * GROUP * GROUPS

        def on_step_end(self, args, state, control, **_) -> None:
            if state.global_step % EVERY == 0:
                right = sums.accuracy(learned)
                seconds = round(time.perf_counter() - Curve.began, 1)
                Curve.rows.append((state.global_step, Curve.answers(state.global_step), right, seconds))
                control.should_training_stop = right >= GOAL

    def rewards(prompts, completion_ids, **_) -> list[float]:
        """1 for the right digit."""
        return [float(ids[:1] == [sums.right_token(each)]) for each, ids in zip(prompts, completion_ids, strict=True)]

    side = {
        "trl": dict,
        "direct": lambda: direct_side(sums, learned),
        "memoire": lambda: memoire_side(sums, learned, Curve),
    }[options.side]()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, per_device_train_batch_size=GROUP * GROUPS, num_generations=GROUP,
            max_completion_length=1, learning_rate=options.rate, lr_scheduler_type="constant", beta=0.0,
            max_steps=options.steps, logging_steps=10**6, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, seed=options.seed, dataloader_pin_memory=False,
        )  # fmt: skip
        rows = InMemoryTable.from_pydict({"prompt": sums.PROMPTS})
        trainer = GRPOTrainer(
            learned, side.pop("reward", rewards), args=config, train_dataset=Dataset(rows, fingerprint="sums"),
            processing_class=sums.tokenizer(), callbacks=[Curve()], **side,
        )  # fmt: skip
        trainer.train()
    line = {"side": options.side, "rate": options.rate, "seed": options.seed, "rows": Curve.rows}
    with open(options.record, "a", encoding="utf-8") as record:
        record.write(json.dumps(line) + "\n")
    print(options.side, options.rate, options.seed, "step, answers, accuracy, seconds:", Curve.rows[-1], flush=True)


def direct_side(sums, learned):
    """TRL alone with the generator of memoire's side, which is quicker than TRL's: so their seconds can be compared."""

    def rollout(prompts, trainer):
        asked = prompts[:: trainer.num_generations]
        said, known = sums.answers(learned, asked, trainer.num_generations)
        return {
            "prompt_ids": [sums.ids_of(each) for each in prompts],
            "completion_ids": [[token] for token in said.flatten().tolist()],
            "logprobs": [[each] for each in known.flatten().tolist()],
        }

    return {"rollout_func": rollout}


def memoire_side(sums, learned, curve):
    """What TRL's trainer is given to draw its batches from memoire."""
    import numpy as np

    import memoire
    import memoire.trl

    server = memoire.Server(
        "tcp://127.0.0.1:*",
        tables={
            "sums": memoire.Table(
                memoire.trl.schema(), storage="prompts", group=GROUP, score="variance", drop_dead=True,
                capacity=100_000, keep=0, replay_limit=KEPT,
            )
        },
    )  # fmt: skip
    prompts = memoire.Prompts(server.endpoint)
    made = {"answers": 0, "epoch": 0, "waiting": 0, "held": 0, "live": 0}
    curve.answers = lambda step: made["answers"]
    order = np.random.default_rng(0)

    def answer_some() -> int:
        """Answer a few prompts with the model as it is; returns how many groups have a signal."""
        if made["waiting"] < FRESH:
            shuffled = order.permutation(len(sums.PROMPTS))
            given = [(place, sums.PROMPTS[index]) for place, index in enumerate(shuffled.tolist())]
            made["waiting"] += prompts.add(given, "sums", made["epoch"])
            made["epoch"] += 1
        leases = prompts.lease(FRESH)
        made["waiting"] -= len(leases)
        texts = [bytes(lease.payload).decode() for lease in leases]
        said, known = sums.answers(learned, texts, GROUP)
        live = 0
        for lease, text, tokens, logprobs in zip(leases, texts, said.tolist(), known.tolist(), strict=True):
            right = sums.right_token(text)
            rows = {
                place: memoire.trl.answer_of(sums.ids_of(text), [token], [logprob]) | {"reward": float(token == right)}
                for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
            }
            prompts.answers(lease, rows)
            live += 0 < tokens.count(right) < GROUP
            made["answers"] += GROUP
        return live

    def generate(trainer) -> None:
        if rollouts.drawn is not None:
            rollouts.drawn.update_scores(np.ones(len(rollouts.drawn.keys)))  # replayed alike, informative as they are
            prompts.commit(rollouts.step - 1)
        made["live"] += answer_some()
        while made["live"] + min(made["held"], GROUPS) < GROUPS:  # at first there is nothing to replay
            made["live"] += answer_some()

    def share(groups) -> float:
        fresh = min(made["live"], groups)
        made["live"] -= fresh
        made["held"] += fresh
        return (groups - fresh) / groups

    rollouts = memoire.trl.Rollouts(prompts, generate=generate, replay=share, timeout=60.0)
    return {"rollout_func": rollouts, "reward": memoire.trl.reward}


def show(options) -> None:
    """Print, and write, what the record says."""
    runs = [json.loads(line) for line in Path(options.record).read_text(encoding="utf-8").splitlines()]
    ends = "answers until then, median", "steps", "seconds", "accuracy at the end"
    lines = [measure.head("side", "rate", "seeds", "reached 0.9", *ends)]
    groups = sorted({(each["side"], each["rate"]) for each in runs})
    for side, rate in groups:
        found = curves_of(runs, side, rate)
        done = [rows[-1] for rows in found if rows[-1][2] >= GOAL]
        answers, steps, seconds = (f"{median(row[at] for row in done):,.0f}" if done else "-" for at in (1, 0, 3))
        ends = ", ".join(f"{rows[-1][2]:.2f}" for rows in found)
        lines.append(measure.cells(side, f"{rate:g}", len(found), len(done), answers, steps, seconds, ends))
    lines += ["", soonest(runs, groups)]
    print("\n".join(lines))
    if options.write:
        folder = Path(options.write)
        draw(runs, groups, folder / "grpo.svg")
        measure.write_page(folder, "grpo", __doc__, "\n".join(lines), "![curves](grpo.svg)")
        (folder / "grpo.json").write_text(json.dumps(runs) + "\n", encoding="utf-8")


def soonest(runs, groups) -> str:
    """The best rate of each side, in answers, and how they compare. Rates with fewer than three seeds do not count."""
    best = {}
    for side, rate in groups:
        ends = [rows[-1] for rows in curves_of(runs, side, rate)]
        if len(ends) >= 3 and all(row[2] >= GOAL for row in ends):
            found = median(row[1] for row in ends), median(row[3] for row in ends), rate
            best[side] = min(best.get(side, found), found)
    said = [f"{side} at rate {rate:g}: {answers:,.0f} answers" for side, (answers, _, rate) in best.items()]
    others = [best[side] for side in ("trl", "direct") if side in best]
    if "memoire" in best and others:
        more = min(others)[0] / best["memoire"][0]
        longer = min(seconds for _, seconds, _ in others) / best["memoire"][1]
        said.append(f"without replay it takes {more:.1f} times as many answers, and {longer:.1f} times as long")
    return "Best rates with which every seed gets there. " + "; ".join(said) + "."


def curves_of(runs, side, rate):
    """The rows of each seed of a side."""
    return [each["rows"] for each in runs if (each["side"], each["rate"]) == (side, rate)]


def draw(runs, groups, path) -> None:
    """Accuracy over answers, a line for each seed."""
    with measure.plot(path, 7, 4.5) as axes:
        for place, (side, rate) in enumerate(groups):
            style = {"color": f"C{place}", "linewidth": 1, "linestyle": "-" if side == "memoire" else "--"}
            for number, rows in enumerate(curves_of(runs, side, rate)):
                label = f"{side}, rate {rate:g}" if not number else None
                axes.plot([row[1] for row in rows], [row[2] for row in rows], label=label, **style)
        axes.set(xlabel="answers that the model has made", ylabel="right of 100 prompts", ylim=(0, 1))
        axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    calls = parser.add_subparsers(required=True)
    one = calls.add_parser("run")
    one.add_argument("--side", choices=["trl", "direct", "memoire"], required=True)
    one.add_argument("--rate", type=float, required=True)
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--steps", type=int, default=2000)
    one.add_argument("--record", default="build/grpo.jsonl")
    one.set_defaults(call=run)
    shown = calls.add_parser("show")
    shown.add_argument("record")
    shown.add_argument("--write", default="")
    shown.set_defaults(call=show)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
