"""Checkpoints in object storage: a second tier behind the local one, written behind training by one thread of rank 0.

    <prefix>/files/<xxh3 of the file>                  pieces of any checkpoint, named by their content
    <prefix>/step-00000100/manifest.json               committed: the manifest, put last and on condition

A file is put under the hash of its content, so putting it twice, late or by two writers gives the same object. The
manifest makes a checkpoint: it is put only if there is none (or only in place of the one that was read), and read back.
Reading a checkpoint writes it into the local folder as any other: hashed, fsynced, renamed. No torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, FileEntry, parse_manifest
from meshwright.checkpoint.step_folders import (
    committed_folders,
    read_manifest,
    step_folder,
    temporary_name,
    usable_folders,
    verify,
    write_checkpoint,
)
from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.units import pretty_seconds

REQUEST_SECONDS = 60.0
"""For one request, a chunk of a file or a manifest."""
RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0, 60.0)
"""Between attempts at an upload; then it is given up, until the next checkpoint."""
END_SECONDS = 600.0
"""That the end of a run waits for its last upload at most."""
STOP_SECONDS = 15.0
"""That a run which was asked to stop waits at most."""
Report = Callable[[str], None]


class ObjectFolder:
    """A prefix of a bucket as a place for checkpoints. Endpoint and credentials come from the environment, as AWS's
    own tools read them (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...); they are in no message."""

    def __init__(self, url: str, request_seconds: float = REQUEST_SECONDS):
        try:
            import obstore
            from obstore.store import S3Store
        except ImportError:
            fix = 'Install it: pip install "meshwright[s3]".'
            raise error_at("run.remote", "needs the package obstore, which is not installed.", fix) from None
        self.url, self.api = url.rstrip("/"), obstore
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if endpoint and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
            fix = "Use the form https://HOST:PORT."
            raise error_at("run.remote", f'AWS_ENDPOINT_URL is "{endpoint[:100]}", which is no address.', fix)
        limit = timedelta(seconds=request_seconds)
        about: dict[str, Any] = {"config": {"endpoint": endpoint} if endpoint else {}}
        about["client_options"] = {"timeout": limit, "connect_timeout": min(limit, timedelta(seconds=10))}
        about["client_options"]["allow_http"] = endpoint.startswith("http://")
        about["retry_config"] = {"max_retries": 3, "retry_timeout": 2 * limit}
        with self._errors("opening"):
            self.store = S3Store.from_url(self.url, **about)

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Any:
        try:
            yield
        except FileNotFoundError:
            raise
        except (self.api.exceptions.BaseError, OSError, ValueError) as error:
            said = " ".join(str(error).split()).partition(" Debug source:")[0]
            words = re.sub(r"\?[^\s\"')]*", "", said)[:300]  # without what signs an address
            raise error_at(self.url, f"{doing} failed: {type(error).__name__}: {words}.", exit_code=1) from None

    def steps(self) -> list[int]:
        """Steps that have a manifest, ascending."""
        with self._errors("listing"):
            names = [each["path"] for chunk in self.api.list(self.store) for each in chunk]
        found = [name.split("/")[-2:] for name in names if name.endswith(f"/{MANIFEST}")]
        numbers = [int(folder[5:]) for folder, _ in found if folder.startswith("step-") and folder[5:].isdecimal()]
        return sorted(number for number in numbers if step_folder(Path(), number).name in {each[0] for each in found})

    def _key(self, step: int) -> str:
        return f"{step_folder(Path(), step).name}/{MANIFEST}"

    def read(self, step: int) -> tuple[bytes, Any] | None:
        """The bytes of a step's manifest and what names this version of it; None where there is none."""
        with contextlib.suppress(FileNotFoundError), self._errors(f"reading step {step}"):
            got = self.api.get(self.store, self._key(step))
            if got.meta["size"] > MAX_MANIFEST_BYTES:
                raise error_at(self.url, f"the manifest of step {step} has {got.meta['size']} bytes.", exit_code=1)
            return bytes(got.bytes()), {key: got.meta[key] for key in ("e_tag", "version") if got.meta[key]}
        return None

    def upload(self, folder: Path) -> None:
        """Put a committed local checkpoint; returns once its manifest has been read back."""
        manifest, data = read_manifest(folder), (folder / MANIFEST).read_bytes()
        with self._errors(f"listing the files of step {manifest.step}"):
            there = {each["path"]: each["size"] for chunk in self.api.list(self.store, "files") for each in chunk}
        for name, entry in manifest.files.items():
            key = f"files/{entry.xxh3}"
            if there.get(key) == entry.bytes:
                continue
            with self._errors(f"putting {name} of step {manifest.step}"):
                self.api.put(self.store, key, folder / name)
                if (size := self.api.head(self.store, key)["size"]) != entry.bytes:
                    raise ValueError(f"{size} of {entry.bytes} bytes arrived")
        known = self.read(manifest.step)
        if known is None or known[0] != data:
            with contextlib.suppress(self.api.exceptions.AlreadyExistsError, self.api.exceptions.PreconditionError):
                self._put_manifest(manifest.step, data, "create" if known is None else known[1])
        after = self.read(manifest.step)  # also where the answer to our own put was lost
        if after is None or after[0] != data:
            what = f"another writer has committed step {manifest.step} here."
            raise error_at(self.url, what, "Give each run a prefix of its own (run.remote).", exit_code=1)

    def _put_manifest(self, step: int, data: bytes, mode: Any) -> None:
        conflicts = (self.api.exceptions.AlreadyExistsError, self.api.exceptions.PreconditionError)
        try:
            self.api.put(self.store, self._key(step), data, mode=mode, use_multipart=False)
        except conflicts:
            raise
        except Exception as error:
            with self._errors(f"committing step {step}"):
                raise error from None

    def download(self, step: int, root: Path) -> Path:
        """Write a remote checkpoint into the local folder, every byte checked; its folder there."""
        got = self.read(step)
        if got is None:
            raise error_at(self.url, f"has no step {step}.", exit_code=1)
        manifest = parse_manifest(got[0], f"{self.url}/{self._key(step)}")
        if manifest.step != step:
            raise error_at(self.url, f"the manifest of step {step} is of step {manifest.step}.", exit_code=1)

        def chunks_of(name: str, entry: FileEntry) -> Iterator[Any]:
            try:
                with self._errors(f"reading {name} of step {step}"):
                    yield from self.api.get(self.store, f"files/{entry.xxh3}").stream()
            except FileNotFoundError:
                raise error_at(f"{self.url}/files/{entry.xxh3}", "is missing.", exit_code=1) from None

        return write_checkpoint(root, got[0], self.url, chunks_of)

    def retain(self, keeps: Callable[[list[int]], set[int]]) -> None:
        """Delete older checkpoints, manifests first, and older files that no manifest names any more."""
        steps = self.steps()
        stay, used = keeps(steps), set[str]()
        if not set(steps) - stay:
            return
        with self._errors("deleting old checkpoints"):
            for step in set(steps) - stay:
                self.api.delete(self.store, self._key(step))
        for step in stay:
            if (got := self.read(step)) is not None:
                used |= {f"files/{entry.xxh3}" for entry in parse_manifest(got[0], self.url).files.values()}
        with self._errors("deleting old checkpoints"):
            oldest = min(self.api.head(self.store, self._key(step))["last_modified"] for step in stay)
            held = [each for chunk in self.api.list(self.store, "files") for each in chunk]
            # What is newer may be of a checkpoint that somebody is about to commit.
            unused = [each["path"] for each in held if each["path"] not in used and each["last_modified"] < oldest]
            if unused:
                self.api.delete(self.store, unused)


def fetch_newest(remote: ObjectFolder, root: Path, *, report: Report) -> Path | None:
    """Bring the newest good remote checkpoint here where it is newer than all that are good here; its folder."""
    local = next((step for step, folder in reversed(usable_folders(root).items()) if not verify(folder)), -1)
    failed: MeshwrightError | None = None
    for step in reversed(remote.steps()):
        if step <= local:
            return None
        with contextlib.suppress(OSError):
            if step in committed_folders(root):  # damaged, or it would have counted
                os.rename(step_folder(root, step), temporary_name(step_folder(root, step)))
        try:
            folder = remote.download(step, root)
        except MeshwrightError as error:
            report(f"remote checkpoint of step {step} is not used: {error.problems[0]}")
            failed = failed or error
            continue
        report(f"checkpoint of step {step} read from {remote.url}")
        return folder
    if failed is not None and local < 0:
        raise failed  # a second beginning would meet the first one there
    return None


class Uploader:
    """Puts local checkpoints into object storage, the newest first, by a thread; training never waits for it.

    At most one upload is under way and one waits: a newer checkpoint takes the place of the one that waits.
    """

    def __init__(self, remote: ObjectFolder, keeps: Callable[[list[int]], set[int]], report: Report):
        self.remote, self.keeps, self.report = remote, keeps, report
        self.changed = threading.Condition()
        self.waiting: Path | None = None
        self.current: Path | None = None
        self.is_closed = False
        self.has_failed = False
        self.thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self.thread.start()

    def put(self, folder: Path) -> None:
        with self.changed:
            self.waiting = folder
            self.changed.notify_all()

    def reads(self, step: int) -> bool:
        """Whether the local checkpoint of that step is still needed."""
        name = step_folder(Path(), step).name
        return any(each is not None and each.name == name for each in (self.waiting, self.current))

    def _work(self) -> None:
        while True:
            with self.changed:
                self.current = None
                self.changed.notify_all()
                while self.waiting is None:
                    if self.is_closed:
                        return
                    self.changed.wait()
                self.current, self.waiting = self.waiting, None
            self._upload(self.current)

    def _upload(self, folder: Path) -> None:
        for pause in (*RETRY_SECONDS, None):
            try:
                self.remote.upload(folder)
                self.remote.retain(self.keeps)
            except Exception as error:  # the network's, the storage's, or a local file that went
                reason = str(error)
            else:
                if self.has_failed:
                    self.report(f"{self.remote.url} answers again: {folder.name} is there")
                self.has_failed = False
                return
            if not self.has_failed:
                self.report(f"{folder.name} is not in object storage yet, training goes on: {reason}")
            self.has_failed = True
            with self.changed:
                if pause is None or self.waiting is not None:
                    break  # a newer one takes its turn
                self.changed.wait(pause)
        self.report(f"{folder.name} was not put into object storage: {reason}")

    def close(self, limit_seconds: float) -> bool:
        """Wait for what is under way; whether everything is there."""
        until = time.monotonic() + limit_seconds
        with self.changed:
            is_said = False
            while self.waiting is not None or self.current is not None:
                if (left := until - time.monotonic()) <= 0:
                    break
                if not is_said:
                    self.report(f"waiting for {self.remote.url}, {pretty_seconds(limit_seconds)} at most")
                    is_said = True
                self.changed.wait(left)
            missing = self.waiting or self.current
            self.is_closed = True
            self.changed.notify_all()
        if missing is not None:
            self.report(f"{missing.name} is not in object storage; the next start of this run puts it there")
        return missing is None and not self.has_failed
