"""The fleet that a YAML file describes, for ``drivetrain serve --fleet``."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import read_yaml


class FleetFile(BaseModel):
    """Engines of a fleet, and arguments of ``InferenceEngineClient``, whose own defaults stand for those left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engines: dict[str, dict[str, JsonValue]] = Field(
        min_length=1, description="Name of each engine → the fields of its configuration."
    )
    min_engines: JsonValue = Field(default=None, description="Engines that must commit a weight update.")
    max_staleness: JsonValue = Field(default=None, description="Versions that a served engine may lag behind.")
    max_waiting: JsonValue = Field(default=None, description="Most samples that wait for an engine.")
    max_samples_per_engine: JsonValue = Field(default=None, description="Most samples in one engine.")
    exact_failover: JsonValue = Field(default=None, description="Draw the same samples at another engine.")
    resume: JsonValue = Field(default=None, description="Resume requests of a lost engine from their tokens.")


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
        return InferenceEngineClient(engines, **asked.model_dump(exclude={"engines"}, exclude_unset=True))
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
