"""Images and videos for models that take them: claims, preparation with the model's processor, positions."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from transformers import AutoProcessor, PreTrainedModel

from drivetrain.backend.base import GenerateRequest, ReadMedium
from drivetrain.errors import EngineStartError, InvalidRequest
from drivetrain.media.qwen_vision import Patches, VisionReader
from drivetrain.types.config import EngineConfig
from drivetrain.types.prompts import MediaInput, VideoInput
from drivetrain_transformers.model import LoadedModel
from drivetrain_transformers.row_media import PlacedMedium, RowMedia

_NOT_INPUTS: Final = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Outputs of a processor about its text, which here is only a placeholder."""

_TOLERATED: Final = 0.1
"""Largest change of the logits by rounding in a batch, as a share of their norm."""


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


class Vision:
    """Prepares the images and videos of requests for one model.

    Args:
        config: The engine's configuration.
        model: The model.

    Raises:
        EngineStartError: The model's processor cannot be loaded.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        self._loaded = model
        self._model: Any = model.module
        length = model.info.context_length
        has_grids = getattr(self._model.config, "vision_start_token_id", None) is not None
        self._reader = (
            VisionReader(config, self._model.config, length)
            if has_grids
            else ProcessorReader(config, self._model, length)
        )

    async def check(self) -> None:
        """Check that the model sees an image in a padded batch as it does alone.

        Raises:
            EngineStartError: It does not, or the image cannot be prepared or run.
        """
        name = type(self._model).__name__
        try:
            token_ids, media = await self._example((224, 112))
            difference = await asyncio.to_thread(self._difference, [*token_ids, 7, 11], media)
        except torch.OutOfMemoryError:
            raise
        except (InvalidRequest, IndexError, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise EngineStartError(
                f"{name} cannot be run with an image, as the transformers backend does: {type(error).__name__}: {error}"
            ) from error
        if not difference <= _TOLERATED:
            raise EngineStartError(
                f"{name} sees an image in a batch otherwise than alone: its logits differ by {difference:.2g} of their "
                "norm; the transformers backend does not serve such models, use another backend"
            )

    @torch.inference_mode()
    def _difference(self, token_ids: list[int], media: RowMedia) -> float:
        """Return the distance of the logits in a batch beside a longer text from those of the model's plain forward."""
        device = self._loaded.device
        arguments = {name: tensor.to(device) for medium in media.media for name, tensor in medium.inputs.items()}
        ids = torch.tensor([token_ids], device=device)
        if "mm_token_type_ids" in inspect.signature(self._model.forward).parameters:
            arguments["mm_token_type_ids"] = (ids == self._reader.image_token_id).int()
        alone = self._model(input_ids=ids, **arguments).logits[0].float()
        rows = [token_ids, [13, 17, 19, 23, 29, 31, 37] * (len(token_ids) // 7 + 1)]
        cache = self._loaded.empty_cache()
        beside = self._loaded.prefill(rows, [None, None], cache, 0, all_positions=True, media=[media, None])
        difference = beside.logits[0, -len(token_ids) :].float() - alone
        centred = (part - part.mean(-1, keepdim=True) for part in (difference, alone))
        return float(next(centred).norm() / next(centred).norm())

    async def read(self, media: Sequence[MediaInput]) -> list[ReadMedium]:
        """Fetch and prepare the media of one prompt; raises as :meth:`VisionReader.read` does."""
        return await self._reader.read(media)

    async def _example(self, size: tuple[int, int]) -> tuple[list[int], RowMedia]:
        """Return a prompt of one black image with this width and height in pixels, and its media."""
        token_ids, media = await self._reader.example(size)
        return token_ids, await self._placed(token_ids, media)

    async def of(self, request: GenerateRequest) -> RowMedia | None:
        """Return the media of a request, whose prompt holds all their placeholders; None if it has none.

        Raises:
            InvalidRequest: A medium cannot be read.
        """
        return await self._placed(request.prompt_token_ids, request.media) if request.media else None

    async def _placed(self, token_ids: list[int], media: Sequence[MediaInput]) -> RowMedia:
        seen = await self._reader.patches(media)
        left = iter(seen.images), iter(seen.videos)
        ordered = [(isinstance(medium, VideoInput), next(left[isinstance(medium, VideoInput)])) for medium in media]
        placed = sorted(self._places(token_ids, ordered), key=lambda medium: medium.start)
        if not hasattr(self._model.base_model, "get_rope_index"):
            return RowMedia(tuple(placed))
        seconds = [one.seconds for one in seen.videos]
        positions = await asyncio.to_thread(self._mrope, token_ids, placed, seconds)
        return RowMedia(tuple(placed), positions, int(positions.max()) + 1 - len(token_ids))

    def _places(self, token_ids: list[int], media: Sequence[tuple[bool, Patches]]) -> Iterator[PlacedMedium]:
        """Yield the media at their places: the next placeholders of their kind."""
        begins = [0, 0]
        for is_video, patches in media:
            token_id = self._reader.video_token_id if is_video else self._reader.image_token_id
            begin = begins[is_video]
            start = token_ids.index(token_id, begin) if token_id in token_ids[begin:] else len(token_ids)
            begins[is_video] = start + patches.count
            if token_ids[start : begins[is_video]] != [token_id] * patches.count:
                raise InvalidRequest(
                    f"the prompt repeats token id {token_id} less often than the {patches.count} times that an image "
                    "or video takes; give it as often",
                    field="prompts",
                )
            yield PlacedMedium(_key(patches), token_id, start, patches.count, _inputs(patches, is_video=is_video))

    def _mrope(
        self, token_ids: list[int], media: Sequence[PlacedMedium], seconds: Sequence[float | None]
    ) -> torch.Tensor:
        """Return the model's own positions of a prompt's tokens, of shape (3, tokens)."""
        index: Any = self._model.base_model.get_rope_index
        ids = torch.tensor([token_ids])
        kinds = torch.zeros_like(ids, dtype=torch.int)
        for medium in media:
            kinds[0, medium.start : medium.end] = 2 if medium.token_id == self._reader.video_token_id else 1
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
        return _continued(positions, media) if "video_grid_thw" in grids else positions


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


def _key(patches: Patches) -> int:
    return -1 - int(patches.name, 16)


def _inputs(patches: Patches, *, is_video: bool) -> Mapping[str, torch.Tensor]:
    if patches.inputs is not None:
        return patches.inputs
    grid = torch.tensor([patches.grid])
    if is_video:
        return {"pixel_values_videos": patches.pixels, "video_grid_thw": grid}
    return {"pixel_values": patches.pixels, "image_grid_thw": grid}
