"""README and docs: every command is run or parsed by the real command line, every link leads somewhere, README stays one page.

RUN are run here; the built-in pair `tiny` stands in for hub repos in a local hub layout. CI are run by scripts/ci.sh on every
change. The rest needs a network, a GPU, a Mac or over a minute. The real command line parses each `dflash-mlx` command, so a flag
that was renamed or a value that is refused fails here.
"""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from kit import TINY

import dflash_mlx
from dflash_mlx.machine import ENVIRONMENT

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").is_file() else ""
PAGES = [p for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))) if p.is_file()]
TARGETS = ("mlx-community/Qwen3-8B-4bit", "Qwen/Qwen3-8B")
DRAFTERS = ("z-lab/Qwen3-8B-DFlash-b16",)

# Run here, with what is added so that they end soon.
RUN = {
    "dflash-mlx generate --model mlx-community/Qwen3-8B-4bit --draft-model auto --no-thinking "
    '-p "Write a haiku about tides."': "-m 8",
    "dflash-mlx convert --hf-path Qwen/Qwen3-8B --mlx-path qwen3-8b-4bit -q": "",
    "dflash-mlx models": "",
}
# What `tiny` lacks, and README's --no-thinking needs.
TEMPLATE = "{{ messages[-1]['content'] }}{% if enable_thinking %}<think>{% endif %}"
# Run by scripts/ci.sh: what it says of them.
CI = {
    'pip install -e . && dflash-mlx generate -p "Explain why the sky is blue."': '"$env/bin/dflash-mlx" generate -m 16',
    'pip install -e ".[cpu,train,dev]" && pytest': 'pip install -q -e ".[cpu,train,dev]"\npytest',
    "pytest -m full": "pytest -m full",
}


def blocks(page, language):
    """Texts of the fenced blocks of a language; "" are those that name none."""
    found, inside = [], None
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("```"):
            if inside is not None:
                found[-1][1].append(line)
        elif inside is None:
            inside = line[3:].strip()
            found.append((inside, []))
        else:
            inside = None
    return ["\n".join(lines) for name, lines in found if name == language]


def commands():
    """(page, command) of every line that begins as a command does, its comment taken off."""
    for page in PAGES:
        for block in blocks(page, "") + blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s{2,}#.*$", "", line).strip()
                if re.match(r"(mlx\.\w+|dflash-mlx|pip|pytest|python|bash|curl|DFLASH_MLX_\w+=\S+)\s", line):
                    yield page, line


COMMANDS = sorted({command for _, command in commands()})


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """An environment whose local hub holds `tiny` under the names that README uses."""
    folder = tmp_path_factory.mktemp("hub")
    for names, source in ((TARGETS, TINY / "target"), (DRAFTERS, TINY / "drafter")):
        for name in names:
            repo = folder / f"models--{name.replace('/', '--')}"
            snapshot = repo / "snapshots" / ("0" * 40)
            snapshot.mkdir(parents=True)
            (repo / "blobs").mkdir()
            (repo / "refs").mkdir()
            (repo / "refs" / "main").write_text("0" * 40)
            for file in source.iterdir():
                shutil.copy(file, repo / "blobs" / file.name)
                (snapshot / file.name).symlink_to(repo / "blobs" / file.name)
            if source.name == "target":
                (snapshot / "chat_template.jinja").write_text(TEMPLATE)
    return {**os.environ, "HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}


def run(arguments, environment, folder):
    return subprocess.run(arguments, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not PAGES, reason="README and docs are not beside the tests")
@pytest.mark.parametrize("command", RUN)
def test_a_command_of_readme_runs(command, hub, tmp_path):
    assert command in COMMANDS
    arguments = [*shlex.split(command)[1:], *shlex.split(RUN[command])]
    done = run([sys.executable, "-m", "dflash_mlx", *arguments], hub, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and (done.stdout.strip() or done.stderr.strip())


@pytest.mark.skipif(not PAGES, reason="README and docs are not beside the tests")
def test_readmes_python_runs(hub, tmp_path):
    (code,) = blocks(ROOT / "README.md", "python")
    done = run([sys.executable, "-c", code], hub, tmp_path)
    assert done.returncode == 0 and "tokens/s" in done.stdout, done.stderr


@pytest.mark.parametrize("command", CI)
def test_ci_runs_the_commands_that_set_up(command):
    assert command in COMMANDS and CI[command] in (ROOT / "scripts" / "ci.sh").read_text()


def parse(arguments):
    """Let the real command line read its arguments, without running anything.

    Raises:
      click.UsageError: an unknown command, option or value.
    """
    from dflash_mlx.cli.app import app

    command = typer.main.get_command(app)
    with command.make_context("dflash-mlx", list(arguments), ignore_unknown_options=False) as context:
        while hasattr(command, "resolve_command"):
            rest = [*context._protected_args, *context.args]
            name, command, rest = command.resolve_command(context, rest)
            context = command.make_context(name, rest, parent=context)
        return context.params


@pytest.mark.parametrize("command", [c for c in COMMANDS if "dflash-mlx " in c])
def test_every_command_of_the_docs_is_one_that_the_command_line_takes(command):
    for part in re.split(r"&&|;|\|", command):
        words = shlex.split(re.sub(r"^(\s*\w+=\S+)*|^\s*mlx\.launch .*(?=dflash-mlx )", "", part))
        if words and words[0] == "dflash-mlx":
            parse(words[1:])


def test_options_of_mlxs_own_commands_are_written_out():
    folder = Path(find_spec("mlx._distributed_utils.launch").origin).parent
    found = set()
    for command in (command for command in COMMANDS if command.startswith("mlx.")):
        tool, *words = shlex.split(command.partition(" dflash-mlx ")[0].removesuffix(" --"))
        source = (folder / {"mlx.launch": "launch.py", "mlx.distributed_config": "config.py"}[tool]).read_text()
        found |= {(tool, word) for word in words if word.startswith("--")}
        assert not [name for of, name in found if of == tool and f'"{name}"' not in source]
    assert len(found) > 4


def test_a_drafter_trained_without_thinking_is_shown_without_thinking():
    shown = [c for c in COMMANDS if re.search(r"dflash-mlx (generate|chat|serve) .*Qwen3-8B\S* --draft-model auto", c)]
    assert len(shown) > 3 and not [command for command in shown if "--no-thinking" not in command]


@pytest.mark.parametrize("wrong", ["generate --modle x", "generate --max-tokens many", "generate --temp warm", "no-such-command"])
def test_a_command_that_is_not_taken_is_seen(wrong):
    with pytest.raises(Exception, match="No such|valid"):
        parse(shlex.split(wrong))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python ")])
def test_every_script_of_the_docs_is_there(command):
    words = shlex.split(command)
    assert words[1] == "-m" or (ROOT / words[1]).is_file(), command


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    lost = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, place = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        text = file.read_text(encoding="utf-8") if file.suffix == ".md" and file.is_file() else ""
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        if not file.exists() or place and place not in map(anchor, headings):
            lost.append(target)
    assert not lost


@pytest.mark.skipif(not PAGES, reason="README and docs are not beside the tests")
def test_architecture_says_what_every_module_and_folder_is_for():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = Path(inspect.getfile(dflash_mlx)).parent
    # An installed wheel has convert/ inside the package, as conversion/.
    folders = [p.parent.name.replace("conversion", "convert") for p in package.glob("*/__init__.py")]
    names = [p.name for p in package.glob("[!_]*.py")] + [f"{name}/" for name in folders]
    assert len(names) > 30 and not [name for name in names if f"`{name}" not in text]


@pytest.mark.skipif(not PAGES, reason="README and docs are not beside the tests")
def test_readme_is_one_page_for_the_owner_of_a_mac():
    assert README.count("\n") <= 125 and max(map(len, README.splitlines())) <= 145
    fold = README[: README.index("## Chat")]
    assert not re.search(r"H100|H200|EPYC|\bCUDA\b", fold), "a figure of a machine that the reader cannot own"
    assert "another project" in fold and fold.index("pip install -e .") < fold.index("[cpu]")
    assert len(re.findall(r"!\[", README)) == 1


@pytest.mark.skipif(not PAGES, reason="README and docs are not beside the tests")
def test_the_page_of_variables_is_the_list_of_switches():
    text = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    assert rows == [(switch.name, switch.values, switch.about) for switch in ENVIRONMENT.values()]
