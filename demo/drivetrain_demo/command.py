"""``drivetrain demo``: train a small policy on any backend."""

from __future__ import annotations

import asyncio
import importlib.util
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import JsonValue, TypeAdapter, ValidationError

from drivetrain.checks.extras import from_extra
from drivetrain.checks.yaml_mappings import load_yaml
from drivetrain.cli.output import err, out, print_error, print_json
from drivetrain.types.config import Isolation
from drivetrain_demo.display import display
from drivetrain_demo.report import document, summary, write_plot
from drivetrain_demo.result import DemoResult
from drivetrain_demo.settings import MIN_STEPS_TO_JUDGE, OTHER_POLICY, TINY_POLICY, Settings

_policy, _rollout, _training, _checks, _output = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Policy and engine", "Rollout", "Training", "Checks", "Output")
)
INTERRUPTED = 130


def _by_policy(name: str) -> str:
    return f"{getattr(TINY_POLICY, name)}; with --model {getattr(OTHER_POLICY, name)}"


def demo(
    backend: Annotated[str, _policy(help="The engine: a backend's name, or a YAML file.")] = "transformers",
    isolation: Annotated[Isolation | None, _policy(help="Process of the engine.", show_default="the backend's")] = None,
    model: Annotated[
        str | None,
        _policy(
            metavar="DIR_OR_ID",
            help="Any causal language model.",
            show_default="a tiny one, made on the spot with random weights",
        ),
    ] = None,
    engine_fields: Annotated[
        list[str] | None,
        _policy(
            "--set", metavar="FIELD=VALUE", help="Any further field of the engine's configuration, as YAML; repeatable."
        ),
    ] = None,
    engines: Annotated[int, _policy(min=1, help="Number of engines; more than one are a fleet.")] = 1,
    prompts: Annotated[
        Path | None,
        _rollout(
            metavar="FILE",
            help='One JSON object per line: {"prompt": "3 + 4 =", "answer": 7}.',
            show_default="a shipped file of sums",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        _rollout(
            "--chat/--text",
            help="Send prompts as a user's message, or as text to continue.",
            show_default="chat, if --model is given and has a chat template",
        ),
    ] = None,
    prompts_per_step: Annotated[
        int | None, _rollout(min=1, help="Prompts in one rollout.", show_default=_by_policy("prompts_per_step"))
    ] = None,
    n: Annotated[
        int | None, _rollout("--n", min=2, help="Completions per prompt.", show_default=_by_policy("n"))
    ] = None,
    max_new_tokens: Annotated[
        int | None, _rollout(min=1, help="Most tokens of one completion.", show_default=_by_policy("max_new_tokens"))
    ] = None,
    temperature: Annotated[float, _rollout(min=0.01, help="Sampling temperature.")] = 1.0,
    steps: Annotated[
        int | None,
        _training(min=0, help="Rollouts that are trained on; one more follows.", show_default=_by_policy("steps")),
    ] = None,
    learning_rate: Annotated[
        float | None, _training(min=0.0, help="Learning rate of AdamW.", show_default=_by_policy("learning_rate"))
    ] = None,
    minibatches: Annotated[
        int | None, _training(min=1, help="Optimizer steps per rollout.", show_default=_by_policy("minibatches"))
    ] = None,
    micro_batch: Annotated[int, _training(min=1, help="Most completions in one forward pass.")] = 64,
    entropy_weight: Annotated[
        float | None,
        _training(min=0.0, help="Weight of the entropy; decays to 0.", show_default=_by_policy("entropy_weight")),
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        _training(min=0.0, help="Clip gradients to this norm.", show_default=_by_policy("max_grad_norm")),
    ] = None,
    seed: Annotated[
        int, _training(min=0, max=2**31 - 1, help="Seed of the policy, the prompts' order and the sampling.")
    ] = 0,
    device: Annotated[
        str | None,
        _training(help="Device of the trainer's copy of the model.", show_default="cuda if there is one, else cpu"),
    ] = None,
    threads: Annotated[
        int | None,
        _training(min=1, help="Threads of torch in this process.", show_default="1; with --model torch's own choice"),
    ] = None,
    logprob_tolerance: Annotated[
        float | None,
        _checks(
            min=0.0,
            help="Largest difference of engine's and trainer's logprobs, in nats.",
            show_default="0.001 for a float32 engine, 0.2 for float16, 0.5 for bfloat16",
        ),
    ] = None,
    expect_rise: Annotated[
        bool | None,
        _checks(
            "--expect-rise/--no-expect-rise",
            help=f"Fail if the reward does not rise; needs {MIN_STEPS_TO_JUDGE} steps.",
            show_default="expected, unless --model or --prompts is given",
        ),
    ] = None,
    min_rise: Annotated[float, _checks(help="Least rise of the mean reward.")] = 0.2,
    out_directory: Annotated[Path, _output("--out", metavar="DIR", help="Folder of the plot.")] = Path(
        "drivetrain-demo"
    ),
    plot: Annotated[bool, _output("--plot/--no-plot", help="Draw demo.png.")] = True,
    as_json: Annotated[bool, _output("--json", help="One JSON document on stdout; progress on stderr.")] = False,
) -> None:
    """Train a small policy with GRPO against any engine: roll out, score, train, sync, roll out again.

    Each step checks that every token carries the weight version just pushed, and that engine and trainer agree on its
    logprob.

    Exit code 1 if a check fails, including the expected rise of the reward.
    """
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "needs matplotlib: pip install 'drivetrain[demo]', or use --no-plot", param_hint="--plot"
        )
    defaults = TINY_POLICY if model is None else OTHER_POLICY
    settings = Settings(
        backend=backend,
        isolation=isolation,
        engine_fields=_fields(engine_fields or []),
        engines=engines,
        model=model,
        prompts=prompts,
        chat=chat,
        steps=defaults.steps if steps is None else steps,
        prompts_per_step=prompts_per_step or defaults.prompts_per_step,
        n=n or defaults.n,
        max_new_tokens=max_new_tokens or defaults.max_new_tokens,
        temperature=temperature,
        learning_rate=defaults.learning_rate if learning_rate is None else learning_rate,
        minibatches=minibatches or defaults.minibatches,
        micro_batch=micro_batch,
        entropy_weight=defaults.entropy_weight if entropy_weight is None else entropy_weight,
        max_grad_norm=defaults.max_grad_norm if max_grad_norm is None else max_grad_norm,
        seed=seed,
        device=_device(device),
        logprob_tolerance=logprob_tolerance,
        min_rise=min_rise,
        expect_rise=model is None and prompts is None if expect_rise is None else expect_rise,
    )
    if expect_rise and settings.steps < MIN_STEPS_TO_JUDGE:
        raise typer.BadParameter(
            f"a rise can only be judged in {MIN_STEPS_TO_JUDGE} steps or more, and --steps is {settings.steps}",
            param_hint="--expect-rise",
        )
    import torch

    if threads is not None or model is None:
        torch.set_num_threads(threads or 1)
    result = _run(settings)
    path = write_plot(result, out_directory) if plot else None
    if as_json:
        print_json(document(result, path))
        err.print(summary(result, path), soft_wrap=True)
    else:
        out.print(summary(result, path), soft_wrap=True)
    if not result.ok:
        raise typer.Exit(1)


def _run(settings: Settings) -> DemoResult:
    from drivetrain_demo.loop import run

    try:
        with display(err, settings.steps) as shown:
            return asyncio.run(run(settings, report=shown.stage, watch=shown.step))
    except KeyboardInterrupt:
        print_error("interrupted; the engine was shut down", "demo")
        raise typer.Exit(INTERRUPTED) from None


def _device(name: str | None) -> str:
    with from_extra("demo", "drivetrain demo"):
        import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without that device
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(f"torch has no device {name!r} here: {reason}", param_hint="--device") from None
    return name


def _fields(settings: list[str]) -> dict[str, JsonValue]:
    fields: dict[str, JsonValue] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{setting!r} is not FIELD=VALUE", param_hint="--set")
        if name in ("backend", "model", "isolation"):
            raise typer.BadParameter(f"{setting!r} has an option of its own: --{name}", param_hint="--set")
        try:
            fields[name] = TypeAdapter[JsonValue](JsonValue).validate_python(load_yaml(value))
        except (yaml.YAMLError, ValidationError) as error:
            raise typer.BadParameter(
                f"the value of {setting!r} is not plain YAML: {error}", param_hint="--set"
            ) from None
    return fields
