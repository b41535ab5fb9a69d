"""Reports of a run: a summary table, a JSON document, a plot."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from drivetrain_demo.result import DemoResult, StepRecord
from drivetrain_demo.settings import WINDOW, Settings


def summary(result: DemoResult, plot: Path | None) -> RenderableType:
    """Return the summary for a terminal."""
    sync = result.sync_seconds_median
    rows = {
        "backend": f"{result.backend}, {result.isolation}",
        "policy": f"{result.settings.model or 'made on the spot'}, {result.parameters:,} parameters, {result.dtype}",
        "rollouts": f"{len(result.records)}, of {result.records[0].completions} completions each",
        "reward": f"{result.reward_first:.3f} → {result.reward_last:.3f} (first and last {WINDOW} rollouts)",
        "right answers": f"{result.records[0].accuracy:.1%} → {result.records[-1].accuracy:.1%}",
        "logprob gap": f"at most {result.max_logprob_gap:.1e} nats",
        "weight sync": "none" if sync is None else f"{result.strategy}, {sync * 1e3:.1f} ms (median)",
        "generation": f"{result.tokens_per_second_median:,.0f} tokens/s (median)",
        "time": f"{result.seconds:.0f} s",
    }
    if plot is not None:
        rows["plot"] = str(plot)
    width = max(map(len, rows)) + 2
    facts = [Text.assemble((name.ljust(width), "bold"), value) for name, value in rows.items()]
    checks = [
        Text.assemble(
            ("passed ", "green") if check.passed else ("FAILED ", "bold red"), f"{check.name}: {check.detail}"
        )
        for check in result.checks
    ]
    return Group(*facts, "", *checks, *(Text(f"note: {note}") for note in result.notes))


def document(result: DemoResult, plot: Path | None) -> dict[str, object]:
    """Return the run as one JSON document; times are in seconds, logprob gaps in nats."""
    return {
        "ok": result.ok,
        "backend": result.backend,
        "isolation": result.isolation,
        "model": result.model,
        "dtype": result.dtype,
        "parameters": result.parameters,
        "weight_sync_strategy": result.strategy,
        "steps": sum(record.training is not None for record in result.records),
        "reward_first": result.reward_first,
        "reward_last": result.reward_last,
        "max_logprob_gap": result.max_logprob_gap,
        "weight_versions_ok": result.weight_versions_ok,
        "sync_seconds_median": result.sync_seconds_median,
        "tokens_per_second_median": result.tokens_per_second_median,
        "seconds": result.seconds,
        "checks": [{"name": check.name, "passed": check.passed, "detail": check.detail} for check in result.checks],
        "notes": list(result.notes),
        "plot": None if plot is None else str(plot),
        "config": _config(result.settings),
        "records": [_record(record) for record in result.records],
    }


def write_plot(result: DemoResult, directory: Path) -> Path:
    """Draw reward, logprob gap, sync time and tokens per second over the steps; return the path of the PNG.

    Raises:
        OSError: the folder cannot be made or written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = result.records
    steps = [record.step for record in records]
    trained = [(record.step, record.training) for record in records if record.training]
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    reward, gap, sync, speed = figure.subplots(2, 2, sharex=True).flat
    reward.plot(steps, [record.reward for record in records], label="reward")
    reward.plot(steps, [record.accuracy for record in records], label="right answers")
    reward.set(title="reward (mean) and right answers (share)", ylim=(0, 1.02))
    reward.legend()
    gap.semilogy(steps, [max(record.logprob_gap, 1e-12) for record in records])
    gap.set(title="logprob gap, engine to trainer (largest, nats)")
    sync.plot([step for step, _ in trained], [training.sync_seconds * 1e3 for _, training in trained])
    sync.set(title=f"weight sync, {result.strategy} (ms)", xlabel="step")
    speed.plot(steps, [record.tokens_per_second for record in records])
    speed.set(title="generation (tokens/s)", xlabel="step")
    for axes in (sync, speed):
        axes.set_ylim(bottom=0)
    for axes in (reward, gap, sync, speed):
        axes.grid(alpha=0.3)
    figure.suptitle(f"drivetrain demo: {result.backend}, {result.isolation}")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "demo.png"
    figure.savefig(path, dpi=120)
    return path


def _config(settings: Settings) -> dict[str, object]:
    return {
        "backend": settings.backend,
        "isolation": settings.isolation.value if settings.isolation else None,
        "engine_fields": dict(settings.engine_fields),
        "model": settings.model,
        "prompts": str(settings.prompts) if settings.prompts else None,
        "chat": settings.chat,
        "steps": settings.steps,
        "prompts_per_step": settings.prompts_per_step,
        "n": settings.n,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "learning_rate": settings.learning_rate,
        "minibatches": settings.minibatches,
        "micro_batch": settings.micro_batch,
        "entropy_weight": settings.entropy_weight,
        "max_grad_norm": settings.max_grad_norm,
        "seed": settings.seed,
        "device": settings.device,
        "logprob_tolerance": settings.logprob_tolerance,
        "min_rise": settings.min_rise,
        "expect_rise": settings.expect_rise,
    }


def _record(record: StepRecord) -> dict[str, object]:
    training = record.training
    return {
        "step": record.step,
        "version": record.version,
        "versions_seen": list(record.versions_seen),
        "reward": record.reward,
        "accuracy": record.accuracy,
        "logprob_gap": record.logprob_gap,
        "completions": record.completions,
        "tokens": record.tokens,
        "generate_seconds": record.generate_seconds,
        "tokens_per_second": record.tokens_per_second,
        "example": record.example,
        "entropy": training.entropy if training else None,
        "train_seconds": training.train_seconds if training else None,
        "sleep_seconds": training.sleep_seconds if training else None,
        "sync_seconds": training.sync_seconds if training else None,
        "wake_seconds": training.wake_seconds if training else None,
    }
