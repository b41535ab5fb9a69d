"""The program of a front-end process, which :class:`FrontEnds` starts."""

from __future__ import annotations

from drivetrain_serving.front_ends.front_end import main

main()
