"""Sounds on their way to an engine: files of every usual form, bounds, refusals."""

from __future__ import annotations

import importlib.util
import struct
import sys
import tracemalloc
import wave
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoProcessor

from drivetrain import (
    AudioInput,
    Capability,
    DeadlineExceeded,
    EngineConfig,
    ImageInput,
    InvalidRequest,
    TokenPrompt,
    UnsupportedCapability,
)
from drivetrain.backend.base import Backend
from drivetrain.engine.validation import check_media
from drivetrain.media import qwen_audio, sound
from drivetrain.media.qwen_audio import SoundReader, audio_capabilities, tokens_of
from drivetrain.media.sound import Bounds, decoded
from drivetrain.testing import tiny_model
from drivetrain_sglang.engine import SGLangBackend
from drivetrain_sglang.multimodal_inputs import audio_data, keep_token_ids
from drivetrain_vllm.engine import VLLMBackend
from drivetrain_weight_sync.receiver.checkpoint_manifest import checkpoint_of

RATE = 16_000
WIDE = Bounds(3600, 1 << 28)
PLACE = 262


def config(**fields: object) -> EngineConfig:
    return EngineConfig.from_mapping({"backend": "b", "model": str(tiny_model("qwen2_audio")), **fields})


def reader(context_length: int = 1024, timeouts: object = None, **media: Any) -> SoundReader:
    settings = config(media=media, **({} if timeouts is None else {"timeouts": timeouts}))
    return SoundReader(settings, SimpleNamespace(audio_token_id=PLACE), context_length)


def noise(seconds: float, rate: int = RATE, seed: int = 0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(round(seconds * rate)) / 8).astype(np.float32)


def tone(seconds: float, rate: int, hertz: float = 440) -> NDArray[np.float32]:
    return (np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate) / 2).astype(np.float32)


def pcm(samples: NDArray[np.int16], rate: int = RATE) -> bytes:
    """Return a WAV of 16 bits; ``samples`` has shape (samples, channels)."""
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((samples.shape[1], 2, rate, 0, "NONE", ""))
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def encoded(samples: NDArray[np.float32], form: str, codec: str, rate: int) -> bytes:
    file = BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((samples[None] * 32768).astype(np.int16), format="s16", layout="mono")
        frame.sample_rate = rate
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return file.getvalue()


def test_an_array_arrives_as_it_was_given() -> None:
    samples = noise(0.3)
    data = AudioInput.from_array(samples, RATE).data
    assert data is not None
    np.testing.assert_array_equal(decoded(data, WIDE, RATE), samples)
    halves = AudioInput.from_array(samples.astype(np.float16)[::2], RATE).data
    assert halves is not None
    np.testing.assert_array_equal(decoded(halves, WIDE, RATE), samples.astype(np.float16)[::2].astype(np.float32))


@pytest.mark.parametrize(
    ("samples", "rate", "why"),
    [
        (
            np.zeros((2, 5), np.float32),
            RATE,
            "expected .* average several channels",
        ),
        (np.zeros(5, np.int16), RATE, "divide integers"),
        (np.zeros(0, np.float32), RATE, "expected an array"),
        ([0.0, 0.5], RATE, "expected an array"),
        (np.array([0, np.nan], np.float32), RATE, "not finite"),
        (np.zeros(5, np.float32), 0, "sampling_rate=0: expected samples per second"),
        (np.zeros(5, np.float32), True, "sampling_rate=True"),
        (np.zeros(5, np.float32), 16e3, "sampling_rate=16000.0"),
    ],
)
def test_what_is_no_sound_is_no_input(samples: Any, rate: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        AudioInput.from_array(samples, rate)


def test_channels_are_averaged() -> None:
    left, right = (np.array([1, -1], np.int16) * np.array([[16384], [8192]], np.int16)[:, :1]).repeat(50, axis=0).T
    both = decoded(pcm(np.stack([left, right], axis=1)), WIDE, RATE)
    np.testing.assert_array_equal(both, ((left.astype(np.float32) + right) / 2 / 32768).astype(np.float32))
    alone = decoded(pcm(left[:, None]), WIDE, RATE)
    np.testing.assert_array_equal(alone, left.astype(np.float32) / 32768)


@pytest.mark.parametrize(("form", "codec"), [("flac", "flac"), ("wav", "pcm_s24le"), ("wav", "pcm_f32le")])
def test_files_without_loss_have_equal_samples(form: str, codec: str) -> None:
    samples = noise(0.5)
    whole = decoded(encoded(samples, form, codec, RATE), WIDE, RATE)
    np.testing.assert_array_equal(whole, (samples * 32768).astype(np.int16).astype(np.float32) / 32768)


@pytest.mark.parametrize(("form", "codec"), [("mp3", "mp3"), ("ogg", "libopus"), ("mp4", "aac")])
def test_files_with_loss_are_read(form: str, codec: str) -> None:
    samples = tone(1.0, 48_000)
    whole = decoded(encoded(samples, form, codec, 48_000), WIDE, RATE)
    assert abs(len(whole) - RATE) < 0.1 * RATE
    middle = whole[RATE // 4 : RATE // 2]
    assert np.abs(np.fft.rfft(middle)).argmax() == pytest.approx(440 * len(middle) / RATE, abs=2)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_a_sound_of_another_rate_is_resampled(rate: int) -> None:
    data = AudioInput.from_array(tone(1.0, rate), rate).data
    assert data is not None
    resampled = decoded(data, WIDE, RATE)
    assert abs(len(resampled) - RATE) <= 1
    np.testing.assert_allclose(resampled[200:-200], tone(1.0, RATE)[200 : len(resampled) - 200], rtol=0, atol=5e-3)


@pytest.mark.parametrize("size", [b"\0\0\0\0", b"\xff\xff\xff\xff"])
def test_a_wav_written_as_a_stream_is_read_to_its_end(size: bytes) -> None:
    data = bytearray(pcm(np.ones((800, 1), np.int16)))
    data[4:8] = size
    assert len(decoded(bytes(data), WIDE, RATE)) == 800


def broken() -> dict[str, bytes]:
    whole, flac = pcm((noise(0.5)[:, None] * 32767).astype(np.int16)), encoded(noise(0.5), "flac", "flac", RATE)
    endless = AudioInput.from_array(noise(0.1), RATE).data
    assert endless is not None
    return {
        "nothing": b"",
        "text": b"this is no sound",
        "a WAV cut off": whole[: len(whole) // 2],
        "a FLAC cut off": flac[: len(flac) // 2],
        "a header alone": whole[:44],
        "an image": b"\x89PNG\r\n\x1a\n",
        "a playlist": b"#EXTM3U\n#EXTINF:2,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",
        "infinite samples": endless[:-4] + struct.pack("<f", float("inf")),
    }


@pytest.mark.parametrize("kind", broken())
async def test_what_is_no_sound_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=r"the audio '.* bytes' beside a prompt cannot be read") as caught:
        await reader().read([AudioInput(data=broken()[kind])])
    assert caught.value.field == "prompts"


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ({"max_audio_seconds": 0.4}, r"more than 0\.4 seconds \(media\.max_audio_seconds\)"),
        ({"max_audio_samples": 15_999}, r"more than 15999 samples in its 2 channels \(media\.max_audio_samples\)"),
        ({"max_bytes": 100}, r"media\.max_bytes"),
    ],
)
async def test_bounds_are_named(bounds: dict[str, Any], why: str) -> None:
    data = pcm(np.ones((8000, 2), np.int16))
    with pytest.raises(InvalidRequest, match=why):
        await reader(**bounds).read([AudioInput(data=data)])
    (read,) = await reader(max_audio_seconds=0.5, max_audio_samples=16_000).read([AudioInput(data=data)])
    assert (read.token_id, read.count) == (PLACE, 12)


async def test_a_sound_that_is_said_to_be_long_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = encoded(np.zeros(60 * RATE, np.float32), "flac", "flac", RATE)
    monkeypatch.setattr(sound, "_frames", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(InvalidRequest, match="more than the 30 seconds that the model hears at once"):
        await reader().read([AudioInput(data=file)])


@pytest.mark.slow
async def test_a_small_file_of_a_long_sound_takes_little_memory() -> None:
    file = encoded(np.zeros(1200 * RATE, np.float32), "mp3", "mp3", RATE)
    made = reader()
    await made.read([AudioInput.from_array(noise(1), RATE)])
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="more than the 30 seconds"):
            await made.read([AudioInput(data=file)])
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


def test_channels_and_rates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "MOST_CHANNELS", 1)
    with pytest.raises(ValueError, match="it has 2 channels; expected 1 to 1"):
        decoded(pcm(np.ones((800, 2), np.int16)), WIDE, RATE)
    with pytest.raises(ValueError, match="it has 500000 samples a second; expected 1 to 384000"):
        decoded(pcm(np.ones((800, 1), np.int16), 500_000), WIDE, RATE)


async def test_decoding_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(data: bytes, bounds: Bounds, rate: int) -> NDArray[np.float32]:
        while True:
            bounds.look()

    monkeypatch.setattr(qwen_audio, "decoded", endless)
    with pytest.raises(
        DeadlineExceeded, match=r"timed out after 0\.1 s waiting for the audio .* to be decoded \(timeouts\.media\)"
    ):
        await reader(timeouts={"media": 0.1}).read([AudioInput.from_array(noise(0.2), RATE)])


# Sounds for one model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.061, 0.1, 0.37, 1.0, 29.99, 30.0])
async def test_a_sound_becomes_what_the_models_own_processor_makes_of_it(seconds: float) -> None:
    samples = noise(seconds)
    processor: Any = AutoProcessor.from_pretrained(tiny_model("qwen2_audio"))
    own = processor(text="<|AUDIO|>", audio=[samples], sampling_rate=RATE, return_tensors="pt")
    (made,) = await reader().prepared([AudioInput.from_array(samples, RATE)])
    assert made.count == own["input_ids"][0].tolist().count(PLACE) == tokens_of(int(made.mask.sum()))
    assert bool((made.features == own["input_features"]).all())
    assert bool((made.mask == own["feature_attention_mask"]).all())


async def test_sounds_that_the_model_does_not_hear_whole_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"0\.060 seconds, of which the model hears nothing"):
        await reader().read([AudioInput.from_array(noise(0.06), RATE)])
    with pytest.raises(InvalidRequest, match="30 seconds that the model hears at once; cut it into several"):
        await reader().read([AudioInput.from_array(noise(30.1), RATE)])
    with pytest.raises(InvalidRequest, match="2 sounds beside a prompt take 50 tokens; the context holds 49"):
        await reader(context_length=49).read([AudioInput.from_array(noise(1.0), RATE)] * 2)
    with pytest.raises(InvalidRequest, match="takes sounds, and no ImageInput"):
        await reader().read([ImageInput(data=b"1")])


async def test_two_sounds_of_equal_shape_have_two_names() -> None:
    one, other, again = await reader().prepared(
        [AudioInput.from_array(noise(0.2, seed=seed), RATE) for seed in (0, 1, 0)]
    )
    assert one is again
    assert one.name != other.name


def test_sounds_are_claimed_for_models_that_take_them_where_they_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert audio_capabilities(config()) == {Capability.AUDIO}
    assert not audio_capabilities(config(task="embed"))
    assert not audio_capabilities(config(model=str(tiny_model("qwen2"))))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not audio_capabilities(config())
    media = (AudioInput(data=b"1"),)
    with pytest.raises(UnsupportedCapability, match=r"pip install 'drivetrain\[audio\]'"):
        check_media(TokenPrompt(token_ids=(1,), media=media), "prompts[0]", config(), frozenset())


async def test_a_package_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UnsupportedCapability, match=r"sounds need PyAV \(pip install 'drivetrain\[audio\]'\)"):
        await reader().read([AudioInput.from_array(noise(0.2), RATE)])


async def test_sounds_are_read_from_files(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(pcm(np.ones((8000, 1), np.int16)))
    (read,) = await reader().read([AudioInput(path=str(file))])
    assert (read.count, read.data, read.follows) == (12, file.read_bytes(), None)


@pytest.mark.parametrize("backend", [SGLangBackend, VLLMBackend])
def test_engines_claim_sounds_where_they_were_seen(backend: type[Backend]) -> None:
    assert Capability.AUDIO in backend.capabilities(config(device="cpu"))
    assert Capability.AUDIO not in backend.capabilities(config(device="cuda"))
    assert Capability.AUDIO not in backend.capabilities(config(model=str(tiny_model("qwen2_5_vl")), device="cpu"))


def test_a_checkpoint_with_an_audio_model_is_named_as_it_is_stored() -> None:
    folder = tiny_model("qwen2_audio")
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert {spec.name: spec.shape for spec in checkpoint_of(str(folder)).tensors} == stored
    assert "language_model.model.embed_tokens.weight" in stored


async def test_sglang_is_given_all_sounds_of_a_prompt_as_one() -> None:
    media = [AudioInput.from_array(noise(seconds), RATE) for seconds in (0.2, 0.4)]
    (given,) = audio_data(await reader().prepared(media))
    assert given["format"] == "processor_output"
    assert given["input_features"].shape == (2, 32, 3000)
    assert given["feature_attention_mask"].sum(-1).tolist() == [20, 40]
    processor = SimpleNamespace(_build_transcription_prompt=lambda ids: "text")
    keep_token_ids(processor)
    assert processor._build_transcription_prompt([200, 5]) == [200, 5]
