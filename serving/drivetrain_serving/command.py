"""``drivetrain serve``: an HTTP server over an engine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from pydantic import ValidationError

from drivetrain.checks.pydantic_errors import describe_validation_error
from drivetrain.cli.configuration import (
    BackendOption,
    ConfigOption,
    IsolationOption,
    ModelOption,
    SettingsOption,
    configuration,
)
from drivetrain.cli.running import started
from drivetrain.create import create_engine
from drivetrain.engine.engine import InferenceEngine
from drivetrain.errors import InvalidConfig
from drivetrain.types.config import read_yaml
from drivetrain_serving.config import ServerConfig
from drivetrain_serving.fleet_file import fleet_of
from drivetrain_serving.http_layer.request_records import log_to_stderr
from drivetrain_serving.server import Listening, Server

API_KEY_VARIABLE: Final = "DRIVETRAIN_API_KEY"
CONTROL_KEY_VARIABLE: Final = "DRIVETRAIN_CONTROL_KEY"
_OF_SESSIONS: Final = {
    "keep_answers": "keep_answers",
    "session_timeout": "timeout",
    "session_memory": "memory_bytes",
    "session_folder": "folder",
}
"""Option → its field of :class:`SessionConfig`."""


def serve(
    context: typer.Context,
    model: ModelOption = None,
    backend: BackendOption = None,
    config: ConfigOption = None,
    settings: SettingsOption = None,
    isolation: IsolationOption = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that answer: 1 is the engine's own, more are front-ends beside it.")
    ] = 1,
    engines: Annotated[int, typer.Option(min=1, help="Number of engines; more than one are a fleet.")] = 1,
    fleet: Annotated[
        Path | None, typer.Option(help="YAML file that describes each engine of a fleet.", show_default=False)
    ] = None,
    server_config: Annotated[
        Path | None,
        typer.Option(help="YAML file with fields of ServerConfig, which options override.", show_default=False),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other machines need keys, unless --open-to-all is set.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in requests; repeatable.", show_default=False)
    ] = None,
    dialect: Annotated[
        Literal["vllm", "sglang"],
        typer.Option(help="Dialect of the answers on paths that vLLM and SGLang both have."),
    ] = "vllm",
    api_key: Annotated[
        str | None,
        typer.Option(envvar=API_KEY_VARIABLE, help="Key of the routes that generate.", show_default=False),
    ] = None,
    control_key: Annotated[
        str | None,
        typer.Option(
            envvar=CONTROL_KEY_VARIABLE, help="Key of the routes that pause and change weights.", show_default=False
        ),
    ] = None,
    open_control: Annotated[
        bool, typer.Option("--open-control", help="Let anyone who reaches the port change the weights.")
    ] = False,
    open_to_all: Annotated[
        bool,
        typer.Option("--open-to-all", help="Take no keys: anyone who reaches the port generates and changes weights."),
    ] = False,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            help="Name by which clients may call a server without keys, beside localhost; repeatable. *: any name.",
            show_default=False,
        ),
    ] = None,
    lora_folder: Annotated[
        Path | None,
        typer.Option(help="Folder of adapters; each is loaded when a request first names it.", show_default=False),
    ] = None,
    cast_weights: Annotated[
        bool,
        typer.Option(
            "--cast-weights/--no-cast-weights",
            help="Round weights that a trainer broadcasts to the engine's dtype, or refuse them.",
        ),
    ] = True,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Write each request to stderr as a line of JSON, without prompts.")
    ] = False,
    trace_requests: Annotated[
        bool, typer.Option("--trace-requests", help="Make an OpenTelemetry span of each request (extra otel).")
    ] = False,
    keep_answers: Annotated[
        bool,
        typer.Option(
            "--keep-answers",
            help="Keep answers of recorded sessions whole, with reasoning that the template drops.",
        ),
    ] = False,
    session_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without use after which a recorded session expires.")
    ] = 3600.0,
    session_memory: Annotated[
        int, typer.Option(min=1, help="Bytes of memory for recorded sessions; further sessions go to disk.")
    ] = 1 << 30,
    session_folder: Annotated[
        Path | None,
        typer.Option(help="Folder for recorded sessions that do not fit into memory.", show_default=False),
    ] = None,
) -> None:
    """Serve an engine by HTTP, with the routes of OpenAI, vLLM and SGLang.

    Prints the address once the engine is ready. At SIGTERM or Ctrl-C, requests in flight get 30 s to end;
    then the engine ends.
    """
    sessions = {
        "keep_answers": keep_answers,
        "session_timeout": session_timeout,
        "session_memory": session_memory,
        "session_folder": None if session_folder is None else str(session_folder),
    }
    options: dict[str, object] = {
        "host": host,
        "port": port,
        "processes": processes,
        "served_model_name": tuple(served_model_name or ()),
        "dialect": dialect,
        "api_key": api_key,
        "control_key": control_key,
        "open_control": open_control,
        "open_to_all": open_to_all,
        "allowed_hosts": tuple(allowed_hosts or ()),
        "lora_folder": None if lora_folder is None else str(lora_folder),
        "cast_weights": cast_weights,
        "log_requests": log_requests,
        "trace_requests": trace_requests,
    }
    served = _server_config(
        server_config,
        {name: value for name, value in options.items() if _is_given(context, name)},
        {_OF_SESSIONS[name]: value for name, value in sessions.items() if _is_given(context, name)},
    )
    if served.log_requests:
        log_to_stderr()
    if fleet is not None:
        if engines > 1 or any(one is not None for one in (model, backend, config, settings, isolation)):
            raise typer.BadParameter(
                "the file says which engines there are; leave out --model, --backend, --config, --set, --isolation and "
                "--engines",
                param_hint="--fleet",
            )
        asyncio.run(_serve(fleet_of(fleet), served))
        return
    engine_config = configuration(config, settings or [], backend, model, isolation)
    asyncio.run(_serve(_engine([create_engine(engine_config) for _ in range(engines)]), served))


def _is_given(context: typer.Context, option: str) -> bool:
    """Return whether an option stands on the command line or in the environment."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _server_config(file: Path | None, options: dict[str, object], of_sessions: dict[str, object]) -> ServerConfig:
    """Return the configuration of a file, with these fields in place of its own.

    Raises:
        InvalidConfig: The file cannot be read, or a field is wrong.
    """
    fields = {} if file is None else read_yaml(file)
    sessions = fields.get("sessions", {})
    if of_sessions and isinstance(sessions, dict):  # else refused below
        options = {**options, "sessions": {**sessions, **of_sessions}}
    try:
        return ServerConfig.model_validate({**fields, **options})
    except ValidationError as error:
        field, message = describe_validation_error(error, ServerConfig)
        raise InvalidConfig(message, field=field) from None


def _engine(engines: list[InferenceEngine]) -> InferenceEngine:
    if len(engines) == 1:
        return engines[0]
    from drivetrain_fleet import InferenceEngineClient

    return InferenceEngineClient(engines)


async def _serve(engine: InferenceEngine, config: ServerConfig) -> None:
    async with Listening(config) as listening, started(engine) as until_end:
        if until_end is not None:
            async with Server(engine, config, listening=listening) as server:
                sys.stdout.write(f"serving {engine.config.model} at {server.url}\n")
                sys.stdout.flush()
                await until_end()
