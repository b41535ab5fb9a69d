"""A trainer's sharded weights, gathered bucket by bucket by the rank that pushes."""
