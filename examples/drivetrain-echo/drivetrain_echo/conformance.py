"""What the conformance suite is told of this backend: its name, and an oracle to compare its numbers with."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from drivetrain_conformance import Logits, Oracle, Suite


class EchoOracle:
    """The rule of the echo, written a second time, in another way, from the README alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Row i has one spike, at the token that stands three places before token i; at the first if none does."""
        padded = np.concatenate([np.repeat(token_ids[:1], 3), token_ids])[: len(token_ids)]
        is_echo = padded[:, None] == np.arange(self._vocab_size)
        return np.log(np.where(is_echo, 1 / 2, 1 / (2 * (self._vocab_size - 1))))


class EchoSuite(Suite):
    """The suite of the echo backend."""

    backend = "echo"

    def oracle(self, model: Path) -> Oracle:
        """An echo echoes alike whatever the model's weights are."""
        return EchoOracle(AutoConfig.from_pretrained(model).vocab_size)
