"""Models and messages: published once, received by every client in order; a late client gets the newest at once."""

import numpy as np

import memoire

schema = memoire.Schema({"obs": memoire.Column(np.float32, (4,), "state")})

with memoire.Server("tcp://127.0.0.1:0", schema) as server:
    with memoire.connect(server.endpoint) as client:
        messages = client.subscribe("news")
        policy = client.model("policy")
        server.publish("news", "a message is text")
        print(messages.receive(timeout=10.0))
        server.publish("news", b"or bytes")
        print(messages.receive(timeout=10.0))

        # A model may be large: the client fetches the model's body in pieces and checks the body before use.
        server.publish("policy", np.arange(1_000_000, dtype=np.float64).tobytes())
        model = policy.wait(timeout=10.0)
        print(f"policy version {model.version}: {np.frombuffer(model.body).sum():.0f}")

        server.publish("policy", np.ones(10).tobytes())
        print(f"policy version {policy.wait(timeout=10.0, after=1).version}")

    with memoire.connect(server.endpoint) as late:
        print(f"late: version {late.model('policy').wait(timeout=10.0).version}")
