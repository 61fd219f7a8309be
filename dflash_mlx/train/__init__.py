"""Train a drafter: prompts, the target's answers, the masked forward and losses, the run, and tau by replaying known text.

`prompts` knows text, `rollout` decodes many rows, `data` stores and batches them, `forward` is the training pass, `losses` what
its slots learn, `start` makes config and first weights, `trainer` optimises and saves, `offline_tau` measures tau without
decoding. Nothing here is imported by generation.
"""
