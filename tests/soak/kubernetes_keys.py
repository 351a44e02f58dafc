"""Is anything lost or counted twice while every key and token of a release is replaced by changing its Secrets?

Actors play and a learner learns. The key of each role is replaced as docs/kubernetes.md says (both let in, then the new one
shown, then the old one revoked), and the tokens. After each, both go on, and whoever has the old key, another cluster's, none,
or an actor's key in a learner's role gets nowhere and is counted. At the end every actor's own counts are the cluster's.
"""

import sys

from _kubernetes import Trial, kubekit, trial
from accesskit import CLIENT, Visitor, refused, replace_key, replace_tokens, sees_refusals

REPLACED = ("actor", "learner", "proxy", "server")


def play(release: Trial) -> None:
    release.apply(kubekit.memoire("keys", "new", "--kubernetes", "other"))
    for role in REPLACED:
        release.apply(kubekit.memoire("keys", "export", str(release.keys / role), "--kubernetes", "former"))
    release.install()
    release.note("installed")
    mounts = ["other-actor", *(f"former-{role}" for role in REPLACED)]
    with Visitor(release, "stranger", CLIENT, mounts=mounts) as stranger, release.last_words() as words:
        release.check(stranger.is_let_in("former-actor"), "the actors' key does not open the door")
        refuse(release, stranger, "plain", None)
        refuse(release, stranger, "unknown", "other-actor")
        before = refused(release)
        said = stranger.publishes("former-actor")
        release.check(said == "AuthError", f"an actor's key published a model: {said or 'nobody refused it'}")
        sees_refusals(release, "role", before)
        release.note("no key, another cluster's, an actor's in a learner's role", "refused")
        for role in REPLACED:
            replace_key(release, role)
            release.note(f"key of {role} replaced")
            go_on(release, role)
            if role in ("actor", "learner"):
                refuse(release, stranger, "revoked", f"former-{role}")
        new, old = replace_tokens(release)
        url = f"http://{release.full}-dashboard.{release.namespace}.svc/api/overview"
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


def refuse(release: Trial, stranger: Visitor, reason: str, keys: str | None) -> None:
    """Look that somebody is not let in, and counted."""
    before = refused(release)
    release.check(not stranger.is_let_in(keys), f"with {keys or 'no key'} the door opens")
    sees_refusals(release, reason, before)


if __name__ == "__main__":
    sys.exit(trial(play))
