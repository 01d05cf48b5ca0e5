"""The text: what is read, how it is split, and that batches depend on seed and step alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from narrowcast_tools.train import data
from narrowcast_tools.train.data import Corpus, held_out_batches, load_corpus, split, train_batch
from narrowcast_tools.train.errors import SettingsError


def counted_text(length: int) -> list[bytes]:
    """Four bytes per word, counting up, so that a window tells where it was cut."""
    return [b"".join((i // 4).to_bytes(4, "big") for i in range(0, length, 4))]


def words(part: torch.Tensor) -> set[bytes]:
    raw = bytes(part.tolist())
    return {raw[i : i + 4] for i in range(0, len(raw) - 3, 4)}


@pytest.mark.parametrize("length", [4 * 1000, 4 * 1001, 4 * 12_345, 4 * 300_000])
def test_parts_are_disjoint_and_complete(length: int) -> None:
    # A block border that cuts a word would make the check blind there, so block sizes are multiples of four.
    texts = counted_text(length)
    corpus = split(texts, seq_len=15, source="test")
    assert len(corpus.train) + len(corpus.held_out) == length
    block = min(data.LARGEST_BLOCK, max(16, length // data.BLOCKS))
    if block % 4 == 0:
        assert not words(corpus.train) & words(corpus.held_out)
        assert words(corpus.train) | words(corpus.held_out) == words(torch.tensor(list(texts[0])))
    assert 0.05 < len(corpus.held_out) / length <= 0.1


def test_both_parts_sample_the_whole_text() -> None:
    corpus = split(counted_text(40_000), seq_len=16, source="test")
    first, last = corpus.held_out[:4].tolist(), corpus.held_out[-4:].tolist()
    assert int.from_bytes(first, "big") < 1_000 < 9_000 < int.from_bytes(last, "big")


def test_batches_are_a_function_of_seed_and_step(corpus: Corpus) -> None:
    def batch(seed: int, step: int) -> torch.Tensor:
        return train_batch(corpus, batch_size=4, seq_len=16, seed=seed, step=step)[0]

    first = batch(0, 7)
    torch.manual_seed(123)  # neither torch's generator nor the order of calls matters
    batch(0, 8)
    assert torch.equal(batch(0, 7), first)
    assert not torch.equal(batch(0, 8), first)
    assert not torch.equal(batch(1, 7), first)


def test_a_batch_leaves_torchs_generator_alone(corpus: Corpus) -> None:
    before = torch.get_rng_state()
    train_batch(corpus, batch_size=4, seq_len=16, seed=0, step=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_targets_are_the_next_bytes(corpus: Corpus) -> None:
    for inputs, targets in [
        train_batch(corpus, batch_size=3, seq_len=16, seed=0, step=0),
        *held_out_batches(corpus, batch_size=3, seq_len=16, count=2),
    ]:
        assert inputs.shape == targets.shape == (3, 16)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert inputs.is_contiguous()
        assert targets.is_contiguous()


def test_every_window_can_be_drawn() -> None:
    corpus = split([bytes(range(180))], seq_len=16, source="test")
    tail = bytes(corpus.train[-17:].tolist())
    seen = set()
    for step in range(400):
        inputs, targets = train_batch(corpus, batch_size=8, seq_len=16, seed=0, step=step)
        seen |= {bytes([*i, t[-1]]) for i, t in zip(inputs.tolist(), targets.tolist())}
    assert len(seen) == len(corpus.train) - 16
    assert tail in seen


def test_held_out_windows_come_from_the_held_out_text() -> None:
    corpus = split(counted_text(40_000), seq_len=16, source="test")
    raw = bytes(corpus.held_out.tolist())
    batches = held_out_batches(corpus, batch_size=4, seq_len=16, count=3)
    for inputs, _ in batches:
        assert all(bytes(row) in raw for row in inputs.tolist())
    assert bytes(batches[-1][1][-1].tolist()) == raw[-16:]


def test_a_folder_is_read_in_order_without_binary_and_hidden_files(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    (root / "b" / "deep").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "z.txt").write_text("z" * 200)
    (root / "a.md").write_text("a" * 200)
    (root / "b" / "deep" / "c.rst").write_text("c" * 200)
    (root / "empty.txt").write_text("")
    (root / "picture.png").write_bytes(b"\x89PNG\0\0" + b"q" * 200)
    (root / ".git" / "objects.txt").write_text("q" * 200)
    (root / ".hidden").write_text("q" * 200)
    corpus = load_corpus(root, seq_len=16)
    assert corpus.files == 3
    assert ord("q") not in corpus.train
    first, last = corpus.train[0].item(), corpus.train[-20].item()
    assert (chr(first), chr(last)) == ("a", "c")
    assert load_corpus(root, seq_len=16).digest == corpus.digest
    assert corpus.remark == f"text: 3 files, 600 bytes of {root}; skipped 1 binary, 1 empty, 2 hidden"


def test_what_is_neither_text_nor_folder_is_told(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    root.mkdir()
    (root / "a.txt").write_text("a" * 400)
    (root / "here").symlink_to(root)
    (root / "gone.txt").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe")
    corpus = load_corpus(root, seq_len=16)
    assert corpus.files == 1
    assert corpus.remark.endswith("skipped 1 links to folders, 2 neither file nor folder")
    assert load_corpus(root / "a.txt", seq_len=16).remark == ""


def test_reading_stops_at_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SIZE_CAP", 500)
    for name in "abc":
        (tmp_path / name).write_text(name * 400)
    corpus = load_corpus(tmp_path, seq_len=16)
    assert corpus.files == 2
    assert corpus.remark.endswith("; ended at 500 bytes, in b") and "skipped" not in corpus.remark
    assert corpus.remark.startswith("text: 2 files, 500 bytes of ")
    file = load_corpus(tmp_path / "a", seq_len=16)
    assert file.remark == ""
    (tmp_path / "a").write_text("a" * 501)
    assert load_corpus(tmp_path / "a", seq_len=16).remark.startswith("text: the first 500 of 501 bytes of ")
    (tmp_path / "a").write_text("a" * 400)
    assert len(corpus.train) + len(corpus.held_out) == 501  # and the newline between two files
    assert len(load_corpus(tmp_path / "a", seq_len=16).train) < 400


def test_the_default_text_is_there() -> None:
    corpus = load_corpus(None, seq_len=128)
    assert corpus.files > 100
    assert len(corpus.train) > 2**20
    assert b"def " in bytes(corpus.train[: 2**16].tolist())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, r"--data is .*text, where no file or folder is; give an existing"),
        (
            lambda path: path.write_bytes(b""),
            r"text holds no text; give --data a text file or a folder",
        ),
        (
            lambda path: path.write_bytes(b"short"),
            r"holds 5 bytes of text, and sequences of 16 need at least 170; give --data more text$",
        ),
        (lambda path: path.mkdir(), r"holds no text; give --data a text file"),
        (lambda path: path.write_bytes(b"\0" * 999), r"is a binary file; give --data a text file"),
        (
            lambda path: path.write_text("hello" * 99, encoding="utf-16"),
            r"is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 .*text > text.txt$",
        ),
    ],
    ids=["missing", "empty file", "short file", "empty folder", "binary", "UTF-16"],
)
def test_bad_paths(tmp_path: Path, make, message: str) -> None:
    path = tmp_path / "text"
    make(path)
    with pytest.raises(SettingsError, match=message):
        load_corpus(path, seq_len=16)


def test_the_shortest_text_that_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 170)
    corpus = load_corpus(path, seq_len=16)
    assert len(corpus.held_out) == 17
    inputs, _ = held_out_batches(corpus, batch_size=2, seq_len=16, count=1)[0]
    assert inputs.shape == (2, 16)


@pytest.mark.parametrize("content", [b"", b" \n\t\n" * 1000])
def test_a_file_without_text_is_told(content: bytes, tmp_path: Path) -> None:
    """A lower --seq-len was named, which helps none of them."""
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(
        SettingsError, match="holds no text; give --data a text file or a folder of text files$"
    ):
        load_corpus(tmp_path / "text.txt", seq_len=16)


def test_a_folder_without_text_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\0")
    with pytest.raises(SettingsError, match=r"holds no text \(skipped 1 binary\); give --data a text"):
        load_corpus(tmp_path, seq_len=16)


def test_a_sequence_may_be_longer_than_a_block() -> None:
    """The held-out part had a block of 65,536 bytes, and its first window ended in an IndexError."""
    seq_len = data.LARGEST_BLOCK
    corpus = split(counted_text(12 * seq_len), seq_len=seq_len, source="test")
    ((inputs, _),) = held_out_batches(corpus, batch_size=2, seq_len=seq_len, count=1)
    assert inputs.shape == (2, seq_len)
    with pytest.raises(
        SettingsError, match=r"need at least 1000010; give --data more text, or .* 78642 or less"
    ):
        split(counted_text(12 * seq_len), seq_len=100_000, source="test")


@pytest.mark.parametrize("length", [1, 19, 20, 159])
def test_a_short_text_names_the_longest_sequence(length: int, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * length)
    with pytest.raises(SettingsError, match=f"holds {length} byte") as raised:
        load_corpus(path, seq_len=16)
    found = re.search(r"--seq-len (\d+) or less$", str(raised.value))
    assert (found is None) == (length < 20)
    if found:
        assert len(load_corpus(path, seq_len=int(found[1])).held_out)
        with pytest.raises(SettingsError):
            load_corpus(path, seq_len=int(found[1]) + 1)
