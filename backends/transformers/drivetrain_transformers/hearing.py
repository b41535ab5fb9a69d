"""Sounds for models that take them: preparation with the model's feature extractor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from drivetrain.media.qwen_audio import SoundReader, Spectrogram
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import MediaInput
from drivetrain_transformers.media_preparation import MediaPreparation, key_of, places
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.row_media import PlacedMedium, RowMedia


class Hearing(MediaPreparation[Spectrogram]):
    """Prepares the sounds of requests for one model.

    Args:
        config: The engine's configuration.
        model: The model.
    """

    one: ClassVar[str] = "a sound"

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        self._reader = SoundReader(config, model.module.config, model.info.context_length)
        super().__init__(model, self._reader)

    async def _example(self) -> tuple[list[int], Sequence[MediaInput]]:
        return await self._reader.example()

    async def _placed(self, token_ids: list[int], media: Sequence[MediaInput]) -> RowMedia:
        made = [(self._reader.audio_token_id, one) for one in await self._reader.prepared(media)]
        return RowMedia(
            tuple(
                PlacedMedium(
                    key_of(one),
                    token_id,
                    start,
                    one.count,
                    {"input_features": one.features, "feature_attention_mask": one.mask},
                )
                for token_id, start, one in places(token_ids, made, "a sound")
            )
        )
