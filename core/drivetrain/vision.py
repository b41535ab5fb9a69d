"""Images and videos as Qwen's vision models take them: read, decoded, cut into patches.

For backends, in the engine's process.
"""

from __future__ import annotations

import hashlib
import importlib.util
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
from drivetrain.capability import Capability
from drivetrain.config import EngineConfig, Task
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.media import read_bytes, unreadable
from drivetrain.prompts import ImageInput, MediaInput, VideoInput
from drivetrain.videos import decoded

IMAGE_MODELS: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Types of models whose images were seen to come out as transformers has them."""

VIDEO_MODELS: Final = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""The same of videos. Qwen3-VL's prompts hold the time of each frame in words, which no single token stands for."""

TIMED_MODELS: Final = frozenset({"qwen2_5_vl"})
"""Those that are told how many seconds of a video one of its grids spans."""

HELD_BYTES: Final = 1 << 29
"""Most memory that patches take which may be asked for again: by the other samples of a prompt, or its next turn."""


def vision_capabilities(config: EngineConfig) -> frozenset[Capability]:
    """What the configured model takes beside text, with the packages that are here.

    Reads its ``config.json``, nothing else. Videos need PyAV, and torchvision for transformers' video processors.
    """
    model_type = _model_type(config)
    claimed: set[Capability] = set()
    if model_type in IMAGE_MODELS:
        claimed.add(Capability.IMAGES)
    if model_type in VIDEO_MODELS and all(importlib.util.find_spec(name) for name in ("av", "torchvision")):
        claimed.add(Capability.VIDEO)
    return frozenset(claimed)


def _model_type(config: EngineConfig) -> str | None:
    if config.task is not Task.GENERATE:
        return None
    try:
        file = Path(config.model).expanduser() / "config.json"
        if not file.parent.is_dir():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(config.model, "config.json", revision=config.revision))
        return str(json.loads(file.read_text(encoding="utf-8")).get("model_type"))
    except (OSError, ValueError, AttributeError):
        return None  # what has no configuration does not start, which says why


@dataclass(frozen=True, slots=True)
class Patches:
    """One image or video."""

    name: str
    """Of its kind and its file's bytes: another image or video has another."""
    pixels: Any
    """Tensor of shape (patches, values of a patch)."""
    grid: tuple[int, int, int]
    """Pairs of frames, rows and columns of patches."""
    count: int
    """Tokens."""
    seconds: float | None = None
    """From one pair of frames to the next; None of an image, and to models that are not told."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What lies beside a prompt, each kind in its order."""

    images: tuple[Patches, ...]
    videos: tuple[Patches, ...]


class VisionReader:
    """Reads images and videos with the processors that the model's folder names. Its methods block, in any thread.

    Which frames of a video the model sees is up to its video processor: all of them, as Qwen's are configured, or those
    that it picks by the video's frames per second where the folder's ``video_preprocessor_config.json`` says
    ``do_sample_frames`` with ``fps`` or ``num_frames``.
    """

    def __init__(self, config: EngineConfig, model_config: Any) -> None:
        self._config = config
        self.image_token_id = int(model_config.image_token_id)
        """What stands in a prompt where an image is, as often as it has tokens."""
        self.video_token_id = int(model_config.video_token_id)
        """The same of a video."""
        self._around = int(model_config.vision_start_token_id), int(model_config.vision_end_token_id)
        self._takes_videos = model_config.model_type in VIDEO_MODELS
        self._is_timed = model_config.model_type in TIMED_MODELS
        self._held: OrderedDict[str, Patches] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def _image_processor(self) -> Any:
        from transformers import AutoImageProcessor

        config = self._config
        return AutoImageProcessor.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )

    @cached_property
    def _video_processor(self) -> Any:
        from transformers import AutoVideoProcessor

        config = self._config
        return AutoVideoProcessor.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )

    def read(self, media: Sequence[MediaInput]) -> list[ReadMedium]:
        """Fetch and decode.

        Raises:
            InvalidRequest: one is no image or video, or cannot be had.
        """
        found: list[ReadMedium] = []
        for medium in media:
            data = read_bytes(medium)
            count = self._patches(medium, data).count
            looked_for = None if medium.data is not None else data
            token_id = self.video_token_id if isinstance(medium, VideoInput) else self.image_token_id
            found.append(ReadMedium(token_id, count, looked_for, follows=self._around[0]))
        return found

    def example(self, size: tuple[int, int]) -> tuple[list[int], tuple[MediaInput, ...]]:
        """A prompt of one black image, and the image, of this width and height in pixels."""
        from PIL import Image

        media = (ImageInput.from_pil(Image.new("RGB", size)),)
        (image,) = self.read(media)
        start, end = self._around
        return [start, *[self.image_token_id] * image.count, end], media

    def patches(self, media: Sequence[MediaInput]) -> Seen:
        """Return what the model is to see of each image and video.

        Raises:
            InvalidRequest: as :meth:`read`.
        """
        made = [(isinstance(medium, VideoInput), self._patches(medium, read_bytes(medium))) for medium in media]
        return Seen(
            tuple(patches for is_video, patches in made if not is_video),
            tuple(patches for is_video, patches in made if is_video),
        )

    def _patches(self, medium: MediaInput, data: bytes) -> Patches:
        if not isinstance(medium, ImageInput) and not (isinstance(medium, VideoInput) and self._takes_videos):
            kinds = "images and videos" if self._takes_videos else "images"
            raise InvalidRequest(f"this model takes {kinds}, and no {type(medium).__name__}", field="prompts")
        # The same bytes can be an image and a video.
        kind = type(medium).__name__.encode()
        name = hashlib.blake2b(data, digest_size=16, person=kind[:16]).hexdigest()
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
        try:
            return self._video(data, name) if isinstance(medium, VideoInput) else self._image(data, name)
        except UnsupportedCapability:
            raise
        except Exception as error:  # decoders raise whatever broken files make them
            raise unreadable(medium, f"{type(error).__name__}: {error}") from error

    def _image(self, data: bytes, name: str) -> Patches:
        from PIL import Image

        image = Image.open(BytesIO(data)).convert("RGB")
        made = self._image_processor(images=[image], return_tensors="pt")
        return _cut(name, made["pixel_values"], made["image_grid_thw"], self._image_processor)

    def _video(self, data: bytes, name: str) -> Patches:
        from transformers.video_utils import VideoMetadata

        processor = self._loaded_video_processor()

        def pick(total: int, per_second: float | None) -> Sequence[int]:
            indices: Sequence[int] = processor.sample_frames(VideoMetadata(total, per_second)).tolist()
            return indices

        frames = decoded(data, pick if processor.do_sample_frames else None)
        made = processor(
            videos=[frames.pixels], do_sample_frames=False, input_data_format="channels_last", return_tensors="pt"
        )
        seconds = None
        if self._is_timed:
            seen = VideoMetadata(frames.total, frames.per_second, frames_indices=list(frames.indices))
            seconds = float(processor.temporal_patch_size / seen.sampled_fps)
        return _cut(name, made["pixel_values_videos"], made["video_grid_thw"], processor, seconds)

    def _loaded_video_processor(self) -> Any:
        try:
            import av  # noqa: F401

            return self._video_processor
        except ImportError as error:
            raise UnsupportedCapability(
                f"videos need PyAV (pip install 'drivetrain[video]') and the engine's torchvision: {error}",
                capability=Capability.VIDEO.value,
            ) from error


def _cut(name: str, pixels: Any, grids: Any, processor: Any, seconds: float | None = None) -> Patches:
    frames, rows, columns = (int(value) for value in grids[0])
    count = frames * rows * columns // int(processor.merge_size) ** 2
    return Patches(name, pixels, (frames, rows, columns), count, seconds)
