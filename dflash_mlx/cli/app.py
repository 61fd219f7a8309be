"""The `dflash-mlx` command: its commands, and how it ends.

Only this package prints and only this module exits. Text goes to stdout, figures, progress and errors to stderr. Everything
heavy is imported inside the commands, so that `dflash-mlx -h` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from typing import Annotated

import typer

from ..errors import error_text
from ..machine import mistyped_switches, switch
from ..serving.interrupt import bring_back, is_ctrl_c
from ..version import __version__
from . import generate, lists, over_ranks, serving, tools, train
from .narrow_help import HelpfulGroup
from .options import CheckedCommand, example
from .output import say, wrapped

app = typer.Typer(
    cls=HelpfulGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run language models faster with the same text: DFlash speculative decoding on MLX.",
    epilog="Start with `dflash-mlx chat`. DFLASH_TRACEBACK=1 shows where an error came from.",
)
# Each command, and the example that ends its --help.
_COMMANDS = (
    (generate.generate, 'dflash-mlx generate -p "Write a haiku about tides." --temp 0.7'),
    (tools.convert, "dflash-mlx convert --hf-path MODEL --mlx-path DIRECTORY -q"),
    (serving.chat, "dflash-mlx chat --model mlx-community/Qwen3-8B-4bit --draft-model auto --no-thinking"),
    (serving.serve, "dflash-mlx serve --model mlx-community/Qwen3-8B-4bit --draft-model auto --no-thinking"),
    (tools.doctor, "dflash-mlx doctor --model mlx-community/Qwen3-8B-4bit --draft-model auto"),
    (tools.bench, "dflash-mlx bench --kinds code,chat --max-tokens 64"),
    (lists.models, "dflash-mlx models"),
    (lists.cache, "dflash-mlx cache --delete measured/cost_models"),
)
for command, shown in _COMMANDS:
    app.command(cls=CheckedCommand, epilog=example(shown))(command)
app.add_typer(train.train_app, name="train")


def main() -> None:
    """Entry point: runs a command; an error becomes one line on stderr and exit status 1. Typer ends Ctrl-C with 130.

    With DFLASH_TRACEBACK set, an error keeps its traceback.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Show a warning as a sentence, without its place in the code.
    warnings.formatwarning = lambda message, *place, **more: wrapped(f"Warning: {str(message).rstrip('.')}.\n", sys.stderr)
    sys.unraisablehook = bring_back
    if sys.stdin is None:
        # Whoever started the command has closed it: it reads as empty.
        sys.stdin = open(os.devnull, encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        # Without UTF-8 a character that the locale lacks would end the answer with an error.
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")
    try:
        app()
    except BrokenPipeError:
        # The reader has closed the pipe (a pager, for example): nothing more can be printed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:
        if is_ctrl_c(error):
            raise SystemExit(130) from None
        said = over_ranks.failed(f"Error: {sentence(error)}")
        if switch("DFLASH_TRACEBACK"):
            raise
        if said:
            say(said)
        raise SystemExit(1) from None


def sentence(error: Exception) -> str:
    """An error in one line, for someone who never read the code."""
    if isinstance(error, ImportError):
        from ..requirements import explain

        if said := explain(error):
            return f"{said}."
    return error_text(error)


def _version(value: bool) -> None:
    if value:
        print(f"dflash-mlx {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    for name, meant in mistyped_switches().items():
        say(f"{name} is set and nothing reads it. Did you mean {meant}?")


if __name__ == "__main__":
    main()
