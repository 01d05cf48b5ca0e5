"""``spin_less``: how the threads of a CPU wait for each other, set before anything imports PyTorch and OpenMP."""

from __future__ import annotations

import os

SPINS = "2000"


def spin_less() -> None:
    """Have GNU OpenMP's threads wait in a short loop, and then asleep, unless the user has said how they wait.

    In its own long loop a thread keeps a core, while the one that it waits for waits for another program on the other
    core (benchmarks/results/LOG.md, "Threads of the demo").
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
