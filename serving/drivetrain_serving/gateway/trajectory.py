"""Trajectories: sessions in the form that a trainer reads."""

from __future__ import annotations

from drivetrain.openai.choices import json_logprob
from drivetrain.openai.responses import WeightSpan
from drivetrain.types.sampling_mask import SamplingMask
from drivetrain_serving.gateway.answer_types import Trajectory, TrajectoryBranch, TrajectoryTurn
from drivetrain_serving.gateway.recorded_extras import packed_experts, packed_mask
from drivetrain_serving.gateway.records import unpacked_ids, unpacked_logprobs
from drivetrain_serving.gateway.session_turns import Session, Turn, leaves_of


def trajectory_of(session: Session) -> Trajectory:
    """Return a session's branches with their ids, loss masks, logprobs and weight versions, and its turns.

    Call it in a thread: it may read from disk.
    """
    turns = list(session.turns)
    seen: set[int] = set()
    branches: list[TrajectoryBranch] = []
    for leaf in leaves_of(turns):
        path = session.path_to(leaf)
        branches.append(_branch(len(branches), path, seen))
        seen.update(turn.number for turn in path)
    return {
        "session_id": session.id,
        "created": session.created,
        "branches": branches,
        "turns": [_turn(turn) for turn in turns],
    }


def _branch(index: int, path: list[Turn], seen: set[int]) -> TrajectoryBranch:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float | None] = []
    spans: list[WeightSpan] = []
    shared = 0
    for turn in path:
        record = turn.record.read()
        prompt, sampled = unpacked_ids(record.new_prompt_ids), unpacked_ids(record.token_ids)
        ids.extend(prompt)
        at = len(ids)
        ids.extend(sampled)
        mask += [0] * len(prompt)
        mask += [1] * len(sampled)
        logprobs += [None] * len(prompt)
        logprobs += map(json_logprob, unpacked_logprobs(record.logprobs))
        spans.extend(
            {"version": span.version, "start": at + span.start, "end": at + span.end} for span in turn.weight_versions
        )
        if turn.number in seen:
            shared = len(ids)
    return {
        "branch": index,
        "turns": [turn.number for turn in path],
        "token_ids": ids,
        "loss_mask": mask,
        "logprobs": logprobs,
        "weight_versions": spans,
        "shared_length": shared,
        "begins_because": path[0].begins_because,
        "continues": path[0].continues,
        "finish_reason": path[-1].finish_reason,
    }


def _turn(turn: Turn) -> TrajectoryTurn:
    record = turn.record.read()
    mask = None if record.mask is None else SamplingMask(record.mask_vocab_size, record.mask)
    return {
        "turn": turn.number,
        "parent": turn.parent,
        "continues": turn.continues,
        "begins_because": turn.begins_because,
        "prompt_tokens": turn.prompt_length,
        "completion_tokens": turn.sampled_length,
        "finish_reason": turn.finish_reason,
        "logprobs_mode": turn.logprobs_mode,
        "model": turn.model,
        "sampling_params": dict(turn.sampling_params),
        "routed_experts": packed_experts(record.routed_experts),
        "prompt_routed_experts": packed_experts(record.prompt_routed_experts),
        "prompt_routed_experts_start": None if record.prompt_routed_experts is None else turn.first_read,
        "sampling_mask": packed_mask(mask),
        "ended": turn.ended,
    }
