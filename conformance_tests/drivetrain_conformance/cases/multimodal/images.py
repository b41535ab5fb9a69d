"""Images are read, bounded and refused."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.prompts import ImageInput
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench

if TYPE_CHECKING:
    pass
from drivetrain_conformance.cases.multimodal.checks import (
    BOUNDED,
    BOUNDS,
    GREEDY,
    SEEN,
    answers_about,
    assert_same,
    assert_tells_apart,
    chat,
    check_bytes_are_bounded,
    check_refused,
    check_seen,
    served,
)
from drivetrain_conformance.cases.multimodal.media_files import black_pixel, eps, pattern_pixel, png, png_header


@case(Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED)
async def another_image_has_another_answer(bench: Bench) -> None:
    """The same text with two different images is answered differently, and with the same image equally."""
    black, noise = (ImageInput(data=png(pixel)) for pixel in (black_pixel, pattern_pixel))
    await assert_tells_apart(bench, "image", black, noise)


@case(Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED)
async def images_are_read_from_bytes_files_and_data_urls(bench: Bench) -> None:
    """An image is the same given as bytes, as a path and as a data URL."""
    data = png(pattern_pixel)
    path = bench.folder("images") / "pattern.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    await assert_same(bench, "image", [ImageInput(data=data), ImageInput(path=str(path)), ImageInput(url=url)])


@case(Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED)
async def images_stay_with_their_prompts(bench: Bench) -> None:
    """In a batch each prompt has its own images, and a prompt without images is answered as it is alone."""
    black, pattern = (ImageInput(data=png(pixel)) for pixel in (black_pixel, pattern_pixel))
    prompts = [chat("image", [black]), chat("image", [pattern]), chat("image", []), chat("image", [black, pattern])]
    alone = [(await bench.engine.generate(prompt, GREEDY)).completions[0] for prompt in prompts]
    together = (await bench.engine.generate(prompts, GREEDY)).completions
    for index, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert one.token_ids == other.token_ids, f"prompt {index} is answered otherwise in a batch than alone"


@case(Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED)
async def images_are_fetched_once(bench: Bench) -> None:
    """An image behind a URL is fetched once for all samples of its prompt, and seen like its bytes."""
    data = png(pattern_pixel)
    with served({"/pattern.png": data}) as (address, asked):
        params = SEEN.model_copy(update={"n": 3})
        fetched = await bench.engine.generate(chat("image", [ImageInput(url=f"{address}/pattern.png")]), params)
        assert asked == ["/pattern.png"]
        for completion in fetched.completions:
            check_seen(bench, completion, [data])
        with refused(InvalidRequest, naming="/missing.png"):
            await bench.engine.generate(chat("image", [ImageInput(url=f"{address}/missing.png")]), GREEDY)


@case(Capability.IMAGES, model=ModelKind.VISION, config=BOUNDED)
async def what_is_no_image_is_refused(bench: Bench) -> None:
    """An image that is broken, too large or missing is refused as a mistake in the request, with its whole batch."""
    missing = str(bench.folder("images") / "missing.png")
    os.mkfifo(fifo := bench.folder("fifos") / "fifo.png")
    good, nothing = png(black_pixel), base64.b64encode(b"nothing").decode()
    broken = (
        ImageInput(path=str(fifo)),
        ImageInput(data=png_header(50_000, 50_000)),
        ImageInput(data=eps()),
        ImageInput(data=b"this is no image"),
        ImageInput(data=b""),
        ImageInput(data=good[: len(good) // 2]),
        ImageInput(path=missing),
        ImageInput(url=f"data:image/png;base64,{nothing}"),
        ImageInput(url=Path(missing).as_uri()),
        ImageInput(url="http://127.0.0.1:1/image.png"),
    )
    await check_refused(bench, "image", broken, ((ImageInput(data=png(black_pixel, 260, 260)), "max_pixels"),))
    await check_bytes_are_bounded(bench, ImageInput, good)
    assert await answers_about(bench, "image", ImageInput(data=good))
    there = bench.folder("images") / "there.png"
    there.write_bytes(good)
    redirects = {"/to-a-file": there.as_uri(), "/around": "/around"}
    with served({}, redirects, {"/huge": 10**12}) as (address, _):
        for path in ("to-a-file", "around", "huge"):
            with refused(InvalidRequest, field="prompts", naming=f"/{path}"):
                await bench.engine.generate(chat("image", [ImageInput(url=f"{address}/{path}")]), GREEDY)


@case(Capability.IMAGES, model=ModelKind.VISION, config={"media": {**BOUNDS, "allow_private_hosts": False}}, slow=True)
async def private_hosts_may_be_forbidden(bench: Bench) -> None:
    """With allow_private_hosts=False nothing is fetched from loopback, link-local or private addresses or names.

    To mend it, fetch media with ``drivetrain.media.inputs.read_bytes``: it checks each address before it connects.
    """
    image = png(pattern_pixel)
    with served({"/pattern.png": image}) as (address, asked):
        port = address.rpartition(":")[2]
        for host in (
            "127.0.0.1",
            "localhost",
            "0.0.0.0",
            "[::ffff:127.0.0.1]",
            "127.1",
            "2130706433",
            "169.254.169.254",
        ):
            url = f"http://{host}:{port}/pattern.png"
            with refused(InvalidRequest, field="prompts", otherwise=f"an image was fetched from {host}"):
                await bench.engine.generate(chat("image", [ImageInput(url=url)]), GREEDY)
        assert not asked, f"a private host was asked for {asked}"
    assert await answers_about(bench, "image", ImageInput(data=image))
