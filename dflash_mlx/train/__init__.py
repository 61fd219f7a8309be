"""Train a drafter: prompts, the target's answers, the masked forward and losses, the run, and tau by replaying known text.

`prompts` knows text, `rollout` decodes many rows, `data` makes and filters conversations, `docs` stores and batches them,
`forward` is the training pass, `losses` what its slots learn, `start` makes config and first weights, `trainer` optimises and
saves, `card` says what a drafter was made of, `offline_tau` measures tau without decoding. Generation imports none of it.
"""
