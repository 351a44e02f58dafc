"""Is anything lost or counted twice while every key and token of a release is replaced by changing its Secrets?

Actors play and a learner learns. The key of each role is replaced as docs/kubernetes.md says (both let in, then the new one
shown, then the old one revoked), and the tokens. After each, both go on, and whoever has the old key, a made-up
one, another cluster's, none, or an actor's key in a learner's role gets nowhere and is counted. At the end every actor's own counts are the cluster's.
"""

import sys

from _kubernetes import Trial, kubekit, trial
from accesskit import CLIENT, Visitor, is_refused, refused, replace_key, replace_tokens, strangers_keys

REPLACED = ("actor", "learner", "proxy", "server")


def play(release: Trial) -> None:
    for role in REPLACED:
        release.apply(kubekit.memoire("keys", "export", str(release.keys / role), "--kubernetes", "former"))
    release.install()
    release.note("installed")
    mounts = [*strangers_keys(release), *(f"former-{role}" for role in REPLACED)]
    with Visitor(release, "stranger", CLIENT, mounts=mounts) as stranger, release.last_words() as words:
        kubekit.until(lambda: stranger.is_let_in("former-actor"), 60.0, "a key that opens the door")
        is_refused(release, stranger.is_let_in, "plain", "silent")  # silent: who hung up before it was answered
        is_refused(release, lambda: stranger.is_let_in("stranger-actor"), "unknown")
        is_refused(release, lambda: stranger.is_let_in("other-actor"), "server_key")
        is_refused(release, lambda: not stranger.publishes("former-actor"), "role")
        release.note("without a key, with a made-up one, another cluster's, an actor's as a learner", "refused")
        for role in REPLACED:
            replace_key(release, role)
            release.note(f"key of {role} replaced")
            go_on(release, role)
            if role in ("actor", "learner"):
                former = f"former-{role}"
                kubekit.until(lambda key=former: not stranger.is_let_in(key), 60.0, f"{former} opens nothing")
                is_refused(release, lambda key=former: stranger.is_let_in(key), "revoked")
                release.note(f"the former key of {role}", "refused")
        new, old = replace_tokens(release)
        url = f"http://{release.service('dashboard')}/api/overview"
        is_changed = kubekit.until(lambda: (stranger.gets(url, old), stranger.gets(url, new)) == (401, 200), 60.0, url)
        release.check(is_changed, "the dashboard's token")
        kubekit.until(
            lambda: {node["state"] for node in release.overview()["nodes"]} == {"up"},
            60.0,
            "nodes that answer the dashboard",
        )
        release.note("tokens replaced")
        go_on(release, "tokens")
        release.end_actors()
    for trouble in release.differences(words):
        release.check(False, trouble)
    release.note("actors, each counted exactly", len(words))
    release.note("steps", f"{release.totals()['steps']:,}")
    release.note(
        "refused meanwhile", ", ".join(f"{reason} {count}" for reason, count in sorted(refused(release).items()))
    )


def go_on(release: Trial, what: str) -> None:
    """Wait until actors record and the learner draws."""
    drawn = sum(each["stats"]["samples"] for each in release.servers())
    release.goes_on(f"replacing {what}")
    kubekit.until(
        lambda: sum(each["stats"]["samples"] for each in release.servers()) > drawn, 120.0, f"more draws after: {what}"
    )
    release.note(f"{what}: actors and learner went on after")


if __name__ == "__main__":
    sys.exit(trial(play))
