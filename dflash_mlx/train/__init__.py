"""Train a drafter: prompts, the target's answers, the masked forward and loss, the loop, and tau by walking.

`prompts` knows text, `sampling` decodes many rows, `data` stores and batches them, `forward` is the training pass,
`loop` optimises and saves, `walk` measures tau without decoding. Nothing here is imported by generation.
"""
