"""Who started us: torchrun, Slurm, or nobody. Pure functions of a mapping.

Tests of `launch/environment.py`.
"""

from __future__ import annotations

import pytest

from meshwright.core.errors import MeshwrightError
from meshwright.launch.environment import RankPlace, first_host, outside_launcher

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}


def test_a_plain_start() -> None:
    assert outside_launcher({"PATH": "/bin", "MASTER_ADDR": "left over"}) is None


def test_torchrun() -> None:
    place = RankPlace(
        rank=3,
        num_ranks=8,
        local_rank=1,
        num_local=8,
        master_address="10.0.0.1",
        master_port=29500,
        kind="torchrun",
    )
    assert outside_launcher(TORCHRUN) == place
    assert outside_launcher(SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "a"}) == place


def test_slurm() -> None:
    place = RankPlace(
        rank=5,
        num_ranks=8,
        local_rank=1,
        num_local=8,
        master_address="gpu007",
        master_port=23456,
        kind="slurm",
    )
    assert outside_launcher(SLURM) == place


def test_ranks_of_a_node_as_the_launcher_says() -> None:
    for environ, name in ((TORCHRUN, "LOCAL_WORLD_SIZE"), (SLURM, "SLURM_NTASKS_PER_NODE")):
        for given, expected in (("4", 4), ("3", 8), ("0", 8), ("4(x2)", 8)):
            place = outside_launcher(environ | {name: given})
            assert place is not None
            assert place.num_local == expected


def test_slurm_with_one_task_or_in_the_batch_script_is_plain() -> None:
    assert outside_launcher(SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    script = {name: value for name, value in SLURM.items() if name != "SLURM_NTASKS"} | {"ENVIRONMENT": "BATCH"}
    assert outside_launcher(script) is None
    assert outside_launcher(SLURM | {"ENVIRONMENT": "BATCH", "SLURM_STEP_ID": "0"}) is not None


@pytest.mark.parametrize("name", TORCHRUN)
def test_torchrun_without_one_of_its_names(name: str) -> None:
    environ = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(MeshwrightError, match=f"torchrun: {name} missing"):
        outside_launcher(environ)


def test_everything_missing_is_named_at_once() -> None:
    with pytest.raises(MeshwrightError, match="WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing"):
        outside_launcher({"RANK": "0"})
    with pytest.raises(MeshwrightError, match="slurm: SLURM_NTASKS, SLURM_LOCALID, SLURM_JOB_ID, SLURM_JOB_NODE"):
        outside_launcher({"SLURM_PROCID": "0"})


def test_wrong_numbers() -> None:
    with pytest.raises(MeshwrightError, match='RANK="one" is not a whole number') as caught:
        outside_launcher(TORCHRUN | {"RANK": "one", "MASTER_PORT": "-1"})
    assert len(caught.value.problems) == 2
    with pytest.raises(MeshwrightError, match=r"rank 8 .* does not exist among 8 ranks"):
        outside_launcher(TORCHRUN | {"RANK": "8"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("host[1-3,5]", "host1"),
        ("gpu[007-009,012],cpu1", "gpu007"),
        ("n[3,5-6]-ib", "n3-ib"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("a1,b[2-3]", "a1"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", "[", "a[1-2", ","])
def test_a_nodelist_without_a_host(nodelist: str) -> None:
    with pytest.raises(MeshwrightError, match="names no host"):
        first_host(nodelist)
