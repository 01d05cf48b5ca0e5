"""Measurements of a run so far."""

from dataclasses import dataclass, field

from .pace import Pace


@dataclass
class History:
    """Losses of a run, in nats per token.

    Args:
        train: one loss per step done, of that step's batch before its update.
        held_out: pairs of steps done and loss on the held-out batches.
    """

    train: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)

    def to_json(self) -> dict[str, list]:
        return {"train": self.train, "held_out": [list(pair) for pair in self.held_out]}

    @classmethod
    def from_json(cls, data: dict[str, list]) -> "History":
        return cls([float(x) for x in data["train"]], [(int(s), float(x)) for s, x in data["held_out"]])


@dataclass(frozen=True)
class RunResult:
    """Outcome of a run.

    Args:
        recipe: canonical recipe name.
        history: losses of the whole run, steps before a resume included.
        steps: steps done.
        parameters: number of model parameters.
        pace: of this process; its speed is 0 if unknown.
        seconds: wall time of the run, everything and the time before a resume included.
        seed: of the run.
        variant: layers whose recipe is another one, for people; empty if all have the run's.
        mode: eager, compiled or graphs.
    """

    recipe: str
    history: History
    steps: int
    parameters: int
    pace: Pace
    seconds: float
    seed: int = 0
    variant: str = ""
    mode: str = "eager"

    @property
    def held_out_loss(self) -> float:
        """The last held-out loss, in nats per token."""
        return self.history.held_out[-1][1]
