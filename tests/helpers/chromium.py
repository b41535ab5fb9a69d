"""Headless Chromium, driven over the pipe of its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from engines import HANGING, until


class Page:
    """A page of the browser.

    Args:
        reader: Messages from the browser, each ended by a zero byte.
        writer: Messages to it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._session: str | None = None
        self._answers: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self.complaints: list[Mapping[str, Any]] = []
        """Exceptions of the page's script, and errors and warnings of the browser about the page."""

    async def read(self) -> None:
        """Take the browser's messages until it ends."""
        try:
            await self._read()
        except asyncio.IncompleteReadError:
            for answer in self._answers.values():
                answer.set_exception(ConnectionError("the browser has ended"))

    async def _read(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if (answer := self._answers.pop(message.get("id", 0), None)) is not None:
                answer.set_result(message)
            elif message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(message["params"])
            elif message.get("method") == "Log.entryAdded":
                self.complaints.append(message["params"]["entry"])

    async def call(self, method: str, **params: object) -> Mapping[str, Any]:
        """Call a method of the protocol."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(HANGING):
            answer = await self._answers[number]
        assert "error" not in answer, answer
        result: Mapping[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        """Open a page."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression in the page is true."""

        async def holds() -> bool:
            return await self.value(script) is True

        await until(holds)

    async def text(self, selector: str) -> str:
        """Return the text of an element as it is shown; empty if it is hidden."""
        found: str = await self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    async def screenshot(self) -> bytes:
        """Return the page as a PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Page]:
    """Start the browser with a profile in ``folder``; end it with the block."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert program is not None, "no Chromium is installed; on Debian: apt-get install chromium"
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()
    options = [
        "--headless",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-pipe",
        "--window-size=960,560",
    ]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium's sandbox refuses root
    # The protocol's pipes are descriptors 3 and 4 of the browser.
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f'exec "$@" 3<&{command_out} 4>&{answer_in}', "bash"),
        *(program, *options, f"--user-data-dir={folder}", "about:blank"),
        pass_fds=(command_out, answer_in),
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(command_out)
    os.close(answer_in)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answer_out, "rb"))
    writing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(command_in, "wb"))
    page = Page(reader, asyncio.StreamWriter(writing, protocol, None, loop))
    messages = asyncio.ensure_future(page.read())
    try:
        yield page
    finally:
        messages.cancel()
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        await asyncio.gather(messages, return_exceptions=True)
        writing.close()
        reading.close()
