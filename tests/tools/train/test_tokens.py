"""Tokens: bytes, or those of a tokenizer's file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from narrowcast_tools.cli import main
from narrowcast_tools.train.data import load_corpus
from narrowcast_tools.train.errors import SettingsError
from narrowcast_tools.train.tokens import Bytes, FileTokenizer, load_tokens


@pytest.fixture
def tokenizer_file(tmp_path: Path, text_file: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(text_file)], trainer)
    path = tmp_path / "own.json"
    tokenizer.save(str(path))
    return path


def test_bytes_are_themselves() -> None:
    tokens = Bytes()
    text = "a line\nand näxt"
    encoded = tokens.encode([b"a line", "and näxt".encode()])
    assert tokens.decode(encoded.tolist()) == text
    assert tokens.encode([]).numel() == 0
    assert load_tokens(None).vocabulary == 256


def test_a_file_gives_fewer_tokens_than_bytes(tokenizer_file: Path, text_file: Path) -> None:
    tokens = load_tokens(tokenizer_file)
    assert tokens.vocabulary == 300
    encoded = tokens.encode([text_file.read_bytes()])
    assert encoded.numel() < 0.7 * text_file.stat().st_size
    assert (
        tokens.decode(encoded[:40].tolist()).strip().startswith("0 bottles of beer on the wall, 0 squared.")
    )
    corpora = [load_corpus(text_file, seq_len=16, tokens=each) for each in (tokens, None)]
    assert [corpus.unit for corpus in corpora] == ["token", "byte"]
    assert corpora[0].digest != corpora[1].digest


def test_a_run_on_tokens(
    tokenizer_file: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(text_file.parent)
    words = [
        "train",
        "--data",
        "text.txt",
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--seq-len",
        "8",
        "--dim",
        "32",
    ]
    words += ["--layers", "1", "--hidden", "48", "--eval-batches", "1", "--device", "cpu", "--out", "run"]
    assert main([*words, "--tokenizer", "own.json"]) == 0
    assert "nats per token after 2 steps" in capsys.readouterr().out
    result = json.loads(Path("run/result.json").read_text())
    assert (result["settings"]["vocabulary"], result["data"]["unit"]) == (300, "token")
    assert result["history"]["held_out"][0][1] == pytest.approx(5.70, abs=0.15)  # log 300
    assert Path("run/tokenizer.json").read_text() == tokenizer_file.read_text()
    assert main([*words, "--resume"]) == 0, "the folder keeps the tokenizer's path"
    Path("run/options.json").unlink()
    assert main([*words, "--resume"]) == 2
    assert (
        "with no --tokenizer; its run has a --tokenizer of 300 tokens: give those" in capsys.readouterr().err
    )


def test_what_is_no_tokenizer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        SettingsError, match=r"--tokenizer is .*absent, .* \(No such file.*; give a tokenizer\.json"
    ):
        load_tokens(tmp_path / "absent")
    pytest.importorskip("tokenizers")
    with pytest.raises(SettingsError, match=r"here is no tokenizer \(.*; give --tokenizer a tokenizer\.json"):
        FileTokenizer("{}", "here")


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SettingsError, match=r"; run: \S+ -m pip install tokenizers$"):
        FileTokenizer("{}", "here")
