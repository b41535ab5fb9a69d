"""Wrong backends that are drawn: the same ones for a seed, right where they must not show, and caught where they do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from drivetrain.types.capability import Capability
from drivetrain.types.modes import PauseMode
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.case import Case
from drivetrain_conformance.harness.testbench import Bench
from drivetrain_conformance.mutants.drawn.draw import Drawing, draw
from drivetrain_conformance.mutants.drawn.mutant import Drawn, OnCall, OnConfig, OnRequest
from drivetrain_conformance.mutants.drawn.numbers import in_bfloat16
from drivetrain_conformance.mutants.drawn.run import claimable, reached, try_drawn

LENGTH = "generate/at_most_max_new_tokens"
FROZEN = {
    PauseMode.IN_PLACE: "pause/no_token_is_made_while_frozen_in_place",
    PauseMode.RETRACT: "sleep/retracted_requests_survive_a_sleep_of_the_cache",
}


def case(name: str) -> Case:
    return next(one for one in all_cases([name.partition("/")[0]]) if one.id == name)


def mutant(effect: OnRequest) -> Drawn:
    return Drawn("made up", effect, lambda scene: True)


TOO_LONG = mutant(OnRequest(lambda request, _: replace(request, max_new_tokens=request.max_new_tokens + 1)))


class Harmless(OnRequest):
    """Takes a request apart and puts its answer together again, and changes nothing."""

    def spoils(self, request: object, scene: object) -> bool:
        return True


def test_a_seed_draws_the_same_mutants_again() -> None:
    names = [one.name for one in draw(1, 40)]
    assert names == [one.name for one in draw(1, 40)]
    assert len(set(names)) == 40
    assert set(names) != {one.name for one in draw(2, 40)}


def test_no_mutant_is_drawn_that_the_backend_cannot_show() -> None:
    assert _needed([*Capability]) >= {Capability.SLEEP_KEEPS_WEIGHTS, Capability.DETERMINISTIC, Capability.LORA, None}
    assert _needed([Capability.LORA]) == {Capability.LORA, None}
    assert Capability.LORA in claimable("transformers", all_cases(["lora"]))


def _needed(claimed: Collection[Capability]) -> set[Capability | None]:
    return {one.effect.needs for one in draw(1, 400, claimed) if isinstance(one.effect, OnCall | OnConfig)}


def test_no_mutant_is_drawn_whose_condition_hides_its_effect() -> None:
    names = [one.name for one in draw(1, 4000)]
    assert "temperature is lost, with n > 1" in names
    assert "temperature is lost, at temperature 0" not in names


async def _asks_a_host(bench: Bench) -> None:
    """A host process sees more of a prompt than its first token."""
    async with bench.open(isolation="process") as engine:
        first, second = bench.prompts(2, engine=engine)
        one, other = await bench.greedy([first, first[:1] + second[1:]], engine=engine)
    assert one.token_ids != other.token_ids, "the prompts were cut"


@pytest.mark.slow
def test_a_host_process_serves_the_mutant() -> None:
    drawing = Drawing("transformers", 1, 200, frozenset(Capability))
    (cuts,) = (one for one in drawing.mutants() if one.name == "prompt_token_ids keeps its first 1, at temperature 0")
    asking = Case("faults", "asks_a_host", "", frozenset(), _asks_a_host, own_engine=True)
    ((found, _, names),) = reached("transformers", drawing.mutants(), [asking], drawing=drawing)
    assert cuts.name in names
    assert "the prompts were cut" in try_drawn("transformers", cuts, [found], drawing=drawing).message


def test_a_mutant_shows_where_a_user_would_see_it_and_is_caught_there() -> None:
    unseen = replace(TOO_LONG, name="never", holds=lambda scene: False)
    ((found, _, names),) = reached("transformers", [TOO_LONG, unseen], [case(LENGTH)])
    assert names == [TOO_LONG.name]
    assert try_drawn("transformers", TOO_LONG, [found]).verdict == "caught"


def test_a_mutant_that_no_case_reaches_is_told_apart() -> None:
    assert try_drawn("transformers", TOO_LONG, []).verdict == "not reached"


@pytest.mark.parametrize("mode", FROZEN)
def test_requests_that_are_made_again_after_a_freeze_are_answered_alike(mode: PauseMode) -> None:
    harmless = mutant(Harmless(lambda request, _: request, frozen=mode))
    assert not try_drawn("transformers", harmless, [case(FROZEN[mode])]).caught_by


def test_requests_that_are_made_in_two_parts_are_answered_alike() -> None:
    harmless = mutant(Harmless(lambda request, _: request, start=3))
    assert not try_drawn("transformers", harmless, [case(LENGTH), case("sampling/a_seed_fixes_the_output")]).caught_by


@pytest.mark.parametrize(("value", "rounded"), [(1.0, 1.0), (0.7, 0.69921875), (-3.14159, -3.140625), (0.0, 0.0)])
def test_numbers_are_rounded_to_bfloat16(value: float, rounded: float) -> None:
    assert in_bfloat16(value) == rounded
