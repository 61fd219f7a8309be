"""--help: every option stands in a group, and every command has an example that the real command line takes."""

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dflash_mlx.cli import options
from dflash_mlx.cli.app import app

ROOT = get_command(app)
GROUPS = [options.MODEL, options.PROMPT, options.SAMPLING, options.DRAFTING, options.MEMORY, options.OUTPUT]


def commands(group=ROOT, path=()):
    for name, command in group.commands.items():
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


COMMANDS = dict(commands())


def help_of(path):
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_stands_in_a_group(path):
    stray = [p.name for p in COMMANDS[path].params if not p.hidden and not p.rich_help_panel and p.name != "help"]
    assert not stray
    text = help_of(path)
    assert max(map(len, text.splitlines())) <= 80
    shown = [name for name in re.findall(r"^(\w.*):$", text, re.MULTILINE) if name in GROUPS]
    assert shown == [name for name in GROUPS if name in shown]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_an_example_that_the_command_line_takes(path):
    _, _, shown = help_of(path).rpartition("Example: ")
    words = shlex.split(shown)
    assert words[: 1 + len(path)] == ["dflash-mlx", *path]
    COMMANDS[path].make_context(path[-1], words[1 + len(path) :])


def test_generate_has_every_group_in_order():
    assert re.findall(r"^(\w.*):$", help_of(("generate",)), re.MULTILINE) == [*GROUPS, "Options"]


@pytest.mark.parametrize(
    ("command", "alias", "meant"),
    [
        ("generate", ["--system-prompt", "s"], ("system", "s")),
        ("chat", ["--system-prompt", "s"], ("system", "s")),
        ("generate", ["--ignore-chat-template"], ("raw", True)),
        ("generate", ["--num-draft-tokens", "3"], ("block_size", 4)),
        ("chat", ["--num-draft-tokens", "0"], ("block_size", 1)),
        ("serve", ["--num-draft-tokens", "3"], ("block_size", 4)),
        ("generate", ["--chat-template-config", '{"a": 1}'], ("chat_template_args", '{"a": 1}')),
        ("serve", ["--chat-template-config", '{"a": 1}'], ("chat_template_args", '{"a": 1}')),
    ],
)
def test_mlx_lms_names_are_taken_and_not_shown(command, alias, meant):
    given = {}

    def stand_in(model: options.Model = None, system: options.System = None, raw: options.AsJson = False,
             block_size: options.BlockSize = None, chat_template_args: options.ChatTemplateArgs = None):  # fmt: skip
        given.update(locals())

    import typer

    one = typer.Typer()
    one.command()(options.mlx_lm_names(stand_in))
    assert CliRunner().invoke(one, alias).exit_code == 0 and given[meant[0]] == meant[1]
    assert alias[0] not in help_of((command,)) and any(alias[0] in p.opts for p in COMMANDS[(command,)].params)
    own = "--json" if meant[0] == "raw" else "--" + meant[0].replace("_", "-")
    both = CliRunner().invoke(one, [*alias, own, *([str(meant[1])] if alias[1:] else [])])
    assert both.exit_code == 2 and "give one of the two" in " ".join(both.output.replace("│", " ").split())
