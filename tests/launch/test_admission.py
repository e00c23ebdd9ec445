"""Who does not know a run's secret does not become one of its ranks."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.core.errors import MeshwrightError
from meshwright.launch.admission import (
    SECRET_FILE,
    SECRET_NAME,
    Admission,
    code_version,
    group_proof,
    require_group,
    run_secret,
)

SECRET, OTHER = b"0123456789abcdef", b"0123456789abcdeF"
ABOUT = {"host": "node", "torch": "2", "meshwright": "x"}
Answer = bytes | MeshwrightError


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)


def client(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=30))


def met(store: dist.TCPStore, *ranks: Admission | Callable[[dist.TCPStore], object]) -> list[Answer]:
    """What each rank gets: the key, or the error it raised. A function is a stranger in place of a rank."""
    answers: dict[int, Answer] = {}

    def run(number: int) -> None:
        mine, each = client(store), ranks[number]
        try:
            if isinstance(each, Admission):
                answers[number] = each.admit(mine)
            else:
                each(mine)
        except MeshwrightError as error:
            answers[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [answers[number] for number in sorted(answers)]


def of(rank: int, num_ranks: int = 3, secret: bytes = SECRET, **about: str) -> Admission:
    return Admission(secret=secret, rank=rank, num_ranks=num_ranks, about=ABOUT | about)


def test_those_who_know_the_secret_get_one_key_a_new_one_each_time(store: dist.TCPStore) -> None:
    keys = met(store, *(of(rank, host=f"node{rank}") for rank in range(3)))
    assert isinstance(keys[0], bytes)
    assert len(set(keys)) == 1
    fresh = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    assert met(fresh, *(of(rank) for rank in range(3)))[0] != keys[0]


def test_a_rank_with_another_secret_is_named_and_nobody_is_admitted(store: dist.TCPStore) -> None:
    first, second, third = met(store, of(0), of(1), of(2, secret=OTHER))
    for error in (first, second):
        assert isinstance(error, MeshwrightError)
        assert "rank 2: does not know this run's secret" in str(error)
        assert error.is_everywhere
    assert "rank 0: does not know" in str(third)
    assert not any(text in str(error) for error in (first, third) for text in (SECRET.decode(), OTHER.decode()))


@pytest.mark.parametrize(
    "claim",
    ["", "{", "[]", "null", '{"nonce": 1}', '{"nonce": "a", "about": "{}", "proof": ""}', "[" * 100_000, "\xff",
     json.dumps({"nonce": "a" * 32, "about": json.dumps(ABOUT), "proof": "é" * 64})],
)  # fmt: skip
def test_a_stranger_in_place_of_a_rank_is_refused(claim: str, store: dist.TCPStore) -> None:
    def stranger(mine: dist.TCPStore) -> None:
        mine.set("claim 2", claim)
        mine.set("read 2", "")

    first, second = met(store, of(0), of(1), stranger)
    for error in (first, second):
        assert "rank 2: does not know" in str(error)


@pytest.mark.parametrize("answer", ["", "{}", '{"told": "{}", "proof": "00"}', '{"told": 3, "proof": null}'])
def test_a_stranger_in_place_of_rank_0_is_refused(answer: str, store: dist.TCPStore) -> None:
    def stranger(mine: dist.TCPStore) -> None:
        mine.set("begin", "00")
        for rank in (1, 2):
            mine.set(f"answer {rank}", answer)

    for error in met(store, stranger, of(1), of(2)):
        assert "rank 0: does not know" in str(error)


def test_a_claim_that_was_overheard_is_worth_nothing_in_another_run(store: dist.TCPStore) -> None:
    met(store, of(0, 2), of(1, 2))
    overheard = store.get("claim 1").decode()
    fresh = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    fresh.set("read 1", "")
    (error,) = met(fresh, of(0, 2), lambda mine: mine.set("claim 1", overheard))
    assert "rank 1: does not know" in str(error)


def test_a_host_with_another_version_is_named(store: dist.TCPStore) -> None:
    for error in met(store, of(0), of(1, host="node7", torch="1"), of(2)):
        assert "rank 1 on node7: has torch 1, rank 0 has 2" in str(error)


def test_peers_prove_themselves_over_their_own_connections() -> None:
    proofs = [group_proof(b"key", rank) for rank in range(3)]
    require_group(b"key", proofs)
    with pytest.raises(MeshwrightError, match="rank 1: does not know"):
        require_group(b"key", [proofs[0], proofs[0], proofs[2]])


def test_one_secret_is_made_however_many_come_at_once(tmp_path: Path) -> None:
    found: list[bytes] = []
    folder = tmp_path / "runs" / "a"
    threads = [threading.Thread(target=lambda: found.append(run_secret(folder, {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    assert stat.S_IMODE((folder / SECRET_FILE).stat().st_mode) == 0o600
    assert os.listdir(folder) == [SECRET_FILE]


def test_a_secret_that_others_know_or_choose_is_refused(tmp_path: Path) -> None:
    (tmp_path / SECRET_FILE).write_text("x" * 32)
    (tmp_path / SECRET_FILE).chmod(0o640)
    with pytest.raises(MeshwrightError, match="can be read by, somebody else"):
        run_secret(tmp_path, {})
    (tmp_path / SECRET_FILE).chmod(0o600)
    assert run_secret(tmp_path, {}) == b"x" * 32
    (tmp_path / SECRET_FILE).rename(tmp_path / "elsewhere")
    (tmp_path / SECRET_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MeshwrightError, match="symbolic link"):
        run_secret(tmp_path, {})
    (tmp_path / SECRET_FILE).unlink()
    (tmp_path / SECRET_FILE).write_text("short")
    (tmp_path / SECRET_FILE).chmod(0o600)
    with pytest.raises(MeshwrightError, match="fewer than 16"):
        run_secret(tmp_path, {})
    with pytest.raises(MeshwrightError, match=f"{SECRET_NAME}: has fewer than 16 characters") as told:
        run_secret(tmp_path, {SECRET_NAME: "hunter2"})
    assert "hunter2" not in str(told.value)
    assert run_secret(tmp_path, {SECRET_NAME: "y" * 16}) == b"y" * 16


def test_the_version_is_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = code_version(tmp_path)
    assert code_version(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2")
    assert code_version(tmp_path) != before
