"""Ranks of several hosts prove to each other that they know the run's secret, before any of them trains. No torch.

    rank 0                              the others
    begin: a nonce         ──────────>  claim: a nonce, what they run, HMAC over both nonces and their rank
    answer: digest of all nonces, HMAC over it and each rank's nonce
    ──> a session key, HMAC over the digest; the process group meets under it

The secret never travels. It is `MESHWRIGHT_SECRET`, or the file `.secret` of the run folder, which all hosts share and
only its owner can read. Messages pass through the store by which torch's ranks meet, and which anybody who reaches its
port can read and write: so a stranger can keep a run from starting, and cannot become a rank of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import MeshwrightError, Problem, error_at
from meshwright.core.files import link_problems, open_plain, parse_json

SECRET_NAME = "MESHWRIGHT_SECRET"
SECRET_FILE = ".secret"
LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_SLOW_FOLDER_SECONDS = 60.0
"""Network file systems show another host's file late."""
_LINGER_SECONDS = 3.0
"""The store may end with rank 0: so long it waits for the others to have read why nobody trains."""


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def run_secret(folder: Path, environ: Mapping[str, str]) -> bytes:
    """The secret of a run: from the environment, or from its folder, where the first rank makes one."""
    if given := environ.get(SECRET_NAME, ""):
        if len(given) < LEAST_CHARACTERS:
            fix = "Use the output of `openssl rand -hex 16`, the same on every host."
            raise error_at(SECRET_NAME, f"has fewer than {LEAST_CHARACTERS} characters.", fix)
        return given.encode("utf-8", "surrogateescape")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _make_secret(folder)
    except OSError as error:
        fix = f"Make run.folder writable, or set {SECRET_NAME} on every host."
        raise error_at(f"run.folder {folder}", f"cannot write there: {error.strerror}.", fix) from None
    deadline = time.monotonic() + _SLOW_FOLDER_SECONDS
    while not (folder / SECRET_FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    file, _ = open_plain(folder, SECRET_FILE)
    with os.fdopen(file, "rb") as stream:
        about = os.fstat(stream.fileno())
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            fix = f"Delete it, or set {SECRET_NAME} on every host."
            raise error_at(folder / SECRET_FILE, "belongs to, or can be read by, somebody else.", fix)
        found = stream.read(_MOST_BYTES).strip()
    if len(found) < LEAST_CHARACTERS:
        raise error_at(folder / SECRET_FILE, f"has fewer than {LEAST_CHARACTERS} characters.", "Delete it.")
    return found


def _make_secret(folder: Path) -> None:
    """Whole or not at all, once for all hosts: a hard link fails where another rank was first."""
    if problems := [each for each in link_problems(folder) if each.where == str(folder / SECRET_FILE)]:
        raise MeshwrightError(problems)
    if (folder / SECRET_FILE).exists():
        return
    draft = folder / f".secret-{secrets.token_hex(8)}.tmp"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "w") as stream:
            stream.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, folder / SECRET_FILE)
    finally:
        draft.unlink(missing_ok=True)


def code_version(package: Path) -> str:
    """A digest of the package's source: ranks with different code do not train the same model."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """One rank's side. `about`: what all ranks must have in common, by its name, and `host`, which they need not."""

    secret: bytes
    rank: int
    num_ranks: int
    about: Mapping[str, str]

    def _proof(self, *words: str) -> str:
        return hmac.new(self.secret, json.dumps([self.num_ranks, *words]).encode(), hashlib.sha256).hexdigest()

    def admit(self, store: Store) -> bytes:
        """Meet the others; a key that only those have who know the secret. Raises on every rank if one does not."""
        nonce = secrets.token_hex(16)
        if self.rank == 0:
            store.set("begin", nonce)
            claims = [json.dumps(dict(self.about))]
            nonces, problems = [nonce], []
            for rank in range(1, self.num_ranks):
                claim = _parsed(store.get(f"claim {rank}"))
                nonces.append(claim["nonce"])
                claims.append(claim["about"])
                expected = self._proof("claim", str(rank), nonce, claim["nonce"], claim["about"])
                if not hmac.compare_digest(expected, claim["proof"]):
                    problems.append(_stranger(rank))
                    claims[-1] = claims[0]
            every = [parse_json(claim, f"rank {rank}") for rank, claim in enumerate(claims)]
            problems += [
                Problem(
                    where=f"rank {rank} on {claim.get('host', '?')}",
                    what=f"has {name} {claim.get(name, 'none')}, rank 0 has {value}.",
                    fix="Use the same Python environment on every host.",
                )
                for rank, claim in enumerate(every)
                for name, value in every[0].items()
                if name != "host" and claim.get(name) != value
            ]
            digest = hashlib.sha256(json.dumps(nonces).encode()).hexdigest()
            told = json.dumps({"digest": digest, "problems": [[each.where, each.what, each.fix] for each in problems]})
            for rank in range(1, self.num_ranks):
                proof = self._proof("answer", str(rank), nonces[rank], told)
                store.set(f"answer {rank}", json.dumps({"told": told, "proof": proof}))
            deadline, others = time.monotonic() + _LINGER_SECONDS, [f"read {rank}" for rank in range(1, self.num_ranks)]
            while problems and not store.check(others) and time.monotonic() < deadline:
                time.sleep(0.05)
        else:
            first, about = store.get("begin").decode("utf-8", "replace"), json.dumps(dict(self.about))
            proof = self._proof("claim", str(self.rank), first, nonce, about)
            store.set(f"claim {self.rank}", json.dumps({"nonce": nonce, "about": about, "proof": proof}))
            answer = _parsed(store.get(f"answer {self.rank}"), "told", "proof")
            store.set(f"read {self.rank}", "")
            expected = self._proof("answer", str(self.rank), nonce, answer["told"])
            if not hmac.compare_digest(expected, answer["proof"]):
                raise MeshwrightError([_stranger(0)])
            found = parse_json(answer["told"], "rank 0")
            digest, problems = found["digest"], [Problem(where=a, what=b, fix=c) for a, b, c in found["problems"]]
        if problems:
            raise MeshwrightError(problems, is_everywhere=True)
        return self._proof("session", digest).encode()


def group_proof(session: bytes, rank: int) -> str:
    """What a rank shows its peers once they are connected: connections are not those of the store."""
    return hmac.new(session, f"group {rank}".encode(), hashlib.sha256).hexdigest()


def require_group(session: bytes, proofs: list[str]) -> None:
    """Refuse peers that were not admitted."""
    wrong = [
        rank for rank, proof in enumerate(proofs) if not hmac.compare_digest(group_proof(session, rank), str(proof))
    ]
    if wrong:
        raise MeshwrightError([_stranger(rank) for rank in wrong], is_everywhere=True)


def _stranger(rank: int) -> Problem:
    fix = f"All hosts must share run.folder, or have the same {SECRET_NAME}. Is somebody else on this network?"
    return Problem(where=f"rank {rank}", what="does not know this run's secret; nobody trains.", fix=fix)


def _parsed(data: bytes, *names: str) -> dict[str, Any]:
    """A message of the others, or of anybody: texts by these names, empty where it is something else."""
    names = names or ("nonce", "about", "proof")
    try:
        found = parse_json(data, "a message")
    except MeshwrightError:
        found = {}
    texts = {name: found.get(name) for name in names} if isinstance(found, dict) else {}
    return {name: text if isinstance(text := texts.get(name), str) and text.isascii() else "" for name in names}
