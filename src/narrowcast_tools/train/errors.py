"""Errors that the command line reports as one line."""


class SettingsError(Exception):
    """A setting that the user can fix; the message is one line that names the value and the fix."""


class TrainingError(Exception):
    """A run that cannot go on, such as one whose loss is no longer finite; the message is one line."""


class DivergedError(TrainingError):
    """A run whose loss or weights are no longer finite at ``step``."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
