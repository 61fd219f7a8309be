"""An mlx-lm script with a drafter: the import changes, and `draft_model` is new.

python examples/change_the_import.py
"""

from mlx_lm.sample_utils import make_sampler

from dflash_mlx import load, load_drafter, stream_generate  # was: from mlx_lm import load, stream_generate

model, tokenizer = load("tiny")
drafter = load_drafter("tiny", model)

for response in stream_generate(
    model,
    tokenizer,
    "def test_",
    max_tokens=48,
    sampler=make_sampler(temp=0.7, top_p=0.95),
    seed=1,  # the same text with any drafter, and without one
    draft_model=drafter,
):
    print(response.text, end="", flush=True)

# stats also holds the rounds, tau, and why drafting was on or off.
why = response.stats.width_reason or "the first run on this machine times both models"
print(f"\n\n{response.generation_tokens} tokens, {response.generation_tps:.1f} tokens/s; {why}")
