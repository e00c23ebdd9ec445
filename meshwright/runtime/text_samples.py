"""Text that a model writes while it is trained: the same for the same weights, whatever the plan.

    every rank: the text so far, padded to a sample -> the plan's own forward pass -> scores of the last token
    who has scores: (score / temperature + noise of the word) -> its best word; the best of all ranks goes on the text

The noise is Gumbel's, so that the largest sum is a draw from the softmax (Gumbel 1954; Maddison et al. 2014). It is a
function of the seed, the step, the place and the word alone: a rank with a slice of the vocabulary needs no other's
scores, and nothing random is used up.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshwright.data.open_data import Data
from meshwright.ops.collectives import gather_json
from meshwright.run.run_file import TrainSection
from meshwright.runtime.build import RankBuild
from meshwright.runtime.loop import Interpreter

TEMPERATURE = 0.8


class Sampler:
    def __init__(self, build: RankBuild, data: Data, settings: TrainSection):
        assert data.tokenizer is not None
        self.build, self.settings, self.tokenizer = build, settings, data.tokenizer
        self.sequence = data.sequence
        self.has_documents = isinstance(data.batch(0, 1).inputs, tuple)
        self.prompt = [int(token) for token in self.tokenizer.encode(settings.sample_prompt)]

    def text(self, step: int) -> str | None:
        """The prompt and what the model makes of it; None where it has no scores for every token."""
        written = self.tokens(step)
        return None if written is None else self.tokenizer.decode([*self.prompt, *written])

    @torch.no_grad()
    def tokens(self, step: int) -> list[int] | None:
        """What follows the prompt, up to the end of the document. All ranks call this together."""
        build = self.build
        build.model.eval()
        for exchange in build.exchanges:
            exchange.before_evaluation()
        text, written = self.prompt or [self.tokenizer.separator], list[int]()
        for _ in range(self.settings.sample_tokens):
            # The end of the text in the shape of a microbatch.
            tokens = [*text, *written][-self.sequence :]
            padded = tokens + [self.tokenizer.separator] * (self.sequence - len(tokens))
            rows = torch.tensor([padded] * build.plan.microbatch, device=build.mesh.device)
            inputs = (rows, torch.zeros_like(rows, dtype=torch.int32)) if self.has_documents else rows
            mine = self._best(Interpreter(build).scores(inputs), len(tokens) - 1, step, len(written))
            result = [best for best in gather_json(build.mesh.control, mine) if best is not None]
            if not result or (token := max(result)[1]) == self.tokenizer.separator:
                break
            written.append(token)
        for exchange in build.exchanges:
            exchange.after_evaluation()
        return written if result else None

    def _best(self, scores: Tensor | None, place: int, step: int, position: int) -> list[Any] | None:
        """[score with noise, word] of the best word that this rank has scores for."""
        if scores is None or scores.ndim != 3:
            return None
        _, head = self.build.model.ends()
        first = getattr(head, "first_word", 0)
        # A vocabulary is often padded to a round number: words past the tokenizer's are never meant.
        row = scores[0, place, : max(0, self.tokenizer.vocab_size - first)].double().cpu().numpy()
        if not len(row):
            return None
        noisy = row / TEMPERATURE + gumbel(f"{self.settings.seed}/{step}/{position}", first, len(row))
        best = int(noisy.argmax())
        return [float(noisy[best]), first + best]


def gumbel(key: str, first: int, count: int) -> npt.NDArray[np.float64]:
    """Noise of the words first, first + 1, ..., each from its own number (splitmix64: Steele et al. 2014)."""
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    mixed = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    uniform = ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # never 0 or 1
    return -np.log(-np.log(uniform))
