"""``drivetrain generate``: generates completions from the command line."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import Annotated

import typer
from rich.text import Text

from drivetrain.cli.configuration import (
    BackendOption,
    ConfigOption,
    IsolationOption,
    ModelOption,
    SettingsOption,
    configuration,
)
from drivetrain.cli.output import out, print_json, progress
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.validation import check_params_supported, check_sampling_params
from drivetrain.types.outputs import Completion
from drivetrain.types.prompts import ChatPrompt, Message, Prompt, TextPrompt
from drivetrain.types.sampling import SamplingParams


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help="Prompts; without any, each line of stdin is one.")
    ] = None,
    model: ModelOption = None,
    backend: BackendOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    isolation: IsolationOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens per completion.")] = 128,
    temperature: Annotated[float, typer.Option(help="Temperature; 0 is greedy.")] = 1.0,
    n: Annotated[int, typer.Option("--n", help="Completions per prompt.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers.", show_default=False)] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: return logprobs, also of this many of the most likely tokens.", show_default=False
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat each prompt as a user message.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the completion while it is generated.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")] = False,
) -> None:
    """Generate completions of prompts."""
    texts = prompts or _prompts_of_stdin()
    if stream and (as_json or n != 1 or len(texts) != 1):
        raise typer.BadParameter(
            f"shows one completion of one prompt as text; got {len(texts)} prompts, --n {n}"
            + (" and --json" if as_json else ""),
            param_hint="--stream",
        )
    if logprobs is not None and not as_json:
        raise typer.BadParameter("are only shown with --json; add it", param_hint="--logprobs")
    wanted: list[Prompt] = [
        ChatPrompt(messages=(Message(role="user", content=text),)) if chat else TextPrompt(text=text) for text in texts
    ]
    params: dict[str, object] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "n": n}
    params |= {"stop": tuple(stop)} if stop else {}
    params |= {"seed": seed} if seed is not None else {}
    params |= {"logprobs": logprobs} if logprobs is not None else {}
    engine = create_engine(configuration(config, settings or [], backend, model, isolation))
    checked = check_sampling_params(params)  # before the model loads, which may take minutes
    check_params_supported(checked, engine.config, engine.capabilities)
    completions = asyncio.run(_run(engine, wanted, checked, stream))
    if as_json:
        print_json(_document(engine, texts, completions))
    elif not stream:
        _show(texts, completions)


async def _run(
    engine: InferenceEngine, prompts: list[Prompt], params: SamplingParams, stream: bool
) -> list[Completion]:
    try:
        with progress(f"starting {engine.config.backend}") as report:
            await engine.start(report)
        if not stream:
            return (await engine.generate(prompts, params)).completions
        async with aclosing(engine.generate_stream(prompts, params)) as chunks:
            async for chunk in chunks:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        sys.stdout.write("\n")
        return []
    finally:
        await engine.teardown()


def _prompts_of_stdin() -> list[str]:
    if sys.stdin.isatty():
        raise typer.BadParameter("give at least one prompt, or pipe one per line into stdin", param_hint="PROMPT...")
    lines = [line.rstrip("\r\n") for line in sys.stdin]
    texts = [line for line in lines if line]
    if not texts:
        raise typer.BadParameter(
            "stdin holds no prompt; pipe one per line, or give prompts as arguments", param_hint="PROMPT..."
        )
    return texts


def _show(texts: list[str], completions: list[Completion]) -> None:
    for completion in completions:
        if len(completions) > 1:
            place = f"prompt {completion.prompt_index + 1}/{len(texts)}, sample {completion.sample_index + 1}"
            ending = f"{completion.finish_reason.value} after {len(completion.token_ids)} tokens"
            out.rule(Text(f"{place}: {ending}"), align="left")
        sys.stdout.write(completion.text + "\n")
        sys.stdout.flush()


def _document(engine: InferenceEngine, texts: list[str], completions: list[Completion]) -> dict[str, object]:
    return {
        "backend": engine.config.backend,
        "model": engine.config.model,
        "completions": [_completion(texts, completion) for completion in completions],
    }


def _completion(texts: list[str], completion: Completion) -> dict[str, object]:
    document: dict[str, object] = {
        "prompt_index": completion.prompt_index,
        "sample_index": completion.sample_index,
        "prompt": texts[completion.prompt_index],
        "text": completion.text,
        "prompt_token_ids": completion.prompt_token_ids,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason.value,
        "matched_stop": completion.matched_stop,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in completion.weight_versions
        ],
    }
    if completion.logprobs is not None and completion.logprobs_mode is not None:
        document["logprobs_mode"] = completion.logprobs_mode.value
        document["logprobs"] = completion.logprobs
    if completion.top_logprobs is not None:
        document["top_logprobs"] = completion.top_logprobs
    return document
