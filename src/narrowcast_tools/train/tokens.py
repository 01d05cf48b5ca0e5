"""Tokens: bytes, or the tokens of a tokenizer of the package `tokenizers`."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..words import pip_install
from .asked import text_of
from .config import VOCABULARY
from .errors import SettingsError

TOKENIZER = "tokenizer.json"  # its name in the folder of a run


class Tokens(Protocol):
    """Text to tokens and back.

    Attributes:
        unit: what a token is called.
        vocabulary: how many there are.
        digest: tells tokenizers apart; empty for bytes.
        content: the tokenizer's file; empty for bytes.
    """

    unit: str
    vocabulary: int
    digest: str
    content: str

    def encode(self, texts: Sequence[bytes]) -> Tensor: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """Each byte is a token."""

    unit, vocabulary, digest, content = "byte", VOCABULARY, "", ""

    def encode(self, texts: Sequence[bytes]) -> Tensor:
        """Return the texts, with a line's end between them, as one uint8 tensor."""
        joined = b"\n".join(texts)
        return (
            torch.frombuffer(bytearray(joined), dtype=torch.uint8)
            if joined
            else torch.empty(0, dtype=torch.uint8)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; bytes that are no UTF-8 show as the replacement character."""
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """A tokenizer of the package `tokenizers`.

    Args:
        content: its JSON.
        where: its file, for messages.

    Raises:
        SettingsError: the package is missing, or refuses the content.
    """

    unit = "token"

    def __init__(self, content: str, where: str) -> None:
        try:
            from tokenizers import Tokenizer  # type: ignore[import-not-found]
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"--tokenizer needs the package tokenizers; run: {pip_install('tokenizers')}"
            ) from error
        try:
            self._tokenizer: Any = Tokenizer.from_str(content)
        except Exception as error:  # the package raises no class of its own
            raise SettingsError(
                f"{where} is no tokenizer ({error}); give --tokenizer a tokenizer.json"
            ) from error
        self.content = content
        self.digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        self.vocabulary = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: Sequence[bytes]) -> Tensor:
        """Return the tokens of the texts, with a line's end between them, as one int32 tensor."""
        ends = ["\n"] * (len(texts) - 1) + [""]
        decoded = [text.decode(errors="replace") + end for text, end in zip(texts, ends)]
        encoded = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return torch.tensor([token for part in encoded for token in part.ids], dtype=torch.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


def load_tokens(path: Path | None) -> Tokens:
    """Return the tokens that a file describes; bytes without a file.

    Args:
        path: a `tokenizer.json`, as `tokenizers` and Transformers save it.

    Raises:
        SettingsError: the file cannot be read or is no tokenizer, or the package is missing.
    """
    if path is None:
        return Bytes()
    return FileTokenizer(text_of(path, "--tokenizer", "a tokenizer.json"), str(path))
