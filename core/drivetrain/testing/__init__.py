"""Test helpers for this and other projects: tiny models, generated in a fraction of a second."""

from __future__ import annotations

from drivetrain.checks.extras import from_extra

with from_extra("transformers", "drivetrain.testing"):
    from drivetrain.testing.byte_tokenizer import byte_tokenizer
    from drivetrain.testing.tiny_model import ARCHITECTURES, AUDIO_ARCHITECTURES, VISION_ARCHITECTURES, tiny_model

__all__ = ["ARCHITECTURES", "AUDIO_ARCHITECTURES", "VISION_ARCHITECTURES", "byte_tokenizer", "tiny_model"]
