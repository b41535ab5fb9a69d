"""The fleet that a YAML file describes, for ``drivetrain serve --fleet``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictBool, StrictInt, ValidationError

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import read_yaml


class FleetFile(BaseModel):
    """Engines of a fleet, and how the fleet treats them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    other_names: ClassVar[dict[str, str]] = {}

    engines: dict[str, dict[str, JsonValue]] = Field(
        min_length=1, description="Name of each engine → the fields of its configuration."
    )
    min_engines: StrictInt = Field(default=1, description="Engines that must commit a weight update.")
    max_staleness: StrictInt = Field(default=0, description="Versions that a served engine may lag behind.")
    max_waiting: StrictInt = Field(default=1 << 16, description="Most samples that wait for an engine.")
    max_samples_per_engine: StrictInt | None = Field(default=None, description="Most samples in one engine.")
    exact_failover: StrictBool = Field(default=True, description="Draw the same samples at another engine.")
    resume: StrictBool = Field(default=False, description="Resume requests of a lost engine from their tokens.")


def fleet_of(path: Path) -> InferenceEngine:
    """Return the fleet of a YAML file. Its engines are made, and not started.

    Raises:
        InvalidConfig: The file cannot be read, or a field is wrong.
        DrivetrainError: as ``create_engine``.
    """
    from drivetrain_fleet import InferenceEngineClient

    try:
        asked = FleetFile.model_validate(read_yaml(path))
    except ValidationError as error:
        field, message = describe_validation_error(error, FleetFile)
        raise InvalidConfig(f"{path}: {message}", field=field) from None
    engines = {name: _engine(path, name, fields) for name, fields in asked.engines.items()}
    try:
        return InferenceEngineClient(engines, **asked.model_dump(exclude={"engines"}))
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error}", field=error.field) from error


def _engine(path: Path, name: str, fields: dict[str, JsonValue]) -> InferenceEngine:
    try:
        return create_engine(fields)
    except InvalidConfig as error:
        where = f"engines.{name}"
        joint = "." if error.field and str(error).startswith(error.field) else ": "
        field = f"{where}.{error.field}" if error.field else where
        raise InvalidConfig(f"{path}: {where}{joint}{error}", field=field) from error
