"""Images and videos for models that take them: preparation with the model's processor, positions."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from transformers import AutoProcessor, PreTrainedModel

from drivetrain.errors import EngineStartError
from drivetrain.media.qwen_vision import Patches, VisionReader
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import MediaInput
from drivetrain_transformers.media_preparation import MediaPreparation, key_of, places
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.row_media import PlacedMedium, RowMedia

_NOT_INPUTS: Final = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of a processor about its text, which here is only a placeholder."""


class ProcessorReader(VisionReader):
    """Reads images with the processor of a model that repeats one placeholder for each image, such as LLaVA's.

    Raises:
        EngineStartError: transformers cannot load the processor.
    """

    def __init__(self, config: EngineConfig, model: PreTrainedModel, context_length: int) -> None:
        super().__init__(config, model.config, context_length)
        self._takes = inspect.signature(model.forward).parameters
        self._processing = threading.Lock()
        """Held while the processor runs: its tokenizer cannot be used by two threads at once."""
        try:
            self._processor: Any = AutoProcessor.from_pretrained(
                config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
            )
            self._placeholder = str(self._processor.image_token)
        except (OSError, ValueError, ImportError, TypeError, AttributeError) as error:
            raise EngineStartError(
                f"transformers cannot load the image processor of {config.model!r}: {type(error).__name__}: {error}"
            ) from error

    def _image(self, data: bytes, name: str) -> Patches:
        image = self._opened(data)
        with self._processing:
            made = dict(self._processor(text=[self._placeholder], images=[image], return_tensors="pt"))
        ids: list[int] = made["input_ids"][0].tolist()
        count = ids.count(self.image_token_id)
        begin = ids.index(self.image_token_id) if count else 0
        if not count or set(ids[begin : begin + count]) != {self.image_token_id}:
            raise ValueError(
                f"the processor writes token ids {ids[:20]} for it; expected token id {self.image_token_id}, the "
                "model's placeholder, repeated without others between"
            )
        inputs = {key: one for key, one in made.items() if key not in _NOT_INPUTS and key in self._takes}
        return Patches(name, made["pixel_values"], (1, 1, count), count, inputs=inputs)


class Vision(MediaPreparation[Patches]):
    """Prepares the images and videos of requests for one model.

    Args:
        config: The engine's configuration.
        model: The model.

    Raises:
        EngineStartError: The model's processor cannot be loaded.
    """

    one: ClassVar[str] = "an image"

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        length, module = model.info.context_length, model.module
        has_grids = getattr(module.config, "vision_start_token_id", None) is not None
        self._reader = (
            VisionReader(config, module.config, length) if has_grids else ProcessorReader(config, module, length)
        )
        super().__init__(model, self._reader)

    async def _example(self) -> tuple[list[int], Sequence[MediaInput]]:
        return await self._reader.example((224, 112))

    async def _placed(self, token_ids: list[int], media: Sequence[MediaInput]) -> RowMedia:
        made = await self._reader.prepared(media)
        kinds = [self._reader.place(medium).token_id for medium in media]
        of_video = self._reader.video_token_id
        placed = sorted(
            (
                PlacedMedium(key_of(one), token_id, start, one.count, _inputs(one, is_video=token_id == of_video))
                for token_id, start, one in places(token_ids, list(zip(kinds, made, strict=True)), "an image or video")
            ),
            key=lambda medium: medium.start,
        )
        base = self._model.base_model
        if not hasattr(base, "get_rope_index"):
            return RowMedia(tuple(placed))
        seconds = [one.seconds for one, token_id in zip(made, kinds, strict=True) if token_id == of_video]
        positions = await asyncio.to_thread(mrope_positions, base, token_ids, placed, seconds, of_video)
        return RowMedia(tuple(placed), positions, int(positions.max()) + 1 - len(token_ids))


def mrope_positions(
    model: Any,
    token_ids: list[int],
    media: Sequence[PlacedMedium],
    seconds: Sequence[float | None],
    video_token_id: int,
) -> torch.Tensor:
    """Return the temporal, row and column positions of a prompt's tokens, of shape (3, tokens).

    Args:
        model: The model without its head, whose ``get_rope_index`` is asked.
        token_ids: The prompt.
        media: Its images and videos, in order.
        seconds: Seconds between frame pairs of each video; None if the model is not given the time.
        video_token_id: Placeholder token id of a video.
    """
    index: Any = model.get_rope_index
    ids = torch.tensor([token_ids])
    kinds = torch.zeros_like(ids, dtype=torch.int)
    for medium in media:
        kinds[0, medium.start : medium.end] = 2 if medium.token_id == video_token_id else 1
    grids: dict[str, list[torch.Tensor]] = {}
    for medium, name in itertools.product(media, ("image_grid_thw", "video_grid_thw")):
        if name in medium.inputs:
            grids.setdefault(name, []).append(medium.inputs[name])
    arguments: dict[str, object] = {name: torch.cat(own) for name, own in grids.items()}
    if "mm_token_type_ids" in inspect.signature(index).parameters:
        arguments["mm_token_type_ids"] = kinds
    timed = [one for one in seconds if one is not None]
    if timed:
        # float64: rounding errors could make whole products of seconds and speed one less.
        arguments["second_per_grid_ts"] = torch.tensor(timed, dtype=torch.float64)
    positions: torch.Tensor = index(ids, **arguments)[0][:, 0]
    if "video_grid_thw" not in grids:
        return positions
    videos = [medium for medium in media if medium.token_id == video_token_id]
    for medium, own in zip(videos, seconds, strict=True):
        if own is not None:
            _time(positions, medium, own * model.config.vision_config.tokens_per_second)
    return _continued(positions, media)


def _time(positions: torch.Tensor, video: PlacedMedium, step: float) -> None:
    """Write the temporal positions of a video whose frame pairs are so many positions apart.

    The ``get_rope_index`` of transformers 5.17 rounds the seconds between them down to whole ones.
    """
    frames = int(video.inputs["video_grid_thw"][0, 0])
    times = (torch.arange(frames, dtype=torch.float64) * step).long().repeat_interleave(video.count // frames)
    positions[0, video.start : video.end] = positions[1:, video.start : video.end].min() + times


def _continued(positions: torch.Tensor, media: Sequence[PlacedMedium]) -> torch.Tensor:
    """Let what follows each medium begin after the medium's largest position, as the authors of Qwen2-VL do.

    The ``get_rope_index`` of transformers 5.19 and 5.24 looks only at a video's rows and columns, so that text after a
    long video would have positions of its frames.
    """
    edges = sorted({0, positions.shape[1], *(edge for medium in media for edge in (medium.start, medium.end))})
    continued = positions.clone()
    begin = 0
    for start, end in itertools.pairwise(edges):
        continued[:, start:end] += begin - positions[:, start:end].min()
        begin = int(continued[:, start:end].max()) + 1
    return continued


def _inputs(patches: Patches, *, is_video: bool) -> Mapping[str, torch.Tensor]:
    if patches.inputs is not None:
        return patches.inputs
    grid = torch.tensor([patches.grid])
    if is_video:
        return {"pixel_values_videos": patches.pixels, "video_grid_thw": grid}
    return {"pixel_values": patches.pixels, "image_grid_thw": grid}
