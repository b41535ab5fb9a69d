"""Videos."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.prompts import ImageInput, MediaInput, TokenPrompt, VideoInput
from drivetrain.types.sampling import SamplingParams
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench

if TYPE_CHECKING:
    pass
from drivetrain_conformance.cases.multimodal.checks import (
    BOUNDED,
    SEEN,
    answers_about,
    assert_same,
    assert_tells_apart,
    chat,
    check_bytes_are_bounded,
    check_refused,
    check_retracted,
    check_scored,
    check_seen,
    first_place,
    served,
    with_videos,
)
from drivetrain_conformance.cases.multimodal.media_files import (
    MOVING,
    Video,
    black_pixel,
    pattern_pixel,
    png,
    striped_pixel,
    white_noise,
)


@case(Capability.VIDEO, model=ModelKind.VISION, config=BOUNDED)
async def another_video_has_another_answer(bench: Bench) -> None:
    """The same text with two different videos is answered differently, and with the same video equally."""
    black, moving = Video((black_pixel,) * 4), Video(MOVING)
    await assert_tells_apart(bench, "video", VideoInput(data=black.file), VideoInput(data=moving.file))


@case(Capability.VIDEO, model=ModelKind.VISION, config=BOUNDED)
async def videos_are_read_from_bytes_files_and_data_urls(bench: Bench) -> None:
    """A video is the same given as bytes, as a path and as a data URL."""
    data = Video(MOVING).file
    path = bench.folder("videos") / "moving.avi"
    path.write_bytes(data)
    url = f"data:video/x-msvideo;base64,{base64.b64encode(data).decode()}"
    await assert_same(bench, "video", [VideoInput(data=data), VideoInput(path=str(path)), VideoInput(url=url)])


@case(Capability.VIDEO, model=ModelKind.VISION, config=BOUNDED)
async def videos_are_fetched_once(bench: Bench) -> None:
    """A video behind a URL is fetched once for all samples of its prompt, and seen like its bytes."""
    video = Video(MOVING)
    with served({"/moving.avi": video.file}) as (address, asked):
        prompt = chat("video", [VideoInput(url=f"{address}/moving.avi")])
        fetched = await bench.engine.generate(prompt, SEEN.model_copy(update={"n": 3}))
        assert asked == ["/moving.avi"]
        for completion in fetched.completions:
            check_seen(bench, completion, videos=[video])


@case(Capability.VIDEO, model=ModelKind.VISION, config=BOUNDED)
async def what_is_no_video_is_refused(bench: Bench) -> None:
    """A video that is broken, too large or missing is refused as a mistake in the request, with its whole batch."""
    missing = str(bench.folder("videos") / "missing.avi")
    good = Video(MOVING).file
    broken = (
        VideoInput(data=b"this is no video"),
        VideoInput(data=b""),
        VideoInput(data=good[:300]),
        VideoInput(data=good[: len(good) // 2]),
        VideoInput(data=png(black_pixel)),
        VideoInput(data=white_noise(1).file),
        VideoInput(data=f"#EXTM3U\n#EXTINF:2,\n{Path(missing).as_uri()}\n#EXT-X-ENDLIST\n".encode()),
        VideoInput(path=missing),
        VideoInput(url="http://127.0.0.1:1/video.avi"),
    )
    large = (
        (VideoInput(data=Video((black_pixel,) * 24, 2).file), "max_video_seconds"),
        (VideoInput(data=Video((black_pixel,) * 70, 25).file), "max_video_pixels"),
        (VideoInput(data=Video((black_pixel,) * 4, 2, 260, 260).file), "max_video_pixels"),
    )
    await check_refused(bench, "video", broken, large)
    await check_bytes_are_bounded(bench, VideoInput, good)
    assert await answers_about(bench, "video", VideoInput(data=good))


@case(Capability.VIDEO, model=ModelKind.VISION, config=BOUNDED)
async def a_video_is_seen_as_the_model_sees_it(bench: Bench) -> None:
    """Answers have the logprobs of an independent forward pass over the returned prompt and the videos' frames."""
    for videos in (
        [Video(MOVING)],
        [Video((black_pixel,) * 4)],
        [Video((*MOVING, striped_pixel, pattern_pixel, black_pixel, striped_pixel), 8, 96, 40)],
        [Video((striped_pixel, pattern_pixel, black_pixel), 1)],
        [Video((pattern_pixel,), 25)],
        [Video(MOVING, 3)],
        [Video((striped_pixel, pattern_pixel) * 26, 25)],
        [Video(MOVING, 4), Video((striped_pixel, striped_pixel), 2, 40, 96)],
        [Video((striped_pixel, striped_pixel), 2, 40, 96), Video(MOVING, 4)],
    ):
        (completion,) = (await bench.engine.generate(with_videos(videos=videos), SEEN)).completions
        check_seen(bench, completion, videos=videos)


@case(Capability.VIDEO, Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED)
async def images_and_videos_stand_in_one_prompt(bench: Bench) -> None:
    """Images and videos in one prompt are seen in their own places, in any order and beside other prompts."""
    image, other, video = png(striped_pixel, 96, 40), png(pattern_pixel), Video(MOVING, 4, 84, 56)
    one, first, second = ImageInput(data=image), ImageInput(data=other), VideoInput(data=video.file)
    beside: list[tuple[list[MediaInput], list[bytes], list[Video]]] = [
        ([second, one], [image], [video]),
        ([one, second], [image], [video]),
        ([first, second, one], [other, image], [video]),
        ([second], [], [video]),
        ([first], [other], []),
        ([], [], []),
    ]
    batch = await bench.engine.generate([chat("video", media) for media, _, _ in beside], SEEN)
    for completion, (_, images, videos) in zip(batch.completions, beside, strict=True):
        check_seen(bench, completion, images, videos=videos)


@case(Capability.VIDEO, Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED)
async def a_prompt_with_a_video_comes_back_as_it_was_seen(bench: Bench) -> None:
    """A completion's prompt ids repeat each image's and video's placeholder, and can be sent back as a prompt."""
    image, video = png(striped_pixel, 96, 40), Video(MOVING)
    media = (VideoInput(data=video.file), ImageInput(data=image))
    asked = chat("video", media)
    (completion,) = (await bench.engine.generate(asked, SEEN)).completions
    check_seen(bench, completion, [image], videos=[video])
    written, seen = bench.engine.tokenizer.encode(asked), completion.prompt_token_ids
    repeated = {token for token in seen if seen.count(token) > written.count(token)}
    assert len(repeated) == 2
    assert [token for token, _ in itertools.groupby(seen)] == [token for token, _ in itertools.groupby(written)]
    for token_ids in (written, seen):
        prompt = TokenPrompt(token_ids=tuple(token_ids), media=media)
        (again,) = (await bench.engine.generate(prompt, SEEN)).completions
        assert again.prompt_token_ids == seen
        check_seen(bench, again, [image], videos=[video])
    first = first_place(completion)
    for wrong in (
        [one for one in seen if one != seen[first]],
        [*seen[:first], seen[first], *seen[first:]],
        [*written, seen[first]],
    ):
        with refused(InvalidRequest, field="prompts[0]"):
            await bench.engine.generate(TokenPrompt(token_ids=tuple(wrong), media=media), SEEN)


@case(Capability.VIDEO, model=ModelKind.VISION, config=BOUNDED, slow=True)
async def videos_count_in_the_context(bench: Bench) -> None:
    """Videos count towards the context length; a request that does not fit is refused."""
    prompt = with_videos(videos=[Video(MOVING)])
    seen = (await bench.engine.generate(prompt, SEEN)).completions[0].prompt_token_ids
    room = bench.engine.model_info.context_length - len(seen)
    with refused(InvalidRequest, field="sampling_params.max_new_tokens"):
        await bench.engine.generate(prompt, SamplingParams(max_new_tokens=room + 1))
    fitting = SamplingParams(max_new_tokens=room, temperature=0)
    (completion,) = (await bench.engine.generate(prompt, fitting)).completions
    assert completion.prompt_token_ids == seen
    assert 0 < len(completion.token_ids) <= room


@case(Capability.VIDEO, Capability.PROMPT_LOGPROBS, model=ModelKind.VISION, config=BOUNDED)
async def prompts_with_videos_are_scored(bench: Bench) -> None:
    """Prompt logprobs, also those of video placeholders, are those of an independent forward pass."""
    videos = [Video(MOVING, 4), Video((striped_pixel, black_pixel), 2, 96, 40)]
    params = SEEN.model_copy(update={"prompt_logprobs": 0})
    (completion,) = (await bench.engine.generate(with_videos(videos=videos), params)).completions
    check_scored(bench, completion, videos=videos)
    check_seen(bench, completion, videos=videos)


@case(Capability.VIDEO, Capability.PREFIX_CACHE, model=ModelKind.VISION, config=BOUNDED)
async def a_cached_video_is_no_other(bench: Bench) -> None:
    """The prefix cache serves a video again, but never for another that differs only in shape or speed."""
    engine = bench.engine
    for first, second, is_speed in (
        (Video(MOVING), Video((*MOVING[:3], striped_pixel)), False),
        (Video((black_pixel,) * 2, 2, 112, 56), Video((black_pixel,) * 2, 2, 56, 112), False),
        (Video(MOVING * 2, 1), Video(MOVING * 2, 8), True),
    ):
        await engine.reset_prefix_cache()
        seen: list[list[int]] = []
        for video, is_new in ((first, True), (second, True), (first, False), (second, False)):
            (completion,) = (await engine.generate(with_videos(videos=[video]), SEEN)).completions
            check_seen(bench, completion, videos=[video])
            seen.append(completion.prompt_token_ids)
            if not is_speed:  # some models are not told the speed
                assert (completion.cached_tokens <= first_place(completion)) is is_new
        assert seen[0] == seen[1], "the videos take different ids, so they could not have been mixed"
    await engine.reset_prefix_cache()
    (completion,) = (await engine.generate(with_videos(videos=[first]), SEEN)).completions
    assert completion.cached_tokens == 0
    check_seen(bench, completion, videos=[first])


@case(Capability.VIDEO, Capability.WEIGHTS_DISK, model=ModelKind.VISION, config=BOUNDED, changes_weights=True)
async def new_weights_see_a_video_anew(bench: Bench) -> None:
    """After an update a video seen before is seen with the new weights, including the vision model's."""
    other, videos = bench.other_weights(), [Video(MOVING)]
    await bench.engine.generate(with_videos(videos=videos), SEEN)
    await bench.engine.load_weights_from_disk(str(other), "new")
    (completion,) = (await bench.engine.generate(with_videos(videos=videos), SEEN)).completions
    assert completion.weight_version in ("new", None)
    check_seen(bench, completion, model=other, videos=videos)


@case(Capability.VIDEO, Capability.PAUSE_RETRACT, model=ModelKind.VISION, config=BOUNDED)
async def a_retracted_video_is_seen_again(bench: Bench) -> None:
    """A retracted request continues with its video."""
    await check_retracted(bench, lambda side: ([], [Video(MOVING, 2, side, 84)], []))
