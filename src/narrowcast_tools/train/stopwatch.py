"""Training speed."""

import time


class Stopwatch:
    """Counts tokens and the time spent on them, and leaves out what happens between `stop` and `start`."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Begin timing; no effect while running."""
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self, tokens: int) -> None:
        """End timing and count the tokens processed since `start`."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._tokens += tokens
            self._started = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per timed second; 0 before anything was timed."""
        return self._tokens / self._seconds if self._seconds else 0.0
