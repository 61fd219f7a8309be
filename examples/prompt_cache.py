"""A prompt cache for target and drafter: two turns, a file between them, and a cut.

python examples/prompt_cache.py
"""

import tempfile
from pathlib import Path

from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from dflash_mlx import generate, load, load_drafter, make_prompt_cache, trim_prompt_cache

model, tokenizer = load("tiny")
drafter = load_drafter("tiny", model)
cache = make_prompt_cache(model, drafter)

# The cache remembers what it holds: a later call passes new tokens only.
first = generate(model, tokenizer, "class Stack:\n", max_tokens=32, draft_model=drafter, prompt_cache=cache)
print(first)

with tempfile.TemporaryDirectory() as folder:
    file = str(Path(folder) / "turn1.safetensors")
    save_prompt_cache(file, cache)
    again = load_prompt_cache(file)  # in another process too: it drafts the same ids

turns = [
    generate(model, tokenizer, "\n\ndef main(", max_tokens=32, draft_model=drafter, prompt_cache=held) for held in (cache, again)
]
print("def main(" + turns[0])
assert turns[0] == turns[1]

# Take the last 8 tokens back, in both models' parts.
assert trim_prompt_cache(cache, 8) == 8
