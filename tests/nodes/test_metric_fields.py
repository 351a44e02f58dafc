"""Each metric of a node is the figure that its name says: read of stats in which no two numbers are the same."""

import dataclasses
import itertools
import types
import typing

import pytest

from memoire.accounting.figures import BOUNDS, Timing
from memoire.client.stats import ClientStats
from memoire.inference.batching import InferenceStats
from memoire.proxy.proxy import ProxyStats
from memoire.reader.reader import ReaderStats
from memoire.server.stats import ServerStats

metrics = pytest.importorskip("memoire.nodes.metrics", reason="prometheus-client is not installed")


def unequal(kind, count, name=""):
    """A value of this type in which every number and text is another one; mappings and tuples have two of each."""
    outer, inner = typing.get_origin(kind), typing.get_args(kind)
    if outer in (typing.Union, types.UnionType):
        return unequal(inner[0], count, name)
    if outer is dict:
        keys = ("HELLO", "UPDATE") if inner[1] is Timing else (f"{name}-1", f"{name}-2")
        return {key: unequal(inner[1], count, key) for key in keys}
    if outer is tuple:
        return tuple(unequal(inner[0], count, f"{name}-{place}") for place in (1, 2))
    if outer is typing.Literal:
        return inner[0]
    if kind is Timing:
        return Timing(float(next(count)), tuple(next(count) for _ in (*BOUNDS, 0)))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{each.name: unequal(hints[each.name], count, each.name) for each in dataclasses.fields(kind)})
    return {bool: lambda: True, str: lambda: f"{name} {next(count)}"}.get(kind, lambda: kind(next(count)))()


def follow(found, path):
    """What lies on a path of names: in a mapping or tuple, of each of them, under its name."""
    for part in path.split(".") if path else ():
        if isinstance(found, dict):
            found = {key: getattr(each, part) for key, each in found.items()}
        elif isinstance(found, tuple):
            named = "endpoint" if hasattr(found[0], "endpoint") else "name"
            found = {getattr(each, named): getattr(each, part) for each in found}
        else:
            found = getattr(found, part)
    return found


TABLES = {
    "batches": "batches", "samples": "samples", "batch_wait_seconds": "waited", "held_caches": "held_caches",
    "held_bytes": "held_bytes", "held_limit_bytes": "byte_limit", "unused_samples": "unused_samples",
    "overwritten_caches": "overwritten_caches", "overwritten_samples": "overwritten_samples",
    "split_fragments": "split_fragments", "passed_over_samples": "passed_over_samples", "table_steps": "steps",
    "table_episodes": "episodes", "table_clients": "clients", "parameters_version": "parameters_version",
    "samples_per_insert_target": "samples_per_insert", "held_capacity": "capacity", "table_entries": "rate.entries",
    "samples_surplus": "rate.surplus", "draws_limited": "rate.draws_wait", "inserts_limited": "rate.inserts_wait",
    "limited_seconds": "rate.waited", "sample_age_median_seconds": "freshness.age_median",
    "sample_age_p90_seconds": "freshness.age_p90", "sample_age_max_seconds": "freshness.age_max",
    "sample_model_lag_mean": "freshness.lag_mean", "sample_model_lag_max": "freshness.lag_max",
    "sample_effective_ratio": "freshness.effective", "left_out_ratio": "freshness.left_out",
}  # fmt: skip
PROMPTS = """
waiting leased answered ready drawn committed dropped forgotten given workers oldest_lease expired late failed dead stale
full incomplete replayable tokens_drawn lag
"""
RENAMED = {
    "oldest_lease": "oldest_lease_seconds", "expired": "expired_leases", "late": "late_answers",
    "failed": "failed_answers", "lag": "model_lag",
}  # fmt: skip
TABLES |= {f"prompts_{RENAMED.get(name, name)}": f"prompts.{name}" for name in PROMPTS.split()}
FIELDS = {
    "server": {
        **{name: f"tables.{path}" for name, path in TABLES.items()},
        "faults": "faults", "refused": "refused", "uptime_seconds": "uptime", "run_info": {"run 1": 1},
        "run_finished": "finished", "durable": "durable", "backup_restores": "restored", "episodes": "totals.episodes",
        "steps": "totals.steps", "caches": "totals.accepted_caches", "clients": "presence",
        "accounts": {"memory": "accounts_in_memory", "folded": "accounts_folded"}, "new_clients_left": "newcomers_left",
        "generated_bytes": "totals.generated_bytes", "received_bytes": "totals.received_bytes",
        "pushed_caches": "totals.pushed_caches", "lost_caches": "totals.lost_caches",
        "dropped_caches": {"skipped": "totals.skipped_caches", "rejected": "totals.rejected_caches",
                           "overwritten": "overwritten_caches"},
        "dropped_replies": "dropped_replies", "log_lines": "log_lines", "dropped_log_lines": "totals.dropped_lines", "request_duration_seconds": "requests",
        "holder_bytes": "holders", "budget_bytes": "budget", "credit_bytes": "credit", "model_version": "models", "model_bytes": "model_bytes",
        "feedback_samples": {name: f"feedback.{name}" for name in ("given", "applied", "superseded", "gone", "stale", "lost")},
        "feedback_waiting_samples": "feedback.waiting", "feedback_overflowed": "feedback_overflowed",
        "feedback_delay_seconds": "feedback_delay", "actor_entries": "actor_entries",
        "episode_return_mean": "recent.return_mean", "episode_return_min": "recent.return_min",
        "episode_return_max": "recent.return_max", "episode_length_mean_steps": "recent.length_mean",
        "test_episode_return_mean": "tested.return_mean", "test_episode_length_mean_steps": "tested.length_mean",
        "client_scalar": "scalars.mean", "learner_scalar": "learner_scalars", "learners": 2,
        "state_bytes": "folder.bytes", "state_disk_free_bytes": "folder.free_bytes",
        "state_disk_bytes": "folder.disk_bytes",
    },
    "proxy": {
        "faults": "faults", "refused": "refused", "uptime_seconds": "uptime", "proxy_requests": "requests",
        "proxy_replies": "replies", "proxy_caches": "caches", "proxy_cache_bytes": "cache_bytes",
        "dropped_replies": "dropped_replies", "proxy_homeless": "homeless", "proxy_back_up": "not backs.is_away", "proxy_queue_bytes": "backs.queued_bytes",
        "proxy_lost_requests": "backs.lost_requests", "proxy_lost_caches": "backs.lost_caches",
        "proxy_lost_bytes": "backs.lost_bytes", "model_version": "models", "model_bytes": "model_bytes",
    },
    "actor": {
        "faults": "faults", "refused": "refused", "client_episodes": "episodes", "client_steps": "steps",
        "client_generated_bytes": "generated_bytes", "client_pushed_caches": "pushed_caches",
        "client_pushed_bytes": "pushed_bytes", "client_accepted_caches": "accepted_caches",
        "client_lost_caches": "lost_caches", "client_skipped_caches": "skipped_caches",
        "client_in_flight_bytes": "in_flight_bytes", "client_credit_bytes": "credit", "client_wait_seconds": "waited",
        "client_held_back_seconds": "held_back_for", "client_passed_steps": "passed_steps",
        "client_waiting_lines": "waiting_lines", "client_dropped_lines": "dropped_lines", "client_updates": "updates",
        "client_resends": "resends", "client_silent_seconds": "silent", "client_skipped_models": "skipped_models",
        "client_model_version": "models",
    },
    "learner": {
        "faults": "faults", "refused": "refused", "reader_batches": "batches", "reader_samples": "samples",
        "reader_wait_seconds": "waited", "reader_short_samples": "short", "reader_prefetched_batches": "prefetched",
        "reader_servers": {"answering": 2, "away": 2}, "reader_resends": "resends",
        "reader_feedback_samples": {"given": "feedback_given", "lost": "feedback_lost"},
        "reader_sample_age_median_seconds": "freshness.age_median",
        "reader_sample_age_p90_seconds": "freshness.age_p90", "reader_sample_model_lag_mean": "freshness.lag_mean",
    },
    "inference": {
        "faults": "faults", "refused": "refused", "uptime_seconds": "uptime", "inference_requests": "requests",
        "inference_rows": "rows", "inference_batches": "batches", "inference_batch_rows": "batched_rows",
        "inference_expired": "expired", "inference_resends": "resends", "inference_failures": "failures",
        "inference_weights_failures": "weights_failures", "inference_wait_seconds": "waits.seconds",
        "inference_forward_seconds": "computed_seconds", "inference_queue_rows": "queue_rows", "holder_bytes": "holders", "budget_bytes": "budget",
        "inference_request_duration_seconds": "durations", "inference_clients": "clients", "inference_model_version": "version",
        **{f"jobs_{name}": f"jobs.{name}" for name in
           ("open", "leased", "observers", "done", "failed", "cancelled", "lost", "expired", "late")},
        "starts_kept": "starts.kept", "starts_draws": "starts.draws", "starts_best_cost": "starts.best",
    },
}  # fmt: skip
"""By metric: the figure of the stats that it shows, a number, or one figure for each label; a tuple is summed."""
STATS = {
    "server": ServerStats,
    "proxy": ProxyStats,
    "actor": ClientStats,
    "learner": ReaderStats,
    "inference": InferenceStats,
}


def shown(stats, said):
    """What a metric should show."""
    if isinstance(said, dict):
        return {label: shown(stats, each) for label, each in said.items()}
    if isinstance(said, tuple):
        return float(sum(follow(stats, said[0]).values()))
    if isinstance(said, int):
        return float(said)
    negated = said.startswith("not ")
    found = follow(stats, said.removeprefix("not "))
    if isinstance(found, dict):
        return {label: _number(each, negated) for label, each in found.items()}
    return _number(found, negated)


def _number(value, negated):
    return float(bool(value) != negated) if isinstance(value, bool | str) else value


@pytest.mark.parametrize("role", FIELDS)
def test_every_metric_shows_the_figure_of_its_name(role):
    count = itertools.count(2)
    stats = unequal(STATS[role], count)
    if role == "server":
        stats = dataclasses.replace(stats, run="run 1")
    catalogue = {entry.name: entry for entry in metrics.CATALOGUE[role]}
    assert catalogue.keys() == FIELDS[role].keys()
    for name, said in FIELDS[role].items():
        family = catalogue[name].family(stats)
        if catalogue[name].kind == "histogram":
            label, timings = catalogue[name].label, getattr(stats, said)
            timings = timings if label else {"": timings}
            sums = {one.labels.get(label, ""): one.value for one in family.samples if one.name.endswith("_sum")}
            assert sums == {kind: timing.seconds for kind, timing in timings.items()}
            counts = {one.labels.get(label, ""): one.value for one in family.samples if one.name.endswith("_count")}
            assert counts == {kind: sum(timing.counts) for kind, timing in timings.items()}
            continue
        found = {next(iter(one.labels.values()), ""): one.value for one in family.samples}
        wanted = shown(stats, said)
        wanted = wanted if isinstance(wanted, dict) else {"": wanted}
        unheard = dict.fromkeys(found.keys() - wanted.keys(), 0.0) if name == "refused" else {}
        assert found == wanted | unheard, name
