"""Wrong keywords of public functions and classes, whose message names the nearest one, and arguments too few or many.

Python names the argument alone, before any line of the function runs. So :func:`check_public` puts a function that
compares names in front of each public one, at the doors that users call; the package's own calls do not pass it.
A module's ``forward`` is called too often for a function in front: it takes ``**unknown`` and refuses what is in it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any, NoReturn

from torch import nn

from ._checks import shown

_PACKAGE = __name__.partition(".")[0]
_LISTED = 200  # characters of the names that a message lists
RECIPES: list[str] = []
"""Names of recipes, which ``recipe`` adds."""
CHOICES: dict[str, tuple[str, ...]] = {}
"""Texts that an argument takes, by its name, which the rooms that know them add."""
_CHECKED: dict[Any, Any] = {}  # functions, and constructors that check -> what checks
_FOREIGN = {
    "DelayedScaling.interval": "Transformer Engine no longer has it: scales are renewed in every step; leave it out",
    "autocast.dtype": "that is torch.autocast, another context; write autocast(recipe='current')",
    "autocast.device_type": "that is torch.autocast, another context; write autocast(recipe='current')",
    "set_recipe.only": 'name the layers in a table of recipes, as in {"layers.*.mlp": "mxfp8"}',
    "set_recipe.skip": 'name the layers in a table of recipes, as in {"": "mxfp8", "lm_head": None}',
    "FusedAdam.moment_dtype": "the moments are two: exp_avg_dtype= and exp_avg_sq_dtype=",
    "fused": "narrowcast's optimizers are always fused; leave it out",
    "foreach": "narrowcast's optimizers are always fused; leave it out",
    "module_filter_fn": "use only= or skip=: names, patterns, or functions of (name, module), the other order",
}
"""Keywords of other packages, or of other functions, and what to do about them."""
_EXAMPLES = {"recipe": "'current'", "format": "'compressed-tensors'"}
"""Values of arguments for a message; of others it has the name."""
_INPUTS = ("input", "x")
"""Names of an input in torch.nn: of ``nn.Linear`` and ``nn.LayerNorm``, and of ``nn.RMSNorm``."""
_FURTHER = ("serving",)
"""Public subpackages of narrowcast that ``import *`` does not bring."""
_SYNONYMS = {
    "learning_rate": "lr",
    "include": "only",
    "interval": "every",
    **dict.fromkeys(("exclude", "ignore", "modules_to_not_convert", "skip_modules"), "skip"),
}
_GUESSED = {
    "quantize_": "narrowcast.convert converts a model",
    "prepare": "narrowcast.convert converts a model",
    "train": "train in your own loop after narrowcast.convert(model, 'current'), or run narrowcast train",
    "convert_to_float8_training": "it is in narrowcast.compat.torchao_float8",
    "Float8LinearConfig": "it is in narrowcast.compat.torchao_float8",
}
"""Names that users of other packages try, and what to use."""


def check(name: str, accepted: Collection[str], keywords: Collection[str]) -> None:
    """Check keywords that a call was given.

    Args:
        name: of the function or class.

    Raises:
        TypeError: one is not accepted; the message has the nearest name, or the accepted ones.
    """
    for keyword in keywords:
        if keyword not in accepted:
            raise TypeError(f"{name} takes no {shown(keyword)}; {_remedy(name, keyword, accepted)}")


def _check_given(
    name: str, required: tuple[str, ...], named: tuple[str, ...], given: int, keywords: Collection[str]
) -> None:
    """Check that a call has what has no default.

    Args:
        required: names without a default, in order. named: those that only a keyword gives.
        given: how many arguments came without a name.

    Raises:
        TypeError: one is missing; the message has a call with all of them.
    """
    missing = [one for one in (*required[given:], *named) if one not in keywords]
    if missing:
        call = ", ".join(
            [_EXAMPLES.get(one, one) for one in required]
            + [f"{one}={_EXAMPLES.get(one, one)}" for one in named]
        )
        known = "".join(f"; {one} is one of {', '.join(CHOICES[one])}" for one in missing if one in CHOICES)
        raise TypeError(f"{name} lacks {', '.join(missing)}; call {name}({call}){known}")


def _check_places(
    name: str, required: tuple[str, ...], keyword: str, numbers: tuple[int, ...], args: tuple[Any, ...]
) -> None:
    """Refuse a recipe in the place of a number or flag.

    Args:
        keyword: of the recipe.
        numbers: the places.

    Raises:
        TypeError: there is one; the message has the call with its keyword.
    """
    for place in numbers:
        value = args[place] if place < len(args) else None
        if value is None or isinstance(value, (int, float)) or not _is_recipe(value):
            continue
        given = shown(value) if isinstance(value, str) else f"{type(value).__name__}(...)"
        call = ", ".join([*required, f"{keyword}={given}"])
        raise TypeError(f"{name} got {given} as a positional argument; write {name}({call})")


def _check_order(name: str, required: tuple[str, ...], args: tuple[Any, ...]) -> None:
    """Refuse a model that comes after another argument.

    Raises:
        TypeError: it does; the message has the call in its order.
    """
    if isinstance(args[0], nn.Module) or not isinstance(args[1], nn.Module):
        return
    call = ", ".join(_EXAMPLES.get(one, one) for one in required)
    raise TypeError(f"{name} takes the model first and got {shown(args[0])}; call {name}({call})")


def _refuse_more(name: str, function: Any, taken: tuple[str, ...], more: Any) -> None:
    """Refuse an argument that came without a name after all that may.

    Args:
        taken: the names of those that may.

    Raises:
        TypeError: always; the message has the names that it may be meant for.
    """
    named = [
        f"{one}=" for one in _accepted(function) if one not in (*taken, "self") and not one.startswith("_")
    ]
    names, before = _listed(named), ", ".join(taken) or "nothing"
    remedy = f"name it: {names}" if named else "leave it out"
    raise TypeError(f"{name} takes {before} by position, and {shown(more)} came as well; {remedy}")


def _listed(names: list[str]) -> str:
    text = ", ".join(names)
    return text if len(text) <= _LISTED else text[:_LISTED].rpartition(",")[0] + ", ..."


def _remedy(name: str, keyword: str, accepted: Collection[str]) -> str:
    for known in (keyword, f"{name}.{keyword}", f"{name}.{_SYNONYMS.get(keyword)}"):
        if known in _FOREIGN:
            return _FOREIGN[known]
    near = [_SYNONYMS[keyword]] if _SYNONYMS.get(keyword) in accepted else []
    near += difflib.get_close_matches(keyword, accepted, 1) or [one for one in accepted if keyword in one]
    if near:
        return f"did you mean {near[0]}=?"
    return f"it takes {_listed([one for one in accepted if not one.startswith('_')])}"


def refuse_keywords(module: Any, unknown: Collection[str]) -> None:
    """Refuse keywords that a module's ``forward`` was given and does not know.

    Raises:
        TypeError: always, as :func:`check` does.
    """
    ours = (base for base in type(module).__mro__ if base.__module__.partition(".")[0] == _PACKAGE)
    forward = next(vars(base)["forward"] for base in ours if "forward" in vars(base))
    check(f"{type(module).__name__}.forward", _accepted(forward)[1:], unknown)


def given_input(module: Any, inp: Any, unknown: dict[str, Any]) -> Any:
    """Return the input of a module by its name in torch.nn, among keywords that its ``forward`` does not know.

    Raises:
        TypeError: there are other keywords, or the input has two names.
    """
    others = [name for name in unknown if name not in _INPUTS]
    if others:
        refuse_keywords(module, others)
    names = [*(["inp"] if inp is not None else []), *unknown]
    if len(names) > 1:
        raise TypeError(
            f"{type(module).__name__}.forward got {' and '.join(names)}, one input; give one of them"
        )
    return unknown[names[0]]


def check_public(package: ModuleType) -> None:
    """Check the keywords of all that a package and its public subpackages export and have loaded.

    What they do not have raises an AttributeError with the nearest of their names.
    """
    for name, value in exported(package):
        checked(name, value)
    for room in _rooms(
        package
    ):  # set here, as type checkers take a module that defines it to have every name
        vars(room).setdefault("__getattr__", functools.partial(refuse_attribute, room.__name__))


def _rooms(package: ModuleType) -> Iterator[ModuleType]:
    """Yield a package and its public subpackages that list what they export."""
    yield package
    for name in (*package.__all__, *_FURTHER):
        value = vars(package).get(name)
        if isinstance(value, ModuleType) and "__all__" in vars(value):
            yield from _rooms(value)


def exported(package: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every function and class that a package and its subpackages export and have loaded."""
    for room in _rooms(package):
        for name in room.__all__:
            value = vars(room).get(name)
            if inspect.isroutine(value) or isinstance(value, type):
                yield name, value


def refuse_attribute(module: str, name: str) -> NoReturn:
    """Refuse a name that a package does not have.

    Args:
        module: the package's name.

    Raises:
        AttributeError: always; the message has the nearest name of the whole library.
    """
    told = f"module {shown(module)} has no attribute {shown(name)}"
    if name.startswith("_"):  # asked for by tools
        raise AttributeError(told)
    if name in _GUESSED:
        raise AttributeError(f"{told}; {_GUESSED[name]}")
    if name == "list_recipes":
        raise AttributeError(f"{told}; the names of recipes are {', '.join(RECIPES)}")
    known: dict[str, str] = {}
    for room in sorted(_rooms(sys.modules[_PACKAGE]), key=lambda room: room.__name__ != module):
        for one in room.__all__:
            known.setdefault(one.lower(), f"{room.__name__}.{one}")
    near = difflib.get_close_matches(name.lower(), known, 1, 0.75)
    if not near and len(name) >= 4:  # such as MXFP8
        near = [one for one in known if one.startswith(name.lower())]
    if near:
        raise AttributeError(f"{told}; did you mean {known[near[0]]}?")
    kind = re.search("([A-Z][a-z]+)[A-Z]?$", name)  # such as Scaling, or Adam of AdamW
    alike = [one for one in sys.modules[module].__all__ if kind and one.endswith(kind[1])]
    raise AttributeError(f"{told}; it has {_listed(alike)}" if alike else told)


def checked(name: str, value: Any) -> Any:
    """Return a function or class that checks its keywords; a package that exports it has this one from now on."""
    if not isinstance(value, type):
        return _checked_function(name, value)
    for base in value.__mro__:
        if base.__module__.partition(".")[0] == _PACKAGE and "__init__" in vars(base):
            _check_init(base)
    return value


def _accepted(function: Any) -> tuple[str, ...]:
    """Return the names that a function takes as keywords; none if it takes any."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    last = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[code.co_posonlyargcount : last]
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return names
    further = code.co_varnames[last + bool(code.co_flags & inspect.CO_VARARGS)]
    kind = str(function.__annotations__.get(further, ""))
    if kind == "NoReturn":  # it refuses them itself
        return names
    if not kind.startswith("Unpack["):
        return ()
    declared = function.__globals__[kind.removeprefix("Unpack[").removesuffix("]")]  # a TypedDict
    return (*names, *sorted(declared.__required_keys__ | declared.__optional_keys__))


def named(function: Any) -> tuple[str, ...]:
    """Return the names that a call of a function or module may give; none if it may give any, or that is not known."""
    forward = getattr(type(function), "forward", None)
    function = function if forward is None else forward
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        refuses = "NoReturn" in function.__annotations__.values()  # those that are no input's name
        names = (*names, *_INPUTS) if refuses else ()
    return tuple(name for name in names if name != "self")


def _required(function: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names without a default: those that a function takes by position, and those only by keyword."""
    function = inspect.unwrap(function)
    code = function.__code__
    named = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    return (
        code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())],
        tuple(name for name in named if name not in (function.__kwdefaults__ or ())),
    )


def _taken(function: Any) -> tuple[str, ...] | None:
    """Return the names that a function takes by position; None if it takes any number."""
    code = inspect.unwrap(function).__code__
    return None if code.co_flags & inspect.CO_VARARGS else code.co_varnames[: code.co_argcount]


def _numbers(function: Any, first: int) -> tuple[str, tuple[int, ...]]:
    """Return the keyword of a function's recipe, "" without one, and the places of numbers and flags.

    Args:
        first: of the places.
    """
    function = inspect.unwrap(function)
    names = _accepted(function)
    keyword = next((one for one in ("recipe", "fp8_recipe") if one in names), "")
    kinds = [function.__annotations__.get(one, "").partition(" |")[0] for one in (_taken(function) or ())]
    places = (place for place, kind in enumerate(kinds[first:]) if kind in ("bool", "int", "float"))
    return keyword, tuple(places) if keyword else ()


def _is_recipe(value: Any) -> bool:
    """Return whether a value is a recipe, or the name of one."""
    if isinstance(value, str):
        return value in RECIPES
    return any(base.__module__ == f"{_PACKAGE}.recipe.base" for base in type(value).__mro__)


def _checked_function(name: str, function: Any) -> Any:
    accepted = _accepted(function)
    if not accepted:
        return function
    (required, named), taken = _required(function), _taken(function)
    most = sys.maxsize if taken is None else len(taken)
    keyword_of_recipe, numbers = _numbers(function, 0)
    model_first = required[:1] == ("model",)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for keyword in kwargs:
            if keyword not in accepted:
                check(name, accepted, kwargs)
        if model_first and len(args) > 1:
            _check_order(name, required, args)
        if named or len(args) < len(required):
            _check_given(name, required, named, len(args), kwargs)
        if len(args) > most:
            _refuse_more(name, function, taken or (), args[most])
        if args and numbers:
            _check_places(name, required, keyword_of_recipe, numbers, args)
        return function(*args, **kwargs)

    checked = _CHECKED.setdefault(
        function, checked
    )  # one for all names of a function, as pickle and users expect
    # In the packages, where users find it, and where it is defined, where pickle does.
    for path, module in list(sys.modules.items()):
        public = path.partition(".")[0] == _PACKAGE and "__path__" in vars(module)
        if (public or path == function.__module__) and vars(module).get(name) is function:
            setattr(module, name, checked)
    return checked


def _check_init(cls: type) -> None:
    init = vars(cls)["__init__"]
    accepted = _accepted(init)[1:]
    if not accepted or init in _CHECKED:
        return
    (required, named), taken = _required(init), _taken(init)
    required, taken = required[1:], taken and taken[1:]
    most = sys.maxsize if taken is None else len(taken)
    keyword_of_recipe, numbers = _numbers(init, 1)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for keyword in kwargs:
            if keyword not in accepted:
                check(type(self).__name__, accepted, kwargs)
        if named or len(args) < len(required):
            _check_given(type(self).__name__, required, named, len(args), kwargs)
        if len(args) > most:
            _refuse_more(type(self).__name__, init, taken or (), args[most])
        if args and numbers:
            _check_places(type(self).__name__, required, keyword_of_recipe, numbers, args)
        init(self, *args, **kwargs)

    _CHECKED[checked] = checked
    cls.__init__ = checked
