"""Sampled text depends on the weights, the seed and the step: never on how the model is cut.

Tests of `runtime/text_samples.py`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from meshwright.core.plan import Plan
from meshwright.data.data_section import DataSection
from meshwright.data.open_data import Data, open_data
from meshwright.launch.rank_pool import RankPool
from meshwright.run.run_file import OptimizerConfig, TrainSection
from meshwright.runtime.run_record import one_line
from meshwright.runtime.text_samples import TEMPERATURE, Sampler, gumbel
from meshwright.verify import parity

CPU = torch.device("cpu")
# 259 words for 256 bytes: the pieces of a split vocabulary differ in size, and the last three words are never meant.
OURS = {name: shape | {"vocab_size": 259} for name, shape in tiny.FAMILIES.items()}
FOREIGN = {"section": {"factory": "test_sample:by_hand"}, "vocab": 256}
STEP = 7


def by_hand() -> nn.Module:
    """A module that knows nothing of us, over bytes."""
    import foreign

    module = foreign.ByHand()
    module.words, module.out = nn.Embedding(256, 16), nn.Linear(16, 256)
    module.mixers = nn.ModuleList(foreign.Mixer(16, 4) for _ in range(6))
    return foreign._larger(module)


def corpus(folder: str, packing: str) -> Data:
    path = Path(folder) / "corpus.txt"
    if not path.exists():
        path.write_text("to be, or not to be: that is the question. " * 20, encoding="utf-8")
    section = DataSection(train=str(path), sequence=tiny.SEQUENCE, packing=packing)  # type: ignore[arg-type]
    return open_data(section, cache=None)


def sample_job(
    *, plan: dict[str, Any], config: dict[str, Any], folder: str, packing: str, prompt: str, num_tokens: int,
    rank: int, num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Tokens of two samples, and the loss of a step after them."""
    import rank_jobs

    chosen = Plan.from_json(json.dumps(plan))
    if chosen.mesh:
        parity.enter(rank, num_ranks, rendezvous)
    opened, samples = rank_jobs.open_tiny(config, chosen.batch, tiny.SEQUENCE, "float64")
    session = parity.open_session(chosen, opened, OptimizerConfig(), dtype="float64", device=CPU)
    settings = TrainSection(batch=8, steps=1, sample_every=1, sample_tokens=num_tokens, sample_prompt=prompt)
    sampler = Sampler(session.build, corpus(folder, packing), settings)
    found = [sampler.tokens(STEP), sampler.tokens(STEP + 1)]
    part = session.mesh.part(chosen.sample_axes)
    loss = session.loop.step(samples(0, *part), 0.0).loss
    if chosen.mesh:
        parity.leave()
    return {"tokens": found, "loss": loss, "text": sampler.text(STEP) if not chosen.mesh else ""}


@pytest.fixture(scope="module")
def sampled(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("sampled"))

    def run(config: dict[str, Any], *techniques: Any, packing: str = "stream", num_tokens: int = 14) -> list[Any]:
        plan = tiny.plan_of(*techniques)
        asked = {"plan": json.loads(plan.to_json()), "config": config, "folder": folder, "packing": packing}
        asked |= {"prompt": "to be", "num_tokens": num_tokens}
        return pool.run("test_sample:sample_job", asked, plan.num_ranks, timeout_seconds=60)

    return run


@pytest.fixture(scope="module")
def alone(sampled: Any) -> Any:
    """One device's answer, asked once."""
    return cache(lambda name, packing="stream": sampled(_model(name), packing=packing)[0])


def _model(name: str) -> dict[str, Any]:
    return OURS.get(name, FOREIGN)


CUT = (
    ("llama", (tiny.TENSOR,)),
    ("gpt", (tiny.SEQUENCED,)),
    ("qwen", (tiny.PIPELINE,)),
    ("llama", (tiny.SHARD2,)),
    ("qwen", (tiny.SEQUENCED, tiny.UNEVEN, tiny.RECOMPUTE, tiny.CHUNKED)),
    ("by hand", (tiny.PIPELINE,)),
    ("qwen", (tiny.INTERLEAVED,)),
    ("llama", (tiny.RING,)),
    ("gpt", (tiny.ULYSSES, tiny.PIPELINE)),
)


@pytest.mark.parametrize(("name", "techniques"), CUT, ids=[f"{name} {tiny.joined(cut)}" for name, cut in CUT])
def test_every_plan_writes_the_same_text(name: str, techniques: tuple[Any, ...], sampled: Any, alone: Any) -> None:
    wanted = alone(name)
    first, second = wanted["tokens"]
    assert first != second, "the step makes no difference"
    for answer in sampled(_model(name), *techniques):
        assert answer["tokens"] == wanted["tokens"]
        assert answer["loss"] == pytest.approx(wanted["loss"], rel=1e-12), "sampling disturbs the step after it"


def test_packed_documents_are_sampled_as_one_document(sampled: Any, alone: Any) -> None:
    """The same text, through the other kind of inputs, also where it is longer than a sample."""
    packed = alone("llama", "documents")
    assert packed["tokens"] == alone("llama")["tokens"]
    assert max(map(len, packed["tokens"])) + len("to be") > tiny.SEQUENCE


def test_a_token_is_the_best_of_its_noisy_scores(sampled: Any, alone: Any) -> None:
    """Written out: the whole text so far without padding, through the module itself."""
    import rank_jobs

    opened, _ = rank_jobs.open_tiny(OURS["llama"], 8, tiny.SEQUENCE, "float64")
    plan = Plan(batch=8, microbatch=8)
    model = parity.open_session(plan, opened, OptimizerConfig(), dtype="float64", device=CPU).build.model
    text = list(b"to be")
    for position, token in enumerate(alone("llama")["tokens"][0]):
        scores = model(torch.tensor([text[-tiny.SEQUENCE :]]))[0, -1, :256].detach().numpy()
        assert int((scores / TEMPERATURE + gumbel(f"0/{STEP}/{position}", 0, 256)).argmax()) == token
        text.append(token)
    assert alone("llama")["text"] == bytes(text).decode(errors="replace")


def test_noise_draws_words_as_often_as_their_chance() -> None:
    chances = np.array([0.5, 0.3, 0.15, 0.05])
    drawn = [int((np.log(chances) + gumbel(f"3/5/{position}", 0, 4)).argmax()) for position in range(20_000)]
    assert np.bincount(drawn, minlength=4) / len(drawn) == pytest.approx(chances, abs=0.015)
    assert np.array_equal(gumbel("key", 100, 20), gumbel("key", 0, 200)[100:120]), "a slice has noise of its own"


def test_a_terminal_is_shown_one_harmless_line() -> None:
    assert one_line("a\nb\x1b[2Jcé\ufffd\x00") == "a\\nb\\x1b[2Jcé\ufffd\\x00"
