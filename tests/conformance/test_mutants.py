"""The harness of the mutants: one is caught only if its engine fails the named case, for the stated reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import pytest

from drivetrain import Capability, EngineConfig, load_backend
from drivetrain.backend.base import Backend
from drivetrain.engine.controller import Controller
from drivetrain.engine.engine import InferenceEngine
from drivetrain.engine.parts import PartKinds
from drivetrain.testing import tiny_model
from drivetrain.types.outputs import GenerationOutput
from drivetrain_conformance.mutants.registry import Mutant, mixed, registered_mutants, spoiled_backend
from drivetrain_conformance.mutants.run import MutantResult, all_mutants, try_mutants
from drivetrain_conformance.mutants.spoil import CorrectBackend, answering, claiming, configured

CASE = "generate/at_most_max_new_tokens"


def long_winded(backend: type[Backend]) -> type[Backend]:
    return answering(
        backend, lambda request, result: dataclasses.replace(result, token_ids=[1] * 20, weight_versions=[])
    )


def mutant(**fields: object) -> Mutant:
    made = Mutant("made_up", "A made-up mutant.", CASE, ("assert len(completion.token_ids) <= count",))
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def tried(made: Mutant) -> MutantResult:
    (result,) = try_mutants("transformers", [made])
    return result


def test_a_spoiled_backend_is_caught_for_what_is_wrong_with_it() -> None:
    result = tried(mutant(spoil_backend=long_winded))
    assert result.caught
    assert "assert len(completion.token_ids) <= count" in result.message


def test_engines_have_the_fields_that_are_given() -> None:
    seen: list[object] = []

    def watched(backend: type[Backend]) -> type[Backend]:
        def note(config: EngineConfig) -> Mapping[str, object]:
            seen.append(config.max_num_seqs)
            return {}

        return configured(long_winded(backend), note)

    (result,) = try_mutants("transformers", [mutant(spoil_backend=watched)], {"max_num_seqs": 3})
    assert result.caught
    assert set(seen) == {3}


def test_a_spoiled_engine_page_is_caught() -> None:
    def mute(engine: type[InferenceEngine]) -> type[InferenceEngine]:
        class Wrong(InferenceEngine):
            async def generate(self, *_: object, **__: object) -> GenerationOutput:
                raise RuntimeError("the cat has got its tongue")

        return mixed(engine, Wrong)

    assert tried(mutant(spoil_engine=mute, says=("the cat has got its tongue",))).caught


def test_a_spoiled_part_is_caught() -> None:
    def unready(parts: PartKinds) -> PartKinds:
        class Wrong(Controller):
            def holds_requests(self) -> bool:
                raise RuntimeError("the gate fell from its hinges")

        return dataclasses.replace(parts, controller=mixed(parts.controller, Wrong))

    assert tried(mutant(spoil_part=unready, says=("the gate fell from its hinges",))).caught


def test_a_mutant_that_is_not_wrong_is_missed() -> None:
    result = tried(mutant(spoil_backend=lambda backend: mixed(backend, CorrectBackend)))
    assert not result.caught
    assert result.message == "its case ended as passed"


def test_a_mutant_that_fails_with_other_words_is_missed() -> None:
    result = tried(mutant(spoil_backend=long_winded, says=("the moon is full",)))
    assert not result.caught
    assert "not with 'the moon is full'" in result.message
    assert "token_ids) <= count" in result.message


def test_a_mutant_whose_case_is_refused_is_missed() -> None:
    def modest(backend: type[Backend]) -> type[Backend]:
        class Wrong(CorrectBackend):
            @classmethod
            def capabilities(cls, config: object) -> frozenset[Capability]:
                return frozenset()

        return mixed(backend, Wrong)

    result = tried(mutant(spoil_backend=modest, caught_by="sampling/top_k_of_one_is_greedy"))
    assert not result.caught
    assert result.message == "its case ended as refused"


def test_a_case_that_there_is_not_is_an_error() -> None:
    with pytest.raises(LookupError, match="generate/that_there_is_not"):
        list(try_mutants("transformers", [mutant(spoil_backend=long_winded, caught_by="generate/that_there_is_not")]))


def test_the_correct_engine_is_correct_again_after_a_mutant() -> None:
    assert tried(mutant(spoil_backend=long_winded)).caught
    assert not tried(mutant(spoil_backend=lambda backend: claiming(backend, Capability.VIDEO))).caught


def test_a_mutant_must_say_what_is_wrong_with_it() -> None:
    with pytest.raises(TypeError, match="must say what is wrong"):

        @spoiled_backend(caught_by=CASE, says="something")
        def silent(backend: type[Backend]) -> type[Backend]:
            return backend

    assert "silent" not in registered_mutants()


def test_two_mutants_of_one_name_are_refused() -> None:
    name = all_mutants()[0].name

    def again(backend: type[Backend]) -> type[Backend]:
        """A mutant whose name is taken."""
        return backend

    again.__name__ = name
    with pytest.raises(TypeError, match=f"two mutants {name}"):
        spoiled_backend(caught_by=CASE, says="something")(again)


def test_every_mutant_names_a_case_words_and_one_thing_that_is_wrong() -> None:
    mutants = all_mutants()
    assert len(mutants) >= 40
    for one in mutants:
        assert one.wrong.endswith("."), one.name
        assert all(part.strip("?") for part in one.says), one.name
        ways = (one.spoil_backend, one.spoil_engine, one.spoil_part, one.spoil_rank)
        assert sum(way is not None for way in ways) == 1, one.name


def test_a_mutant_is_tried_only_where_its_capability_is_claimed() -> None:
    for_videos = mutant(
        spoil_backend=lambda backend: mixed(backend, CorrectBackend),
        caught_by="multimodal/videos_are_fetched_once",
        needs=Capability.VIDEO,
    )
    assert list(try_mutants("transformers", [for_videos])) == []
    (missed,) = try_mutants("transformers", [dataclasses.replace(for_videos, needs=None)])
    assert not missed.caught


def test_no_mutant_shares_the_name_of_an_attribute_with_the_backend() -> None:
    """A mutant of whose state a backend has an attribute of the same name would write into that attribute."""
    all_mutants()
    config = EngineConfig(backend="transformers", model=str(tiny_model("qwen2")))
    held = vars(load_backend("transformers")(config)).keys()

    def below(kind: type[object]) -> Iterator[type[object]]:
        yield kind
        for one in kind.__subclasses__():
            yield from below(one)

    assert [(kind.__name__, name) for kind in below(CorrectBackend) for name in vars(kind) if name in held] == []
