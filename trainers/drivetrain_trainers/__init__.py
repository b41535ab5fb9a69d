"""Trainers that run on drivetrain, each in a module of its own."""
