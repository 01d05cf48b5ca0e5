"""The words that options take, and the answer to a wrong one; without PyTorch, whose import takes seconds."""

from collections.abc import Collection

from ..words import AUTO, DEVICES, any_of, find
from .errors import SettingsError

RECIPES = ("bf16", "delayed", "current", "rowwise", "mxfp8", "block", "nvfp4", "mxfp6", "mxfp4")
ALIASES = {"none": "bf16", "tensorwise": "current"}
MODES = ("fsdp", "tp", "fsdp+tp")
TP_SIZE = 2  # default of fsdp+tp


def one_of(known: Collection[str], word: str, option: str, *, suggest: bool = True) -> str:
    """Return the word.

    Args:
        option: that takes the word, for the message.
        suggest: whether the message has the name that looks like it.

    Raises:
        SettingsError: it is not among the known ones.
    """
    try:
        return find(word, {name: name for name in known}, option, suggest=suggest)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def device_word(word: str) -> str:
    """Return a word of `--device`.

    Raises:
        SettingsError: it is none.
    """
    return one_of(DEVICES, word, "--device", suggest=False)


def recipe_name(word: str, option: str = "--recipe", *others: str) -> str:
    """Return the canonical name of a recipe; `none` means `bf16`.

    Args:
        option: that takes the word, for the message.
        others: what the option takes besides recipes, for the message.
    Raises:
        SettingsError: the word names no recipe.
    """
    name = ALIASES.get(word, word)
    if name in RECIPES:
        return name
    return one_of([*others, *RECIPES], word, option)


def recipe_names(words: str) -> list[str]:
    """Return the recipes that `--recipe` of `train` names, or `[AUTO]`.

    Raises:
        SettingsError: a word names none, or two name the same.
    """
    if words.strip() == AUTO:
        return [AUTO]
    split = [word.strip() for word in words.split(",")]
    if split == [""]:
        raise SettingsError(f"--recipe is empty; use {AUTO}, or one of {any_of(RECIPES)}")
    if "" in split:
        raise SettingsError(
            f"--recipe is {words!r:.60}, where a name is missing; put one comma between two names"
        )
    if AUTO in split:
        raise SettingsError(
            f"--recipe is {words!r:.60}, and {AUTO} cannot be compared; give it alone, or name recipes only"
        )
    recipes = [recipe_name(word, "--recipe", AUTO) for word in split]
    for at, name in enumerate(recipes):
        if name in recipes[:at]:
            raise SettingsError(
                f"--recipe names {name} twice; name it once, and give --seeds for more runs of it"
            )
    return recipes
