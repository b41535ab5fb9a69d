"""The engine configuration that command-line options give."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer
import yaml

from drivetrain.checks.pydantic_errors import shown_name
from drivetrain.checks.yaml_mappings import load_yaml
from drivetrain.types.config import EngineConfig, Isolation

DEFAULT_BACKEND: Final = "transformers"

# Options of every command that starts an engine ----------------------------------------------------------------------

ModelOption: TypeAlias = Annotated[str | None, typer.Option(help="Folder or hub id of the model.", show_default=False)]
BackendOption: TypeAlias = Annotated[
    str | None, typer.Option(help=f"Backend; default: that of --config, else {DEFAULT_BACKEND}.", show_default=False)
]
ConfigOption: TypeAlias = Annotated[
    Path | None, typer.Option(help="YAML file with the engine's configuration.", show_default=False)
]
SettingsOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Set a configuration field; the value is YAML. Repeatable."),
]
IsolationOption: TypeAlias = Annotated[
    Isolation | None,
    typer.Option(help="Run the engine in this process or in a host process.", show_default=False),
]


def configuration(
    file: Path | None, settings: list[str], backend: str | None, model: str | None, isolation: Isolation | None
) -> EngineConfig:
    """Return the configuration of a YAML file, changed by each ``FIELD=VALUE``, and then by the other options.

    Raises:
        BadParameter: a setting is not ``FIELD=VALUE``, or no option names a model.
        InvalidConfig: a field is wrong.
    """
    fields: dict[str, object] = EngineConfig.from_yaml(file).model_dump(exclude_unset=True) if file else {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise typer.BadParameter(
                "a --set has no '='; write --set FIELD=VALUE, such as --set dtype=float16", param_hint="--set"
            )
        try:
            fields[name] = load_yaml(value)
        except yaml.YAMLError as error:
            why = getattr(error, "problem", None) or type(error).__name__
            raise typer.BadParameter(
                f"the value of {shown_name(name)!r} is not YAML: {why}", param_hint="--set"
            ) from None
    given = {"backend": backend, "model": model, "isolation": isolation}
    fields |= {name: value for name, value in given.items() if value is not None}
    fields.setdefault("backend", DEFAULT_BACKEND)
    if "model" not in fields:
        raise typer.BadParameter("say which model: --model DIR_OR_ID, or --config FILE", param_hint="--model")
    return EngineConfig.from_mapping(fields)
