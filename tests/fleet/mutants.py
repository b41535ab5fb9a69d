"""Fleets that are wrong in one place: a test of the transaction, of failover or of control must catch each.

A mutant is a copy of the package with one piece of text replaced. Its test runs in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import drivetrain_fleet

ROOT = Path(__file__).parents[2]
PACKAGE = Path(drivetrain_fleet.__file__).parent
SECONDS = 60
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    text: str
    instead: str
    test: str
    """The test that must fail, in a file of this folder."""


UPDATES = "test_updates.py::"
RESUMING = "test_resuming.py::"
MADE_ANEW = "test_made_anew.py::"
MUTANTS = [
    Mutant(
        "one commit is enough",
        "updates.py",
        "if len(update.members) < self.min_engines:",
        "if not update.members:",
        UPDATES + "test_too_few_engines_fail_the_whole_update[apply_update]",
    ),
    Mutant(
        "who does not commit stays in sync",
        "updates.py",
        "if member.missed(why, self._max_staleness):",
        "if True:",
        UPDATES + "test_an_engine_that_does_not_commit_is_stale_and_gets_nothing[prepare_weight_update]",
    ),
    Mutant(
        "who does not commit keeps its requests",
        "failover.py",
        "if tickets and not member.status.failed:",
        "if False:",
        UPDATES + "test_requests_of_an_engine_that_is_left_behind_end_or_move",
    ),
    Mutant(
        "the first engine's weights are the fleet's",
        "backend.py",
        "if member.engine.status.weights is WeightState.CLEAN]",
        "if member]",
        UPDATES + "test_engines_with_committed_weights_serve_beside_one_whose_update_failed",
    ),
    Mutant(
        "engines go on before all have answered",
        "updates.py",
        "if freeze is not None:\n                update.drop",
        "if False:\n                update.drop",
        UPDATES + "test_no_token_is_made_with_weights_that_the_fleet_does_not_commit",
    ),
    Mutant(
        "a failed update leaves who committed in sync",
        "updates.py",
        '            member.left_behind(f"the fleet\'s update to {update.request.version!r} failed")',
        "            pass",
        UPDATES + "test_too_few_engines_fail_the_whole_update[apply_update]",
    ),
    Mutant(
        "who fails a step goes on, bucket by bucket",
        "updates.py",
        "        update.drop(failed)\n        if failed:",
        "        if failed:",
        UPDATES + "test_an_engine_that_is_left_behind_bucket_by_bucket_is_stale[load_buckets]",
    ),
    Mutant(
        "a refused update stays prepared",
        "updates.py",
        "            await self._on_each(outcomes.done, lambda member: member.calls.forget_weight_update())\n",
        "",
        UPDATES + "test_a_source_that_is_wrong_is_refused_by_all_and_changes_nothing",
    ),
    Mutant(
        "a refusal of one engine counts as its loss",
        "updates.py",
        "if isinstance(error, _REFUSALS)}",
        "if False}",
        UPDATES + "test_a_source_that_is_wrong_is_refused_by_all_and_changes_nothing",
    ),
    Mutant(
        "an engine that has died counts",
        "updates.py",
        "for m in update.members if m.status.failed})",
        "for m in ()})",
        UPDATES + "test_an_engine_that_dies_after_its_commit_does_not_count",
    ),
    Mutant(
        "an engine that is synced keeps its old adapters",
        "updates.py",
        "if member in update.stale:",
        "if False:",
        UPDATES + "test_an_engine_that_is_synced_gets_the_adapters_that_it_missed",
    ),
    Mutant(
        "an engine that was left frozen stays so",
        "updates.py",
        "if self._control.frozen is None:",
        "if False:",
        UPDATES + "test_an_engine_that_was_left_frozen_goes_on_once_it_is_synced",
    ),
    Mutant(
        "stale engines get requests",
        "health.py",
        "return self.health in (Health.READY, Health.LAGGING)",
        "return self.health in (Health.READY, Health.LAGGING, Health.STALE)",
        UPDATES + "test_an_engine_that_does_not_commit_is_stale_and_gets_nothing[apply_update]",
    ),
    Mutant(
        "another holder's version is not seen",
        "members.py",
        "elif version != self.status.version:",
        "elif False:",
        UPDATES + "test_an_engine_that_is_relabelled_by_another_holder_is_stale",
    ),
    Mutant(
        "completions of any version are handed out",
        "failover.py",
        "if not self._known_version(span.version):",
        "if False:",
        UPDATES + "test_a_completion_of_a_version_that_was_not_committed_is_not_handed_out",
    ),
    Mutant(
        "requests of an engine that is left behind look aborted",
        "failover.py",
        "if ticket.evicted and not ticket.aborted:",
        "if False:",
        UPDATES + "test_requests_of_an_engine_that_is_left_behind_end_or_move",
    ),
    Mutant(
        "requests that have begun are repeated",
        "failover.py",
        "if ticket.made and (why",
        "if False and (why",
        "test_fleet.py::test_a_sample_with_tokens_fails_by_name_and_is_not_repeated",
    ),
    Mutant(
        "a pause that one refuses is not undone",
        "control.py",
        "if outcomes.refused and back is not None:",
        "if False:",
        "test_fleet.py::test_a_pause_that_one_engine_refuses_is_undone_and_says_who",
    ),
    Mutant(
        "a pause that is given up is not undone",
        "control.py",
        "            if back is not None:\n                task",
        "            if False:\n                task",
        "test_fleet.py::test_a_pause_that_takes_too_long_is_undone",
    ),
    Mutant(
        "who lags may lag any further",
        "members.py",
        "and status.behind < most and intact",
        "and intact",
        UPDATES + "test_an_engine_that_misses_an_update_may_lag_and_its_completions_say_so",
    ),
    Mutant(
        "who has begun an update may lag",
        "members.py",
        "and not status.updating and status.behind",
        "and status.behind",
        UPDATES + "test_an_engine_whose_weights_may_have_been_touched_does_not_lag[apply_update]",
    ),
    Mutant(
        "who lags is not held by a pause",
        "control.py",
        "if member.status.servable or member.load.samples",
        "if member.status.synced",
        UPDATES + "test_an_engine_that_lags_keeps_its_requests_and_follows_a_pause",
    ),
    Mutant(
        "who lags takes the fleet's new name for other weights",
        "control.py",
        """                self._leave_behind(member, f"it lagged""",
        """                str(f"it lagged""",
        UPDATES + "test_an_engine_that_lags_is_stale_once_it_or_the_fleet_is_relabelled",
    ),
    Mutant(
        "a pinned request goes to any engine",
        "sending.py",
        "and ticket.request.weight_version in (None, member.status.version)",
        "and True",
        UPDATES + "test_a_pinned_request_goes_to_an_engine_of_its_version",
    ),
    Mutant(
        "a pushed adapter is not kept for who joins",
        "control.py",
        "FleetAdapter(path, pinned)",
        "FleetAdapter(source.path, pinned)",
        UPDATES + "test_an_engine_that_joins_gets_an_adapter_whose_folder_was_removed",
    ),
    Mutant(
        "samples that have ended are remembered",
        "sending.py",
        "        self._tickets.pop(ticket.request.request_id, None)",
        "        pass",
        "test_flat.py::test_a_fleet_is_flat_over_ten_thousand_requests_and_two_hundred_updates",
    ),
    Mutant(
        "who joins is in sync",
        "backend.py",
        "if not known and",
        "if False and",
        "test_fleet.py::test_an_engine_that_joins_is_stale_unless_it_is_shown_to_serve_the_same",
    ),
    Mutant(
        "engines with one label have one update",
        "fleet_weights.py",
        'same_update = self.update_id != "" and self.update_id == other.update_id',
        "same_update = True",
        MADE_ANEW + "test_two_pushes_of_one_label_are_two_weights",
    ),
    Mutant(
        "engines with one update are not known",
        "fleet_weights.py",
        'same_update = self.update_id != "" and self.update_id == other.update_id',
        "same_update = False",
        MADE_ANEW + "test_an_engine_that_comes_back_with_the_fleets_update_is_ready",
    ),
    Mutant(
        "the first engine is the measure of all",
        "fleet_weights.py",
        "return counts.index(max(counts))",
        "return 0",
        MADE_ANEW + "test_a_fleet_takes_the_weights_that_most_engines_have",
    ),
    Mutant(
        "an update that is under way is not awaited",
        "backend.py",
        "while engine.state is EngineState.UPDATING:",
        "while False:",
        MADE_ANEW + "test_a_fleet_waits_for_the_end_of_an_update_that_is_under_way",
    ),
    Mutant(
        "adapters of an earlier fleet stay",
        "backend.py",
        "        await self.control.align_all()\n",
        "",
        MADE_ANEW + "test_adapters_of_an_earlier_fleet_do_not_stay_on_its_engines",
    ),
    Mutant(
        "another holder's push of the same label is not seen",
        "members.py",
        "elif self.engine.parts.weights.update_id != self.status.update_id:",
        "elif False:",
        MADE_ANEW + "test_a_push_of_the_fleets_label_that_was_not_seen_makes_an_engine_stale",
    ),
    Mutant(
        "a fleet does not tell its update",
        "client.py",
        "self.parts.weights.publish(weights.version, weights.update_id)",
        "self.parts.weights.publish(weights.version)",
        MADE_ANEW + "test_a_handle_to_a_fleet_made_anew_tells_the_update",
    ),
    Mutant(
        "who goes on begins from the prompt",
        "resuming.py",
        "prompt_token_ids=[*self.whole.prompt_token_ids, *self._ids],",
        "",
        RESUMING + "test_greedy_answers_equal_those_of_an_unbroken_run[whole]",
    ),
    Mutant(
        "who goes on gets the whole length once more",
        "resuming.py",
        "max_new_tokens=self.whole.max_new_tokens - made,",
        "",
        RESUMING + "test_greedy_answers_equal_those_of_an_unbroken_run[whole]",
    ),
    Mutant(
        "logprobs of the lost engine are dropped",
        "resuming.py",
        "self._logprobs[:made] + result.logprobs,",
        "result.logprobs,",
        RESUMING + "test_greedy_answers_equal_those_of_an_unbroken_run[whole]",
    ),
    Mutant(
        "a seed begins anew at the next engine",
        "resuming.py",
        '"seed": request.seed is not None and params.temperature > 0 and not counted,',
        '"seed": False,',
        RESUMING + "test_an_engine_that_does_not_count_resumed_tokens_gets_no_request_that_depends_on_them",
    ),
    Mutant(
        "all tokens are of the version that began",
        "resuming.py",
        "if spans and spans[-1].version == version:",
        "if spans:",
        RESUMING + "test_spans_tell_the_version_of_each_engine",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / "drivetrain_fleet"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = (copy / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.text) == 1, f"{mutant.file} holds the text {source.count(mutant.text)} times"
    (copy / mutant.file).write_text(source.replace(mutant.text, mutant.instead), encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*PYTEST, f"--timeout={SECONDS}", f"tests/fleet/{mutant.test}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        check=False,
    )
    assert done.returncode == 1, f"the mutant was not caught:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert "1 failed" in done.stdout or "Timeout" in done.stdout + done.stderr, done.stdout[-2000:]
