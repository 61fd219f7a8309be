"""The command line as a user meets it: exit codes, and which stream carries what. Processes of their own where it matters."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from cli_kit import run
from kit import figures_of, with_template

import dflash_mlx
from dflash_mlx.cli import output
from dflash_mlx.pairs.published import published_drafter
from dflash_mlx.version import __version__

DATA = Path(__file__).parents[1] / "data"
TARGET = str(Path(dflash_mlx.__file__).parent / "pairs/tiny/target")
COMMAND = [sys.executable, "-m", "dflash_mlx.cli.app"]
TINY = ["--model", "tiny", "--draft-model", "tiny"]


# A command line of two commands, and what is heavy and not needed to show it.
SMALL = """
import typer
app = typer.Typer()
app.command("one")(lambda: None)
app.command("two")(lambda: None)
app()
"""
HEAVY = {"mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "tokenizers", "safetensors", "jinja2", "prompt_toolkit"}


def test_help_imports_nothing_heavy_and_takes_less_than_three_times_a_small_programs_help():
    """Processor time, the least of three: unlike the wall clock it does not count what else this machine is doing."""
    listed = "import atexit, runpy, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    ours = [sys.executable, "-c", listed + "runpy.run_module('dflash_mlx.cli.app', run_name='__main__')", "--help"]

    def spent(command):
        usage = [resource.getrusage(resource.RUSAGE_CHILDREN)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        usage.append(resource.getrusage(resource.RUSAGE_CHILDREN))
        before, after = (u.ru_utime + u.ru_stime for u in usage)
        return after - before, done

    pairs = [(spent(ours), spent([sys.executable, "-c", SMALL, "--help"])) for _ in range(3)]
    done = pairs[0][0][1]
    assert "generate" in done.stdout and not HEAVY & {name.split(".")[0] for name in done.stderr.split()}
    # Measured: 1.5 times. Importing mlx-lm alone would make it more than 8.
    seconds, small = (min(pair[i][0] for pair in pairs) for i in (0, 1))
    assert seconds < 3 * small, (seconds, small)


def test_version_is_the_packages():
    assert run("--version").stdout.strip() == f"dflash-mlx {__version__}"


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize("variable", ["DFLASH_MLX_COMPILE", "DFLASH_MLX_KERNELS"])
@pytest.mark.quick(2)
def test_a_switch_that_is_not_known_is_said_before_anything_is_loaded(command, variable):
    more = ["-p", "Hi"] if command == "generate" else []
    done = run(command, "--model", "/nowhere", *more, stdin="", env={variable: "perhaps"})
    assert done.returncode == 1 and not done.stdout
    assert re.fullmatch(rf"Error: {variable} (is|names) '?perhaps'?; it must be off, .*\. Correct the variable\.\n", done.stderr)


def test_generate_without_arguments_runs_the_built_in_pair_and_shows_acceptance():
    done = subprocess.run([*COMMAND, "generate", *TINY, "-m", "24", "--stats"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    # Whether it pays to draft, and how wide, is this machine's to say; a busy one is timed after the answer.
    assert "Acceptance: " in done.stderr and "tau" in done.stderr
    assert "Draft lengths: " in done.stderr or "the next answers then draft where it is faster" in done.stderr
    assert "tau" not in done.stdout
    forced = run("generate", *TINY, "-m", "24", "--block-size", "8", "--stats")
    assert forced.stdout == done.stdout
    assert "tau " in forced.stderr and "accepted + 1" in forced.stderr and "Draft lengths: " not in forced.stderr
    passes = int(re.search(r"Rounds: (\d+) rounds for the 23 tokens after the first; plain", forced.stderr)[1])
    assert passes == int(re.search(r"over (\d+) rounds", forced.stderr)[1]) < 23


def test_json_says_which_widths_were_taken_and_why():
    got = json.loads(run("generate", *TINY, "--json", "-m", "24").stdout)
    assert {int(w): n for w, n in got["widths"].items()} == dict(Counter(r["width"] for r in got["rounds"]))
    assert "as long as one token here" in got["width_reason"] or "drafts verified" in got["width_reason"]
    fixed = json.loads(run("generate", *TINY, "--json", "-m", "24", "--block-size", "3").stdout)
    assert set(fixed["widths"]) == {"2"} and fixed["width_reason"] is None


def test_where_cuts_left_nothing_to_verify_the_figures_do_not_deny_the_drafts():
    result = figures_of(generation_tokens=3, widths={0: 2}, confidence_cut={0: 2}, width_reason="2.1 of 7 drafts verified")
    said = output.figures(result, details=True)
    assert "no drafts were checked, so there is no tau; each token took one pass." in said and "Drafting is off" not in said


@pytest.mark.full
def test_copied_drafts_are_counted_and_can_be_had_at_a_fixed_block_size():
    asked, without, default = (
        run("generate", *TINY, "--raw", "--json", "-m", "60", "-p", "import os\n", "--block-size", "8", *extra)
        for extra in (["--prompt-lookup", "--stats"], ["--no-prompt-lookup"], [])
    )
    got, plain = json.loads(asked.stdout), json.loads(default.stdout)
    copied = [r for r in got["rounds"] if r["source"] == "prompt_lookup"]
    accepted = sum(r["accepted"] for r in copied)
    assert len(copied) > 3 and got["sources"]["prompt_lookup"] == {"rounds": len(copied), "accepted": accepted}
    assert f"Copied from the text: {accepted} tokens in {len(copied)} of these rounds." in asked.stderr
    assert got["token_ids"] == plain["token_ids"] and plain["rounds"] == json.loads(without.stdout)["rounds"]
    assert {r["source"] for r in plain["rounds"]} == {"drafter"} and "Copied" not in default.stderr


def test_generate_json_equals_the_reference_ids_and_rounds():
    """Of one prompt: test_conformance.py runs all five, whole."""
    reference, n = json.loads((DATA / "generation.json").read_text())[1], 48
    done = run("generate", *TINY, "--raw", "--json", "--block-size", "8", "-m", str(n), "-p", reference["prompt"])
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["token_ids"] == reference["greedy_ids"][:n]
    known = reference["rounds"][: len(got["rounds"]) - 1]
    assert len(known) > 10
    assert [{k: r[k] for k in known[0]} for r in got["rounds"][: len(known)]] == known
    assert got["acceptance_lengths"][: len(known)] == [r["accepted"] + 1 for r in known]
    assert got["tau"] == pytest.approx(sum(got["acceptance_lengths"]) / len(got["acceptance_lengths"]))
    assert got["prompt_tokens"] == len(reference["prompt_ids"]) and got["generation_tokens"] == n
    assert got["finish_reason"] == "length" and set(got["seconds"]) == {"draft", "verify", "rollback", "host"}


def test_json_of_plain_decoding_has_the_same_keys_and_no_acceptance():
    plain = json.loads(run("generate", "--json", "--model", "tiny", "-p", "def test_", "-m", "8").stdout)
    drafted = json.loads(run("generate", *TINY, "--json", "-p", "def test_", "-m", "8").stdout)
    assert plain.keys() == drafted.keys()
    assert plain["tau"] is None and plain["rounds"] == [] and plain["draft_model"] is None
    assert plain["token_ids"] == drafted["token_ids"] and plain["text"] == drafted["text"]


def test_models_lists_built_in_and_published_pairs_with_whole_names():
    rows = json.loads(run("models", "--json").stdout)
    assert {"tiny", "Qwen/Qwen3-8B"} <= {row["target"] for row in rows}
    text = run("models").stdout
    assert all(row["target"] in text and (row["draft_model"] or "") in text for row in rows)
    # What a small Mac can run stands on top, and of several drafters the one that `auto` takes.
    sizes = [row["target_gb"] for row in rows if not row["built_in"]]
    first = [row["draft_model"] for row in rows if row["target"] == "Qwen/Qwen3-8B"][0]
    assert sizes == sorted(sizes) and first == published_drafter("Qwen/Qwen3-8B").repo
    (command,) = re.findall(r"generate --model (\S+) --draft-model auto --no-thinking", text)
    assert published_drafter(command).thinking is False


def test_auto_says_when_no_drafter_is_known():
    done = run("generate", "--model", "nobody/nothing", "--draft-model", "auto", "-p", "x")
    assert done.returncode == 1 and "no drafter is known for nobody/nothing" in done.stderr


def test_a_target_without_a_drafter_decodes_plainly_and_says_so():
    done = run("generate", "--model", "tiny", "-p", "x", "-m", "2")
    assert done.returncode == 0 and "decoding without drafts" in done.stderr


def test_the_prompt_comes_from_standard_input_unchanged():
    piped = run("generate", *TINY, "--raw", "--json", "-m", "12", "-p", "-", stdin="for i in range(\n")
    given = run("generate", *TINY, "--raw", "--json", "-m", "12", "-p", "for i in range(\n")
    assert json.loads(piped.stdout)["token_ids"] == json.loads(given.stdout)["token_ids"]


def test_standard_input_that_is_not_utf_8_is_refused():
    done = run("generate", *TINY, "-p", "-", "-m", "2", stdin=b"a\xffb")
    assert done.returncode == 1 and "the text on standard input is not UTF-8: byte 1 is 0xff" in done.stderr


@pytest.mark.parametrize("option", ["--prompt", "--system"])
def test_an_argument_that_is_not_utf_8_is_refused(option):
    rest = ["-p", "x"] if option == "--system" else []
    done = run("generate", *TINY, *rest, option, os.fsdecode(b"a\xff\xfe"), "-m", "2")
    assert done.returncode == 1, done.stderr
    assert done.stderr == f"Error: the text of {option} is not UTF-8: byte 1 is 0xff. Convert it first.\n"


def test_top_k_beyond_the_vocabulary_is_refused_before_anything_is_generated():
    done = run("generate", *TINY, "-p", "x", "-m", "2", "--temp", "1", "--top-k", "1536")
    assert done.returncode == 1 and not done.stdout
    assert "Error: top_k is 1536; it must be below 1536, the target's vocabulary." in done.stderr


def test_a_target_that_is_not_there_is_not_said_to_decode_plainly():
    for command in (["generate", "-p", "x"], ["chat"]):
        done = run(*command, "--model", "./nope", stdin="")
        assert done.returncode == 1 and "Error: " in done.stderr and "decoding without drafts" not in done.stderr, done.stderr


def test_ctrl_c_before_a_command_has_begun_ends_quietly(tmp_path):
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(300)\n")
    command = [sys.executable, "-m", "dflash_mlx", "-h"]
    done = subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 130 and not done.stderr, done.stderr


def test_the_installed_script_is_what_python_m_runs():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"dflash-mlx": "dflash_mlx.__main__:main"}


def test_a_quantized_cache_gives_the_text_of_plain_decoding():
    common = ["generate", "--json", "--model", "tiny", "-p", "def test_", "-m", "24", "--kv-bits", "8", "--kv-group-size", "32"]
    drafted, plain = (json.loads(run(*common, *extra).stdout) for extra in (["--draft-model", "auto", "--block-size", "8"], []))
    assert drafted["token_ids"] == plain["token_ids"] and drafted["tau"] > 1


def test_a_block_beyond_the_drafters_own_is_said():
    assert "trained for blocks of 8" in run("generate", *TINY, "-p", "def test_", "-m", "4", "--block-size", "9").stderr


def test_the_prompt_comes_from_a_file_unchanged(tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"for i in range(\r\n")
    filed = run("generate", *TINY, "--raw", "--json", "-m", "12", "--prompt-file", str(tmp_path / "prompt.txt"))
    given = run("generate", *TINY, "--raw", "--json", "-m", "12", "-p", "for i in range(\r\n")
    assert json.loads(filed.stdout)["token_ids"] == json.loads(given.stdout)["token_ids"]
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    done = run("generate", *TINY, "--prompt-file", str(tmp_path / "prompt.txt"))
    assert done.returncode == 1 and "prompt.txt is not UTF-8: byte 3 is 0xe9" in done.stderr


def test_a_prompt_that_is_piped_in_needs_no_flag():
    common = ["generate", *TINY, "--raw", "--json", "-m", "8"]
    piped, given = run(*common, stdin="for i in range(\n"), run(*common, "-p", "for i in range(\n", stdin="not this")
    assert json.loads(piped.stdout)["token_ids"] == json.loads(given.stdout)["token_ids"]
    assert "No prompt given" in run(*common, stdin="").stderr and "No prompt given" not in piped.stderr


def test_a_stop_string_ends_the_text_before_it_wherever_tokens_end():
    common = ["generate", *TINY, "--raw", "--json", "-m", "24", "-p", "def test_"]
    whole = json.loads(run(*common).stdout)
    word = whole["text"][9:14]
    cut = json.loads(run(*common, "--stop", "never there", "--stop", word).stdout)
    assert cut["text"] == whole["text"][: whole["text"].index(word)] and cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])] and cut["generation_tokens"] < 24
    assert len(cut["token_ids"]) == cut["generation_tokens"]


def test_thinking_is_handed_to_the_chat_template(tmp_path):
    path = with_template(tmp_path, "{{ enable_thinking }}|{% for m in messages %}{{ m.content }}{% endfor %}")
    common = ["generate", "--model", path, "--json", "-m", "1", "-p", "x"]
    counts = {
        flag: json.loads(run(*common, *([flag] if flag else [])).stdout)["prompt_tokens"]
        for flag in ("--thinking", "--no-thinking", "")
    }
    _, tokenizer = dflash_mlx.load(path)
    assert counts["--thinking"] == len(tokenizer.encode("True|x"))
    assert counts["--no-thinking"] == counts[""] == len(tokenizer.encode("False|x"))


def test_the_same_seed_gives_the_same_text_with_a_drafter_and_without():
    common = ["--json", "-p", "def test_", "-m", "24", "--temp", "0.9", "--top-k", "40", "--seed", "11", "--model", "tiny"]
    plain = json.loads(run("generate", *common).stdout)["token_ids"]
    for block in ("2", "8"):
        drafted = run("generate", *common, "--draft-model", "auto", "--block-size", block)
        assert json.loads(drafted.stdout)["token_ids"] == plain
    other = [a if a != "11" else "12" for a in common]
    assert json.loads(run("generate", *other).stdout)["token_ids"] != plain


def test_a_sampled_answer_names_the_seed_that_repeats_it():
    given = ["generate", *TINY, "--temp", "1", "-m", "12", "-p", "def test_"]
    first = run(*given)
    seed = re.search(r"tokens/s.*, seed (\d+)$", first.stderr, re.M).group(1)
    again = json.loads(run(*given, "--seed", seed, "--json").stdout)
    assert first.stdout == again["text"] + "\n" and again["seed"] == int(seed)
    assert "seed" not in run("generate", *TINY, "-m", "2", "-p", "def test_").stderr


def test_show_drafts_marks_rejected_and_bonus_tokens_when_there_is_no_colour():
    # Drafting is forced: a busy machine may find that it does not pay.
    done = run("generate", *TINY, "-m", "24", "--show-drafts", "-p", "def test_", "--block-size", "8")
    plain = run("generate", *TINY, "-m", "24", "-p", "def test_")
    assert "[-" in done.stdout and "{+" in done.stdout
    # Without the marks and what was rejected, the text is the answer itself.
    text = re.sub(r"\[-.*?-\]", "", done.stdout, flags=re.S)
    assert re.sub(r"\{\+(.*?)\+\}", r"\1", text, flags=re.S) == plain.stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["generate", "--draft-model", "tiny"], 2, "--model"),
        (["generate", *TINY, "--top-p", "0.5"], 2, "temperature 0"),
        (["generate", *TINY, "--json", "--show-drafts"], 2, "rounds"),
        (["generate", *TINY, "--block-size", "1", "--show-drafts"], 2, "drafts nothing"),
        # However it is written.
        (["bench", "--model", "tiny", "--draft-model", "None"], 2, "nothing to compare"),
        (["chat", "--model", "tiny", "--draft-model", "NONE", "--block-size", "4"], 2, "needs a drafter"),
        (["serve", "--model", "tiny", "--draft-model", "None", "--block-size", "4"], 2, "needs a drafter"),
        (["doctor", "--draft-model", "NONE", "--draft-bits", "4"], 2, "needs a drafter"),
        (["generate", "--model", "no-such/model", "--draft-model", "AUTO", "-p", "x"], 1, "auto finds none"),
        (["generate", *TINY, "-m", "0"], 2, "-1 for no limit"),
        *(
            ([command, "--model", "tiny", "--chat-template-args", '{"tokenize": true}'], 2, "it has tokenize; give variables")
            for command in ("generate", "serve")
        ),
        (["generate", *TINY, "--raw", "--system", "x"], 2, "chat template"),
        (["generate", *TINY, "--raw", "--no-thinking"], 2, "chat template"),
        (["generate", *TINY, "--thinking", "-p", "hi"], 1, "Error: --thinking needs a chat template"),
        (["generate", *TINY, "--no-thinking", "-p", "hi"], 1, "Leave --no-thinking out"),
        (["serve", *TINY, "--thinking", "--chat-template-args", '{"enable_thinking": false}'], 2, "give one of the two"),
        (["generate", *TINY, "--stop", "x", "--show-drafts"], 2, "--stop"),
        (["generate", *TINY, "--stop", ""], 2, "needs a text"),
        (["generate", *TINY, "--prompt-file", "absent.txt", "-p", "x"], 2, "one of --prompt"),
        (
            ["generate", *TINY, "--prompt-file", "absent.txt"],
            1,
            "absent.txt cannot be used: No such file or directory. Check the path.",
        ),
        (["generate", *TINY, "--system", "x", "-p", "hi"], 1, "--system needs a chat template"),
        (["generate", *TINY, "--block-size", "0"], 2, "block-size"),
        (["generate", *TINY, "--nonsense"], 2, "nonsense"),
        (["generate", "--model", TARGET], 2, "-p"),
        (["generate", "--model", "tiny", "-p", "x", "--show-drafts"], 1, "drafter"),
        (["generate", "--model", "tiny", "-p", "x", "--block-size", "4"], 2, "name one with --draft-model"),
        (["generate", *TINY, "--kv-bits", "4", "-p", "x"], 1, "kv_bits"),
        (["generate", *TINY, "--dtype", "float64", "-p", "x"], 2, "float64"),
        (["generate", "--model", "tiny", "--draft-model", "no/such/folder", "-p", "x"], 1, "no/such/folder"),
        (["generate", *TINY, "-p", ""], 2, "empty"),
        (["generate", *TINY, "--kv-group-size", "32", "-p", "x"], 2, "--kv-bits"),
        (["generate", *TINY, "--revision", "main", "-p", "x"], 1, "revision main"),
        (["generate", "--model", TARGET, "--revision", "main", "-p", "x"], 1, "revision main"),
        (["generate", *TINY, "--prefill-step-size", "0", "-p", "x"], 2, "prefill-step-size"),
        (["generate", *TINY, "--seed", "-1", "--temp", "1", "-p", "x"], 2, "seed"),
    ],
)
@pytest.mark.quick(12)
def test_what_cannot_run_is_one_line_on_stderr_with_its_exit_code(args, code, message):
    done = run(*args, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert re.search(message, " ".join(done.stderr.replace("│", " ").split())), done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert sum(line.startswith("Error: ") for line in done.stderr.splitlines()) == 1


def test_ctrl_c_ends_the_answer_and_prints_what_there_is():
    process = subprocess.Popen(
        [*COMMAND, "generate", *TINY, "--block-size", "8", "-m", "-1", "-p", "class Node:\n    def __init__(self, "],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Stopped by Ctrl-C." in err and "tokens a round" in err and "Traceback" not in err
    assert out.endswith("\n")


def test_a_closed_pipe_ends_quietly():
    process = subprocess.Popen(
        [*COMMAND, "generate", *TINY, "-m", "-1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=60) != 0
    assert "Traceback" not in process.stderr.read()
