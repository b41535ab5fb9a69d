"""Preprocessing of images and videos for Qwen's vision models: reading, decoding, cutting into patches.

For backends, in the engine's process.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, Final

from drivetrain.backend.toolkit.model_folder import model_file
from drivetrain.errors import InvalidRequest, UnsupportedCapability
from drivetrain.media.reader import MediaReader, Place
from drivetrain.media.video_frames import Bounds, decoded
from drivetrain.types.capability import Capability
from drivetrain.types.config import EngineConfig, Task
from drivetrain.types.prompts import ImageInput, MediaInput, VideoInput

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_MODELS: Final = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Model types whose image patches were checked to equal those of transformers."""

VIDEO_MODELS: Final = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose video patches were checked likewise. Not Qwen3-VL: its prompts hold each frame's time as text,
which cannot be expressed by repeating one placeholder token."""

TIMED_MODELS: Final = frozenset({"qwen2_5_vl"})
"""Model types that are given the seconds of video per temporal grid step."""

IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Formats that Pillow decodes itself; for EPS it would run Ghostscript."""

MOST_SCANS: Final = 500
"""Maximum scans of a JPEG; usual files have ten."""

_SCAN: Final = b"\xff\xda"

ENGINE_FETCHES: Final = (
    "drivetrain reads media itself; use media={'allow_private_hosts': False}, or check URLs and paths before you pass "
    "them"
)
"""Reason to refuse engine arguments that restrict media hosts and folders."""

ENGINE_BOUNDS: Final = "drivetrain reads media itself; use the configuration's field media"
"""Reason to refuse engine arguments that limit media sizes."""

ENGINE_PREPARES: Final = (
    "drivetrain prepares images and videos as the model folder's preprocessor_config.json says; change that file, or "
    "leave the argument out"
)
"""Reason to refuse engine arguments about resizing, normalising and caching media."""

_IMAGES: Final = 8
"""Maximum images that are decoded at a time."""

_VIDEOS: Final = 2
"""Maximum videos that are decoded at a time; each may take gigabytes and several FFmpeg threads."""


def vision_capabilities(config: EngineConfig) -> frozenset[Capability]:
    """Return the media capabilities of the configured model with the installed packages.

    Reads only the model's ``config.json``. Videos need PyAV, and torchvision for transformers' video processors.
    """
    if config.task is not Task.GENERATE:
        return frozenset()
    model_type = model_file(config, "config.json").get("model_type")
    claimed: set[Capability] = set()
    if model_type in IMAGE_MODELS:
        claimed.add(Capability.IMAGES)
    if model_type in VIDEO_MODELS and all(importlib.util.find_spec(name) for name in ("av", "torchvision")):
        claimed.add(Capability.VIDEO)
    return frozenset(claimed)


@dataclass(frozen=True, slots=True)
class Patches:
    """Patches of one image or video."""

    name: str
    """Digest of the kind and the file's bytes; unique to this image or video."""
    pixels: Any
    """Tensor of shape (patches, values of a patch)."""
    grid: tuple[int, int, int]
    """Numbers of frame pairs, rows and columns of patches."""
    count: int
    """Number of tokens."""
    seconds: float | None = None
    """Seconds between frame pairs; None for images, and for models that are not given the time."""
    inputs: Mapping[str, Any] | None = None
    """Inputs of the model's forward pass, by name, if it takes others than patches and their grid."""

    @property
    def nbytes(self) -> int:
        """Bytes of the patches."""
        return int(self.pixels.nbytes)


@dataclass(frozen=True, slots=True)
class Seen:
    """Patches of a prompt's images and of its videos, each in prompt order."""

    images: tuple[Patches, ...]
    videos: tuple[Patches, ...]


class VisionReader(MediaReader[Patches]):
    """Reads images and videos with the processors named by the model's folder, within ``config.media``.

    The methods do not block the event loop. Cancelling the caller ends its fetch or decoding.

    The model's video processor chooses the frames. Qwen's default configuration uses all frames; with
    ``do_sample_frames`` and ``fps`` or ``num_frames`` in ``video_preprocessor_config.json``, frames are sampled.
    """

    says: ClassVar[str] = "images and videos"

    def __init__(self, config: EngineConfig, model_config: Any, context_length: int) -> None:
        super().__init__(config, context_length)
        self.image_token_id = int(model_config.image_token_id)
        """Placeholder token id of an image, repeated once per image token."""
        self.video_token_id = int(getattr(model_config, "video_token_id", -1))
        """Placeholder token id of a video, repeated likewise; -1 for models that take none."""
        self.around: tuple[int, int] | None = None
        """Token ids before and after each image and video; None: any."""
        if getattr(model_config, "vision_start_token_id", None) is not None:
            self.around = int(model_config.vision_start_token_id), int(model_config.vision_end_token_id)
        self._takes_videos = model_config.model_type in VIDEO_MODELS
        self._is_timed = model_config.model_type in TIMED_MODELS
        self._images = ThreadPoolExecutor(min(_IMAGES, os.cpu_count() or 1), "drivetrain-images")
        self._videos = ThreadPoolExecutor(_VIDEOS, "drivetrain-videos")

    @cached_property
    def image_processor(self) -> Any:
        from transformers import AutoImageProcessor

        config = self._config
        return AutoImageProcessor.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )

    @cached_property
    def video_processor(self) -> Any:
        from transformers import AutoVideoProcessor

        config = self._config
        return AutoVideoProcessor.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )

    def place(self, medium: MediaInput) -> Place:
        """Return the token ids that stand for an image, or for a video if the model takes them."""
        if not isinstance(medium, ImageInput) and not (isinstance(medium, VideoInput) and self._takes_videos):
            kinds = "images and videos" if self._takes_videos else "images"
            raise InvalidRequest(f"this model takes {kinds}, and no {type(medium).__name__}", field="prompts")
        token_id = self.video_token_id if isinstance(medium, VideoInput) else self.image_token_id
        return Place(token_id, None if self.around is None else self.around[0])

    async def example(self, size: tuple[int, int]) -> tuple[list[int], tuple[MediaInput, ...]]:
        """Return a prompt of one black image with this width and height in pixels, and the image."""
        from PIL import Image

        media = (ImageInput.from_pil(Image.new("RGB", size)),)
        (image,) = await self.read(media)
        before, after = ([], []) if self.around is None else ([self.around[0]], [self.around[1]])
        return [*before, *[self.image_token_id] * image.count, *after], media

    async def patches(self, media: Sequence[MediaInput]) -> Seen:
        """Return the patches of each image and video.

        Raises:
            InvalidRequest: As in :meth:`read`.
        """
        made = await self.prepared(media)
        kinds = [isinstance(medium, VideoInput) for medium in media]
        return Seen(
            tuple(patches for patches, is_video in zip(made, kinds, strict=True) if not is_video),
            tuple(patches for patches, is_video in zip(made, kinds, strict=True) if is_video),
        )

    def _threads(self, medium: MediaInput) -> ThreadPoolExecutor:
        return self._videos if isinstance(medium, VideoInput) else self._images

    def _prepare(self, medium: MediaInput, data: bytes, name: str, look: Callable[[], None]) -> Patches:
        return self._video(data, name, look) if isinstance(medium, VideoInput) else self._image(data, name)

    def _image(self, data: bytes, name: str) -> Patches:
        made = self.image_processor(images=[self._opened(data)], return_tensors="pt")
        return _cut(name, made["pixel_values"], made["image_grid_thw"], self.image_processor)

    def _opened(self, data: bytes) -> Image:
        """Decode an image file within the bounds."""
        from PIL import Image, UnidentifiedImageError

        Image.init()
        known: list[str] = [form for form in IMAGE_FORMATS if form in Image.OPEN]
        most = self._config.media.max_pixels
        try:
            opened = Image.open(BytesIO(data), formats=known)
        except UnidentifiedImageError:
            raise ValueError(f"it is none of {', '.join(known)}") from None
        except Image.DecompressionBombError as error:
            raise ValueError(f"{error} Expected at most {most} (media.max_pixels); give a smaller one") from None
        if opened.width * opened.height > most:
            raise ValueError(
                f"it has {opened.width} by {opened.height} pixels; expected at most {most} (media.max_pixels); give a "
                "smaller one, or raise the bound"
            )
        if opened.format == "JPEG" and data.count(_SCAN) > MOST_SCANS:
            raise ValueError(f"it has more than {MOST_SCANS} scans, each of which goes over all of its pixels")
        return opened.convert("RGB")

    def _video(self, data: bytes, name: str, look: Callable[[], None]) -> Patches:
        from transformers.video_utils import VideoMetadata

        processor = self._loaded_video_processor()

        def pick(total: int, per_second: float | None) -> Sequence[int]:
            indices: Sequence[int] = processor.sample_frames(VideoMetadata(total, per_second)).tolist()
            return indices

        def fits(frames: int, height: int, width: int) -> None:
            least = _least_tokens(processor, frames, height, width)
            if least > self._context_length:
                raise ValueError(
                    f"{frames} of its frames take {least} tokens or more; the context holds {self._context_length}, so "
                    "give a shorter one, or have the video processor sample it"
                )

        media = self._config.media
        bounds = Bounds(media.max_video_seconds, media.max_video_pixels, fits, look)
        frames = decoded(data, bounds, pick if processor.do_sample_frames else None)
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

            return self.video_processor
        except ImportError as error:
            raise UnsupportedCapability(
                f"videos need PyAV (pip install 'drivetrain[video]') and the engine's torchvision: {error}",
                capability=Capability.VIDEO.value,
            ) from error


def _least_tokens(processor: Any, frames: int, height: int, width: int) -> int:
    """Return the minimum number of tokens for so many frames of this size; 0 if the processor cannot tell."""
    count = getattr(processor, "get_num_of_video_patches", None)
    if count is None:
        return 0
    size = {name: processor.size[name] for name in ("shortest_edge", "longest_edge")}
    if getattr(processor, "cap_pixels_per_frame", True):
        # The processor shrinks the frames of a long video, down to this size.
        size["longest_edge"] = min(size["longest_edge"], int(1.05 * size["shortest_edge"]))
    patches: int = count(frames, height, width, {"size": size})
    return patches // int(processor.merge_size) ** 2


def _cut(name: str, pixels: Any, grids: Any, processor: Any, seconds: float | None = None) -> Patches:
    frames, rows, columns = (int(value) for value in grids[0])
    count = frames * rows * columns // int(processor.merge_size) ** 2
    return Patches(name, pixels, (frames, rows, columns), count, seconds)
