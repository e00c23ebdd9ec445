"""What other frameworks keep, by hand.

Tests of `core/work.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published_memory import MEGATRON_CORE, SCALING, Keeping, Scores, keeping_of
from benchmarks.published_rows import Row
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.core.work import ADAM, Work
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import PRESETS
from meshwright.simulator.pricing import price

CONFIG = replace(PRESETS["byte-tiny"], num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=8, vocab_size=512)
PROFILE = decoder_profile(CONFIG, "tiny")
TOKENS, SEQUENCE = 2 * 32, 32


def _t(name: str, **settings: Any) -> Any:
    return technique_named(name)(**settings)


def _work(keeping: Keeping, *techniques: Any) -> Work:
    plan = Plan(techniques=(_t("precision"), *techniques), batch=16, microbatch=2)
    return keeping.change(price(PROFILE, plan, sequence=SEQUENCE, optimizer=ADAM))


def _held(work: Work, category: str, *lives: str) -> float:
    chosen = [i for i in work.residents if i.category == category and (not lives or i.life in lives)]
    return float(sum(item.repeat * item.bytes for item in chosen))


def test_bytes_of_parameters_follow_the_stage_of_sharding() -> None:
    count = PROFILE.num_params
    alone = _work(MEGATRON_CORE)
    assert [_held(alone, each) for each in ("parameters", "gradients", "optimizer")] == [
        2 * count,
        4 * count,
        12 * count,
    ]
    assert _held(alone, "gathered") == 0
    shared = _work(MEGATRON_CORE, _t("shard", size=8, stage=1))
    assert _held(shared, "parameters") + _held(shared, "gradients") == 6 * count
    assert _held(shared, "optimizer") == pytest.approx(12 * count / 8)
    assert _held(_work(MEGATRON_CORE, _t("shard", size=8)), "parameters") == pytest.approx(2 * count / 8)


def test_logits_are_split_or_whole() -> None:
    logits = TOKENS * CONFIG.vocab_size
    for keeping, kept, beside, ways in ((MEGATRON_CORE, 4, 2, 4), (SCALING, 6, 8, 1)):
        none = replace(keeping, logits_kept_bytes=1e-9, logits_bytes=0.0)
        work, without = (_work(each, _t("tensor", size=4)) for each in (keeping, none))
        assert _held(work, "logits", "forward") == pytest.approx(logits * beside / ways, rel=0.01)
        more = _held(work, "activations", "microbatch") - _held(without, "activations", "microbatch")
        assert more == pytest.approx(logits * kept / ways, rel=0.01)


def test_scores_are_kept_by_kernels_that_write_them_down() -> None:
    kernel = Scores(kept_bytes=5.0, passing_bytes=3.0)
    flash, plain = (
        _work(Keeping(plain=kernel, kernel=name), _t("recompute", layers="first 1"))
        for name in ("flash", "plain_scores")
    )
    scores = 2 * CONFIG.num_heads * SEQUENCE * SEQUENCE
    # Three blocks keep them, one revives them.
    kept = [_held(work, "activations", "microbatch") for work in (flash, plain)]
    assert kept[1] - kept[0] == 3 * 5 * scores
    assert _held(plain, "activations", "backward") == 5 * scores
    assert _held(plain, "working", "moment") - _held(flash, "working", "moment") == 4 * 3 * scores


def test_inputs_are_gathered_again_where_the_sequence_is_split() -> None:
    split = _t("tensor", size=4, sequence=True)
    kept, again = (_held(_work(Keeping(regathers=each), split), "activations", "microbatch") for each in (False, True))
    # Two inputs of a block in bf16, of which three quarters are not kept.
    assert kept - again >= 4 * 2 * TOKENS * 64 * 2 * 3 / 4


def test_a_row_tells_the_kernel_and_the_norm() -> None:
    def row(**cells: str) -> Row:
        return Row({"framework": "Scaling (Aleph Alpha)", **cells})

    assert keeping_of(row(attention_kernel="flash_attention2 + RMS kernel"), "flash").has_fused_norm
    assert not keeping_of(row(attention_kernel="fused"), "fused_scores").has_fused_norm
    unsaid = {"framework": "Megatron-Core", "attention_kernel": "unspecified"}
    assert keeping_of(Row({**unsaid, "row_id": "gpt3_mcore_te_tp2"}), "flash").kernel == "flash"
    assert keeping_of(Row({**unsaid, "row_id": "gpt3_mcore_tp2"}), "flash").kernel == "plain_scores"
