"""States on disk: what is damaged between two steps is found, a full disk is an error with a way out, nothing is left.

That steps are those of one device, bit for bit, is in `tests/optimizers/test_host_states.py`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import full_disk
import pytest
import resumed
import tiny
import torch

from meshwright.core.errors import MeshwrightError
from meshwright.models.presets import DecoderConfig
from meshwright.ops import disk_memory
from meshwright.ops.disk_memory import DiskFile, LayerOnDisk
from meshwright.optimizers.host_states import HostStatesRule
from meshwright.run.model import open_config
from meshwright.runtime.checkpointing import save
from meshwright.verify import parity

CONFIG = DecoderConfig(**tiny.LLAMA | {"num_layers": 5})
ON_DISK = tiny.t("offload_states", disk_share=1.0)


def opened_session() -> tuple[parity.Session, HostStatesRule]:
    session = resumed.session_of(open_config(CONFIG, "tiny", 0), tiny.BF16, ON_DISK)
    rule = session.loop.optimizer.rule
    assert isinstance(rule, HostStatesRule)
    return session, rule


def flip(file: DiskFile, layer: LayerOnDisk) -> None:
    """Behind the mapping's back, as a disk would."""
    place = layer.regions[-1].start + 5
    with open(f"/proc/self/fd/{file.handle}", "r+b", buffering=0) as other:
        other.seek(place)
        byte = other.read(1)
        other.seek(place)
        other.write(bytes([byte[0] ^ 4]))


def train_on(session: parity.Session, rule: HostStatesRule) -> None:
    resumed.train(session, range(2, 4), CONFIG.vocab_size)
    rule.finish()


def truncate(file: DiskFile, layer: LayerOnDisk) -> None:
    os.ftruncate(file.handle, layer.regions[-1].start)


@pytest.mark.parametrize(("damage", "words"), [(flip, "not those that were written"), (truncate, "truncated|ends at")])
def test_what_is_damaged_between_steps_is_never_used(damage: Callable[..., None], words: str, tmp_path: Path) -> None:
    session, rule = opened_session()
    resumed.train(session, range(2), CONFIG.vocab_size)
    rule.finish()
    file, layer = rule.on_disk[0].file, rule.on_disk[-1]  # the last one is not read ahead
    assert layer.loaded is None
    damage(file, layer)
    error = save(tmp_path, 2, session.build, session.loop.optimizer, {}, 1)
    assert any(word in error for word in words.split("|"))
    assert not list(tmp_path.glob("step-*"))
    with pytest.raises(MeshwrightError, match=words) as caught:
        train_on(session, rule)
    assert caught.value.exit_code == 1
    assert "last checkpoint" in str(caught.value)


def test_a_disk_that_fills_up_is_an_error_and_checkpoints_stay() -> None:
    with full_disk.files_of_at_most(1 << 14), pytest.raises(MeshwrightError, match=r"cannot be reserved .* run\.disk"):
        opened_session()
    session, rule = opened_session()
    resumed.train(session, range(2), CONFIG.vocab_size)
    with full_disk.files_of_at_most(1 << 14), pytest.raises(MeshwrightError, match="writing optimizer states failed"):
        train_on(session, rule)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"missing.*run\.disk"):
        DiskFile(tmp_path / "missing", 3)


def test_no_file_has_a_name_and_space_is_given_back(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, 3)
    layer = LayerOnDisk(file)
    layer.add([torch.ones(1000)])
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(file.handle).st_size == disk_memory.PAGE_BYTES
    handle = file.handle
    del file, layer
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_tensors_of_any_size_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks smaller than tensors, and tensors that are no multiple of anything; more layers than buffers."""
    monkeypatch.setattr(disk_memory, "BLOCK_BYTES", 2 * disk_memory.PAGE_BYTES)
    generator = torch.Generator().manual_seed(0)
    file = DiskFile(tmp_path, 3)
    made: list[tuple[LayerOnDisk, list[torch.Tensor], list[torch.Tensor]]] = []
    for size in (1, 5000, 333, 70001, 2048):
        flat = torch.rand(size, generator=generator)
        state = [torch.rand(size, 3, generator=generator, dtype=torch.float64), torch.zeros(7, dtype=torch.uint8)]
        layer = LayerOnDisk(file)
        views = flat.split([size // 2, size - size // 2])
        layer.add([flat])
        layer.watch(flat, views)
        layer.add(state)
        made.append((layer, [flat, *state, *views], [each.clone() for each in (flat, *state, *views)]))
    for step in range(3):
        for at, (layer, tensors, wanted) in enumerate(made):
            for other in [each[0] for each in (made[at:] + made[:at])[:3]]:
                other.prefetch()
            with layer.in_memory():
                for each, value in zip(tensors[:3], wanted[:3], strict=True):
                    assert torch.equal(each, value)
                    each.add_(step + 1)
                    value.add_(step + 1)
                wanted[3:] = wanted[0].split([len(each) for each in wanted[3:]])
    for layer, tensors, wanted in made:
        layer.settle()
        layer.verify()
        assert all(torch.equal(each, value) for each, value in zip(tensors, wanted, strict=True))
    assert file.moved["host", "disk"] == 3 * sum(layer.tensor_bytes for layer, *_ in made)


def test_states_written_by_others_are_read_again(tmp_path: Path) -> None:
    """As `mw train` does when it rolls back to a checkpoint."""
    session, rule = opened_session()
    resumed.train(session, range(1), CONFIG.vocab_size)
    rule.finish()
    first = rule.on_disk[0]
    for state in rule.kept():
        state.value.fill_(0.25)
        rule.restore(state)
    assert first.loaded is None
    seen: list[Any] = []
    with first.in_memory():
        seen += [tensor.clone() for _, tensor, _ in first.regions[-1].members]
    assert all((tensor == 0.25).all() for tensor in seen)
