"""Tokens of real text in a training and a held-out part, and batches that depend on (seed, step) alone."""

import codecs
import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from narrowcast._checks import counted

from .asked import found_text
from .errors import SettingsError
from .tokens import Bytes, Tokens

SIZE_CAP = 16 * 2**20  # bytes read at most: enough text, and it loads in well under a second
SNIFFED = 8192  # a file with a NUL byte in its first bytes is taken for binary
HELD_OUT_EVERY = 10  # one block of ten is held out
BLOCKS = 100  # so that both parts sample the whole text
LARGEST_BLOCK = 64 * 2**10  # unless a sequence is longer
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """A text as tokens.

    Args:
        train: uint8 or int32, (n,).
        held_out: as `train`, (m,); shares no position of the text with it.
        source: where it was read from, for people.
        files: number of files read.
        digest: SHA-256 of the text and its tokenizer, first 16 hex digits; tells whether they are the same.
        remark: what was read of `--data` and what was left out, in one line; empty if all of it was read.
        unit: what a token is called.
    """

    train: Tensor
    held_out: Tensor
    source: str
    files: int
    digest: str
    remark: str = ""
    unit: str = "byte"

    def repeated(self, drawn: int) -> str:
        """Return a line for people where a run draws more than the text holds; empty otherwise."""
        held = len(self.train)
        if drawn <= held:
            return ""
        times = f"each {drawn / held:.1f} times on average"
        return f"text: {held:,} {self.unit}s to train on, and the run draws {drawn:,}: {times}"


def load_corpus(path: Path | None, *, seq_len: int, tokens: Tokens | None = None) -> Corpus:
    """Read a text file, or every text file below a folder; None reads the Python standard library's sources.

    Args:
        path: file or folder. Below a folder, hidden entries and binary files are left out, and the files are
            read in sorted order up to `SIZE_CAP` bytes.
        seq_len: tokens of a training sequence; both parts must hold one and its next token.
        tokens: what a token is; None for bytes.

    Raises:
        SettingsError: the path does not exist or cannot be read, or holds too little text.
    """
    root, source = found_text(path)
    if path is None:
        return split(_Reader(".py", LEFT_OUT).read(root), seq_len=seq_len, source=source, tokens=tokens)
    if root.is_file():
        texts, size = _read_file(root), root.stat().st_size
        remark = f"text: the first {SIZE_CAP:,} of {size:,} bytes of {source}" if size > SIZE_CAP else ""
    else:
        reader = _Reader("", set())
        texts = reader.read(root)
        if not texts:
            why = f" ({left_out})" if (left_out := reader.left_out()) else ""
            raise SettingsError(
                f"{source} holds no text{why}; give --data a text file or a folder of text files"
            )
        counted = f"text: {len(texts):,} files, {sum(map(len, texts)):,} bytes of {source}"
        remark = "; ".join(filter(None, (counted, reader.left_out())))
    return replace(split(texts, seq_len=seq_len, source=source, tokens=tokens), remark=remark)


def split(texts: list[bytes], *, seq_len: int, source: str, tokens: Tokens | None = None) -> Corpus:
    """Join texts and hold out every tenth block of the result.

    Args:
        tokens: what a token is; None for bytes.

    Raises:
        SettingsError: there is no text, or the held-out part would be shorter than one sequence and its next token.
    """
    tokens = tokens or Bytes()
    if not any(text.strip() for text in texts):
        raise SettingsError(f"{source} holds no text; give --data a text file or a folder of text files")
    data = tokens.encode(texts)
    block = max(seq_len + 1, min(LARGEST_BLOCK, len(data) // BLOCKS))
    if len(data) < HELD_OUT_EVERY * block:
        longest = len(data) // HELD_OUT_EVERY - 1
        shorter = f", or train with --seq-len {longest} or less" if longest > 0 else ""
        raise SettingsError(
            f"{source} holds {counted(len(data), tokens.unit)} of text, and sequences of {seq_len} need at least "
            f"{HELD_OUT_EVERY * (seq_len + 1)}; give --data more text{shorter}"
        )
    blocks = data.split(block)
    # The last block may be short, so the held-out ones are the ends of whole groups of ten.
    train = [b for i, b in enumerate(blocks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    held_out = blocks[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    digest = hashlib.sha256(b"\n".join(texts) + tokens.digest.encode()).hexdigest()[:16]
    return Corpus(torch.cat(train), torch.cat(held_out), source, len(texts), digest, unit=tokens.unit)


def train_batch(
    corpus: Corpus, *, batch_size: int, seq_len: int, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """Draw the batch of a step.

    Args:
        step: index of the step. The batch is a function of the seed and the step alone, so that a run may
            stop and go on anywhere without keeping a reader's position.

    Returns:
        inputs and targets, each int64 (batch_size, seq_len) on the CPU; targets are the inputs' next tokens.
    """
    mixed = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little", signed=True))
    starts = torch.randint(len(corpus.train) - seq_len, (batch_size,), generator=generator)
    return _windows(corpus.train, starts, seq_len)


def held_out_batches(
    corpus: Corpus, *, batch_size: int, seq_len: int, count: int
) -> list[tuple[Tensor, Tensor]]:
    """Cut the batches of every evaluation: windows at even distances over the held-out text.

    Returns:
        `count` pairs of inputs and targets as `train_batch` returns them, always the same ones.
    """
    last = len(corpus.held_out) - seq_len - 1
    starts = torch.linspace(0, last, batch_size * count, dtype=torch.float64).long()
    return [_windows(corpus.held_out, part, seq_len) for part in starts.split(batch_size)]


def _windows(data: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    rows = data[starts[:, None] + torch.arange(seq_len + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _read_file(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            text = file.read(SIZE_CAP)
    except OSError as error:
        raise SettingsError(
            f"cannot read {path} ({error.strerror}); give --data a readable text file"
        ) from error
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SettingsError(
            f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {shlex.quote(str(path))} > text.txt"
        )
    if b"\0" in text[:SNIFFED]:
        raise SettingsError(f"{path} is a binary file; give --data a text file or a folder of text files")
    return [text]


class _Reader:
    """Reads the text files below a folder in sorted order, and counts what it leaves out.

    Args:
        suffix: ending of the names that are read; others are left out uncounted.
        ignored: names of folders that are left out uncounted.
    """

    def __init__(self, suffix: str, ignored: set[str]) -> None:
        self._suffix = suffix
        self._ignored = ignored
        self._counts: Counter[str] = Counter()
        self._end = ""

    def read(self, root: Path) -> list[bytes]:
        texts: list[bytes] = []
        room = SIZE_CAP
        for path in self._paths(root):
            try:
                with path.open("rb") as file:
                    text = file.read(room)
            except OSError:
                self._counts["unreadable"] += 1
                continue
            if b"\0" in text[:SNIFFED] or not text:
                self._counts["binary" if text else "empty"] += 1
                continue
            texts.append(text)
            room -= len(text)
            if room <= 0:
                self._end = f"ended at {SIZE_CAP:,} bytes, in {path.relative_to(root)}"
                break
        return texts

    def left_out(self) -> str:
        """Return a note on skipped files, such as `skipped 2 binary, 1 hidden`; "" if there are none."""
        counted = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self._counts.items()))
        return "; ".join(part for part in (f"skipped {counted}" if counted else "", self._end) if part)

    def _paths(self, root: Path) -> Iterator[Path]:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(
                f for f in folders if f not in self._ignored and self._wanted(Path(folder, f))
            )
            for name in sorted(names):
                path = Path(folder, name)
                if name.endswith(self._suffix) and self._wanted(path):
                    yield path

    def _wanted(self, path: Path) -> bool:
        kind = None
        if path.name.startswith("."):
            kind = "hidden"
        elif path.is_dir():
            kind = "links to folders" if path.is_symlink() else None  # os.walk does not follow them
        elif not path.is_file():
            kind = "neither file nor folder"
        if kind is not None:
            self._counts[kind] += 1
        return kind is None
