"""A client of `dflash-mlx serve`, by OpenAI's own package (pip install openai).

dflash-mlx serve --port 8080 &
python examples/client.py http://127.0.0.1:8080/v1
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1", api_key="not needed")
model = client.models.list().data[0]
print(f"{model.id}, drafter {model.draft_model}, block size {model.block_size}")

stream = client.completions.create(
    model=model.id, prompt="def test_", max_tokens=48, stream=True, stream_options={"include_usage": True}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].text, end="", flush=True)

usage = chunk.usage
drafts = usage.completion_tokens_details
print(f"\n\n{usage.completion_tokens} tokens, {drafts.accepted_prediction_tokens} of them drafted and accepted")
