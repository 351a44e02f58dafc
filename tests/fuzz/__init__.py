"""Hostile input for everything that reads bytes from outside: a target for each reader, and one engine.

A target is a module, or one of the targets of `messages` and `texts`, with

    seeds() -> list[bytes]     inputs to begin from
    one(data) -> str           read these bytes and return a verdict ("taken", or the reason of a refusal); any other
                               outcome, an exception above all, is a finding
    REACHED                    verdicts that a short run must reach: a harness that refuses all inputs tests nothing

`make test` tries a few thousand inputs of each with a fixed seed. `make soak SOAK=fuzz_inputs` tries a million, also on
a build under AddressSanitizer and UBSan; with atheris installed, coverage of the code guides `fuzz_guided`.
"""
