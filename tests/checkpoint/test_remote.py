"""Checkpoints in object storage, against an S3 server that runs as a process."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_ranks import holds, save, toy

pytest.importorskip("obstore")
pytest.importorskip("moto")

from s3_server import BUCKET, FaultyProxy, environment, s3_server

from benchmarks.scorecard import final_state, toy_run
from meshwright.checkpoint import remote
from meshwright.checkpoint.remote import ObjectFolder, Uploader, fetch_newest
from meshwright.core.errors import MeshwrightError
from meshwright.run.run import Run
from meshwright.run.run_file import RunSection


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    made = FaultyProxy(server)
    for name, value in environment(made.address).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "RETRY_SECONDS", (0.05,) * 20)
    yield made
    made.shutdown()


@pytest.fixture
def folder(proxy: FaultyProxy, request: pytest.FixtureRequest) -> ObjectFolder:
    return ObjectFolder(f"s3://{BUCKET}/{request.node.name}", request_seconds=1.0)


def newest_two(steps: list[int]) -> set[int]:
    return set(steps[-2:])


def test_what_was_put_comes_back_verified(folder: ObjectFolder, tmp_path: Path) -> None:
    for step in (1, 2):
        folder.upload(save(tmp_path / "here", step, toy(step)))
    folder.upload(tmp_path / "here" / "step-00000002")  # again: nothing changes
    assert folder.steps() == [1, 2]
    lines: list[str] = []
    found = fetch_newest(folder, tmp_path / "there", report=lines.append)
    assert found is not None
    assert holds(found, toy(2))
    assert lines == [f"checkpoint of step 2 read from {folder.url}"]
    assert fetch_newest(folder, tmp_path / "there", report=lines.append) is None
    assert (found / "manifest.json").read_bytes() == (
        tmp_path / "here" / "step-00000002" / "manifest.json"
    ).read_bytes()


def test_a_damaged_one_is_passed_over(folder: ObjectFolder, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        folder.upload(save(tmp_path / "here", step, toy(step), keep=3))
    manifest = remote.read_manifest(tmp_path / "here" / "step-00000003")
    folder.api.put(folder.store, "files/" + next(iter(manifest.files.values())).xxh3, b"other bytes")
    bad, _ = folder.read(2) or (b"", None)
    folder.api.put(folder.store, "step-00000002/manifest.json", bad.replace(b'"seed": 7', b'"seed": 8'))
    lines: list[str] = []
    found = fetch_newest(folder, tmp_path / "there", report=lines.append)
    assert found is not None
    assert holds(found, toy(1))
    assert "step 3 is not used" in lines[0]
    assert "has changed" in lines[0]
    assert "digest" in lines[1]
    assert os.listdir(tmp_path / "there") == ["step-00000001"]


def test_a_local_one_that_is_damaged_is_replaced(folder: ObjectFolder, tmp_path: Path) -> None:
    final = save(tmp_path, 4, toy(4))
    folder.upload(final)
    (final / "rank-00000.safetensors").write_bytes(b"")
    found = fetch_newest(folder, tmp_path, report=lambda _: None)
    assert found == final
    assert holds(final, toy(4))


def test_a_manifest_is_put_only_in_place_of_the_one_that_was_read(folder: ObjectFolder, tmp_path: Path) -> None:
    folder.upload(save(tmp_path, 1, toy(1)))
    conflicts = (folder.api.exceptions.AlreadyExistsError, folder.api.exceptions.PreconditionError)
    for mode in ("create", {"e_tag": '"of another version"'}):
        with pytest.raises(conflicts):
            folder._put_manifest(1, b"x", mode)
    folder.upload(save(tmp_path, 1, toy(7)))  # the same step again, by this run
    found = fetch_newest(folder, tmp_path / "there", report=lambda _: None)
    assert found is not None
    assert holds(found, toy(7))


def test_old_ones_go_and_files_that_two_share_stay(folder: ObjectFolder, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        same = {**toy(step), "weight": toy(1)["weight"]} if step > 1 else toy(1)
        folder.upload(save(tmp_path / "here", step, same))
        time.sleep(1.01)  # the times of objects are in seconds
        folder.retain(newest_two)
    assert folder.steps() == [2, 3]
    for step in (2, 3):
        folder.download(step, tmp_path / "there")
    first = remote.read_manifest(tmp_path / "here" / "step-00000002")
    names = {each["path"] for chunk in folder.api.list(folder.store, "files") for each in chunk}
    kept = {f"files/{entry.xxh3}" for entry in first.files.values()}
    assert kept < names
    assert len(names) <= 4


@pytest.mark.parametrize("seed", range(4))
def test_uploads_survive_faults(seed: int, folder: ObjectFolder, proxy: FaultyProxy, tmp_path: Path) -> None:
    proxy.dice.seed(seed)
    proxy.share = 0.3
    lines: list[str] = []
    uploader = Uploader(folder, newest_two, lines.append)
    for step in (1, 2):
        uploader.put(save(tmp_path / "here", step, toy(step)))
    assert uploader.close(60), lines
    proxy.share = 0.0
    found = fetch_newest(folder, tmp_path / "there", report=lines.append)
    assert found is not None
    assert holds(found, toy(2))


def test_storage_that_never_answers_is_said_and_waited_for_within_a_limit(
    folder: ObjectFolder, proxy: FaultyProxy, tmp_path: Path
) -> None:
    proxy.is_dead = True
    lines: list[str] = []
    uploader = Uploader(folder, newest_two, lines.append)
    start = time.monotonic()
    for step in (1, 2, 3):
        uploader.put(save(tmp_path, step, toy(step), keep=3))
    assert time.monotonic() - start < 20  # nobody waited
    assert uploader.reads(3)
    assert not uploader.close(0.2)
    assert any("waiting for" in line for line in lines)
    assert "step-00000" in lines[-1]
    assert "never-to-be-shown" not in " ".join(lines)


@pytest.mark.slow
def test_a_run_goes_on_elsewhere_from_object_storage(folder: ObjectFolder, tmp_path: Path) -> None:
    """The local folder is lost after 6 of 9 steps; in the end everything is as if nothing had happened."""
    states = []
    for name, remote_url in (("whole", ""), ("split", folder.url)):
        path = toy_run(tmp_path / name, steps=9, save_every=3, ranks=1)
        about = {"plan": tmp_path / name / "toy.plan.json"}
        changes = [f"run.remote={remote_url}", "train.save_async=true"]
        for steps in (6, 9) if remote_url else (9,):
            lr = ["train.optimizer.schedule=constant"]
            with Run(path, changes=[*changes, *lr, f"train.steps={steps}"], **about) as running:
                running.start().result()
            states.append(final_state(tmp_path / name / "run"))
            if steps == 6:
                assert folder.steps() == [3, 6]
                shutil.rmtree(tmp_path / name / "run")
    assert states[0]["files"] == states[-1]["files"]
    assert folder.steps() == [3, 6, 9]


def test_without_the_package_or_the_server_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MeshwrightError, match="listing failed") as caught:
        ObjectFolder(f"s3://{BUCKET}/x", request_seconds=0.5).steps()
    assert caught.value.exit_code == 1
    assert "never-to-be-shown" not in str(caught.value)
    assert "Debug source" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    with pytest.raises(MeshwrightError, match='AWS_ENDPOINT_URL is "minio:9000", which is no address'):
        ObjectFolder(f"s3://{BUCKET}/x")
    for place in ("s3://bucket", "s3://bucket/../x", "s3://bucket/x/..", "s3://b/x", "http://bucket/x"):
        with pytest.raises(MeshwrightError, match="Use the form s3://BUCKET/PREFIX"):
            RunSection(folder="run", remote=place)
    assert RunSection(folder="run", remote="s3://bucket/a..b/c.d/").remote
