"""What a round of one model on several Macs sends, and what that makes of its time: PREDICTION, counted on any machine.

    python bench/machines.py                                 two and four M5 Max, a message over TCP and over RDMA
    python bench/machines.py --message-us 40 --gb-per-s 8    with what your own link does

The passes are those of `bench/ledger.py`: a target's are shared out evenly, the drafter's are not. mlx-lm's `shard` sums twice a
layer, over the rows of the block; qwen3_5's head is gathered besides. Each message waits for the link once and moves its bytes;
a ring of N sends 2 (N - 1) / N of them. The two largest models are not in the ledger: `LARGER` says what their shapes are from.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import ledger
import ledger_models
import ledger_time
from ledger_metal import Ledger
from ledger_walk import Walk

# One message's wait in microseconds and a link's bytes a second: ASSUMED, nobody has measured them here.
LINKS = {"TCP (ring)": (300.0, 4e9), "RDMA (jaccl)": (30.0, 6e9)}
# Of a model in the ledger with these numbers in the place of its own. gpt-oss-120b: OpenAI's model card (36 layers, 128 experts).
# 122B-A10B: 48 layers and 256 experts as published; its widths are ASSUMED, so that 122 and 10 billion come out.
LARGER = {
    "gpt-oss-120b": ("gpt-oss-20b", {"num_hidden_layers": 36, "num_local_experts": 128}),
    "qwen3.5-122b-a10b": (
        "qwen3.6-35b-a3b",
        {"num_hidden_layers": 48, "hidden_size": 3072, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024},
    ),
}
NAMES = ("qwen3.5-27b", "qwen3.5-122b-a10b", "gpt-oss-120b")


def published(name: str) -> ledger_models.Published:
    known = ledger_models.published()
    if name in known:
        return known[name]
    like, changes = LARGER[name]
    target, drafter = copy.deepcopy(known[like].target), copy.deepcopy(known[like].drafter)
    text = target.get("text_config", target)
    text.update(changes)
    if "layer_types" in text:
        period = text["layer_types"][:4]
        text["layer_types"] = (period * text["num_hidden_layers"])[: text["num_hidden_layers"]]
    # The drafter of the smaller model, for states as wide as these.
    drafter["hidden_size"] = text["hidden_size"]
    return ledger_models.Published(name, target, drafter, {})


def messages(of: ledger_models.Published, rows: int) -> tuple[int, float]:
    """-> (messages of a round, bytes of all): two sums a layer, the head's rows where it is shared out, ids."""
    text = of.target.get("text_config", of.target)
    count, size = 2 * text["num_hidden_layers"], 4 * text["num_hidden_layers"] * rows * text["hidden_size"]
    if "qwen3_5" in of.target["model_type"] and not text.get("tie_word_embeddings"):
        # The target's head, and in a drafting round the drafter's.
        heads = 1 + (rows > 1)
        count, size = count + heads, size + 2 * heads * rows * text["vocab_size"]
    return count + 1, size


def round_ms(of: ledger_models.Published, rows: int, machines: int, link: tuple[float, float], chip: Any) -> float:
    """A round at 1k of context; of the device and the links, without the host's time."""
    found = Ledger(WALKS[of.name].primitives(rows, rows // 2, rows // 2 + 1), chip.gpu).launches
    target = ledger_time.round_ms([launch for launch in found if launch.stage == "verify"], chip)
    rest = ledger_time.round_ms([launch for launch in found if launch.stage != "verify"], chip) if rows > 1 else 0.0
    if machines == 1:
        return target + rest
    count, size = messages(of, rows)
    return target / machines + rest + 1e-3 * count * link[0] + 1e3 * 2 * (machines - 1) / machines * size / link[1]


WALKS: dict[str, Walk] = {}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--message-us", type=float, help="what one message waits for, instead of both assumed links")
    p.add_argument("--gb-per-s", type=float, default=6.0, help="with --message-us: what the link moves")
    args = p.parse_args()
    links = {"yours": (args.message_us, 1e9 * args.gb_per_s)} if args.message_us is not None else LINKS
    chip = ledger.chips()[1]
    heads = "".join(f" {n} Macs, {name} |" for n in (2, 4) for name in links)
    print(f"| model | rows | messages | MB | one Mac: ms a round |{heads}")
    print("| --- | ---: | ---: | ---: | ---: |" + " ---: |" * 2 * len(links))
    for name in NAMES:
        of = published(name)
        WALKS[name] = Walk(ledger_models.build(of), 1024)
        for rows in (1, 8):
            count, size = messages(of, rows)
            times = [round_ms(of, rows, n, link, chip) for n in (2, 4) for link in links.values()]
            cells = [f"{round_ms(of, rows, 1, (0, 1), chip):.0f}", *(f"{ms:.0f}" for ms in times)]
            print(f"| {name} | {rows} | {count} | {size / 1e6:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
