"""KV cache: keys and values of earlier tokens, one tensor per layer, contiguous or in pages.

What sequences there are is known on the host and changes in ``pre_step``, once per model forward. What a layer's
``step`` reads is on the device, in buffers that stay where they are: it can be compiled and captured in a CUDA graph,
and the same graph serves every later token.

Tokens are written by slot: page * page_size + place in the page. A contiguous cache has one page per sequence, as long
as the longest sequence may be; so one rule serves both. What is no token (padding of a shorter sequence of the step) is
written to one more slot, which no layer reads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._checks import flags, positive, shape_of, shown
from .._device import checked_device, default_device
from ..layers.parameters import parameter_dtype
from ..upstream.compiler import keep_address
from .formats import checked_format

Caches = tuple[Tensor, Tensor]


class KVCacheManager:
    """A contiguous cache: a row of ``max_sequence_length`` slots for each sequence, the sequences of the batch first.

    Subclasses keep the tokens in other places; :class:`InferenceParams` calls the methods.

    Args:
        max_batch_size, max_sequence_length: sequences, and tokens of each.
        num_heads_kv, head_dim_k, head_dim_v, dtype: of what is kept; None: of the first key and value.
        device: where it is kept.
    """

    zero_pages = 0

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        head_dim_v: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        page_size: int | None = None,
        total_num_pages: int | None = None,
    ) -> None:
        self.page_size = page_size or max_sequence_length
        self.pages_per_sequence = -(-max_sequence_length // self.page_size)
        self.total_num_pages = total_num_pages or max_batch_size
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.head_dim_v = num_heads_kv, head_dim_k, head_dim_v
        self.dtype, self.device = dtype, device or default_device()
        self.caches: dict[int, Caches] = {}  # layer -> keys and values (slots + 1, heads, head dim)
        self.reset()

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        # the pages of each sequence, in batch order
        self.pages: OrderedDict[Hashable, list[int]] = OrderedDict()

    def clear(self, pages: list[int]) -> None:
        """Zero pages that get another owner: a masked NaN of the last one would still spoil sums."""
        if not pages or not self.caches:
            return
        index = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for cache in self.caches.values():
            for part in cache:
                part[:-1].unflatten(0, (-1, self.page_size)).index_fill_(0, index, 0)

    @torch.inference_mode(False)  # else it could be written to in inference mode only
    @torch.no_grad()
    def allocate_memory(
        self, layer_number: int, key: Tensor | None = None, value: Tensor | None = None
    ) -> None:
        """Make the memory of a layer.

        Args:
            key, value: of the layer, for the sizes that the constructor was not told.
        Raises:
            ValueError: unknown sizes.
        """
        heads, dim_k, dim_v, dtype = self.num_heads_kv, self.head_dim_k, self.head_dim_v, self.dtype
        if key is not None and value is not None:
            heads, dim_k, dim_v = heads or key.shape[-2], dim_k or key.shape[-1], dim_v or value.shape[-1]
            dtype = dtype or key.dtype
        if heads is None or dim_k is None or dtype is None:
            raise ValueError(
                f"the KV cache has num_heads_kv={heads}, head_dim_k={dim_k}, dtype={dtype}; give all of them to "
                "InferenceParams to allocate memory before the first forward"
            )
        slots = (self.total_num_pages + self.zero_pages) * self.page_size + 1
        parts = [
            torch.zeros(slots, heads, dim, dtype=dtype, device=self.device) for dim in (dim_k, dim_v or dim_k)
        ]
        for part in parts:  # else a compiled graph with CUDA graphs copies it in, and the result out
            keep_address(part)
        self.caches[layer_number] = (parts[0], parts[1])

    def assign(self, lengths: Mapping[Hashable, int]) -> None:
        """Allocate rows for the sequences of a step, in their order; the others' rows become free.

        Args:
            lengths: tokens of each sequence after the step, within the limits.
        """
        old = {sequence: row for row, sequence in enumerate(self.pages)}
        rows = [old.get(sequence, -1) for sequence in lengths]
        moved = [row for row, source in enumerate(rows) if source not in (-1, row)]
        if moved:
            targets = torch.tensor(moved, dtype=torch.int64, device=self.device)
            sources = torch.tensor([rows[row] for row in moved], dtype=torch.int64, device=self.device)
            for cache in self.caches.values():
                for part in cache:
                    by_row = part[:-1].unflatten(0, (-1, self.page_size))
                    by_row.index_copy_(0, targets, by_row.index_select(0, sources))
        self.clear([row for row, source in enumerate(rows) if source == -1])
        self.pages = OrderedDict((sequence, [row]) for row, sequence in enumerate(lengths))

    def check_space(self, lengths: Mapping[Hashable, int]) -> None:
        """Check that :meth:`assign` can do it.

        Raises:
            RuntimeError: it cannot.
        """

    def step(self, layer_number: int, new_k: Tensor, new_v: Tensor, slots: Tensor, batch: int) -> Caches:
        """Write the tokens of a step.

        Args:
            new_k, new_v: (tokens, heads, head dim).
            slots: (tokens,) where each goes.
            batch: sequences of the step.
        Returns:
            keys and values: (batch, max_sequence_length, heads, head dim), or (pages + 1, page_size, heads, head dim).
        """
        cache = self.caches[layer_number]
        for part, new in zip(cache, (new_k, new_v)):
            part.index_copy_(0, slots, new.to(part.dtype))
        return self.views(cache, batch)

    def views(self, cache: Caches, batch: int) -> Caches:
        """Return the stored tokens, without the slot that no layer reads."""
        keys, values = (part[:-1].unflatten(0, (-1, self.page_size)) for part in cache)
        return keys[:batch], values[:batch]


class PagedKVCacheManager(KVCacheManager):
    """A cache in pages: a sequence has as many as its tokens need, anywhere, and gives them back when it goes.

    One page more is never written to: it stands where a sequence has no page yet.
    """

    zero_pages = 1

    def reset(self) -> None:
        super().reset()
        self.free = list(range(self.total_num_pages))[::-1]

    def _wanted(self, lengths: Mapping[Hashable, int]) -> dict[Hashable, int]:
        return {
            sequence: -(-length // self.page_size) - len(self.pages.get(sequence, ()))
            for sequence, length in lengths.items()
        }

    def check_space(self, lengths: Mapping[Hashable, int]) -> None:
        going = sum(len(pages) for sequence, pages in self.pages.items() if sequence not in lengths)
        wanted = sum(self._wanted(lengths).values())
        if wanted > len(self.free) + going:
            raise RuntimeError(
                f"the KV cache is full: the step needs {wanted} pages more, {len(self.free) + going} of "
                f"{self.total_num_pages} are free; leave sequences out of pre_step, or make total_num_pages larger"
            )

    def assign(self, lengths: Mapping[Hashable, int]) -> None:
        for sequence in [sequence for sequence in self.pages if sequence not in lengths]:
            self.free += self.pages.pop(sequence)
        wanted = self._wanted(lengths)
        new = {sequence: [self.free.pop() for _ in range(count)] for sequence, count in wanted.items()}
        self.clear([page for pages in new.values() for page in pages])
        self.pages = OrderedDict(
            (sequence, [*self.pages.get(sequence, ()), *new[sequence]]) for sequence in lengths
        )

    def views(self, cache: Caches, batch: int) -> Caches:
        keys, values = (part[:-1].unflatten(0, (-1, self.page_size)) for part in cache)
        return keys, values


class InferenceParams:
    """Keys and values of earlier tokens, and the state of the current step.

    Call :meth:`pre_step` once before each forward of the model, and pass the object to every layer as
    ``inference_params``.

    Args:
        max_batch_size, max_sequence_length: largest number of sequences, and tokens of each, prompt and answer.
        num_heads_kv, head_dim_k, dtype: of the keys; None: those of the first key.
        head_dim_v: of the values; None: the keys' if given.
        is_paged: keep the tokens in ``total_num_pages`` pages of ``page_size``; default: as many pages as all sequences
            at full length need.
        max_ctx_len: largest number of new tokens of a sequence in one step; needed for packed tokens ("thd").
        qkv_format: the format of the layers' calls.
        custom_cache_manager: a :class:`KVCacheManager` that stores the tokens.
        device: device of the cache; default: the accelerator, or the CPU without one.
    Raises:
        TypeError: ``dtype`` is no floating-point dtype of 16 bits or more.
        ValueError: a size is not positive, ``is_paged`` lacks ``page_size``, "thd" lacks ``max_ctx_len``, or the format
            is unknown.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: KVCacheManager | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        given = dict(
            max_batch_size=max_batch_size, max_sequence_length=max_sequence_length, num_heads_kv=num_heads_kv,
            head_dim_k=head_dim_k, head_dim_v=head_dim_v, total_num_pages=total_num_pages, page_size=page_size,
            max_ctx_len=max_ctx_len,
        )  # fmt: skip
        needed = {"max_batch_size", "max_sequence_length"}
        positive(**{label: size for label, size in given.items() if size is not None or label in needed})
        flags(is_paged=is_paged)
        parameter_dtype(None, dtype)
        if custom_cache_manager is not None and not isinstance(custom_cache_manager, KVCacheManager):
            raise TypeError(
                f"custom_cache_manager is {shown(custom_cache_manager)}; use a KVCacheManager or None"
            )
        if is_paged and page_size is None:
            raise ValueError("is_paged=True needs page_size, the tokens of a page")
        if checked_format(qkv_format) == "thd" and max_ctx_len is None:
            raise ValueError(
                "qkv_format='thd' needs max_ctx_len, the most new tokens of a sequence in one step"
            )
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.is_paged, self.max_ctx_len, self.qkv_format = is_paged, max_ctx_len, qkv_format
        self.device = default_device() if device is None else checked_device(device)
        sizes = (
            max_batch_size,
            max_sequence_length,
            num_heads_kv,
            head_dim_k,
            head_dim_v,
            dtype,
            self.device,
        )
        if custom_cache_manager is not None:
            self.cache_manager = custom_cache_manager
        elif is_paged:
            assert page_size is not None
            total = total_num_pages or max_batch_size * -(-max_sequence_length // page_size)
            self.cache_manager = PagedKVCacheManager(*sizes, page_size=page_size, total_num_pages=total)
        else:
            self.cache_manager = KVCacheManager(*sizes)
        batch, pages = max_batch_size, self.cache_manager.pages_per_sequence
        with torch.inference_mode(False):
            self._lengths = torch.zeros(3 * batch + 2, dtype=torch.int32, device=self.device)
            self._page_table = torch.zeros(batch, pages, dtype=torch.int32, device=self.device)
        for buffer in (self._lengths, self._page_table):
            keep_address(buffer)
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()
        self.batch_size = 0

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.cache_manager.reset()
        self.sequences, self.batch_size = OrderedDict(), 0

    def allocate_memory(
        self, layer_number: int, key: Tensor | None = None, value: Tensor | None = None
    ) -> None:
        """Make the memory of a layer; layers do it in their first forward, unless that is compiled.

        Args:
            key, value: of the layer, for the sizes that the constructor was not told.
        Raises:
            ValueError: unknown sizes.
        """
        self.cache_manager.allocate_memory(layer_number, key, value)

    def has_layer(self, layer_number: int) -> bool:
        """Return whether a layer has its memory."""
        return layer_number in self.cache_manager.caches

    @torch.no_grad()
    def pre_step(self, step_dict: Mapping[Hashable, int]) -> OrderedDict[Hashable, int]:
        """Set the sequences of the next forward and their numbers of new tokens.

        Sequences that are not named are evicted. The batch has the order of ``step_dict``.

        Args:
            step_dict: sequence -> new tokens.
        Returns:
            sequence -> tokens after the step.
        Raises:
            RuntimeError: the cache is full; nothing has changed then.
            ValueError: no sequence, or negative counts.
        """
        if not step_dict or min(step_dict.values()) < 0:
            raise ValueError(
                f"step_dict is {dict(step_dict)}; give the new tokens, from 0 on, of each sequence"
            )
        before = {sequence: self.sequences.get(sequence, 0) for sequence in step_dict}
        after = OrderedDict((sequence, before[sequence] + new) for sequence, new in step_dict.items())
        too_long = {sequence: n for sequence, n in after.items() if n > self.max_sequence_length}
        if too_long or len(after) > self.max_batch_size:
            raise RuntimeError(
                f"the KV cache is full: {len(after)} sequences of at most max_batch_size={self.max_batch_size}, "
                f"longer than max_sequence_length={self.max_sequence_length}: {too_long or 'none'}"
            )
        self.cache_manager.check_space(after)
        self.cache_manager.assign(after)
        self.sequences, self.batch_size = after, len(after)
        self._tell_device(list(before.values()), list(step_dict.values()))
        return after

    def _tell_device(self, before: list[int], new: list[int]) -> None:
        """Write lengths and pages of the step into the buffers that the layers read; one copy each."""
        count, rest = len(new), self.max_batch_size - len(new)
        cu_q, cu_kv = [0], [0]
        for old, more in zip(before, new):
            cu_q.append(cu_q[-1] + more)
            cu_kv.append(cu_kv[-1] + old + more)
        lengths = [*before, *[0] * rest, *cu_q, *cu_q[-1:] * rest, *cu_kv, *cu_kv[-1:] * rest]
        width = self._page_table.shape[1]
        zeros = [self.cache_manager.total_num_pages] * width
        pages = [(own + zeros)[:width] for own in self.cache_manager.pages.values()]
        self._lengths.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)
        self._page_table[:count].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)

    def get_seqlens_pre_step(self) -> Tensor:
        """Return (batch,) int32 on the device: tokens of each sequence before the step."""
        return self._lengths[: self.batch_size]

    @property
    def cu_seqlens_q(self) -> Tensor:
        """(batch + 1,) int32 on the device: sums of the new tokens."""
        return self._lengths[self.max_batch_size :][: self.batch_size + 1]

    @property
    def cu_seqlens_kv(self) -> Tensor:
        """(batch + 1,) int32 on the device: sums of the tokens, earlier and new."""
        return self._lengths[2 * self.max_batch_size + 1 :][: self.batch_size + 1]

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keep the new keys and values of a layer. Nothing waits for the device.

        Args:
            new_k, new_v: in ``qkv_format``; (b, s, heads, d) has a sequence's new tokens first, then padding.
        Returns:
            keys (batch, max_sequence_length, heads, d), values, None; or, in pages, (pages + 1, page_size, heads, d),
            values and the page table (batch, pages of a sequence) in int32.
        Raises:
            KeyError: the layer has no memory.
            ValueError: another batch than that of :meth:`pre_step`.
        """
        if not self.has_layer(layer_number):
            raise KeyError(
                f"the KV cache has no memory for layer {layer_number}; call allocate_memory({layer_number}) first"
            )
        if qkv_format == "sbhd":
            new_k, new_v = new_k.transpose(0, 1), new_v.transpose(0, 1)
        packed = qkv_format == "thd"
        if not self.batch_size or (not packed and new_k.shape[0] != self.batch_size):
            raise ValueError(
                f"the new keys are {shape_of(new_k)}, in {qkv_format}; the step has {self.batch_size} sequences, "
                "call pre_step with those of the batch"
            )
        slots = self._slots(new_k.shape[0] if packed else new_k.shape[1], packed)
        if not packed:
            new_k, new_v = new_k.flatten(0, 1), new_v.flatten(0, 1)
        keys, values = self.cache_manager.step(layer_number, new_k, new_v, slots, self.batch_size)
        return keys, values, self._page_table[: self.batch_size] if self.is_paged else None

    def _slots(self, tokens: int, packed: bool) -> Tensor:
        """Return where each new token goes: (tokens,) of packed ones, else (batch * tokens,)."""
        sequence, place, valid = self.places(tokens, packed)
        size, pages = self.cache_manager.page_size, self.cache_manager.pages_per_sequence
        position = self._lengths[sequence] + place
        page = self._page_table[sequence, (position // size).clamp(max=pages - 1)]
        nowhere = (self.cache_manager.total_num_pages + self.cache_manager.zero_pages) * size
        return torch.where(valid, page * size + position % size, nowhere).flatten()

    def places(self, tokens: int, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return each new token's row in the batch, its place in the row, and whether a token is there.

        Args:
            tokens: packed ones, else those of a row with its padding.
        Returns:
            three tensors, (tokens,) or (batch, tokens).
        """
        index = torch.arange(tokens, device=self.device)
        begins = self.cu_seqlens_q
        if packed:
            sequence = torch.searchsorted(begins[1:].contiguous(), index, right=True)
            valid = sequence < self.batch_size
            sequence = sequence.clamp(max=self.batch_size - 1)
            return sequence, index - begins[sequence], valid
        sequence = torch.arange(self.batch_size, device=self.device)[:, None].expand(-1, tokens)
        return sequence, index.expand(self.batch_size, -1), index < begins.diff()[:, None]

    def token_of(self, tokens: int) -> Tensor:
        """Return (batch, max_ctx_len): which of the packed new tokens stands where in a row; any one where there is
        none.

        Raises:
            ValueError: ``max_ctx_len`` is not known.
        """
        if self.max_ctx_len is None:
            raise ValueError(
                "packed tokens ('thd') in a KV cache need max_ctx_len, the most new tokens of a sequence in one step; "
                "give it to InferenceParams"
            )
        place = torch.arange(self.max_ctx_len, device=self.device)
        return (self.cu_seqlens_q[:-1, None] + place).clamp(max=tokens - 1)

    def convert_paged_to_nonpaged(self, layer_number: int) -> Caches:
        """Return keys and values of a layer, (batch, tokens, heads, d): copies of its pages, or what a contiguous cache
        has.

        Raises:
            KeyError: the layer has no memory.
        """
        if not self.has_layer(layer_number):
            raise KeyError(f"the KV cache has no memory for layer {layer_number}")
        cache: Any = self.cache_manager.caches[layer_number]
        keys, values = self.cache_manager.views(cache, self.batch_size)
        if not self.is_paged:
            return keys, values
        table = self._page_table[: self.batch_size]
        return keys[table].flatten(1, 2), values[table].flatten(1, 2)
