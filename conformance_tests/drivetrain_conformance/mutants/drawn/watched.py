"""The backend that goes wrong as a drawn mutant says, or tells which mutants a user would see."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, cast

from drivetrain.backend.base import Backend, GenerateRequest, GenerateResult, ModelInfo, TokenDelta
from drivetrain.errors import DrivetrainError
from drivetrain.types.config import EngineConfig
from drivetrain.types.modes import PauseMode
from drivetrain.types.outputs import FinishReason, VersionSpan
from drivetrain.types.weights import (
    CommitUpdate,
    PrepareUpdate,
)
from drivetrain_conformance.mutants.drawn.mutant import (
    Drawn,
    OnAnswer,
    OnCall,
    OnConfig,
    OnRequest,
    OnResult,
    Scene,
)
from drivetrain_conformance.mutants.registry import mixed
from drivetrain_conformance.mutants.spoil import CorrectBackend, resubmitting

_T = TypeVar("_T")

_WATCHED: Final = (
    *("start", "stats", "abort", "freeze", "unfreeze", "sleep", "wake_up", "reset_prefix_cache", "set_weight_version"),
    *("receive_weights", "validate_weights", "read_weight", "save_sharded", "embed", "reward_score"),
    *("load_lora_adapter", "load_lora_tensors", "unload_lora_adapter"),
)


class Probe:
    """Notes which mutants a user would have seen, case by case, and may append their names to a file."""

    def __init__(self, mutants: Sequence[Drawn], file: str = "") -> None:
        self._all = mutants
        self._file = file
        self.case = ""
        self.unseen = list(mutants)
        self._calls: Counter[str] = Counter()
        self.seen: dict[str, list[str]] = {one.name: [] for one in mutants}
        """Cases by mutant."""

    def begin(self, case: str) -> None:
        """Begin a case."""
        self.case, self.unseen = case, list(self._all)
        self._calls.clear()

    def note(self, shows: Callable[[Drawn], bool]) -> None:
        """Record the mutants whose faults this call shows."""
        for one in [one for one in self.unseen if shows(one)]:
            self._calls[one.name] += 1
            if self._calls[one.name] >= (one.effect.least if isinstance(one.effect, OnCall) else 1):
                self.seen[one.name].append(self.case)
                self.unseen.remove(one)
                if self._file:
                    with Path(self._file).open("a", encoding="utf-8") as file:
                        file.write(f"{one.name}\n")


class Watched(CorrectBackend):
    """A backend that goes wrong as one mutant says, or is right and tells a probe about each call."""

    mutant: ClassVar[Drawn | None] = None
    probe: ClassVar[Probe | None] = None

    def __init__(self, config: EngineConfig) -> None:
        self._lost = {
            field for field, info in EngineConfig.model_fields.items() if getattr(config, field) != info.default
        }
        if (
            self.mutant is not None
            and isinstance(self.mutant.effect, OnConfig)
            and self.mutant.effect.field in self._lost
        ):
            lost = self.mutant.effect.field
            config = config.model_copy(update={lost: EngineConfig.model_fields[lost].default})
        super().__init__(config)
        self._info: ModelInfo | None = None
        self._names: list[str] = []
        self.committed = config.weight_version
        self._begin("")

    def _begin(self, case: str) -> None:
        self._case = case
        self._flying: dict[str, Scene] = {}
        self._calls: Counter[str] = Counter()
        self._past: set[str] = set()
        self._earlier: GenerateRequest | None = None
        self.kept: dict[str, Any] = {"names": self._names}
        if self._info is not None:
            scene = Scene("start", 1, [], frozenset(), config=self.config)
            self._note(self._loses)
            self._note(lambda one: _differs(one, scene, self._info))

    def _loses(self, one: Drawn) -> bool:
        return isinstance(one.effect, OnConfig) and one.effect.field in self._lost

    def unwatched(self, method: str) -> Callable[..., Awaitable[Any]]:
        """Return a method of the correct backend."""
        return cast(Callable[..., Awaitable[Any]], getattr(super(), method))

    def _scene(self, method: str, argument: object = None) -> Scene:
        if self.probe is not None and self._case != self.probe.case:
            self._begin(self.probe.case)
        # The steps of one update have one number.
        self._calls[method] += method != "receive_weights" or isinstance(argument, PrepareUpdate)
        request = argument if isinstance(argument, GenerateRequest) else None
        others = [cast(GenerateRequest, one.request) for one in self._flying.values()]
        past = frozenset(self._past)
        return Scene(method, self._calls[method], others, past, request, self._earlier, self.kept, self.config)

    def _note(self, shows: Callable[[Drawn], bool]) -> None:
        if self.probe is not None:
            self.probe.note(shows)

    def _acting(self, scene: Scene, kind: type[_T]) -> _T | None:
        """Return the effect of the mutant, if it is of this kind and the time has come."""
        effect = None if self.mutant is None else self.mutant.effect
        return effect if self.mutant is not None and isinstance(effect, kind) and self.mutant.holds(scene) else None

    # Requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate a sample, wrongly if the mutant says so."""
        with self._in_flight("generate", request) as scene:
            await self._surrounded(scene, request)
            effect = self._acting(scene, OnRequest)
            if effect is None or not effect.spoils(request, scene):
                return self._answered(scene, await super().generate(request))
            if not effect.start:
                return await super().generate(effect.change(request, scene))
            first = await super().generate(first_of(request, effect.start))
            if not _goes_on(request, first):
                return first
            return put_together(first, await super().generate(effect.change(rest_of(request, first), scene)))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Generate a stream, wrongly if the mutant says so."""
        with self._in_flight("stream", request) as scene:
            await self._surrounded(scene, request)
            change, made, last = self._acting(scene, OnResult), 0, None
            async with aclosing(self._changed_stream(scene, request)) as deltas:
                async for delta in deltas:
                    items = getattr(delta, change.field, None) if change else None
                    if change is not None and items is not None and len(items):
                        changed = change.spoiled(delta, made, last)
                        last = items[-1] if isinstance(items, list) else items[-1:]
                        made += len(delta.token_ids)
                        delta = changed
                    if delta.result is not None:
                        delta = replace(delta, result=self._answered(scene, delta.result))
                    yield delta

    async def _changed_stream(self, scene: Scene, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        effect = self._acting(scene, OnRequest)
        if effect is None or not effect.spoils(request, scene):
            async with aclosing(super().stream(request)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        asked = first_of(request, effect.start) if effect.start else effect.change(request, scene)
        first: GenerateResult | None = None
        async with aclosing(super().stream(asked)) as deltas:
            async for delta in deltas:
                if effect.start and delta.result is not None and _goes_on(request, delta.result):
                    first, delta = delta.result, replace(delta, result=None)
                yield replace(delta, released=None)
        if first is not None:
            async with aclosing(super().stream(effect.change(rest_of(request, first), scene))) as deltas:
                async for delta in deltas:
                    whole = None if delta.result is None else put_together(first, delta.result)
                    yield replace(delta, result=whole, released=None)

    @contextmanager
    def _in_flight(self, method: str, request: GenerateRequest) -> Iterator[Scene]:
        scene = self._scene(method, request)
        self._past |= {"stream"} if method == "stream" else set()
        self._past |= {"n > 1"} if request.params.n > 1 else set()
        self._earlier, self._flying[request.request_id] = request, scene
        self._called(scene, (request,), None)
        try:
            yield scene
        finally:
            self._flying.pop(request.request_id, None)

    def _answered(self, scene: Scene, result: GenerateResult) -> GenerateResult:
        """Return a result as the mutant changes it."""
        request = cast(GenerateRequest, scene.request)

        def shows(one: Drawn) -> bool:
            match one.effect:
                case OnRequest(start=start, frozen=None) as effect:
                    if not one.holds(scene) or len(result.token_ids) <= start:
                        return False
                    return effect.spoils(rest_of(request, result, start) if start else request, scene)
                case OnResult() as effect:
                    return one.holds(scene) and effect.spoiled(result) != result
                case _:
                    return _differs(one, scene, result)

        self._note(shows)
        if (changed := self._acting(scene, OnResult)) is not None:
            return cast(GenerateResult, changed.spoiled(result))
        if (answer := self._acting(scene, OnAnswer)) is not None and answer.method == "generate":
            return cast(GenerateResult, answer.change(result, scene))
        return result

    async def _surrounded(self, scene: Scene, request: GenerateRequest) -> None:
        effect = self._acting(scene, OnCall)
        if effect is not None and scene.method in effect.methods:
            await effect.act(self, _nothing, (request,))

    # Other calls ---------------------------------------------------------------------------------------------------

    async def call(self, method: str, *arguments: Any) -> Any:
        """Make another call than a request, wrongly if the mutant says so."""
        scene, proceed = self._scene(method, *arguments[:1]), self.unwatched(method)
        surrounds, changes = self._acting(scene, OnCall), self._acting(scene, OnAnswer)
        if method == "freeze":
            self._frozen(arguments[0])
        try:
            if surrounds is not None and method in surrounds.methods:
                made = await surrounds.act(self, proceed, arguments)
            else:
                made = await proceed(*arguments)
        except Exception as error:
            self._past.add("refuses")
            self._called(scene, arguments, error)
            raise
        self._called(scene, arguments, None)
        self._note(lambda one: _differs(one, scene, made))
        self._past |= (events := _events(method, arguments))
        if method == "start":
            self._info = made
            self._note(self._loses)
            with suppress(DrivetrainError):
                self.kept["names"] = self._names = [
                    spec.name for spec in (await self.unwatched("weight_manifest")()).tensors
                ]
        if "update" in events or method == "set_weight_version":
            self.committed = getattr(arguments[0], "version", arguments[0])
        return changes.change(made, scene) if changes is not None and changes.method == method else made

    def _called(self, scene: Scene, arguments: tuple[Any, ...], error: Exception | None) -> None:
        def shows(one: Drawn) -> bool:
            effect = one.effect
            if not isinstance(effect, OnCall) or scene.method not in effect.methods:
                return False
            return one.holds(scene) and effect.shows(arguments, scene, error)

        self._note(shows)

    def _frozen(self, mode: PauseMode) -> None:
        """Record the mutants whose faults requests in flight show after a freeze."""
        frozen = [scene for scene in self._flying.values() if scene.method == "generate"]

        def shows(one: Drawn) -> bool:
            effect = one.effect
            if not isinstance(effect, OnRequest) or effect.frozen is not mode:
                return False
            return any(effect.spoils(cast(GenerateRequest, scene.request), scene) for scene in frozen)

        self._note(shows)


async def _nothing(*_: object) -> None:
    return None


def _differs(one: Drawn, scene: Scene, made: Any) -> bool:
    effect, method = one.effect, "generate" if scene.method == "stream" else scene.method
    return (
        isinstance(effect, OnAnswer)
        and effect.method == method
        and one.holds(scene)
        and bool(effect.change(made, scene) != made)
    )


def _method(name: str) -> Callable[..., Awaitable[Any]]:
    async def method(self: Watched, *arguments: Any) -> Any:
        return await self.call(name, *arguments)

    return method


for _name in _WATCHED:
    setattr(Watched, _name, _method(_name))


def _events(method: str, arguments: tuple[Any, ...]) -> set[str]:
    """Return the kinds of a call, as conditions name them."""
    match method, arguments:
        case "freeze", (PauseMode() as mode,):
            return {f"freeze {mode.value}"}
        case "sleep", (tags,):
            return {"sleeps", *(f"sleeps {tag.value}" for tag in tags)}
        case "wake_up", (tags,):
            return {"wakes", *(f"wakes {tag.value}" for tag in tags)}
        case "receive_weights", (CommitUpdate(),):
            return {"update"}
    return {method}


def first_of(request: GenerateRequest, tokens: int) -> GenerateRequest:
    """Return the request for the first tokens."""
    return replace(request, max_new_tokens=min(tokens, request.max_new_tokens))


def rest_of(request: GenerateRequest, made: GenerateResult, tokens: int | None = None) -> GenerateRequest:
    """Return the request for the tokens after some that count as generated."""
    ids = made.token_ids[:tokens]
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids + ids,
        max_new_tokens=request.max_new_tokens - len(ids),
        resumed_tokens=request.resumed_tokens + len(ids),
    )


def _goes_on(request: GenerateRequest, made: GenerateResult) -> bool:
    return made.finish_reason is FinishReason.LENGTH and len(made.token_ids) < request.max_new_tokens


def put_together(first: GenerateResult, rest: GenerateResult) -> GenerateResult:
    """Return one result of the tokens of two."""
    count = len(first.token_ids)
    spans = list(first.weight_versions)
    for span in rest.weight_versions:
        if spans and spans[-1].version == span.version:
            spans[-1] = replace(spans[-1], end=count + span.end)
        else:
            spans.append(VersionSpan(span.version, count + span.start, count + span.end))
    lists: dict[str, Any] = {}
    for field in ("token_ids", "logprobs", "top_logprobs", "hidden_states", "routed_experts", "sampling_mask"):
        one, other = getattr(first, field), getattr(rest, field)
        lists[field] = one + other if one is not None and other is not None else other if one is None else one
    of_prompt = (
        "prompt_logprobs",
        "prompt_top_logprobs",
        "prompt_ranks",
        "prompt_routed_experts",
        "cached_tokens",
        "scores",
    )
    return replace(rest, weight_versions=spans, matched_text=None, **lists, **{f: getattr(first, f) for f in of_prompt})


def wrong_backend(correct: type[Backend], drawn: Drawn) -> type[Backend]:
    """Return a backend that goes wrong as drawn."""
    effect = drawn.effect
    if isinstance(effect, OnRequest) and effect.frozen is not None:
        # Requests end when they are frozen. Changed requests for their remaining tokens are submitted later.
        scene = Scene("frozen", 1, [], frozenset())
        return resubmitting(
            effect.frozen,
            correct,
            lambda request: effect.change(request, scene) if effect.spoils(request, scene) else None,
            left=rest_of,
            join=put_together,
        )
    return mixed(correct, cast(type[Any], type("Drawn", (Watched,), {"mutant": drawn, "__doc__": drawn.name})))


def probed_backend(correct: type[Backend], probe: Probe) -> type[Backend]:
    """Return the correct backend, which tells a probe about each call."""
    return mixed(correct, cast(type[Any], type("Probed", (Watched,), {"probe": probe, "__doc__": Watched.__doc__})))
