"""What a load and a run find out about a pair before the first token: finite values, memory and context length."""

import shutil
import warnings
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import BASE, family, known_drafter
from kit import TINY, flat, greedy_ids, ids_of, letters, raw_config, run, tiny_qwen3, tiny_target, with_template

from dflash_mlx import batch_generate, load, load_drafter, loading, machine
from dflash_mlx.checkpoint import inspect_checkpoint
from dflash_mlx.config import DrafterConfig
from dflash_mlx.distribution import Distribution
from dflash_mlx.errors import CheckpointError, GenerationError, PairError
from dflash_mlx.loading import make_drafter, weight_bytes
from dflash_mlx.models.drafter import Drafter
from dflash_mlx.models.target import Target
from dflash_mlx.text import prompt_thinking


def made(model, change=lambda name, value: value, **changes):
    vocab, hidden = model.model.embed_tokens.weight.shape
    config = DrafterConfig.from_dict(raw_config(hidden, vocab, **changes))
    mx.random.seed(2)
    return make_drafter(config, {name: change(name, value) for name, value in flat(Drafter(config)).items()}, model)


def test_overflow_in_float16_is_found_at_load_and_its_place_named():
    """lmdeploy #4991, vllm #55250: NaN from fp16, which elsewhere shows as acceptance 0 and nothing else."""
    model = tiny_target()

    def large(name, value):
        return value * 1e5 if name == "fc.weight" else value

    assert made(model, large).fc.weight.dtype == mx.float32
    model.set_dtype(mx.float16)
    with pytest.raises(PairError, match=r"the drafter's fc gives NaN or infinity in float16\. Load the target"):
        made(model, large)
    made(model)
    model.model.layers[0].mlp.down_proj.weight = model.model.layers[0].mlp.down_proj.weight * 6e4
    with pytest.raises(PairError, match=r"layers \[0, 2\] of llama gives NaN"):
        made(model)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_drafter_runs_in_the_targets_number_type(dtype):
    model = tiny_target()
    model.set_dtype(dtype)
    drafter = made(model)
    assert {value.dtype for value in flat(drafter).values()} == {dtype}
    assert len(run(model, drafter, [3, 4, 5], 6)) == 6


def test_memory_is_compared_before_any_weight_is_read(monkeypatch):
    checkpoint = inspect_checkpoint(TINY / "target")
    needed = weight_bytes(checkpoint, mx.float32)
    model, _ = load("tiny", dtype=mx.float32)
    held = sum(value.nbytes for value in flat(model).values())
    assert abs(needed - held) < 0.01 * held
    monkeypatch.setattr(machine, "machine_bytes", lambda: needed - 1)
    monkeypatch.setattr(mx, "eval", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(
        CheckpointError, match=r"the model does not fit: the weights of .* take 0\.0 GB and this machine has 0\.0 GB"
    ):
        load("tiny", dtype=mx.float32)


def test_a_model_that_hardly_fits_is_a_warning(monkeypatch):
    needed = weight_bytes(inspect_checkpoint(TINY / "target"), mx.float32)
    monkeypatch.setattr(machine, "machine_bytes", lambda: int(needed * 1.05))
    with pytest.warns(UserWarning, match="this can be slow"):
        load("tiny", dtype=mx.float32)


def test_a_prompt_beyond_the_targets_context_is_an_early_error():
    model = tiny_qwen3(layers=4)
    assert Target(model).context_length == 512
    with pytest.raises(GenerationError, match="the prompt has 513 tokens; the context of qwen3 holds at most 512"):
        run(model, made(model), [1] * 513, 2)


def test_a_run_beyond_the_drafters_context_is_a_warning_shown_once_and_stays_exact():
    model = tiny_target()
    drafter, prompt = made(model, max_position_embeddings=20), [5, 9, 33, 7, 20, 41, 2, 8, 50, 11]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            assert ids_of(run(model, drafter, prompt, 30)) == greedy_ids(model, prompt, 30)
    said = [str(w.message)[:70] for w in shown if "attempts" not in str(w.message)]
    assert said == ["the drafter was made for 20 tokens of context and this run may reach 4"]
    with warnings.catch_warnings(record=True) as shown:
        run(model, drafter, prompt, 10)
    assert not [w for w in shown if "attempts" not in str(w.message)]


def test_context_length_is_found_in_any_family_and_scaled_rope_counts():
    assert Target(family("kimi_k25")).context_length == Target(family("nemotron_h")).context_length == 4096
    assert Target(family("rwkv7")).context_length is None
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    model = tiny_target(max_position_embeddings=512, rope_scaling=scaled)
    assert Target(model).context_length == 2048


def test_a_drafter_is_compared_with_the_memory_that_its_target_leaves(monkeypatch):
    model, _ = load("tiny", dtype=mx.float32)
    held = sum(value.nbytes for value in flat(model).values())
    needed = held + weight_bytes(inspect_checkpoint(TINY / "drafter"), mx.float32)
    monkeypatch.setattr(machine, "machine_bytes", lambda: needed - 1)
    with pytest.raises(CheckpointError, match=r"drafter take 0.0 GB beside the target's 0.0 GB and this machine has 0.0 GB"):
        load_drafter("tiny", model)
    monkeypatch.setattr(machine, "machine_bytes", lambda: needed + 1)
    with pytest.warns(UserWarning, match="this can be slow"):
        load_drafter("tiny", model)


# As Qwen3's: thinking off closes an empty thought in the prompt; as Qwen3.5's: thinking on opens one too.
QWEN3 = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN35 = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)


def rendered(tokenizer, **options):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": "def f(x):"}], add_generation_prompt=True, return_dict=False, **options
    )


@pytest.mark.parametrize("template", [QWEN3, QWEN35])
def test_a_prompts_thinking_is_told_from_its_end(tmp_path, template):
    _, tokenizer = load(with_template(tmp_path, template))
    assert prompt_thinking(tokenizer, rendered(tokenizer, enable_thinking=True)) is True
    # mlx-lm's own default, for a vocabulary without a token for a thought's begin.
    assert prompt_thinking(tokenizer, rendered(tokenizer)) is False
    assert prompt_thinking(tokenizer, rendered(tokenizer, enable_thinking=False)) is False
    assert prompt_thinking(tokenizer, tokenizer.encode("def f(x):")) is None
    assert prompt_thinking(tokenizer, []) is None


def test_a_template_without_the_setting_tells_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    _, tokenizer = load(with_template(tmp_path / "a"))
    assert prompt_thinking(tokenizer, rendered(tokenizer)) is None
    (tmp_path / "b").mkdir()
    _, broken = load(with_template(tmp_path / "b", "{{ raise_exception('system first') }}"))
    assert prompt_thinking(broken, [1, 2, 3]) is None and prompt_thinking(letters(), [1]) is None


def test_a_prompt_against_the_drafters_mode_is_warned_of(tmp_path):
    (tmp_path / "target").mkdir()
    model, tokenizer = load(with_template(tmp_path / "target", QWEN3))
    shutil.copytree(TINY / "drafter", tmp_path / "drafter")
    (tmp_path / "drafter" / "README.md").write_text("Use `enable_thinking=False`: it was trained on answers without thinking.")
    drafter = load_drafter(str(tmp_path / "drafter"), model)
    assert drafter.stated_thinking == (False, "its card")
    with pytest.warns(
        UserWarning,
        match=r"trained without it \(its card\): .* Use --no-thinking \(enable_thinking=False",
    ):
        got = run(model, drafter, rendered(tokenizer, enable_thinking=True), 8, tokenizer)
    assert ids_of(got) == greedy_ids(model, rendered(tokenizer, enable_thinking=True), 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(model, drafter, rendered(tokenizer, enable_thinking=False), 4, tokenizer)
        run(model, drafter, "def f(x):", 4, tokenizer)
        # One that nothing is known of.
        run(model, load_drafter("tiny", model), rendered(tokenizer, enable_thinking=True), 4, tokenizer)


def test_a_context_length_that_mlx_lms_class_drops_is_kept():
    model = family("gpt_oss")
    assert Target(model).context_length is None
    loading.keep_positions(model, {"max_position_embeddings": 77})
    assert Target(model).context_length == 77
    # What the model knows itself stands.
    known = family("llama")
    loading.keep_positions(known, {"text_config": {"max_position_embeddings": 77}})
    assert Target(known).context_length == BASE["max_position_embeddings"]
    with pytest.raises(GenerationError, match="the prompt has 78 tokens; the context of gpt_oss holds at most 77"):
        run(model, known_drafter(model, []), [1] * 78, 4)


def test_a_target_that_cannot_be_tapped_loads_all_the_same():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.args, self.layers = SimpleNamespace(), [nn.Linear(4, 4)]

    model = Flat()
    loading.keep_positions(model, {"max_position_embeddings": 77})
    assert vars(model.args) == {}


def test_load_keeps_the_context_length(conformance):
    model, _ = load(str(conformance / "targets" / "gpt_oss"))
    # Its YaRN reaches further than the number of positions.
    assert Target(model).context_length >= 512


def test_a_drafter_of_which_next_to_nothing_is_accepted_is_said_once_over_all_answers():
    """omlx #1277: acceptance collapses, the text stays right, and only the speed shows it."""
    model = tiny_target()
    drafter, prompt = made(model), [3, 4, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # Too few to tell.
        run(model, drafter, prompt, 12, block_size=4)
    told = r"guessed \d tokens right in \d\d attempts.* made for another model: dflash-mlx doctor"
    with pytest.warns(UserWarning, match=told) as said:
        for _ in range(3):
            run(model, drafter, prompt, 24, block_size=4)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # What a drafter does not know of says nothing about it.
        run(model, made(model), prompt, 80, block_size=4, logits_processors=[lambda ids, logits: logits])
        model, tokenizer = load("tiny", dtype=mx.float32)
        run(model, load_drafter("tiny", model), "def add(a, b):", 120, tokenizer, block_size=4)


def test_a_sound_drafter_at_temperature_1_is_not_spoken_of(recwarn):
    """There it loses half of what it keeps at 0: far from nothing."""
    model, tokenizer = load("tiny", dtype=mx.float32)
    drafter = load_drafter("tiny", model)
    for seed, prompt in enumerate(("def add(a, b):", "import os\n", "class A:")):
        run(model, drafter, prompt, 60, tokenizer, sampler=Distribution(1.0), seed=seed, block_size=8)
    judged = drafter.pair.judged
    assert judged["rounds"] > 50 and 0.2 < judged["accepted"] / judged["rounds"] < 2
    assert not [w for w in recwarn if "attempts" in str(w.message)]


def test_requests_side_by_side_count_for_their_drafter_too():
    model = tiny_target()
    with pytest.warns(UserWarning, match="doctor checks it"):
        batch_generate(model, letters(), [[3, 4, 5], [6, 7]], max_tokens=30, draft_model=made(model), block_size=4)
