"""Which published drafter a target name leads to."""

import json
import re

import pytest

from dflash_mlx.cli.inputs import choose_pair
from dflash_mlx.errors import DFlashError
from dflash_mlx.pairs.published import PUBLISHED, base_name, nearest_target, published_drafter, stated_thinking

# Ends of names, of unsloth, bartowski, mradermacher, RedHat, Intel and mlx-community.
PACKINGS = [
    *("-unsloth-bnb-4bit", "-UD-Q4_K_XL.gguf", ".i1-IQ4_XS.gguf", "-Q8_0-00001-of-00002.gguf", "-GGUF", "-MXFP4_MOE.gguf"),
    *("-quantized.w4a16", "-FP8-dynamic", "-W4A16-G128", "-NVFP4A16", "-GPTQ-Int4", "-int4-AutoRound", "-4bit-g32", "-8bit-gs64"),
]


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
        ("mlx-community/Qwen3-8B-4bit", "z-lab/Qwen3-8B-DFlash-b16"),
        ("mlx-community/Qwen3-8B-MLX-8bit", "z-lab/Qwen3-8B-DFlash-b16"),
        ("Qwen/Qwen3-8B-AWQ", "z-lab/Qwen3-8B-DFlash-b16"),
        ("somewhere/Qwen3-4B-4bit-DWQ", "z-lab/Qwen3-4B-DFlash-b16"),
        ("Qwen3-4B-Q4_K_M.gguf", "z-lab/Qwen3-4B-DFlash-b16"),
        ("~/.lmstudio/models/bartowski/Qwen_Qwen3-8B-GGUF/Qwen_Qwen3-8B-Q4_K_M.gguf", "z-lab/Qwen3-8B-DFlash-b16"),
        ("bartowski/google_gemma-4-31B-it-GGUF", "z-lab/gemma-4-31B-it-DFlash"),
        ("https://huggingface.co/mlx-community/Qwen3-8B-4bit/tree/main", "z-lab/Qwen3-8B-DFlash-b16"),
        ("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
        ("mlx-community/gpt-oss-20b-MXFP4-Q8", "z-lab/gpt-oss-20b-DFlash"),
        ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
        ("mlx-community/Qwen3.6-35B-A3B-nvfp4", "z-lab/Qwen3.6-35B-A3B-DFlash"),
        *((f"x/Qwen3-8B{end}", "z-lab/Qwen3-8B-DFlash-b16") for end in PACKINGS),
        ("mlx-community/gemma-4-31b-it-qat-4bit", "z-lab/gemma-4-31B-it-DFlash"),
        # Of several the first.
        ("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"),
        ("mlx-community/Qwen3-14B-4bit", "deepseek-ai/dspark_qwen3_14b_block7"),
        ("mlx-community/gemma-4-12B-it-4bit", "deepseek-ai/dspark_gemma4_12b_block7"),
        ("mlx-community/LFM2.5-8B-A1B-4bit", "LiquidAI/LFM2.5-8B-A1B-DSpark"),
    ],
)
def test_any_packing_of_a_model_leads_to_its_drafter(name, drafter):
    assert published_drafter(name).repo == drafter


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B-Base", "Qwen/Qwen3-80B", "Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Llama-3.1-8B", "x/y", ""]
)
def test_another_model_of_a_similar_name_leads_nowhere(name):
    assert published_drafter(name) is None


@pytest.mark.parametrize(("name", "near"), [
    ("mlx-community/Qwen3-8B-4bitt", "Qwen/Qwen3-8B"),
    ("~/.lmstudio/models/x/Llama-3.2-3B-Instruct-4bit", "meta-llama/Llama-3.1-8B-Instruct"),
    ("openai/gtp-oss-20b", "openai/gpt-oss-20b"),
    ("nobody/nothing", None),
    ("", None),
])  # fmt: skip
def test_of_an_unknown_name_the_nearest_is_named(name, near):
    assert nearest_target(name) == near
    if near:
        with pytest.raises(DFlashError, match=re.escape(f"for {name} (there is one for {near}), so --draft-model auto")):
            choose_pair(name, "auto")


def test_a_directory_is_known_by_what_it_was_made_from(tmp_path):
    (tmp_path / "mine").mkdir()
    assert published_drafter(str(tmp_path / "mine")) is None
    (tmp_path / "mine" / "README.md").write_text("---\nbase_model:\n- Qwen/Qwen3-8B\ntags:\n- mlx\n---\n")
    assert published_drafter(str(tmp_path / "mine")).target == "Qwen/Qwen3-8B"
    (tmp_path / "mine" / "conversion.json").write_text(json.dumps({"source": {"path_or_repo": "/models/Qwen3-4B-bf16"}}))
    assert published_drafter(str(tmp_path / "mine")).target == "Qwen/Qwen3-4B"


@pytest.mark.parametrize("inside", ["", "snapshots/0a1b", "snapshots/0a1b/4bit", "snapshots/0a1b/m.gguf"])
def test_what_lies_in_the_hub_cache_is_known_by_its_repo(tmp_path, inside):
    place = tmp_path / "models--mlx-community--Qwen3-4B-4bit" / inside
    assert published_drafter(str(place)).target == "Qwen/Qwen3-4B"
    (tmp_path / "models--x--y" / inside).mkdir(parents=True)
    assert published_drafter(str(tmp_path / "models--x--y" / inside)) is None


def test_every_drafter_is_listed_once_and_a_target_under_one_name():
    repos, targets = [entry.repo for entry in PUBLISHED], {entry.target for entry in PUBLISHED}
    assert len(set(repos)) == len(repos) and all("/" in repo for repo in repos)
    assert len({base_name(target) for target in targets}) == len(targets)


@pytest.mark.parametrize(
    ("card", "setting"),
    [
        ("This drafter was trained with thinking disabled (`enable_thinking=False`).", False),
        ('extra_body={"chat_template_kwargs": {"enable_thinking": false}}', False),
        ("Trained on non-thinking answers.", False),
        ("tokenizer.apply_chat_template(messages, enable_thinking=True)", True),
        ("enable_thinking=True is slower than enable_thinking=False", None),
        ("A drafter.", None),
    ],
)
def test_a_card_states_the_templates_setting_or_not(tmp_path, card, setting):
    (tmp_path / "README.md").write_text(card)
    assert stated_thinking("my-drafter", tmp_path, {}) == (None if setting is None else (setting, "its card"))


def test_the_config_states_the_setting_before_the_card_and_the_list(tmp_path):
    name = "z-lab/Qwen3-8B-DFlash-b16"
    assert stated_thinking(name, tmp_path, {}) == (False, f"{name}'s card")
    assert stated_thinking("z-lab/Qwen3.5-4B-DFlash", tmp_path, {}) is None
    (tmp_path / "conversion.json").write_text(json.dumps({"source": {"path_or_repo": name}}))
    assert stated_thinking("local", tmp_path, {}) == (False, f"{name}'s card")
    (tmp_path / "README.md").write_text("Set enable_thinking=True.")
    assert stated_thinking("local", tmp_path, {}) == (True, "its card")
    assert stated_thinking("local", tmp_path, {"dflash_config": {"enable_thinking": False}}) == (False, "config.json")
    assert stated_thinking("local", tmp_path, {"enable_thinking": False}) == (False, "config.json")
