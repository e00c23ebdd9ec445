"""Real workers with real gloo collectives between them. One pool for the file: torch costs 2 s a worker.

Tests of `launch/rank_pool.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.core.errors import MeshwrightError
from meshwright.core.files import memory_file
from meshwright.launch.rank_pool import RankError, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def sums(pool: RankPool, num_ranks: int = 2, offset: int = 10) -> list[dict[str, int]]:
    return pool.run("pool_functions:sum_of_ranks", {"offset": offset}, num_ranks)


def test_two_ranks_reduce_and_the_same_processes_serve_again(pool: RankPool) -> None:
    first = sums(pool)
    second, alone = sums(pool, offset=20), sums(pool, num_ranks=1)
    assert [(each["total"], each["rank"], each["threads"]) for each in first] == [(21, 0, 1), (21, 1, 1)]
    assert [each["total"] for each in second] == [41, 41]
    assert [each["total"] for each in alone] == [10]
    assert [each["pid"] for each in first] == [each["pid"] for each in second]


def test_arguments_and_answers_longer_than_a_pipe(pool: RankPool) -> None:
    text = "ü" * 100_000
    assert pool.run("pool_functions:long_answer", {"text": text}, 2) == [text * 2] * 2


def test_an_error_while_the_peer_waits_in_a_collective(pool: RankPool) -> None:
    sums(pool)
    with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError: rank one does not like") as caught:
        pool.run("pool_functions:rank_one_raises", {}, 2)
    assert "in rank_one_raises" in str(caught.value)
    assert caught.value.exit_code == 1
    assert [each["total"] for each in sums(pool)] == [21, 21]


def test_a_killed_worker_is_noticed(pool: RankPool) -> None:
    sums(pool)
    with pytest.raises(RankError, match=r"rank 1 of 2 was killed by SIGKILL \(often"):
        pool.run("pool_functions:rank_one_is_killed", {}, 2)  # the other would sleep for longer than this waits


def test_a_worker_killed_between_runs_is_replaced(pool: RankPool) -> None:
    pid = sums(pool, num_ranks=1)[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    again = sums(pool, num_ranks=1)[0]
    assert again["total"] == 10
    assert again["pid"] != pid


def test_a_timeout_shows_where_the_rank_hangs(pool: RankPool) -> None:
    pid = sums(pool, num_ranks=1)[0]["pid"]
    with pytest.raises(RankError, match=r"no answer from pool_functions:sleep_for_ever within 0\.5 s") as caught:
        pool.run("pool_functions:sleep_for_ever", {}, 1, timeout_seconds=0.5)
    assert "in sleep_for_ever" in str(caught.value)
    assert not Path(f"/proc/{pid}").exists()


def test_wrong_answers_and_names_are_errors_and_close_ends_all(tmp_path: Path) -> None:
    with RankPool(1, log_folder=tmp_path) as pool:
        with pytest.raises(MeshwrightError, match="2 ranks asked of a pool of 1"):
            sums(pool, num_ranks=2)
        with pytest.raises(RankError, match="set is not JSON serializable"):
            pool.run("pool_functions:answer_a_set", {}, 1)
        pid = sums(pool, num_ranks=1)[0]["pid"]
        assert "must not garble" in (tmp_path / "worker-0.log").read_text()
    assert not Path(f"/proc/{pid}").exists()


def test_a_store_that_outlives_its_run_touches_no_file_that_came_after_it(pool: RankPool) -> None:
    text = "not a store: " + "0123456789" * 100
    pool.run("pool_functions:keep_store", {}, 1)
    with contextlib.ExitStack() as held:
        files = [held.enter_context(memory_file(text)) for _ in range(8)]  # one of them has the descriptor of the run's
        pool.run("pool_functions:drop_store", {}, 1, timeout_seconds=20)
        assert [Path(file).read_text(encoding="utf-8") for file in files] == [text] * 8


def test_a_worker_that_keeps_too_many_threads_is_replaced() -> None:
    with RankPool(1) as pool:

        def ask(count: int) -> int:
            return int(pool.run("pool_functions:start_threads", {"count": count}, 1)[0])

        first = ask(1)
        assert ask(150) == first, "it may finish what it was asked"
        assert ask(1) != first
