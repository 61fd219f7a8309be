"""One entry a family: each names something that exists and says something, and a family of several names has all it needs."""

import pytest
from dflash_mlx.conversion.configs import has_mlx_module
from dflash_mlx.conversion.families import FAMILIES, Family, FusedExperts, special
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@pytest.mark.parametrize("name", FAMILIES)
def test_an_entry_is_of_a_family_that_exists_and_says_something(name):
    assert has_mlx_module(name) or name in CONFIG_MAPPING
    assert FAMILIES[name] != Family()
    if FAMILIES[name].same_as:
        assert has_mlx_module(FAMILIES[name].same_as)


def test_a_family_without_an_entry_is_ordinary():
    assert special("llama", "qwen3") == Family()


def test_of_several_names_each_may_say_a_part():
    both = special("qwen3_vl_moe_text", "gpt_oss")
    assert both.same_as == "qwen3_moe" and both.implied == {"norm_topk_prob": True}
    assert both.fused_experts == FusedExperts(transposed=True, interleaved=True)
