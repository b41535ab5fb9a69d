"""A drivetrain backend whose engine is an echo with a delay of four tokens."""
