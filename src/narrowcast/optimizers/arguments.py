"""Checks of what optimizers and list operations are called with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from .._checks import a_kind, in_range, shown, some, tensor, typed

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


def checked_parameters(params: Any) -> list[Any]:
    """Return the parameters, groups or named parameters of an optimizer.

    Raises:
        ValueError: there are none.
        TypeError: there are others among them, or none can be.
    """
    remedy = "pass model.parameters(), or a list of groups"
    if isinstance(params, nn.Module):  # some are iterable
        raise TypeError(f"params is {a_kind(params)}; pass its parameters: model.parameters()")
    if isinstance(params, (str, Tensor, dict)) or not isinstance(params, Iterable):
        raise TypeError(f"params is {typed(params)}; {remedy}")
    listed = list(params)
    if not listed:
        raise ValueError(
            "params is empty; pass model.parameters() of a model that has some, anew for each optimizer: a generator "
            "is read once"
        )
    for one in listed:
        if not isinstance(one, (Tensor, dict, tuple)):
            raise TypeError(f"params has {typed(one)}; {remedy}")
    return listed


def check_rate(label: str, value: Any) -> None:
    """Check a rate or another number of an optimizer; a tensor of one element is a number on the device.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or a tensor of several elements.
    """
    if not isinstance(value, Tensor):
        in_range(label, value, "use a number that is not negative")
    elif value.numel() != 1:
        raise ValueError(
            f"{label} is a tensor of shape {tuple(value.shape)}; use a number, or a tensor of one element"
        )


def check_lists(noop_flag: Any, tensor_lists: Any, least: int) -> None:
    """Check the flag and the lists of a list operation.

    Args:
        least: how many lists it reads.
    Raises:
        TypeError: no flag, or other lists.
    """
    tensor("noop_flag", noop_flag)
    if noop_flag.numel() != 1:
        raise ValueError(f"noop_flag has shape {tuple(noop_flag.shape)}; use one element")
    lists = tensor_lists if isinstance(tensor_lists, (list, tuple)) else ()
    fits = len(lists) >= least and all(isinstance(one, (list, tuple)) for one in lists)
    if not fits or not all(isinstance(x, Tensor) for one in lists for x in one):
        raise TypeError(f"tensor_lists is {typed(tensor_lists)}; pass {least} or more lists of tensors")


def check_state_dict(state_dict: Any, groups: list[dict[str, Any]]) -> None:
    """Check that a state dict to load is that of an optimizer of the same parameters.

    Args:
        groups: the parameter groups of the optimizer that loads it.
    Raises:
        TypeError: it is no dict, or has state that is no tensor.
        ValueError: it lacks a part, or is of other groups or shapes.
    """
    remedy = "pass what the state_dict() of an optimizer returned"
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict is {typed(state_dict)}; {remedy}")
    for part, kind in (("state", Mapping), ("param_groups", (list, tuple))):
        if part not in state_dict:
            raise ValueError(
                f"state_dict lacks {shown(part)} and has {some([*map(str, state_dict)])}; {remedy}"
            )
        if not isinstance(state_dict[part], kind):
            raise TypeError(f"{shown(part)} of state_dict is {typed(state_dict[part])}; {remedy}")
    lacking = next((one for one in state_dict["param_groups"] if "params" not in one), None)
    if lacking is not None:
        raise ValueError(f"a group of state_dict has no 'params': {shown(lacking)}; {remedy}")
    sizes, own = ([len(group["params"]) for group in each] for each in (state_dict["param_groups"], groups))
    if sizes != own:
        raise ValueError(
            f"state_dict is of groups of {shown(sizes)} parameters, and the optimizer has {shown(own)}; make it of the "
            "parameters that it was saved with, in the same groups"
        )
    saved = (index for group in state_dict["param_groups"] for index in group["params"])
    differ: list[str] = []
    for index, p in zip(saved, (p for group in groups for p in group["params"])):
        for name in (*MOMENTS, "master_param", "momentum_buffer"):
            value = (state_dict["state"].get(index) or {}).get(name)
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{name} of parameter {index} is {typed(value)}; load tensors")
            if value is not None and value.shape != p.shape:
                differ.append(
                    f"{name} of parameter {index} is {tuple(value.shape)}, the parameter {tuple(p.shape)}"
                )
    if differ:
        more = f", and {len(differ) - 1} more" if len(differ) > 1 else ""
        raise ValueError(
            f"state_dict is of other shapes: {differ[0]}{more}; load the state of an optimizer of this model"
        )


def check_loaded(state_dict: dict[str, Any], decoupled: bool) -> None:
    """Check a state dict for Adam to load.

    Raises:
        ValueError: the state of another optimizer, or of options that this one does not have.
    """
    for group in state_dict["param_groups"]:
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise ValueError(
                    f"the state dict is of an optimizer with {option}=True, which FusedAdam has not"
                )
        saved = group.get("decoupled_weight_decay")
        if saved is not None and saved != decoupled and group.get("weight_decay"):
            kinds = {True: "AdamW", False: "Adam"}
            raise ValueError(
                f"the state dict is of torch.optim.{kinds[saved]} with weight_decay={group['weight_decay']}, and "
                f"this optimizer decays as {kinds[decoupled]}; make it with adam_w_mode={saved}"
            )
        for index in group["params"]:
            state = state_dict["state"].get(index)
            if state and not ({*MOMENTS} <= state.keys() and (STEP in state or STEP in group)):
                raise ValueError(
                    f"the state of parameter {index} is {', '.join(map(str, state))}; FusedAdam loads "
                    "exp_avg, exp_avg_sq and step, as torch.optim.Adam, AdamW and FusedAdam save them"
                )


def check_numbers(lr: Any, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Check what a step of Adam takes.

    Raises:
        ValueError: a number is negative, or betas are outside [0, 1).
    """
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        check_rate(name, value)
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas is {shown(betas)}; use two numbers from 0 to below 1")
    for beta in betas:
        if not isinstance(beta, Tensor):
            in_range("betas", beta, "use two numbers from 0 to below 1", below=1.0)
