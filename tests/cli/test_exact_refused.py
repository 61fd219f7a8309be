"""What cannot be served exactly is refused in every command, by name, before a prompt is read."""

import mlx.core as mx
import pytest
from cli_kit import run

from dflash_mlx import load, load_drafter, loop
from dflash_mlx.batch.generator import batch_generate
from dflash_mlx.cli import inputs
from dflash_mlx.errors import GenerationError
from dflash_mlx.kernels import autotune
from dflash_mlx.serving import server
from dflash_mlx.tools import bench, doctor

PAIR = ["--model", "tiny", "--draft-model", "tiny", "--exact", "--dtype", "bfloat16"]
COMMANDS = {
    "generate": [*PAIR, "-p", "def f", "-m", "4"],
    "generate alone": ["--model", "tiny", "--exact", "--dtype", "bfloat16", "-p", "def f", "-m", "4", "--json"],
    "chat": PAIR,
    "serve": [*PAIR, "--port", "0"],
    "bench": [*PAIR, "--kinds", "copy", "-m", "4"],
}
NORM = "qwen3 cannot be served exactly: model.layers.0.input_layernorm (RMSNorm)"


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch):
    """No run comes as far as its prompt."""
    monkeypatch.setattr(loop.Run, "prefill", lambda *_: pytest.fail("a prompt was read"))
    monkeypatch.setattr(server.Server, "start", lambda *_: pytest.fail("a server answers"))
    monkeypatch.setattr(bench, "timed", lambda *_: pytest.fail("an answer is timed"))


@pytest.fixture
def row_dependent_norm(monkeypatch):
    norm = mx.fast.rms_norm

    def planted(x, *about):
        y = norm(x, *about)
        return y * (1 + 2.0**-7 * (x.shape[-2] % 3 == 2)) if x.ndim == 3 else y

    monkeypatch.setattr(mx.fast, "rms_norm", planted)


def refused(command, said, *more):
    done = run(command.split()[0], *COMMANDS[command], *more, stdin="hello\n")
    assert done.returncode == 1 and said in " ".join(done.stderr.split()), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_target_whose_rows_differ_is_refused_by_the_modules_name(row_dependent_norm, command):
    refused(command, f"Error: {NORM}")


@pytest.mark.parametrize("command", COMMANDS)
def test_kernels_off_on_a_gpu_are_refused(monkeypatch, command):
    monkeypatch.setattr(autotune, "has_gpu", lambda: True)
    monkeypatch.setenv("DFLASH_MLX_KERNELS", "off")
    refused(command, "Error: DFLASH_MLX_KERNELS is 'off' and exact needs our kernels on a GPU")


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
@pytest.mark.parametrize("option", ["--max-kv-size", "--kv-bits"])
def test_caches_that_are_not_exact_are_a_usage_error(command, option):
    done = run(command, *COMMANDS[command], option, "8", stdin="hello")
    assert done.returncode == 2 and f"it cannot honour {option}" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_blocks_of_more_rows_than_a_kernel_takes_are_refused(command):
    refused(command, "block_size is 17 with exact; a pass of exact has at most 16 rows", "--block-size", "17")


def test_a_server_of_batches_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(inputs, "load_pair", lambda *_: pytest.fail("a pair is loaded"))
    done = run("serve", *COMMANDS["serve"], "--max-batch", "4")
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2 and "--exact" in said and "it cannot honour --max-batch" in said


def test_a_bench_of_batches_is_refused():
    done = run("bench", *COMMANDS["bench"], "--batch", "1,4")
    assert done.returncode == 2 and "it cannot honour --batch" in done.stderr


def test_a_batch_is_refused():
    model, tokenizer = load("tiny")
    with pytest.raises(GenerationError, match="exact was given in a batch"):
        batch_generate(model, tokenizer, [[5, 6]], draft_model=load_drafter("tiny", model), exact=True)


def test_doctor_names_what_differs_and_fails(row_dependent_norm, monkeypatch):
    monkeypatch.setattr(doctor, "_speed", lambda *_: pytest.fail("timed"))
    done = run("doctor", "--model", "tiny", "--draft-model", "none", "--exact", "--dtype", "bfloat16")
    assert done.returncode == 1 and "failed: model.layers.0.input_layernorm (RMSNorm)" in " ".join(done.stdout.split())
