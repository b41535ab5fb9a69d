"""Results of runs: reports, the matrix of several, and the parity of backends."""
