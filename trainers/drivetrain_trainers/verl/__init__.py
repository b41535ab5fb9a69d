"""Rollouts of verl on any drivetrain engine: ``actor_rollout_ref.rollout.name=drivetrain``."""
