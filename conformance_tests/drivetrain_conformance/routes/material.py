"""Checkpoints and adapters of the served model, and the logprobs by which answers tell which of them was served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from drivetrain_conformance.assets.made_adapters import Adapter, make_adapter, merge
from drivetrain_conformance.assets.served_models import Models
from drivetrain_conformance.references.oracle import TransformersOracle, token_logprobs
from drivetrain_conformance.routes.sampled import Sampled

TIMES_NEARER: Final = 5.0


class Material:
    """Checkpoints and adapters that cases load into the server under test. Each is made on first use.

    Args:
        model: Folder of the served model: a Hugging Face checkpoint in safetensors.
        models: Writes copies of it.
    """

    def __init__(self, model: Path, models: Models) -> None:
        self.model = model
        self._models = models
        self._adapters: dict[int, Adapter] = {}
        self._merged: dict[int, Path] = {}
        self._oracles: dict[Path, TransformersOracle] = {}

    @property
    def pushed(self) -> Path:
        """A checkpoint of the served model with every weight changed."""
        return self._models.with_other_weights(self.model)

    @property
    def gone(self) -> Path:
        """A path at which there is nothing."""
        return self.model.with_name(f"{self.model.name}-that-is-not-there")

    def adapter(self, seed: int) -> Path:
        """Return the folder of a random adapter of the served model."""
        return self._adapter(seed).path

    def merged(self, seed: int) -> Path:
        """Return a checkpoint of the served model with that adapter merged into its weights."""
        if seed not in self._merged:
            self._merged[seed] = merge(self.model, self._adapter(seed), self._models.folder(f"merged-{seed}"))
        return self._merged[seed]

    def _adapter(self, seed: int) -> Adapter:
        if seed not in self._adapters:
            self._adapters[seed] = make_adapter(self.model, self._models.folder(f"adapter-{seed}"), seed=seed)
        return self._adapters[seed]

    def require(self, sampled: Sampled, served: Path, *others: Path) -> None:
        """Assert that an answer is of the checkpoint ``served``.

        Its logprobs must be several times nearer to transformers' with ``served`` than with any other checkpoint.
        Rounding by the server's dtype is far smaller than that.
        """
        assert sampled.ids, "the answer has no token"
        near = self._distance(sampled, served)
        for other in others:
            far = self._distance(sampled, other)
            assert near * TIMES_NEARER < far, (
                f"the answer's logprobs differ by {near:.2g} from those of {served.name}, whose weights should be "
                f"served, and by {far:.2g} from those of {other.name}"
            )

    def _distance(self, sampled: Sampled, folder: Path) -> float:
        oracle = self._oracles.setdefault(folder, TransformersOracle(folder))
        rows = oracle.logits([*sampled.prompt, *sampled.ids])[len(sampled.prompt) - 1 : -1]
        expected = token_logprobs(rows, sampled.ids)
        return sum(abs(one - two) for one, two in zip(sampled.logprobs, expected, strict=True)) / len(expected)


@contextmanager
def made_of(model: Path) -> Iterator[Material]:
    """Make material of a model folder; its copies are removed at the end."""
    models = Models(text=model)
    try:
        yield Material(model, models)
    finally:
        models.close()
