"""A draft source of your own: a suffix automaton proposes what followed the longest suffix of the text that stood before.

python examples/suffix_automaton.py
"""

from dflash_mlx import load, load_drafter, stream_generate
from dflash_mlx.proposers import Draft


class SuffixAutomaton:
    """Every substring of the text in a graph that grows by one token at a time."""

    source = "suffix_automaton"

    def __init__(self):
        # By state: where each token leads, the longest proper suffix of another class, its length, where it ended first.
        self.next, self.link, self.length, self.end = [{}], [-1], [0], [0]
        self.last = self.at = self.matched = self.known = 0

    def rates(self, ids, n):
        """How likely each of the next n tokens is accepted: the longer the match, the likelier."""
        for token in ids[self.known :]:
            while self.at and token not in self.next[self.at]:
                self.at = self.link[self.at]
                self.matched = self.length[self.at]
            if token in self.next[self.at]:
                self.at, self.matched = self.next[self.at][token], self.matched + 1
            self.known += 1
            self.add(token)
        self.ids = ids
        left = len(ids) - self.end[self.at]
        return [1 - 1 / (self.matched + 1)] * min(n, left) if self.matched > 2 else []

    def propose(self, anchor, n):
        return Draft(self.ids[self.end[self.at] :][:n], source=self.source)

    def state(self, next, link, length, end):
        for column, value in zip((self.next, self.link, self.length, self.end), (next, link, length, end), strict=True):
            column.append(value)
        return len(self.next) - 1

    def add(self, token):
        new, p = self.state({}, 0, self.length[self.last] + 1, self.known), self.last
        while p >= 0 and token not in self.next[p]:
            self.next[p][token], p = new, self.link[p]
        if p >= 0:
            q = self.next[p][token]
            if self.length[q] > self.length[p] + 1:
                clone = self.state(dict(self.next[q]), self.link[q], self.length[p] + 1, self.end[q])
                self.link[q], old, q = clone, q, clone
                while p >= 0 and self.next[p].get(token) == old:
                    self.next[p][token], p = clone, self.link[p]
            self.link[new] = q
        self.last = new


if __name__ == "__main__":
    model, tokenizer = load("tiny")
    drafter = load_drafter("tiny", model)
    prompt = "import os\nimport sys\n\n\ndef main(path):\n    return os.path.join(path, path)\n\n\ndef main(path):"
    for r in stream_generate(model, tokenizer, prompt, 80, drafter, block_size=8, proposers=[SuffixAutomaton()]):
        print(r.text, end="", flush=True)
    print(f"\n{r.generation_tokens} tokens; drafts by source: {r.stats.sources}")
