"""``Fp8Padding`` and ``Fp8Unpadding``: the rows of each group padded to a multiple, and back.

No layer here needs them, ``GroupedLinear`` takes groups of any size; they are for programs that pad the groups of
several layers once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor, nn

from .._checks import positive, shown
from .._keywords import refuse_keywords
from ..formats import round_up
from ..functional.grouped_padding import pad_rows, unpad_rows
from ..layers import refuse_script
from ..state import THREAD, get_default_recipe


class _Padding(nn.Module):
    """Base of both.

    Args:
        num_gemms: groups.
        align_size: what the padded groups are multiples of; None: what the current recipe is multiplied in, 32 rows
            for MXFP8, 64 for NVFP4, 16 for the others.

    Raises:
        ValueError: a size that is not positive.
    """

    __prepare_scriptable__ = refuse_script

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        positive(num_gemms=num_gemms, align_size=1 if align_size is None else align_size)
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def extra_repr(self) -> str:
        """Return sizes, as printed by the module."""
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"

    def _alignment(self) -> int:
        if self.align_size is not None:
            return self.align_size
        recipe = THREAD.state.recipe if THREAD.state.depth else None
        recipe = get_default_recipe() if recipe is None else recipe
        return 32 if recipe.mxfp8() else 64 if recipe.nvfp4() else 16

    def _checked(self, m_splits: Sequence[int]) -> list[int]:
        if isinstance(m_splits, Tensor) or not all(isinstance(rows, int) for rows in m_splits):
            raise TypeError(
                f"m_splits is {shown(m_splits)}; the result has as many rows as they say, so give a list of ints"
            )
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"m_splits has {len(m_splits)} entries; give one for each of the {self.num_gemms} groups"
            )
        return list(m_splits)


class Fp8Padding(_Padding):
    __doc__ = f"Zero-pads the rows of each group to a multiple.\n{(_Padding.__doc__ or '').partition('.')[2]}"

    def forward(self, inp: Tensor, m_splits: Sequence[int], **unknown: NoReturn) -> tuple[Tensor, list[int]]:
        """Pad the rows of each group; differentiable.

        Args:
            inp: (*lead, K), the groups one after the other.
            m_splits: rows of each group, a list of ints.

        Returns:
            (P, K), and the rows of each group in it; ``inp`` itself if no padding is needed.

        Raises:
            TypeError: splits are not ints.
            ValueError: their number is another, or their sum is not the rows of ``inp``.
        """
        if unknown:
            refuse_keywords(self, unknown)
        splits, alignment = self._checked(m_splits), self._alignment()
        padded = [round_up(rows, alignment) for rows in splits]
        rows = inp.reshape(-1, inp.shape[-1])
        return (rows if padded == splits else pad_rows(rows, splits, alignment)[0]), padded


class Fp8Unpadding(_Padding):
    __doc__ = f"Undoes :class:`Fp8Padding`.\n{(_Padding.__doc__ or '').partition('.')[2]}"

    def forward(self, inp: Tensor, m_splits: Sequence[int], **unknown: NoReturn) -> Tensor:
        """Remove the padding; differentiable.

        Args:
            inp: (P, K), as padded.
            m_splits: rows of each group before padding.

        Returns:
            (T, K).

        Raises:
            TypeError: splits are not ints.
            ValueError: their number is another, or ``inp`` has another number of rows.
        """
        if unknown:
            refuse_keywords(self, unknown)
        splits, alignment = self._checked(m_splits), self._alignment()
        expected, rows = sum(round_up(rows, alignment) for rows in splits), inp.reshape(-1, inp.shape[-1])
        if rows.shape[0] != expected:
            raise ValueError(
                f"input has {rows.shape[0]} rows; {splits} padded to multiples of {alignment} are {expected}"
            )
        return rows if expected == sum(splits) else unpad_rows(rows, splits, alignment, sum(splits))
