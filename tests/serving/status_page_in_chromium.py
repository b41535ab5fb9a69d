"""The status page in headless Chromium: ``make test-status-page``. ``SCREENSHOT=FILE`` keeps its picture."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from chromium import chromium
from drivetrain import InferenceEngine, PauseMode
from drivetrain_serving import Server, ServerConfig
from engines import until_running
from fleets import fleet_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "a-key-for-requests"
MARKUP = '<img src=x onerror="document.title=1">'
ASKED = {"prompt": [[5, 6]] * 4, "max_tokens": 64, "ignore_eos": True}


async def test_a_fleet_is_shown_and_the_page_refreshes_itself(model: Path, tmp_path: Path) -> None:
    async with (
        fleet_of(2, model) as fleet,
        Server(fleet, ServerConfig(port=0, served_model_name=("policy",))) as server,
    ):
        async with chromium(tmp_path) as page, httpx.AsyncClient(base_url=server.url, timeout=240) as client:
            await page.open(server.url)
            await page.until("document.title === 'policy - ready'")
            assert await page.text("#generated_tokens") == "0"
            for _ in range(4):
                assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
            await page.until("document.getElementById('generated_tokens').textContent === '1,024'")
            asking = asyncio.create_task(client.post("/v1/completions", json={**ASKED, "max_tokens": 900}))
            await until_running(fleet, 4)
            await fleet.pause_generation(PauseMode.IN_PLACE)
            await page.until("document.title === 'policy - paused'")
            await page.until("document.getElementById('running').textContent === '4'")
            rows = await page.value("Array.from(document.querySelectorAll('#engines tbody tr'), row => row.innerText)")
            assert sum(int(row.split("\t")[5].replace(",", "")) for row in rows) >= 1024
            assert [row.split("\t")[:4] for row in rows] == [
                ["engine-0", "paused", "initial", "2"],
                ["engine-1", "paused", "initial", "2"],
            ]
            picture = await page.screenshot()
            assert picture.startswith(b"\x89PNG")
            if path := os.environ.get("SCREENSHOT"):
                await asyncio.to_thread(Path(path).write_bytes, picture)
            await fleet.continue_generation()
            assert (await asking).status_code == 200
            await page.until("document.title === 'policy - ready'")
            assert page.complaints == []


async def test_values_are_text_and_a_server_that_ends_is_told(engine: InferenceEngine, tmp_path: Path) -> None:
    before = engine.get_weight_version()
    async with chromium(tmp_path) as page:
        async with Server(engine, ServerConfig(port=0, served_model_name=(MARKUP,))) as server:
            async with httpx.AsyncClient(base_url=server.url) as client:
                for version in (MARKUP, before):
                    await client.post("/update_weight_version", json={"new_version": version})
                    if version == MARKUP:
                        await page.open(server.url)
                    await page.until(f"document.getElementById('weight_version')?.textContent === {version!r}")
            assert await page.text("#model") == MARKUP
            assert await page.value("document.images.length") == 0
            assert page.complaints == []
        await page.until("!document.getElementById('error').hidden")
        assert "The server cannot be asked since" in await page.text("#error")


async def test_the_key_is_asked_for(engine: InferenceEngine, tmp_path: Path) -> None:
    submit = "document.getElementById('key').value = {!r}; document.querySelector('button').click()"
    async with Server(engine, ServerConfig(port=0, api_key=KEY)) as server, chromium(tmp_path) as page:
        await page.open(server.url)
        await page.until("document.getElementById('ask')?.hidden === false")
        assert await page.value("document.getElementById('facts').hidden")
        await page.value(submit.format("a-wrong-key"))
        await page.until("document.getElementById('error').textContent === 'The server refuses this key.'")
        await page.value(submit.format(KEY))
        await page.until("document.getElementById('facts').hidden === false")
        assert await page.text("#running") == "0"
        assert await page.value("document.getElementById('ask').hidden")
        assert await page.value("localStorage.length + sessionStorage.length + document.cookie.length") == 0
