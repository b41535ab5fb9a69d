# pyright: reportMissingImports=false
"""The configuration of a teacher whose most likely tokens a drivetrain engine returns.

verl takes a loss over a teacher's most likely tokens with rollouts that it knows by name. Name this class instead of
verl's: ``distillation.teacher_models.teacher_model._target_=drivetrain_trainers.verl.teacher.TeacherConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.workers.config import DistillationTeacherModelConfig

from drivetrain.errors import InvalidConfig
from drivetrain_trainers.verl.plugin_names import ROLLOUT


@dataclass
class TeacherConfig(DistillationTeacherModelConfig):
    """verl's configuration of a teacher, which takes ``inference.name=drivetrain`` with any loss."""

    def _validate_topk_logprobs(self, use_topk: bool, topk: int | None) -> None:
        """Check ``distillation_loss.topk``; engines need no setting for it.

        Raises:
            InvalidConfig: The loss needs it, and it is not set.
        """
        if self.inference.name != ROLLOUT:
            super()._validate_topk_logprobs(use_topk=use_topk, topk=topk)
        elif use_topk and not topk:
            raise InvalidConfig(
                f"distillation.distillation_loss.topk={topk}: this loss is over the teacher's most likely tokens; set "
                "their number",
                field="distillation.distillation_loss.topk",
            )
