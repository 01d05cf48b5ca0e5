"""Write the reference of the command line from its declarations."""

from __future__ import annotations

from typing import Any


def _cell(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _default(parameter: Any) -> str:
    """Return a parameter's default as text."""
    default = parameter.default
    if parameter.required:
        return "required"
    if isinstance(getattr(parameter, "show_default", None), str):
        return parameter.show_default  # type: ignore[no-any-return]
    if default is None or default is False or default == "" or callable(default):
        return ""
    return f"`{getattr(default, 'value', default)}`"


def _row(parameter: Any) -> str:
    """Return the row of an option or argument."""
    names = [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{name}`" for name in names)
    if "|" in (parameter.metavar or ""):  # the choices, which the help has no other place for
        shown += f" `{_cell(parameter.metavar)}`"
    return f"| {shown} | {_default(parameter)} | {_cell(parameter.help or '')} |"


def page() -> str:
    """Return the page: each command with its description, arguments and options."""
    import typer

    from narrowcast_tools.cli.commands import app
    from narrowcast_tools.cli.options import EXAMPLES

    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    same = "`narrowcast COMMAND --help` prints the same; for all of `train`, `narrowcast train --help-all`."
    lines = ["# Command line", "", same, ""]
    for name, command in commands.items():
        lines += [f"## narrowcast {name}", "", command.help or "", ""]
        shown = [one for one in command.params if one.name != "help" and one.help]  # others are hidden
        if shown:
            lines += ["| option | default | meaning |", "| --- | --- | --- |", *map(_row, shown), ""]
        lines += ["```sh", *EXAMPLES[name], "```", ""]
    return "\n".join(lines)
