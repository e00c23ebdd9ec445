"""Which interface leads where, and which peer is gone: on this machine's own addresses, without any right."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from meshwright.launch.peers import (
    SILENT_SECONDS,
    Connection,
    PeerWatch,
    RankHost,
    address_towards,
    connections,
    interface_of,
    silent_seconds,
)

Pair = tuple[socket.socket, socket.socket]


def connected() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Our connections to two ranks, and their ends of them."""
    made = [connected(), connected()]
    yield made
    for each in (end for pair in made for end in pair):
        each.close()


def watching(pairs: list[Pair], watch: PeerWatch) -> PeerWatch:
    """We are rank 0; rank 1 runs beside us, rank 2 on another machine."""
    hosts = [RankHost(name="a", address="10.0.0.1")] * 2 + [RankHost(name="b", address="10.0.0.2")]
    watch.start(connections(), hosts, [[], *([far.getsockname()] for _, far in pairs)], seconds=30)
    return watch


def test_the_interface_that_leads_to_an_address() -> None:
    assert interface_of(address_towards("127.0.0.1", 1)) == "lo"
    assert interface_of(address_towards("localhost", 1)) == "lo"
    assert interface_of("127.8.9.1") == interface_of("::1") == "lo"
    names = {name for _, name in socket.if_nameindex()}
    outside = address_towards("198.51.100.1", 1)
    assert not outside or interface_of(outside) in names - {"lo"}


def test_no_way_and_no_name_is_no_interface() -> None:
    assert address_towards("name.invalid", 1) == ""
    assert interface_of("") == interface_of("nonsense") == interface_of("203.0.113.77") == ""


def test_connections_are_found_with_both_ends_and_seen_to_close(pairs: list[Pair]) -> None:
    (near, far), _ = pairs
    (mine,) = [each for each in connections() if each.number == near.fileno()]
    assert (mine.ours, mine.theirs) == (near.getsockname(), far.getsockname())
    assert mine.is_open
    far.close()
    assert not mine.is_open
    near.close()
    assert not mine.is_open


def test_a_number_that_is_used_again_is_another_connection(pairs: list[Pair]) -> None:
    near = pairs[0][0]
    number = near.fileno()
    (mine,) = [each for each in connections() if each.number == number]
    assert Connection(number=number, kernel_name="socket:[1]", ours=mine.ours, theirs=mine.theirs).is_open is False
    assert mine.is_open
    mine.ask_when_silent(20)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5


def test_a_lost_rank_is_named_once_and_ends_who_waits_for_it(pairs: list[Pair]) -> None:
    gave_up = threading.Event()
    watch = watching(pairs, PeerWatch(0, give_up=gave_up.set, patience_seconds=2.0))
    assert watch.lost(wait_seconds=0.3) == ()
    pairs[1][1].close()
    assert watch.lost(wait_seconds=5) == (2,)
    pairs[0][1].close()  # left because of it, a moment later
    assert gave_up.wait(10)
    assert watch.lost() == (2,)
    expected = "rank 2 of 3 on b (10.0.0.2) is gone: the process ended, or the machine does not answer."
    assert watch.sentence(watch.lost()) == expected
    assert watch.is_teller((2,))


def test_ranks_of_one_machine_that_go_together_are_told_together(pairs: list[Pair]) -> None:
    watch = watching(pairs, PeerWatch(0, give_up=lambda: None))
    for _, far in pairs:
        far.close()
    assert watch.lost(wait_seconds=5) == (1, 2)
    assert watch.sentence((1, 2)).startswith("ranks 1, 2 of 3 on a (10.0.0.1), b (10.0.0.2) are gone: ")
    watch.stop()


def test_one_rank_of_each_machine_tells() -> None:
    watch = PeerWatch(1, give_up=lambda: None)
    watch.hosts = (RankHost(name="a", address=""),) * 2 + (RankHost(name="b", address=""),) * 2
    assert not watch.is_teller((2,))
    assert watch.is_teller((0,))


def test_after_the_end_peers_may_leave(pairs: list[Pair]) -> None:
    gave_up = threading.Event()
    watch = watching(pairs, PeerWatch(0, give_up=gave_up.set, patience_seconds=0.0))
    watch.stop()
    pairs[0][1].close()
    time.sleep(0.5)
    assert not gave_up.is_set()


@pytest.mark.parametrize(
    ("given", "seconds"), [("", SILENT_SECONDS), ("90", 90.0), ("7.5", 7.5), ("0", 2.0), ("soon", SILENT_SECONDS)]
)
def test_the_time_a_machine_may_be_silent(given: str, seconds: float) -> None:
    assert silent_seconds({"MESHWRIGHT_SILENT_SECONDS": given} if given else {}) == seconds
