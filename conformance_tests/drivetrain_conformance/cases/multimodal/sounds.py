"""Sounds."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Final

from drivetrain.errors import InvalidRequest
from drivetrain.types.capability import Capability
from drivetrain.types.outputs import FinishReason
from drivetrain.types.prompts import AudioInput, TokenPrompt
from drivetrain_conformance.assertions.refusals import refused
from drivetrain_conformance.assets.served_models import ModelKind
from drivetrain_conformance.harness.case import case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.references.oracle import log_softmax

if TYPE_CHECKING:
    pass
from drivetrain_conformance.cases.multimodal.checks import (
    BOUNDED,
    SEEN,
    answers_about,
    assert_same,
    assert_tells_apart,
    check_bytes_are_bounded,
    check_readable,
    check_refused,
    check_retracted,
    check_scored,
    check_seen,
    first_place,
    logits_of,
    with_sounds,
)
from drivetrain_conformance.cases.multimodal.media_files import Video, black_pixel, png, silence, sine, white_noise

_NO_TEXT: Final = (200, 254, 131)
"""Token ids that no text is tokenised to."""


_RESAMPLED: Final = 0.2
"""Largest change of a logprob, in nats, by the filter with which an engine resamples a pure tone."""


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=BOUNDED)
async def another_sound_has_another_answer(bench: Bench) -> None:
    """The same text with two different sounds is answered differently, and with the same sound equally."""
    await assert_tells_apart(bench, "audio", AudioInput(data=white_noise(1).file), AudioInput(data=white_noise(2).file))


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=BOUNDED)
async def sounds_are_read_from_bytes_files_and_data_urls(bench: Bench) -> None:
    """A sound is the same given as bytes, as a path and as a data URL."""
    data = white_noise(1).file
    path = bench.folder("sounds") / "noise.wav"
    path.write_bytes(data)
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    await assert_same(bench, "audio", [AudioInput(data=data), AudioInput(path=str(path)), AudioInput(url=url)])


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=BOUNDED)
async def what_is_no_sound_is_refused(bench: Bench) -> None:
    """A sound that is broken, too large or missing is refused as a mistake in the request, with its whole batch."""
    missing = str(bench.folder("sounds") / "missing.wav")
    good = white_noise(1).file
    broken = (
        AudioInput(data=b"this is no sound"),
        AudioInput(data=b""),
        AudioInput(data=good[:44]),
        AudioInput(data=good[: len(good) // 2]),
        AudioInput(data=png(black_pixel)),
        AudioInput(data=Video((black_pixel,) * 2).file),
        AudioInput(data=f"#EXTM3U\n#EXTINF:2,\n{Path(missing).as_uri()}\n#EXT-X-ENDLIST\n".encode()),
        AudioInput(path=missing),
        AudioInput(url="http://127.0.0.1:1/sound.wav"),
    )
    large = (
        (AudioInput(data=white_noise(1, 2.1).file), "max_audio_seconds"),
        (AudioInput(data=white_noise(1, 1.0, 48_000).file), "max_audio_samples"),
    )
    await check_refused(bench, "audio", broken, large)
    await check_bytes_are_bounded(bench, AudioInput, good)
    assert await answers_about(bench, "audio", AudioInput(data=good))


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=BOUNDED)
async def a_sound_is_heard_as_the_model_hears_it(bench: Bench) -> None:
    """Answers have the logprobs of an independent forward pass over the returned prompt and the sounds."""
    for sounds in (
        [white_noise(1)],
        [sine(440)],
        [white_noise(2, 0.1)],
        [silence(0.5)],
        [silence(1.0)],
        [white_noise(1), white_noise(2, 1.3)],
        [white_noise(2, 1.3), white_noise(1)],
        [],
    ):
        (completion,) = (await bench.engine.generate(with_sounds(sounds), SEEN)).completions
        check_seen(bench, completion, sounds=sounds)


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=BOUNDED)
async def sounds_stay_with_their_prompts(bench: Bench) -> None:
    """In a batch each prompt has its own sounds, of any length, beside prompts of text alone."""
    beside = [
        [white_noise(1)],
        [white_noise(2)],
        [],
        [white_noise(3, 1.6), white_noise(1)],
        [white_noise(4, 0.1)],
        [white_noise(1), white_noise(3, 1.6)],
    ]
    batch = await bench.engine.generate([with_sounds(sounds) for sounds in beside], SEEN)
    for completion, sounds in zip(batch.completions, beside, strict=True):
        check_seen(bench, completion, sounds=sounds)


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=BOUNDED)
async def a_sound_of_another_rate_is_resampled(bench: Bench) -> None:
    """A tone sampled at another rate than the model's takes as many tokens, and is answered almost equally."""
    (own,) = (await bench.engine.generate(with_sounds([sine(440)]), SEEN)).completions
    check_seen(bench, own, sounds=[sine(440)])
    for rate in (8_000, 32_000):
        (other,) = (await bench.engine.generate(with_sounds([sine(440, rate)]), SEEN)).completions
        assert other.prompt_token_ids == own.prompt_token_ids, f"at {rate} Hz the tone takes other tokens"
        ids = [*other.prompt_token_ids, *other.token_ids[:1]]
        row = log_softmax(logits_of(bench, ids, (), (), sounds=[sine(440)]))[-2]
        assert other.logprobs is not None
        distance = abs(other.logprobs[0] - float(row[other.token_ids[0]]))
        assert distance <= _RESAMPLED, f"a tone at {rate} Hz is answered {distance:.2g} nats otherwise"


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=BOUNDED)
async def a_prompt_with_a_sound_comes_back_as_it_was_heard(bench: Bench) -> None:
    """A completion's prompt ids repeat each sound's placeholder as the model needs, and can be sent back."""
    sounds = [white_noise(1), white_noise(2, 1.3)]
    asked = with_sounds(sounds)
    (completion,) = (await bench.engine.generate(asked, SEEN)).completions
    check_seen(bench, completion, sounds=sounds)
    written, seen = bench.engine.tokenizer.encode(asked), completion.prompt_token_ids
    (token,) = {token for token in seen if seen.count(token) > written.count(token)}
    for token_ids in (written, seen):
        prompt = TokenPrompt(token_ids=tuple(token_ids), media=asked.media)
        (again,) = (await bench.engine.generate(prompt, SEEN)).completions
        assert again.prompt_token_ids == seen
        check_seen(bench, again, sounds=sounds)
    untokenized = TokenPrompt(token_ids=(*_NO_TEXT, *seen), media=asked.media)
    (exact,) = (await bench.engine.generate(untokenized, SEEN)).completions
    assert exact.prompt_token_ids == [*_NO_TEXT, *seen]
    check_seen(bench, exact, sounds=sounds)
    first = seen.index(token)
    for wrong in ([one for one in seen if one != token], [*seen[:first], token, *seen[first:]], [*written, token]):
        with refused(InvalidRequest, field="prompts[0]"):
            await bench.engine.generate(TokenPrompt(token_ids=tuple(wrong), media=asked.media), SEEN)


@case(Capability.AUDIO, model=ModelKind.AUDIO, config=BOUNDED)
async def openais_input_audio_is_heard(bench: Bench) -> None:
    """An ``input_audio`` part of an OpenAI message is heard like the same sound beside a chat prompt."""
    sound = white_noise(1)
    (completion,) = (await bench.engine.generate(with_sounds([sound]), SEEN)).completions
    check_seen(bench, completion, sounds=[sound])
    data = base64.b64encode(sound.file).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": "Describe the audio in one word."},
    ]
    answer = await bench.engine.chat_completion(
        {"messages": [{"role": "user", "content": parts}], "max_tokens": SEEN.max_new_tokens, "temperature": 0}
    )
    assert answer["prompt_token_ids"] == completion.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == completion.token_ids


@case(Capability.AUDIO, Capability.PROMPT_LOGPROBS, model=ModelKind.AUDIO, config=BOUNDED)
async def prompts_with_sounds_are_scored(bench: Bench) -> None:
    """Prompt logprobs, also those of sound placeholders, are those of an independent forward pass."""
    sounds = [white_noise(1), white_noise(2, 1.3)]
    params = SEEN.model_copy(update={"prompt_logprobs": 0})
    (completion,) = (await bench.engine.generate(with_sounds(sounds), params)).completions
    check_scored(bench, completion, sounds=sounds)
    check_seen(bench, completion, sounds=sounds)


@case(Capability.AUDIO, Capability.PREFIX_CACHE, model=ModelKind.AUDIO, config=BOUNDED)
async def a_cached_sound_is_no_other(bench: Bench) -> None:
    """The prefix cache serves a sound again, but never for another sound of the same length."""
    engine = bench.engine
    await engine.reset_prefix_cache()
    one, other = white_noise(1, 1.0), white_noise(2, 1.0)
    seen: list[list[int]] = []
    for sound, is_new in ((one, True), (other, True), (one, False), (other, False)):
        (completion,) = (await engine.generate(with_sounds([sound]), SEEN)).completions
        check_seen(bench, completion, sounds=[sound])
        seen.append(completion.prompt_token_ids)
        assert (completion.cached_tokens <= first_place(completion)) is is_new
    assert seen[0] == seen[1], "the sounds take different ids, so they could not have been mixed"
    await engine.reset_prefix_cache()
    (completion,) = (await engine.generate(with_sounds([one]), SEEN)).completions
    assert completion.cached_tokens == 0
    check_seen(bench, completion, sounds=[one])


@case(Capability.AUDIO, Capability.PREFIX_CACHE, model=ModelKind.AUDIO, config=BOUNDED)
async def a_further_turn_adds_a_sound(bench: Bench) -> None:
    """A prompt that begins with an earlier one and adds a sound hears both, the first in the cached prefix."""
    engine, sounds = bench.engine, [white_noise(1), white_noise(2)]
    await engine.reset_prefix_cache()
    (first,) = (await engine.generate(with_sounds(sounds[:1]), SEEN)).completions
    added = engine.tokenizer.encode(with_sounds(sounds[1:]))
    turn = TokenPrompt(token_ids=(*first.prompt_token_ids, *added), media=with_sounds(sounds).media)
    (second,) = (await engine.generate(turn, SEEN)).completions
    check_seen(bench, second, sounds=sounds)
    assert second.cached_tokens > first_place(first), "the sound of the first turn is computed again"


@case(Capability.AUDIO, Capability.ABORT, model=ModelKind.AUDIO, config=BOUNDED)
async def an_aborted_request_leaves_the_sounds_of_others(bench: Bench) -> None:
    """Requests with sounds are aborted one by one, and the others hear their own sounds to the end."""
    engine, params = bench.engine, bench.long(160, logprobs=0)
    heard, ids = [[white_noise(1)], [white_noise(2)], [white_noise(3), white_noise(1)]], ["first", "second", "third"]
    prompts = [with_sounds(sounds) for sounds in heard]
    async with bench.in_flight(prompts, params, tokens=0, request_ids=ids) as task:
        for request_id in ("third", "first"):
            await engine.abort(request_id)
        completions = (await task).completions
    assert completions[1].finish_reason is not FinishReason.ABORT
    for completion, sounds in zip(completions, heard, strict=True):
        if completion.token_ids:
            check_seen(bench, completion, sounds=sounds)


@case(Capability.AUDIO, Capability.WEIGHTS_DISK, model=ModelKind.AUDIO, config=BOUNDED, changes_weights=True)
async def new_weights_hear_a_sound_anew(bench: Bench) -> None:
    """After an update a sound heard before is heard with the new weights, including the audio model's."""
    other, sounds = bench.other_weights(), [white_noise(1)]
    await bench.engine.generate(with_sounds(sounds), SEEN)
    await bench.engine.load_weights_from_disk(str(other), "new")
    (completion,) = (await bench.engine.generate(with_sounds(sounds), SEEN)).completions
    assert completion.weight_version in ("new", None)
    check_seen(bench, completion, model=other, sounds=sounds)


@case(Capability.AUDIO, Capability.READ_WEIGHTS, model=ModelKind.AUDIO, config=BOUNDED)
async def every_tensor_of_a_model_with_sounds_can_be_read(bench: Bench) -> None:
    """Each tensor of the checkpoint, including the audio model's, is in the manifest and reads back unchanged."""
    await check_readable(bench, with_sounds([white_noise(1)]))


@case(Capability.AUDIO, Capability.PAUSE_RETRACT, model=ModelKind.AUDIO, config=BOUNDED, slow=True)
async def a_retracted_sound_is_heard_again(bench: Bench) -> None:
    """A retracted request continues with its sound."""
    await check_retracted(bench, lambda side: ([], [], [white_noise(side, 1.0)]))
