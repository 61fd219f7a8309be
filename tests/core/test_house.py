"""The shape of the code: how long files, functions and classes may be, and which names do not come back."""

import ast
import functools
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest

import dflash_mlx

PACKAGE = Path(inspect.getfile(dflash_mlx)).parent
TESTS = Path(__file__).parents[1]

FILE, FUNCTION, CLASS, PARAMETERS, TEST_FILE = 600, 70, 260, 12, 800
# Lists of steps.
LONG = {"_Reader", "read", "normalise_config"}
# What users call with keywords.
PUBLIC = {"stream_generate", "generate", "convert", "load", "load_drafter", "make_prompt_cache", "batch_generate"}
RETIRED = (
    "Copier Chooser Rejecter Outcome Replays Blocks Drafts WidthRule FixedWidth Verdict Served Refusal _Gone _Flight _Rows "
    "BlockProposer peeked draft_surely few_rows joints chances foreign walk"
).split()
RETIRED_MODULES = "copying choose choice checks costs reuse layers".split()


def sources():
    """(name relative to the package, path) of every installed module; the converter's are conversion/..."""
    import dflash_mlx.conversion

    root = Path(inspect.getfile(dflash_mlx.conversion)).parent
    for path in sorted(PACKAGE.rglob("*.py")):
        if root not in path.parents:
            yield str(path.relative_to(PACKAGE)), path
    for path in sorted(root.rglob("*.py")):
        yield f"conversion/{path.relative_to(root)}", path


def length(node):
    return node.end_lineno - min([node.lineno, *(d.lineno for d in node.decorator_list)]) + 1


def parameters(node):
    a = node.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *([a.vararg] if a.vararg else []), *([a.kwarg] if a.kwarg else [])]
    return len([p for p in named if p.arg not in ("self", "cls")])


@functools.cache
def commands():
    """Names of the functions that the command line runs."""
    from dflash_mlx.cli.app import app

    apps = [app, *(group.typer_instance for group in app.registered_groups)]
    return {command.callback.__name__ for one in apps for command in one.registered_commands}


def too_long(name, text):
    """What of a module breaks a limit, in words."""
    lines = text.count("\n") + 1
    if lines > FILE:
        yield f"{name}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name in LONG:
            continue
        if isinstance(node, ast.ClassDef):
            if length(node) > CLASS:
                yield f"{name}: class {node.name} has {length(node)} lines"
            continue
        if length(node) > FUNCTION:
            yield f"{name}: {node.name} has {length(node)} lines"
        # A command's options are its parameters.
        command = name.startswith("cli/") and node.name in commands()
        if parameters(node) > PARAMETERS and node.name not in PUBLIC and not command:
            yield f"{name}: {node.name} has {parameters(node)} parameters"


def test_no_file_function_or_class_is_too_long():
    found = [fault for name, path in sources() for fault in too_long(name, path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_test_files_are_short_and_lie_in_folders_that_mirror_the_package():
    found = [f"{p.relative_to(TESTS)}: {n}" for p in TESTS.rglob("test_*.py") if (n := p.read_text().count("\n") + 1) > TEST_FILE]
    stray = [p.name for p in TESTS.glob("test_*.py")]
    assert not found and not stray, (found, stray)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("\n" * 601, "602 lines"),
        ("def f():\n" + "    x = 1\n" * 70, "f has 71 lines"),
        ("class C:\n" + "    x = 1\n" * 260, "class C has 261 lines"),
        ("def f(" + ", ".join(f"a{i}" for i in range(13)) + "): ...", "f has 13 parameters"),
    ],
)
def test_what_is_too_long_is_seen(text, fault):
    assert fault in " ".join(too_long("x.py", text))


def retired(text):
    """Retired names among a module's identifiers, whole words; and retired modules among its imports."""
    words = {t.string for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.NAME}
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            local = getattr(node, "level", 1) or module.startswith("dflash_mlx")
            names = [alias.asname or alias.name for alias in node.names]
            imported |= {part for name in [module, *names] for part in name.split(".")} if local else set()
    # The standard library's own: os.walk, ast.walk.
    own = {"walk"} & words if re.search(r"(?<!os\.)(?<!ast\.)\bwalk\b", text) else set()
    return sorted((words & set(RETIRED) - {"walk"}) | own | imported & set(RETIRED_MODULES))


# Names of others' code that comments speak of.
OTHERS_NAMES = (
    "AutoModel llama_token_type make_text_state_machine generate_extra_tensors load_prompt_cache modeling_rope_utils "
    "tokenization_gemma runtime_block_size"
)


def spoken_and_said(text):
    """A module's docstrings and lines of comment, and the rest of it."""
    lines = text.splitlines()
    spoken = {i for i, line in enumerate(lines) if line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            spoken |= {*range(node.lineno - 1, node.end_lineno)}
    return "\n".join(lines[i] for i in sorted(spoken)), "\n".join(line for i, line in enumerate(lines) if i not in spoken)


def named(spoken):
    """The single names that comments and docstrings put in backquotes, and the modules that they call by their files."""
    return {name for pair in re.findall(r"`(\w{2,})`|\b([a-z_]+)\.py\b", spoken) for name in pair if name}


def test_comments_and_docstrings_name_only_what_exists():
    read = {name: spoken_and_said(path.read_text(encoding="utf-8")) for name, path in sources()}
    exist = {*re.findall(r"\w+", " ".join([OTHERS_NAMES, *read, *(said for _, said in read.values())]))}
    exist |= {path.stem for folder in ("bench", "scripts", "tests") for path in TESTS.parent.glob(f"{folder}/**/*.py")}
    found = {name: gone for name, (spoken, _) in read.items() if (gone := sorted(named(spoken) - exist))}
    assert len(exist) > 2000 and not found, found


def test_a_name_that_is_gone_is_seen():
    spoken, said = spoken_and_said('"""See `gone` and taps.py."""\nx = "`not` this"\n# nor `lost`\n')
    assert named(spoken) == {"gone", "taps", "lost"} and said == 'x = "`not` this"'


def test_no_retired_name_comes_back():
    found = {name: names for name, path in sources() if (names := retired(path.read_text(encoding="utf-8")))}
    stems = {name: path.stem for name, path in sources() if path.stem in RETIRED_MODULES}
    assert not found and not stems, (found, stems)


def test_a_retired_name_is_seen():
    assert retired("x = Chooser()\n") == ["Chooser"]
    assert retired("from .kernels import autotune as choice\n") == ["choice"]
    assert retired("def walk(): ...\n") == ["walk"] and retired("import os\nfor x in os.walk('.'): ...\n") == []
