"""Images as Qwen's vision models take them: read, decoded, cut into patches. For backends, in the engine's process."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from drivetrain.backend import ReadMedium
from drivetrain.config import EngineConfig, Task
from drivetrain.errors import InvalidRequest
from drivetrain.media import read_bytes, unreadable
from drivetrain.prompts import ImageInput, MediaInput

MODELS: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Types of models whose images were seen to come out as transformers has them."""

HELD_BYTES: Final = 1 << 29
"""Most memory that patches take which may be asked for again: by the other samples of a prompt, or its next turn."""


def takes_images(config: EngineConfig) -> bool:
    """Whether the configured model is one of :data:`MODELS`. Reads its ``config.json``, nothing else."""
    if config.task is not Task.GENERATE:
        return False
    try:
        file = Path(config.model).expanduser() / "config.json"
        if not file.parent.is_dir():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(config.model, "config.json", revision=config.revision))
        return json.loads(file.read_text(encoding="utf-8")).get("model_type") in MODELS
    except (OSError, ValueError, AttributeError):
        return False  # what has no configuration does not start, which says why


@dataclass(frozen=True, slots=True)
class Patches:
    """One image."""

    name: str
    """Of its file's bytes: another image has another."""
    pixels: Any
    """Tensor of shape (patches, values of a patch)."""
    grid: tuple[int, int, int]
    """Frames, rows and columns of patches."""
    count: int
    """Tokens."""


class ImageReader:
    """Reads images with the processor that the model's folder names. Its methods block, in any thread."""

    def __init__(self, config: EngineConfig, model_config: Any) -> None:
        self._config = config
        self.token_id = int(model_config.image_token_id)
        """What stands in a prompt where an image is, as often as it has tokens."""
        self._around = int(model_config.vision_start_token_id), int(model_config.vision_end_token_id)
        self._held: OrderedDict[str, Patches] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        config = self._config
        return AutoImageProcessor.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )

    def read(self, media: Sequence[MediaInput]) -> list[ReadMedium]:
        """Fetch and decode.

        Raises:
            InvalidRequest: one is no image, or cannot be had.
        """
        found: list[ReadMedium] = []
        for medium in media:
            data = read_bytes(medium)
            count = self._patches(medium, data).count
            looked_for = None if medium.data is not None else data
            found.append(ReadMedium(self.token_id, count, looked_for, follows=self._around[0]))
        return found

    def example(self, size: tuple[int, int]) -> tuple[list[int], tuple[MediaInput, ...]]:
        """A prompt of one black image, and the image, of this width and height in pixels."""
        from PIL import Image

        media = (ImageInput.from_pil(Image.new("RGB", size)),)
        (image,) = self.read(media)
        start, end = self._around
        return [start, *[self.token_id] * image.count, end], media

    def patches(self, media: Sequence[MediaInput]) -> list[Patches]:
        """Return what the model is to see of each image.

        Raises:
            InvalidRequest: as :meth:`read`.
        """
        return [self._patches(medium, read_bytes(medium)) for medium in media]

    def _patches(self, medium: MediaInput, data: bytes) -> Patches:
        if not isinstance(medium, ImageInput):
            raise InvalidRequest(f"this model takes images, and no {type(medium).__name__}", field="prompts")
        name = hashlib.blake2b(data, digest_size=16).hexdigest()
        with self._lock:
            held = self._held.get(name)
            if held is not None:
                self._held.move_to_end(name)
                return held
        made = self._made(medium, data, name)
        with self._lock:
            self._held[name] = made
            while len(self._held) > 1 and sum(one.pixels.nbytes for one in self._held.values()) > HELD_BYTES:
                self._held.popitem(last=False)
        return made

    def _made(self, medium: MediaInput, data: bytes, name: str) -> Patches:
        from PIL import Image

        try:
            image = Image.open(BytesIO(data)).convert("RGB")
            made = self._processor(images=[image], return_tensors="pt")
        except Exception as error:  # decoders raise whatever broken files make them
            raise unreadable(medium, f"{type(error).__name__}: {error}") from error
        frames, rows, columns = (int(value) for value in made["image_grid_thw"][0])
        count = frames * rows * columns // int(self._processor.merge_size) ** 2
        return Patches(name, made["pixel_values"], (frames, rows, columns), count)
