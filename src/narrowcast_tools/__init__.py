"""The console command's first step: ``narrowcast --help`` and ``--version`` answer without loading PyTorch.

A module beside the package, because importing anything of narrowcast imports all of it: its operators and classes must
be known to PyTorch from then on. Everything but those two is left to ``narrowcast_tools.cli``.
"""

from __future__ import annotations

import sys

HELP = "Train a small Transformer in low precision, compare the recipes, check what this machine runs."
COMMANDS = {
    "train": "Train a small Llama-style model on text; with several recipes or seeds, compare them.",
    "compare": "Compare finished runs of train: a table, a picture with the spread over seeds, and the numbers.",
    "generate": "Continue a text with a trained model, token by token, keeping keys and values in a cache.",
    "demo": "Train each recipe that GPUs run natively on the same text; show table and picture of their losses.",
    "bench": "Time layers and training steps beside bf16, and beside torchao, Transformer Engine and Liger "
    "where installed.",
    "plan": "Estimate memory, traffic and time of a training step on many GPUs; nothing runs.",
    "presets": "Show what each --preset of train sets.",
    "doctor": "Show what this machine runs natively, what it emulates, and the versions found.",
}
"""Every command with the first line of its help; a test compares the whole text with that of the command line."""


def main() -> int:
    """Run the command line on the process's arguments; return its exit code, as ``narrowcast_tools.cli.main``."""
    if sys.argv[1:] in ([], ["--help"]) and _help():
        return 0
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(f"narrowcast {version('narrowcast')}")
        return 0
    from narrowcast_tools.cli import main

    return main()


def _help() -> bool:
    """Print the help; return False where Typer is missing, which ``narrowcast_tools.cli`` says in a line."""
    try:
        import typer
    except ModuleNotFoundError:
        return False
    app = typer.Typer(name="narrowcast", help=HELP, add_completion=False)

    @app.callback()
    def program(
        version: bool = typer.Option(False, "--version", help="Show the version."),
    ) -> None:
        pass

    for name, help in COMMANDS.items():
        app.command(name, help=help)(lambda: None)
    app(args=["--help"], prog_name="narrowcast", standalone_mode=False)
    return True
