"""Prompts with media, and checks of their answers against the oracle."""

from __future__ import annotations

import base64
import gzip
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidRequest
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import Completion
from drivetrain.types.prompts import AudioInput, ChatPrompt, ImageInput, MediaInput, Message, VideoInput
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assets.weight_sources import raw_bytes, tensors_of
from drivetrain_conformance.harness.testbench import Bench, NoOracle, check_held
from drivetrain_conformance.references.oracle import ImagesOracle, Logits, SoundsOracle, VideosOracle, log_softmax

if TYPE_CHECKING:
    pass
from drivetrain_conformance.cases.multimodal.media_files import Sound, Video

_OF_TF32: Final = 5e-3
"""Difference of a logprob, in nats, that a GPU's convolutions leave: it was at most 1.5e-3 on an H200."""


_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


BOUNDS: Final = {
    "max_bytes": 1 << 20,
    "max_pixels": 1 << 16,
    "max_video_seconds": 10,
    "max_video_pixels": 1 << 18,
    "max_audio_seconds": 2,
    "max_audio_samples": 40_000,
}


BOUNDED: Final = {"media": BOUNDS}


_KINDS: Final = {ImageInput: "image", VideoInput: "video", AudioInput: "audio"}


GREEDY: Final = SamplingParams(max_new_tokens=16, temperature=0)


SEEN: Final = SamplingParams(max_new_tokens=12, temperature=0, logprobs=0)


_Beside = tuple[Sequence[bytes], Sequence[Video], Sequence[Sound]]
"""Images, videos and sounds of a prompt."""


def with_images(images: Sequence[bytes]) -> ChatPrompt:
    """Return a question about images."""
    return chat("image", [ImageInput(data=image) for image in images])


def with_videos(*, videos: Sequence[Video]) -> ChatPrompt:
    """Return a question about videos."""
    return chat("video", [VideoInput(data=video.file) for video in videos])


def with_sounds(sounds: Sequence[Sound]) -> ChatPrompt:
    """Return a question about sounds."""
    return chat("audio", [AudioInput(data=sound.file) for sound in sounds])


def _prompt_beside(media: _Beside) -> ChatPrompt:
    images, videos, sounds = media
    return with_images(images) if images else with_videos(videos=videos) if videos else with_sounds(sounds)


def logits_of(
    bench: Bench,
    ids: Sequence[int],
    images: Sequence[bytes],
    videos: Sequence[Video],
    model: Path | None = None,
    sounds: Sequence[Sound] = (),
) -> Logits:
    """Return the oracle's logits of ids that contain the placeholders of these images and videos, or sounds."""
    oracle = bench.oracle(model)
    if sounds:
        if not isinstance(oracle, SoundsOracle):
            raise NoOracle
        return oracle.logits_beside_sounds(ids, [sound.heard for sound in sounds])
    if videos:
        if not isinstance(oracle, VideosOracle):
            raise NoOracle
        return oracle.logits_beside_videos(ids, images, [video.film for video in videos])
    if not images:
        return oracle.logits(ids)
    if not isinstance(oracle, ImagesOracle):
        raise NoOracle
    return oracle.logits_beside(ids, images)


def output_logits(
    bench: Bench,
    completion: Completion,
    images: Sequence[bytes] = (),
    model: Path | None = None,
    videos: Sequence[Video] = (),
    sounds: Sequence[Sound] = (),
) -> Logits:
    """Return the oracle's logits of a completion up to its first placeholder, which the oracle would see as media."""
    prompt, tokens = completion.prompt_token_ids, completion.token_ids
    if images or videos or sounds:
        places = _places(completion)
        until = next((at for at, token in enumerate(tokens) if token in places), len(tokens))
        tokens = tokens[: until + 1]
    return logits_of(bench, [*prompt, *tokens[:-1]], images, videos, model, sounds)[len(prompt) - 1 :]


def first_place(completion: Completion) -> int:
    """Return the number of prompt tokens before the first placeholder, which is the first token to repeat."""
    pairs = itertools.pairwise(completion.prompt_token_ids)
    return next(at for at, (one, other) in enumerate(pairs) if one == other)


def _places(completion: Completion) -> set[int]:
    """Return the placeholder tokens of media: those that occur more than twice in a row."""
    runs = itertools.groupby(completion.prompt_token_ids)
    return {token for token, run in runs if len(list(run)) > 2}


def media_tolerance(bench: Bench, engine: InferenceEngine | None = None) -> float:
    """Return the allowed difference of a logprob from the oracle's; a GPU's convolutions round float32 to TF32."""
    info = (engine or bench.engine).model_info
    is_rounded = info.device.startswith("cuda") and info.dtype == "float32"
    return _OF_TF32 if is_rounded else bench.tolerance(engine)


def check_seen(
    bench: Bench,
    completion: Completion,
    images: Sequence[bytes] = (),
    model: Path | None = None,
    videos: Sequence[Video] = (),
    sounds: Sequence[Sound] = (),
    engine: InferenceEngine | None = None,
) -> None:
    """Raise unless a completion's tokens and logprobs are the oracle's greedy ones for these media."""
    tolerance = media_tolerance(bench, engine)
    beside = f"{len(images)} images, {len(videos)} videos and {len(sounds)} sounds"
    assert completion.logprobs is not None
    assert completion.token_ids
    rows = log_softmax(output_logits(bench, completion, images, model, videos, sounds))
    expected = [float(row[token]) for row, token in zip(rows, completion.token_ids[: len(rows)], strict=True)]
    below = max(float(row.max()) - value for row, value in zip(rows, expected, strict=True))
    assert below <= tolerance, f"a greedy token beside {beside} is {below:.2g} nats below the most likely"
    worst = max(abs(one - other) for one, other in zip(completion.logprobs[: len(rows)], expected, strict=True))
    assert worst <= tolerance, (
        f"logprobs beside {beside} are {worst:.2g} from those of the model: {completion.logprobs}"
    )


def check_scored(
    bench: Bench,
    completion: Completion,
    images: Sequence[bytes] = (),
    videos: Sequence[Video] = (),
    sounds: Sequence[Sound] = (),
) -> None:
    """Raise unless the prompt's logprobs are the oracle's for these media."""
    prompt, scores = completion.prompt_token_ids, completion.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    rows = log_softmax(logits_of(bench, prompt, images, videos, sounds=sounds))
    for index, (token, score) in enumerate(zip(prompt[1:], scores[1:], strict=True)):
        assert score is not None
        assert abs(score - rows[index, token]) <= media_tolerance(bench), f"token {index + 1} of {prompt}: {score}"


async def check_readable(bench: Bench, prompt: ChatPrompt) -> None:
    """Raise unless all tensors of the checkpoint read back unchanged after a prompt."""
    await bench.engine.generate(prompt, SEEN)
    stored = tensors_of(bench.model)
    manifest = await bench.engine.weight_manifest()
    assert {spec.name for spec in manifest.tensors} == set(stored)
    for name, tensor in stored.items():
        assert (await bench.engine.get_weights_by_name(name)).data == raw_bytes(tensor), name


async def seen_to_the_end(
    bench: Bench, params: SamplingParams, of_side: Callable[[int], _Beside]
) -> tuple[_Beside, Completion]:
    """Return media whose answer has no placeholder, so that the oracle can check it to its end, and the answer."""
    for side in range(56, 196, 28):
        media = of_side(side)
        (whole,) = (await bench.engine.generate(_prompt_beside(media), params)).completions
        if not _places(whole) & set(whole.token_ids):
            return media, whole
    raise AssertionError("every answer holds the token that stands for what is seen: none can be checked to its end")


async def check_retracted(bench: Bench, of_side: Callable[[int], _Beside]) -> None:
    """Raise unless a retracted request continues with its media, of a width whose answer has no placeholder."""
    params = bench.long(160, logprobs=0)
    media, whole = await seen_to_the_end(bench, params, of_side)
    async with bench.in_flight([_prompt_beside(media)], params) as task:
        await bench.engine.pause_generation(PauseMode.RETRACT)
        await check_held(bench.engine, task)
        await bench.engine.continue_generation()
        (completion,) = (await task).completions
    assert len(completion.token_ids) == len(whole.token_ids)
    images, videos, sounds = media
    check_seen(bench, completion, images, videos=videos, sounds=sounds)


@contextmanager
def served(
    files: Mapping[str, bytes],
    redirects: Mapping[str, str] = _NONE,
    sizes: Mapping[str, int] = _NONE,
    encodings: Mapping[str, str] = _NONE,
) -> Iterator[tuple[str, list[str]]]:
    """Serve files over HTTP; yield the address, and the list of paths that were requested and found.

    Args:
        files: Bodies, by path.
        redirects: Redirected paths and their targets.
        sizes: Paths that announce this content length and send no body.
        encodings: Content encodings that paths announce.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files.get(self.path)
            if (location := redirects.get(self.path)) is not None:
                self.send_response(302)
                self.send_header("Location", location)
            else:
                self.send_response(404 if body is None and self.path not in sizes else 200)
            if (size := sizes.get(self.path)) is not None:
                self.send_header("Content-Length", str(size))
            if (encoding := encodings.get(self.path)) is not None:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            if body is not None:
                asked.append(self.path)
                with suppress(OSError):  # a client that reads only so much closes the connection
                    self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


async def check_refused(
    bench: Bench, kind: str, broken: Sequence[MediaInput], large: Sequence[tuple[MediaInput, str]]
) -> None:
    """Raise unless broken media are refused with their batch, and large ones by the name of the bound they exceed."""
    for one in broken:
        with refused(InvalidRequest, field="prompts"):
            await bench.engine.generate([chat(kind, []), chat(kind, [one])], GREEDY)
        assert (await bench.engine.stats()).running == 0
    for one, bound in large:
        with refused(InvalidRequest, field="prompts", naming=bound):
            await bench.engine.generate(chat(kind, [one]), GREEDY)


async def check_bytes_are_bounded(bench: Bench, kind: type[MediaInput], good: bytes) -> None:
    """Raise unless files are refused beyond the bound on bytes.

    The bound holds for a file from any source, for what a server sends compressed, and for all files of a prompt.
    """
    most, says = BOUNDS["max_bytes"], _KINDS[kind]
    large = good + bytes(most)
    half = bench.folder("files") / "half"
    half.write_bytes(good + bytes(most // 2))
    (path := half.with_name("large")).write_bytes(large)
    files = {"/large": large, "/compressed": gzip.compress(large)}
    with served(files, encodings={"/compressed": "gzip"}) as (address, _):
        url = f"data:{says}/x;base64,{base64.b64encode(large).decode()}"
        for media in (
            [kind(data=large)],
            [kind(path=str(path))],
            [kind(url=url)],
            [kind(url=f"{address}/large")],
            [kind(path=str(half)), kind(path=str(half))],
        ):
            with refused(InvalidRequest, field="prompts", naming="max_bytes"):
                await bench.engine.generate(chat(says, media), GREEDY)
        with refused(InvalidRequest, field="prompts", naming="/compressed"):
            await bench.engine.generate(chat(says, [kind(url=f"{address}/compressed")]), GREEDY)


def chat(kind: str, media: Sequence[MediaInput]) -> ChatPrompt:
    """Return a question about media, with one placeholder in the message for each."""
    question = {"type": "text", "text": f"Describe the {kind} in one word."}
    content = [*({"type": _KINDS[type(one)]} for one in media), question]
    return ChatPrompt(messages=(Message.model_validate({"role": "user", "content": content}),), media=tuple(media))


async def answers_about(bench: Bench, kind: str, *media: MediaInput) -> list[Completion]:
    """Return greedy answers to the same question about each medium."""
    return (await bench.engine.generate([chat(kind, [one]) for one in media], GREEDY)).completions


async def assert_tells_apart(bench: Bench, kind: str, one: MediaInput, other: MediaInput) -> None:
    """Assert that two media have different answers, and that an answer repeats."""
    first, second, again = await answers_about(bench, kind, one, other, one)
    assert first.token_ids == again.token_ids
    assert first.token_ids != second.token_ids, f"the {kind} changes nothing: {first.text!r}"


async def assert_same(bench: Bench, kind: str, forms: Sequence[MediaInput]) -> None:
    """Assert that all forms of a medium have one answer."""
    answers = await answers_about(bench, kind, *forms)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1, (
        f"one {kind} in several forms has several answers: {[answer.text for answer in answers]}"
    )
