"""A release with inference nodes, whose program (asked.py) is in a ConfigMap."""

from pathlib import Path

HERE = Path(__file__).resolve().parent


class WithInference:
    """Put before a release: it has inference nodes, too."""

    def __enter__(self):
        super().__enter__()
        program = {"asked.py": (HERE / "asked.py").read_text(encoding="utf-8")}
        self.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "trial"}, "data": program})
        return self

    def install(self, *words, **options):
        super().install("-f", str(HERE / "inference.yaml"), *words, **options)

    @property
    def inference(self):
        """What actors ask."""
        return f"tcp://{self.service('inference')}:5570"
