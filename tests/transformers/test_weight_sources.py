"""A policy is pushed however a trainer wraps it, and the engine then computes the policy's own logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from drivetrain import InvalidRequest, LogprobsMode, SamplingParams, SyncEngine, WeightPlanMismatch, sync_engine
from drivetrain.testing import tiny_model
from drivetrain_weight_sync import LoraSync, WeightSync
from drivetrain_weight_sync.trainer.held_policy import held_policy

PARAMS = SamplingParams(max_new_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True, logprobs_mode=LogprobsMode.RAW)
TOLERANCE = 1e-4
"""Nats by which the engine's and the policy's logprobs may differ in float32."""


@pytest.fixture(scope="module")
def engine() -> Iterator[SyncEngine]:
    with sync_engine("transformers", model=str(tiny_model()), dtype="float32", enable_lora=True) as started:
        yield started


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DDP wants one."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def policy(seed: int) -> Any:
    made = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return made.eval()


def adapted(seed: int, **fields: Any) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **fields)
    made = get_peft_model(policy(seed), config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return made.eval()


class Actor:
    """A trainer's worker, which is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.learning_rate = 0.1


class ActorModule(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class ActorAndCritic(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.actor = model
        self.critic = nn.Linear(4, 1)


def compiled_layer(model: Any) -> Any:
    inner = model.get_decoder()
    inner.layers[0] = torch.compile(inner.layers[0], backend="eager")
    return model


def rounded(model: Any) -> Any:
    """Round the parameters, and not the buffers of position embeddings, as loading in bfloat16 does."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "module": lambda model: model,
    "compiled": torch.compile,
    "a layer compiled": compiled_layer,
    "DDP": DistributedDataParallel,
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model)),
    "DDP of a compiled model": lambda model: DistributedDataParallel(torch.compile(model)),
    "actor": Actor,
    "actor of DDP": lambda model: Actor(DistributedDataParallel(model)),
    "actor module": ActorModule,
    "DDP of an actor module": lambda model: DistributedDataParallel(ActorModule(model)),
    "actor module of DDP": lambda model: ActorModule(DistributedDataParallel(model)),
    "bfloat16": rounded,
}


ADAPTERS: dict[str, dict[str, Any]] = {"adapters": {}, "adapters and a saved module": {"modules_to_save": ["lm_head"]}}


def gap(engine: SyncEngine, model: nn.Module, **fields: Any) -> float:
    """Return the largest difference in nats between the engine's logprobs and the policy's."""
    (completion,) = engine.generate([[5, 6, 7]], PARAMS, **fields).completions
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    with torch.no_grad():
        rows = model(input_ids=ids).logits[0].log_softmax(-1)[-len(completion.token_ids) - 1 : -1]
    own = rows.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return float((own - torch.tensor(completion.logprobs)).abs().max())


def push(engine: SyncEngine, source: Any, version: str) -> None:
    sync = WeightSync.connect(source, engine.engine)
    try:
        engine.run(sync.push(version=version))
    finally:
        engine.run(sync.close())


@pytest.mark.parametrize("how", WRAPPED)
@pytest.mark.parametrize("kind", ["plain", *ADAPTERS])
def test_a_policy_is_pushed_however_it_is_wrapped(engine: SyncEngine, kind: str, how: str) -> None:
    seed = 1 + list(WRAPPED).index(how)
    model = policy(seed) if kind == "plain" else adapted(seed, **ADAPTERS[kind])
    push(engine, WRAPPED[how](model), f"{kind} {how}")
    # An adapter is merged in bfloat16; the policy adds its product to the layer's output.
    tolerance = 0.05 if how == "bfloat16" and kind != "plain" else TOLERANCE
    assert gap(engine, model.float()) < tolerance


@pytest.mark.parametrize("how", ["module", "compiled", "DDP", "actor", "actor module"])
def test_an_adapter_alone_is_pushed_however_its_policy_is_wrapped(engine: SyncEngine, how: str) -> None:
    model = adapted(20)
    sync = LoraSync.connect(WRAPPED[how](model), engine.engine)
    push(engine, {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}, f"base {how}")
    engine.run(sync.push(version=f"adapter {how}"))
    assert gap(engine, model, lora="policy") < TOLERANCE
    engine.run(sync.close())


def test_adapters_of_stacked_experts_are_merged_and_refused_alone() -> None:
    """Transformers stacks the experts of its models, and peft then adapts parameters where layers were named."""
    path = str(tiny_model("qwen3_moe"))
    torch.manual_seed(40)
    layers = ["gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), config).eval()
    with sync_engine("transformers", model=path, dtype="float32", enable_lora=True) as moe:
        assert gap(moe, model) > 1000 * TOLERANCE
        push(moe, model, "merged")
        before = gap(moe, model)
        assert before < TOLERANCE
        sync = LoraSync.connect(model, moe.engine)
        with pytest.raises(
            InvalidRequest, match=r"target_parameters=\['down_proj', 'gate_up_proj'\].*push all weights"
        ):
            moe.run(sync.push(version="alone"))
        moe.run(sync.close())
        assert (moe.get_weight_version(), gap(moe, model)) == ("merged", before)


def test_an_actor_with_several_modules_is_refused_with_their_names(engine: SyncEngine) -> None:
    actor = Actor(policy(1))
    actor.critic = nn.Linear(4, 1)  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match=r"a Actor with several modules \(model, critic\); pass the one"):
        WeightSync.connect(actor, engine.engine)
    holder: Any = SimpleNamespace(model=adapted(1), critic=adapted(2))
    with pytest.raises(InvalidRequest, match=r"model is a SimpleNamespace with several modules") as caught:
        LoraSync.connect(holder, engine.engine)
    assert caught.value.field == "model"
    with pytest.raises(WeightPlanMismatch, match=r"27 names begin with 'actor\.'.*Extra: critic\.weight"):
        push(engine, ActorAndCritic(policy(1)), "both")


def test_a_module_with_several_peft_models_is_refused_with_their_names(engine: SyncEngine) -> None:
    both = ActorAndCritic(adapted(1))
    both.critic = adapted(2)
    with pytest.raises(InvalidRequest, match=r"ActorAndCritic with several peft models \(actor, critic\)") as caught:
        LoraSync.connect(both, engine.engine)
    assert caught.value.field == "model"


class CallableActor(Actor):
    def __call__(self, prompts: list[str]) -> list[str]:
        return prompts


class IterableActor(Actor):
    def __iter__(self) -> Iterator[str]:
        return iter(())


@dataclass(slots=True)
class DataActor:
    learning_rate: float
    policy: nn.Module
    optimizer: object = None


class ActorWithParameters(Actor):
    """Its names are not the checkpoint's."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"actor.{name}", tensor) for name, tensor in self.model.named_parameters())


class DelegatingActor(Actor):
    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class PropertyActor:
    def __init__(self, model: nn.Module) -> None:
        self._models = [model]
        self.loss = nn.CrossEntropyLoss()

    @property
    def model(self) -> nn.Module:
        return self._models[0]


class SlottedActor:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model


class ActorModuleWithBuffer(ActorModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.register_buffer("steps", torch.zeros(1), persistent=False)


ACTORS: dict[str, Callable[[nn.Module], Any]] = {
    "callable": CallableActor,
    "iterable": IterableActor,
    "property": PropertyActor,
    "slot": SlottedActor,
    "data class with slots": lambda model: DataActor(0.1, model),
    "named parameters of its own": ActorWithParameters,
    "attributes of its module": DelegatingActor,
    "module without tensors": lambda model: SimpleNamespace(model=model, loss=nn.CrossEntropyLoss()),
    "one module twice": lambda model: SimpleNamespace(model=model, engine=model),
    "a buffer that is not saved": ActorModuleWithBuffer,
}


@pytest.mark.parametrize("how", ACTORS)
def test_the_policy_is_found_in_an_actor(how: str) -> None:
    model = policy(1)
    assert held_policy(ACTORS[how](model)) is model


@pytest.mark.parametrize("outer", [DistributedDataParallel, torch.compile])
def test_the_policy_is_found_in_an_actor_beside_its_wrapper(outer: Callable[[Any], Any]) -> None:
    model = policy(1)
    wrapped = outer(model)
    assert held_policy(SimpleNamespace(model=model, model_wrapped=wrapped)) is wrapped


class PropertyAndReference(PropertyActor):
    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        super().__init__(model)
        self.reference = reference


@dataclass(slots=True)
class DataActorAndCritic:
    model: nn.Module
    critic: nn.Module


@pytest.mark.parametrize("kind", [PropertyAndReference, DataActorAndCritic])
def test_a_module_beside_a_property_or_a_slot_makes_several(kind: Callable[..., Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"several modules \(model, (reference|critic)\)"):
        held_policy(kind(policy(1), policy(2)))


class Pairs:
    """Holds another policy, which must not be pushed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = policy(99)
        self._pushed = model

    def named(self, *, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor.to(dtype)) for name, tensor in self._pushed.named_parameters())


class CalledPairs(Pairs):
    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.named()


class CalledPairsWithOption(Pairs):
    def __call__(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        return self.named(dtype=dtype)


class IteratedPairs(Pairs):
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.named()


class IteratedPairsCalledForMore(IteratedPairs):
    def __call__(self, prompts: list[str]) -> list[str]:
        return prompts


class MappedPairs(Mapping[str, torch.Tensor]):
    def __init__(self, model: nn.Module) -> None:
        self.model = policy(99)
        self._tensors = dict(model.named_parameters())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class NextPairs(Pairs):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._pairs = self.named()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._pairs)


@dataclass
class DataPairs:
    model: nn.Module
    pushed: nn.Module

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.pushed.named_parameters()


def with_model(function: Any) -> Any:
    function.model = policy(99)
    return function


PAIRS: dict[str, Callable[[Any], Any]] = {
    "callable": CalledPairs,
    "callable with an option": CalledPairsWithOption,
    "callable data class": lambda model: DataPairs(policy(99), model),
    "iterable": IteratedPairs,
    "iterable that is callable with an argument": IteratedPairsCalledForMore,
    "iterator": NextPairs,
    "mapping": MappedPairs,
    "method of an actor": lambda model: Pairs(model).named,
    "method of a module": lambda model: model.named_parameters,
    "partial": lambda model: partial(type(model).named_parameters, model),
    "partial with a module": lambda model: with_model(partial(model.named_parameters)),
    "function with a module": lambda model: with_model(lambda: model.named_parameters()),
    "cached function": lambda model: with_model(lru_cache(lambda: list(model.named_parameters()))),
    "generator": lambda model: model.named_parameters(),
    "list": lambda model: list(model.named_parameters()),
}


@pytest.mark.parametrize("how", PAIRS)
def test_pairs_are_pushed_and_not_a_module_beside_them(engine: SyncEngine, how: str) -> None:
    model = policy(30 + list(PAIRS).index(how))
    push(engine, PAIRS[how](model), f"pairs {how}")
    assert gap(engine, model) < TOLERANCE


class Forwarding(Actor):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def needs_a_step(step: int) -> Iterator[tuple[str, torch.Tensor]]:
    raise AssertionError(step)


def test_a_callable_that_may_be_an_actor_or_pairs_is_refused(engine: SyncEngine) -> None:
    with pytest.raises(InvalidRequest, match="a Forwarding that holds a module, and can be called with any") as caught:
        WeightSync.connect(Forwarding(policy(1)), engine.engine)
    assert caught.value.field == "source"
    for function in (needs_a_step, partial(needs_a_step)):
        with pytest.raises(InvalidRequest, match="cannot be called without arguments; give"):
            WeightSync.connect(function, engine.engine)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"source yields 'step 1'; expected .* pass the module that it holds"):
        push(engine, TrainingLoop(policy(1)), "loop")


class TrainingLoop(Actor):
    def __iter__(self) -> Iterator[str]:
        return iter(["step 1"])


@pytest.mark.parametrize("kind", [CallableActor, IterableActor, Forwarding, TrainingLoop])
def test_an_adapter_is_found_in_an_actor_that_is_called_or_iterated_over(engine: SyncEngine, kind: type[Actor]) -> None:
    model = adapted(50)
    push(engine, {name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name}, "base")
    sync = LoraSync.connect(kind(model), engine.engine)
    engine.run(sync.push(version="adapter"))
    assert gap(engine, model, lora="policy") < TOLERANCE
    engine.run(sync.close())


def test_a_callable_actor_is_pushed_if_its_call_wants_arguments(engine: SyncEngine) -> None:
    model = policy(51)
    push(engine, CallableActor(model), "callable actor")
    assert gap(engine, model) < TOLERANCE


def test_connecting_an_actor_module_calls_no_state_dict(engine: SyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP1 gathers in it, and waits for ranks that do not connect."""
    actor = ActorModule(policy(1))
    monkeypatch.setattr(nn.Module, "state_dict", None)
    WeightSync.connect(actor, engine.engine)


def test_a_state_dict_of_a_peft_model_names_both_ways(engine: SyncEngine) -> None:
    with pytest.raises(WeightPlanMismatch, match=r"pass the peft model itself.*merged, or push .* with LoraSync"):
        push(engine, adapted(1).state_dict(), "state dict")


def test_rounding_is_refused_in_one_line_and_a_shared_prefix_is_named(engine: SyncEngine) -> None:
    state = policy(1).state_dict()
    with pytest.raises(WeightPlanMismatch, match="27 of float64, which would round") as rounded:
        push(engine, policy(1).double(), "float64")
    with pytest.raises(WeightPlanMismatch, match=r"27 names begin with 'policy\.'") as prefixed:
        push(engine, {f"policy.{name}": tensor for name, tensor in state.items()}, "prefix")
    for error in (rounded, prefixed):
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 500
