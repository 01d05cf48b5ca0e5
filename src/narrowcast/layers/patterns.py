"""Selection of a model's modules by name, by pattern, or by a function."""

from __future__ import annotations

import difflib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .._checks import a_kind, shown

Selector = str | Callable[[str, nn.Module], bool]
"""A pattern of module names, or a function of (name, module)."""

Selectors = Selector | Sequence[Selector] | None


def selected_names(
    selectors: Selector | Sequence[Selector],
    modules: Mapping[str, nn.Module],
    model: nn.Module,
    kind: str,
    argument: str,
) -> list[str]:
    """Return the names of the modules that any of the selectors stands for.

    Args:
        selectors: one or several patterns, as :func:`narrowcast.set_recipe` reads them, and functions of
            (name, module), which may choose nothing.
        modules: those to choose from, by name.
        model: that they are in.
        kind: what they are, for the message.
        argument: that holds the selectors, for the message.
    Raises:
        ValueError: a pattern without a match.
        TypeError: a selector of another type.
    """
    listed: Any = [selectors] if isinstance(selectors, str) or callable(selectors) else selectors
    if not isinstance(listed, Iterable) or isinstance(listed, Tensor):
        raise TypeError(f"{argument}: {shown(selectors)} chooses no modules; {_ACCEPTED}")
    found: list[str] = []
    for one in listed:
        if isinstance(one, str):
            found += matching_names(one, modules, model, kind, argument)
        elif isinstance(one, type):
            how = f"write lambda name, module: isinstance(module, {one.__name__})"
            raise TypeError(f"{argument}: {shown(one)} is no function of (name, module); {how}")
        elif isinstance(one, nn.Module):
            names = [shown(name) for name, module in model.named_modules() if module is one]
            how = f"its name: {names[0]}" if names else "the name of a module of the model"
            raise TypeError(f"{argument}: {a_kind(one)} is no function of (name, module); write {how}")
        elif callable(one):
            _check_order(one, argument)
            found += [name for name, module in modules.items() if _chooses(one, name, module)]
        else:
            raise TypeError(f"{argument}: {shown(one)} chooses no modules; {_ACCEPTED}")
    return found


def _check_order(selector: Callable[..., Any], argument: str) -> None:
    """Refuse a function whose arguments are named in torchao's order: a name that is no name chooses in silence.

    Raises:
        TypeError: they are.
    """
    try:
        first, second = [*inspect.signature(selector).parameters][:2]
    except (TypeError, ValueError):  # of C, or of one argument, which the call names
        return
    if first in ("m", "mod", "module") or second in ("fqn", "name"):
        raise TypeError(
            f"{argument} has a function of ({first}, {second}), torchao's order; write it with the name first: "
            "lambda name, module: ..."
        )


def _chooses(selector: Callable[[str, nn.Module], Any], name: str, module: nn.Module) -> bool:
    try:
        return bool(selector(name, module))
    except (TypeError, AttributeError) as error:  # of arguments in the other order, or another number of them
        called = f"{getattr(selector, '__name__', type(selector).__name__)}({shown(name)}, {type(module).__name__})"
        raise TypeError(
            f"the selector {called} raised {type(error).__name__}: {str(error)[:80]}; write a function of "
            "(name, module), in this order"
        ) from error


_ACCEPTED = "use a pattern of names such as '**.lm_head', a function of (name, module), or a list of these"


def matching_names(
    pattern: str, names: Iterable[str], model: nn.Module, kind: str, argument: str
) -> list[str]:
    """Return the names that a pattern stands for, as :func:`narrowcast.set_recipe` reads patterns.

    Args:
        names: of modules of ``model``.
        kind: what they are, for the message.
        argument: that holds the pattern, for the message.
    Raises:
        ValueError: none.
    """
    names = list(names)
    matching = _regular_expression(pattern)
    found = [name for name in names if matching.match(name)]
    if not found and not pattern:
        remedy = of_torch_ao(model) or "pass the model that holds the linear layers"
        raise ValueError(f"this {type(model).__name__} has no {kind}; {remedy}")
    if not found:
        raise ValueError(
            f"{argument}: {shown(pattern)} matches no {kind} of this {type(model).__name__}; "
            f"{_hint(pattern, names, model)}"
        )
    return found


def of_torch_ao(model: nn.Module) -> str:
    """Return what to do about a model whose linear layers PyTorch has quantized, "" if it has not."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("torch.ao.nn") and "Linear" in kind.__name__:
            return (
                f"torch.ao.quantization has made {shown(name or 'the model')} a quantized {kind.__name__}; load the "
                "weights into the plain model, and convert that instead"
            )
    return ""


def _hint(pattern: str, names: list[str], model: nn.Module) -> str:
    """Return the nearest alternatives."""
    if not names:
        return "it has none"
    if re.search(r"^\.|[\\^$+?|(\[{]", pattern):
        words = [f"**.{word}" for word in re.findall(r"[^\W\d]\w*", pattern)]
        working = [word for word in words if any(map(_regular_expression(word).match, names))]
        such = f", as in {shown(working[-1])}" if working else ""
        return f"patterns are no regular expressions: * is one part of a name, ** any number{such}"
    anywhere = _regular_expression(f"**.{pattern}")
    if any(map(anywhere.match, names)):
        return f"for that name anywhere, write '**.{pattern}'"
    matching = _regular_expression(pattern)
    for name, module in model.named_modules():
        if matching.match(name):
            return f"it matches {shown(name)} ({type(module).__name__}), which is none"
    patterns = _patterns(names)
    written = re.sub(_NUMBER, "*", pattern).removeprefix("**.")
    if patterns.get(written) == written:  # only its numbers are not there
        depth = written.count(".") + 1
        found = (name for name in names if _regular_expression(written).match(name))
        return f"it has: {_shown(dict.fromkeys('.'.join(name.split('.')[:depth]) for name in found), 8)}"
    alike = difflib.get_close_matches(written, patterns, n=3, cutoff=0.5)
    if alike:
        return f"the nearest: {', '.join(_numbered(patterns[one], pattern, names) for one in alike)}"
    return f"it has: {_shown(dict.fromkeys(map(_short_pattern, filter(None, names))), 8)}"


_NUMBER, _STAR = r"(?<![^.])\d+(?![^.])", r"(?<![^.])\*(?![^.])"  # as whole parts of a name


def _patterns(names: Iterable[str]) -> dict[str, str]:
    """Return patterns of the modules, and of those around them, by the part of the name that each is for."""
    patterns: dict[str, str] = {}
    for name in dict.fromkeys(re.sub(_NUMBER, "*", name) for name in names):
        parts = name.split(".")
        for first, last in itertools.combinations(range(len(parts) + 1), 2):
            part = ".".join(parts[first:last])
            if not first:
                patterns[part] = part
            elif parts[first] != "*":
                patterns.setdefault(part, f"**.{part}")
    return patterns


def _numbered(found: str, pattern: str, names: Iterable[str]) -> str:
    """Return a pattern with the numbers of ``pattern`` in the place of its stars, if that matches."""
    numbers = re.findall(_NUMBER, pattern)
    if len(numbers) == len(re.findall(_STAR, found)):
        exact = re.sub(_STAR, lambda _: numbers.pop(0), found)
        if any(map(_regular_expression(exact).match, names)):
            return shown(exact)
    return shown(found)


def _short_pattern(name: str) -> str:
    head, _, last = name.rpartition(".")
    return f"**.{last}" if head and not last.isdigit() else name


def _shown(names: Iterable[str], most: int) -> str:
    """Return names for a message: where there are more than ``most``, the first of those that differ in numbers."""
    listed = list(names)
    if len(listed) <= most:
        return ", ".join(map(repr, listed))
    different: dict[str, str] = {}
    for name in listed:
        different.setdefault(re.sub(r"\d+", "*", name), name)
    return f"{', '.join(map(repr, list(different.values())[:most]))} and others, {len(listed)} in all"


def _regular_expression(pattern: str) -> re.Pattern[str]:
    parts = {"**.": r"(?:.*\.)?", "**": r".*", "*": r"[^.]*"}
    # at the beginning of a part, "**." matches no part, too
    pieces = re.split(r"((?:(?<=\.)|^)\*\*\.|\*\*|\*)", pattern)
    body = "".join(parts.get(piece, re.escape(piece)) for piece in pieces)
    return re.compile(rf"(?:{body})(?:\..*)?$" if pattern else r".*$")
