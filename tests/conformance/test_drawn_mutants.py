"""Wrong backends that are drawn: the same ones for a seed, right where they must not show, and caught where they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivetrain.types.modes import PauseMode
from drivetrain_conformance.cases import all_cases
from drivetrain_conformance.harness.case import Case
from drivetrain_conformance.mutants.drawn.draw import draw
from drivetrain_conformance.mutants.drawn.mutant import Drawn, OnRequest
from drivetrain_conformance.mutants.drawn.numbers import in_bfloat16
from drivetrain_conformance.mutants.drawn.run import reached, try_drawn

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
