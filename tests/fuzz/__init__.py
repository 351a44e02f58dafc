"""Hostile input for everything that reads bytes from outside: a target for each reader, and one engine.

A target is a module, or one of the targets of `messages` and `texts`, with

    seeds() -> list[bytes]     inputs that are taken, to begin from
    one(data) -> str           read these bytes and say what became of them ("taken", or why they were refused);
                               whatever else comes out of it, an exception above all, is a finding
    REACHED                    what a short run must have come to: a harness that is refused at the door shows nothing

`make test` tries a few thousand inputs of each with a fixed seed. `make soak SOAK=fuzz_inputs` tries a million, also on
a build under AddressSanitizer and UBSan; with atheris installed `fuzz_guided` is led by what the code does.
"""
