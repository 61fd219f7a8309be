"""--help below 100 columns: one option below the other, because the boxes of rich would cut names and words. And what is said
of a command that does not exist."""

from __future__ import annotations

import inspect
import shutil
from typing import Any

from typer import BadParameter, echo, style
from typer.core import TyperCommand, TyperGroup

from ..tools.columns import wrap

# Columns from which rich's boxes have room.
ROOM = 100
# In a package of typer's own or in click, by its version.
UsageError = BadParameter.__base__
# What other programs call a command, and what does it here.
_ELSEWHERE = {
    ("run", "ask", "prompt", "complete"): 'use dflash-mlx chat --model MODEL, or dflash-mlx generate --model MODEL -p "..."',
    ("pull", "download", "get", "install"): "generate, chat and serve download the model that --model names",
    ("list", "ls", "ps", "show"): "dflash-mlx models lists models with a drafter, dflash-mlx cache what is on disk",
    ("rm", "remove", "delete", "clean"): "use dflash-mlx cache --delete NAME",
    ("quantize", "quantise", "create"): "use dflash-mlx convert --hf-path MODEL --mlx-path DIRECTORY -q",
    ("help",): "use dflash-mlx -h, or dflash-mlx COMMAND -h",
    ("version",): "use dflash-mlx --version",
}


class _Narrow:
    def format_help(self, ctx: Any, formatter: Any) -> None:
        if (width := shutil.get_terminal_size().columns) >= ROOM:
            return super().format_help(ctx, formatter)
        # Printed here, as rich prints its own: typer shows nothing else for a command without arguments.
        echo(text(self, ctx, width), nl=False)


class HelpfulCommand(_Narrow, TyperCommand):
    """A command whose --help is readable at any width."""


class HelpfulGroup(_Narrow, TyperGroup):
    """A group of commands whose --help is readable at any width, and which says what there is beside an unknown one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if "Did you mean" in error.message:
                raise
            meant = [said for names, said in _ELSEWHERE.items() if args[0].lower() in names and ctx.parent is None]
            *others, last = (name for name in self.list_commands(ctx) if not self.get_command(ctx, name).hidden)
            said = meant[0] if meant else f"the commands are {', '.join(others)} and {last}"
            raise UsageError(f"{error.message.rstrip('.')}: {said}.", ctx) from None


def text(command: Any, ctx: Any, width: int) -> str:
    """A command's --help: usage, what it does, its options by group, its commands, its last line."""
    parts = [wrap(f"Usage: {ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}", width, 2)]
    parts += [wrap(" ".join(about.split()), width) for about in inspect.cleandoc(command.help or "").split("\n\n")]
    groups: dict[str, list[tuple[str, str]]] = {}
    for one in command.get_params(ctx):
        if record := one.get_help_record(ctx):
            groups.setdefault(getattr(one, "rich_help_panel", None) or "Options", []).append(record)
    commands = {name: command.get_command(ctx, name) for name in getattr(command, "commands", {})}
    if commands:
        groups["Commands"] = [(name, _first(one.help)) for name, one in commands.items() if not one.hidden]
    for title, records in groups.items():
        lines = [style(f"{title}:", bold=True)]
        for names, about in records:
            lines += [style(line, fg="cyan") for line in wrap(f"  {names}", width, 4).split("\n")]
            lines += [f"    {line}" for line in wrap(" ".join(about.split()), width - 4).split("\n")]
        parts.append("\n".join(lines))
    parts.append(wrap(command.epilog or "", width, 2))
    return "\n\n".join(filter(None, parts)) + "\n"


def _first(about: str | None) -> str:
    """The first paragraph of a docstring."""
    return " ".join(inspect.cleandoc(about or "").split("\n\n")[0].split())
