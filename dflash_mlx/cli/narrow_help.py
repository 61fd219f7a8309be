"""--help below 100 columns: one option below the other, because the boxes of rich would cut names and words."""

from __future__ import annotations

import inspect
import shutil
from typing import Any

from typer import echo, style
from typer.core import TyperCommand, TyperGroup

from ..tools.columns import wrap

# Columns from which rich's boxes have room.
ROOM = 100


class _Narrow:
    def format_help(self, ctx: Any, formatter: Any) -> None:
        if (width := shutil.get_terminal_size().columns) >= ROOM:
            return super().format_help(ctx, formatter)
        # Printed here, as rich prints its own: typer shows nothing else for a command without arguments.
        echo(text(self, ctx, width), nl=False)


class HelpfulCommand(_Narrow, TyperCommand):
    """A command whose --help is readable at any width."""


class HelpfulGroup(_Narrow, TyperGroup):
    """A group of commands whose --help is readable at any width."""


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
