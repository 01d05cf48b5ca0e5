"""Check that a checkpoint belongs to the run that resumes from it."""

import torch

from .checkpoint import Checkpoint
from .config import TrainConfig, compared_fields, settings_of
from .data import Corpus
from .errors import SettingsError
from .machine import describe
from .memory import parameters_of


def describe_run(config: TrainConfig, corpus: Corpus, ranks: int) -> dict:
    """Return the JSON-able settings that a checkpoint carries."""
    return {
        "settings": dict(compared_fields(config)),
        "data": {"source": corpus.source, "digest": corpus.digest, "unit": corpus.unit},
        "environment": environment(ranks),
        "machine": describe(config.device),
        "parameters": parameters_of(config.model),
    }


def environment(ranks: int) -> dict[str, str | int]:
    """Return the facts that may change the last bit of a sum although no setting changed."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "processes": ranks}


def require_same_run(checkpoint: Checkpoint, config: TrainConfig, corpus: Corpus, ranks: int) -> list[str]:
    """Check that a run with these settings continues the checkpoint's.

    Returns:
        one line for each difference of the environment, which may cost bitwise equality and nothing else, and
        one where the run is to end at another step than it was.

    Raises:
        SettingsError: another setting or the text differs, or the run is to end before the checkpoint.
    """
    # Settings that an older checkpoint lacks had a new run's default.
    saved = {**dict(compared_fields(TrainConfig())), **checkpoint.meta["settings"]}
    moved = saved["steps"] != config.steps
    changed = [
        (name, value)
        for name, value in compared_fields(config)
        if saved.get(name) != value and name != "steps"
    ]
    if changed:
        theirs, ours = settings_of((name, saved.get(name)) for name, _ in changed), settings_of(changed)
        raise SettingsError(
            f"cannot resume {checkpoint.path} with {ours}; its run has {theirs}: give those, "
            "or another --out to start a new run"
        )
    if config.steps < checkpoint.step:
        raise SettingsError(
            f"cannot resume {checkpoint.path}: it has {checkpoint.step} steps, and --steps is {config.steps}; give "
            f"--steps more than {checkpoint.step}, or another --out to start a new run"
        )
    data = checkpoint.meta["data"]
    if data["digest"] != corpus.digest:
        raise SettingsError(
            f"cannot resume {checkpoint.path}: its --data was {data['source']} (digest {data['digest']}), "
            f"not {corpus.source} (digest {corpus.digest}); give --data the same text, or "
            "another --out to start a new run"
        )
    then, now = {"processes": 1, **checkpoint.meta["environment"]}, environment(ranks)
    notes = [
        f"the checkpoint was made with {key} {then.get(key)}, this is {key} {now[key]}: "
        "the run goes on, perhaps not bit for bit"
        for key in now
        if then.get(key) != now[key]
    ]
    if moved:
        change = "extended" if config.steps > saved["steps"] else "shortened"
        notes.append(
            f"{change} from {saved['steps']} to {config.steps} steps: from step {checkpoint.step} on, the learning "
            f"rate is that of a run of {config.steps}"
        )
    return notes
