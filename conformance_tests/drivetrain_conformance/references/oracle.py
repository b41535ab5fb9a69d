"""Oracles: independent sources of a model's logits, which bypass the engine under test."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from drivetrain.backend.toolkit.progress_bars import no_progress_bars
from drivetrain.types.outputs import TopLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Logits = NDArray[np.float64]


class Oracle(Protocol):
    """An independent source of a model's logits."""

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Return logits of shape (tokens, vocabulary); row i is the distribution of token i + 1."""
        ...


@runtime_checkable
class HiddenStatesOracle(Oracle, Protocol):
    """An oracle that also computes the input of the language model's head."""

    def hidden_states(self, token_ids: Sequence[int]) -> Logits:
        """Return the last layer's states after the final norm, shape (tokens, hidden size)."""
        ...


@runtime_checkable
class CacheOracle(Oracle, Protocol):
    """An oracle that can continue from the KV cache of another one."""

    def logits_on_the_cache_of(self, earlier: Oracle, token_ids: Sequence[int], cached: int) -> Logits:
        """Return the logits of the tokens after the first ``cached`` ones, whose cache ``earlier`` computed."""
        ...


@runtime_checkable
class RoundingOracle(Oracle, Protocol):
    """An oracle that can vary rounding, which moves logits far where a router picks among experts."""

    def rounded_logits(self, token_ids: Sequence[int], unit: float) -> Iterator[Logits]:
        """Yield the logits several times, each time with every weight perturbed by about ``unit`` of its value."""
        ...


@runtime_checkable
class ImagesOracle(Oracle, Protocol):
    """An oracle that also takes images."""

    def logits_beside(self, token_ids: Sequence[int], images: Sequence[bytes]) -> Logits:
        """Return the logits of token ids in which each image's placeholder token is repeated as the model requires."""
        ...


@dataclass(frozen=True, slots=True)
class Film:
    """A video's frames before they were encoded into a file."""

    frames: NDArray[np.uint8]
    """Shape (frames, height, width, 3): red, green, blue."""
    per_second: float


@runtime_checkable
class VideosOracle(ImagesOracle, Protocol):
    """An oracle that also takes videos."""

    def logits_beside_videos(self, token_ids: Sequence[int], images: Sequence[bytes], videos: Sequence[Film]) -> Logits:
        """Return the logits of token ids in which each image's and video's placeholder is repeated as required."""
        ...


@runtime_checkable
class SoundsOracle(Oracle, Protocol):
    """An oracle that also takes sounds."""

    def logits_beside_sounds(self, token_ids: Sequence[int], sounds: Sequence[NDArray[np.float32]]) -> Logits:
        """Return the logits of token ids in which each sound's placeholder token is repeated as the model requires.

        Args:
            token_ids: The prompt and the completion.
            sounds: Samples before they were encoded into a file: one channel at the model's own rate, shape (samples,).
        """
        ...


def load_reference(model: str, **options: Any) -> PreTrainedModel:
    """Load a checkpoint for forward passes, with the class that transformers has for its media."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    remote = {name: value for name, value in options.items() if name != "dtype"}
    config = AutoConfig.from_pretrained(model, **remote)
    kind: Any = AutoModelForMultimodalLM if hasattr(config, "audio_config") else AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        kind = AutoModelForImageTextToText
    with no_progress_bars():
        made: PreTrainedModel = kind.from_pretrained(model, **options)
    made.requires_grad_(False)
    made.eval()
    return made


class TransformersOracle:
    """A transformers forward pass in float32 on the CPU: no cache, no batch, no padding."""

    def __init__(self, model: Path) -> None:
        self._path = model

    @cached_property
    def _model(self) -> PreTrainedModel:
        import torch

        return load_reference(str(self._path), dtype=torch.float32)

    def logits(self, token_ids: Sequence[int]) -> Logits:
        """Run the model over the whole sequence."""
        return self.logits_with(token_ids)

    def logits_with(self, token_ids: Sequence[int], **inputs: Any) -> Logits:
        """Run the model over token ids with further inputs of its forward pass."""
        return _logits(self._model, token_ids, **inputs)

    def logits_on_the_cache_of(self, earlier: Oracle, token_ids: Sequence[int], cached: int) -> Logits:
        """Run the earlier model over the first tokens, and this one over the rest on the resulting cache."""
        from transformers import DynamicCache

        assert isinstance(earlier, TransformersOracle), (
            f"the cache of a {type(earlier).__name__} cannot be gone on from"
        )
        takes = inspect.signature(self._model.forward).parameters
        name = "past_key_values" if "past_key_values" in takes else "cache"  # models without attention, and newer ones
        cache = {name: DynamicCache(config=self._model.config), "use_cache": True}
        earlier.logits_with(token_ids[:cached], **cache)
        return self.logits_with(token_ids[cached:], **cache)

    def rounded_logits(self, token_ids: Sequence[int], unit: float) -> Iterator[Logits]:
        """Yield the logits of eight perturbed copies of the model."""
        import torch

        generator = torch.Generator().manual_seed(0)
        for _ in range(8):
            other = copy.deepcopy(self._model)
            for parameter in other.parameters():
                parameter.mul_(1 + unit * torch.randn(parameter.shape, generator=generator))
            yield _logits(other, token_ids)

    @cached_property
    def _image_processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self._path)

    def logits_beside(self, token_ids: Sequence[int], images: Sequence[bytes]) -> Logits:
        """Run the model over the whole sequence and the images."""
        import torch

        places = (torch.tensor([list(token_ids)]) == self._model.config.image_token_id).int()
        return self.logits_with(token_ids, mm_token_type_ids=places, **self._of_images(images))

    def _of_images(self, images: Sequence[bytes]) -> dict[str, Any]:
        from PIL import Image

        opened = [Image.open(BytesIO(image)).convert("RGB") for image in images]
        return dict(self._image_processor(images=opened, return_tensors="pt"))

    @cached_property
    def _video_processor(self) -> Any:
        from transformers import AutoVideoProcessor

        return AutoVideoProcessor.from_pretrained(self._path)

    def logits_beside_videos(self, token_ids: Sequence[int], images: Sequence[bytes], videos: Sequence[Film]) -> Logits:
        """Run the model over the sequence, the images and the videos, with position ids computed here."""
        import torch

        config, processor = self._model.config, self._video_processor
        inputs: dict[str, Any] = self._of_images(images) if images else {}
        grids = {
            config.image_token_id: [(*grid, 1.0) for grid in inputs.get("image_grid_thw", torch.empty(0)).tolist()]
        }
        if videos:
            made = processor(
                videos=[film.frames for film in videos],
                video_metadata=[{"total_num_frames": len(film.frames), "fps": film.per_second} for film in videos],
                return_metadata=True,
                return_tensors="pt",
            )
            # Time steps are grid steps in Qwen2-VL, and proportional to seconds in Qwen2.5-VL.
            a_second = getattr(config.vision_config, "tokens_per_second", None)
            steps = [
                1.0 if a_second is None else a_second * processor.temporal_patch_size / metadata.sampled_fps
                for metadata in made.pop("video_metadata")
            ]
            grids[config.video_token_id] = [
                (*grid, step) for grid, step in zip(made["video_grid_thw"].tolist(), steps, strict=True)
            ]
            inputs |= made
        positions = mrope_positions(token_ids, grids, config.vision_config.spatial_merge_size)
        return self.logits_with(token_ids, position_ids=torch.from_numpy(positions)[:, None], **inputs)

    @cached_property
    def _feature_extractor(self) -> Any:
        from transformers import AutoFeatureExtractor

        return AutoFeatureExtractor.from_pretrained(self._path)

    def logits_beside_sounds(self, token_ids: Sequence[int], sounds: Sequence[NDArray[np.float32]]) -> Logits:
        """Run the model over the whole sequence and the sounds."""
        extractor = self._feature_extractor
        made = extractor(
            list(sounds), sampling_rate=extractor.sampling_rate, return_attention_mask=True, return_tensors="pt"
        )
        return self.logits_with(
            token_ids, input_features=made["input_features"], feature_attention_mask=made["attention_mask"]
        )

    def hidden_states(self, token_ids: Sequence[int]) -> Logits:
        """Run the model without its head over the whole sequence."""
        import torch

        with torch.no_grad():
            states = self._model.base_model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)[0][0]
        return np.asarray(states.double().numpy())


def mrope_positions(
    token_ids: Sequence[int], grids: dict[int, list[tuple[int, int, int, float]]], merged: int
) -> NDArray[np.int64]:
    """Return the temporal, row and column position of each token, by the rule of Qwen2-VL's authors.

    After an image or video, positions continue at its largest position plus one, as in the authors' code
    (https://github.com/huggingface/transformers/pull/35569). transformers 5.19 looks at rows and columns alone.

    Args:
        token_ids: The prompt and the completion.
        grids: By placeholder token id, for each image or video: frame pairs, rows, columns, and the time between two
            frame pairs.
        merged: Patches along a side of a token.
    """
    left = {token: iter(of_token) for token, of_token in grids.items()}
    found: list[NDArray[np.int64]] = []
    begin = 0
    for token, run in itertools.groupby(token_ids):
        length = len(list(run))
        medium = next(left[token], None) if token in left else None
        if medium is None:
            part = np.broadcast_to(np.arange(length), (3, length))
        else:
            frames, rows, columns, step = medium
            times = np.floor(np.arange(frames) * step + 1e-6).astype(np.int64)
            sides = np.arange(rows // merged), np.arange(columns // merged)
            part = np.stack(np.meshgrid(times, *sides, indexing="ij")).reshape(3, -1)
            assert part.shape[1] == length, f"{length} tokens stand for a grid of {medium}"
        found.append(part + begin)
        begin = int(found[-1].max()) + 1
    return np.concatenate(found, axis=1)


def _logits(model: PreTrainedModel, token_ids: Sequence[int], **inputs: Any) -> Logits:
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(token_ids)]), **{"use_cache": False, **inputs}).logits[0]
    return np.asarray(logits.double().numpy())


def log_softmax(logits: Logits) -> Logits:
    """Return logprobs along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def token_logprobs(logits: Logits, token_ids: Sequence[int]) -> list[float]:
    """Return the logprob of each token by its own row of logits, shape (tokens, vocabulary)."""
    return [float(row[token]) for row, token in zip(log_softmax(logits), token_ids, strict=True)]


def check_top(found: TopLogprobs, row: Logits, count: int, tolerance: float, of: str = "alternatives") -> None:
    """Assert that ``found`` are the ``count`` most likely tokens of a row of logprobs, most likely first."""
    ids, values = [token for token, _ in found], [value for _, value in found]
    assert len(set(ids)) == len(ids), f"{of}: a token is named twice: {found}"
    assert values == sorted(values, reverse=True), f"{of}: not in order: {found}"
    best = np.sort(row[row > -np.inf])[::-1][:count]
    assert len(found) == len(best), f"{of}: expected {len(best)} tokens, got {len(found)}"
    off = float(np.abs(values - best).max(initial=0))
    assert off <= tolerance, f"{of}: expected logprobs {best.round(4).tolist()}, got {found}"
    off = float(np.abs(values - row[ids]).max(initial=0))
    assert off <= tolerance, f"{of}: the tokens named do not have these logprobs: {found}"


def possible_ranks(row: Logits, token: int, tolerance: float) -> range:
    """Return the ranks that a token may have: the number of tokens that are at least as likely, itself included.

    Args:
        row: Logprobs, of shape (vocabulary,).
        token: The token id.
        tolerance: Allowed difference of each logprob from the engine's, in nats.
    """
    others = np.delete(row, token) - row[token]
    return range(1 + int((others > 2 * tolerance).sum()), 2 + int((others >= -2 * tolerance).sum()))


def check_prompt_ranks(
    ranks: Sequence[int | None] | None, token_ids: Sequence[int], rows: Logits, tolerance: float
) -> None:
    """Assert that each prompt token but the first has a rank that it may have.

    Args:
        ranks: Ranks as an engine returned them.
        token_ids: The prompt.
        rows: Logprobs after each of its tokens, of shape (tokens, vocabulary).
        tolerance: Allowed difference of each logprob from the engine's, in nats.
    """
    assert ranks is not None, "the prompt has no ranks"
    assert len(ranks) == len(token_ids), f"{len(ranks)} ranks of {len(token_ids)} prompt tokens"
    assert ranks[0] is None, "the first token of a prompt follows nothing, so it has no rank"
    for at, (rank, token, row) in enumerate(zip(ranks[1:], token_ids[1:], rows[:-1], strict=True), start=1):
        assert rank is not None, f"prompt token {at} has no rank"
        expected = possible_ranks(row, token, tolerance)
        assert rank in expected, (
            f"prompt token {at} has rank {rank}; the reference says {expected.start} to {expected.stop - 1}"
        )
