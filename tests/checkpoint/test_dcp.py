"""torch's Distributed Checkpoints: real ones are read, and no pickle is ever run."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import same_bits

from meshwright.checkpoint.dcp import open_dcp, parse_pickle
from meshwright.checkpoint.load import Reader
from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError
from meshwright.hf.weights_import_export import import_dcp
from meshwright.hf.weights_read import parts_of_decoder
from meshwright.models.presets import preset
from meshwright.zoo.decoder import Decoder


def save(folder: Path, state: dict[str, Any]) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)
    return folder


def sharded(tensor: torch.Tensor) -> Any:
    """Two pieces along dim 1, as two ranks would save it."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    half = tensor.shape[1] // 2
    return LocalShardsWrapper([tensor[:, :half].contiguous(), tensor[:, half:].contiguous()], [(0, 0), (0, half)])


def whole(held: Any, name: str) -> torch.Tensor:
    entry = held.tensors[name]
    out = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    held.read_into(name, Box.whole(entry.shape), out)
    return out


def test_real_ones_are_read(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(6, 4),
        "b": torch.randn(5).bfloat16(),
        "transposed": torch.randn(3, 5, 2).permute(2, 0, 1),
        "part": torch.randn(10, 10)[2:5, 1:4],
        "one": torch.tensor(3.0, dtype=torch.float64),
        "count": torch.arange(3),
        "column": torch.randn(4, 1),
    }
    optimizer = {"state": {"a": {"exp_avg": torch.zeros(6, 4)}}}
    saved = {**tensors, "a": sharded(tensors["a"])}
    folder = save(tmp_path / "dcp", {"model": saved, "optimizer": optimizer, "step": 3})
    assert len(list(folder.glob("*.distcp"))) == 2
    held = open_dcp(folder)
    assert set(held.tensors) == set(tensors)
    assert len(held.tensors["a"].chunks) == 2
    for name, tensor in tensors.items():
        assert same_bits(whole(held, name), tensor.contiguous())
    out = torch.empty(2, 2, dtype=torch.float64)
    held.read_into("a", Box((6, 4), (2, 1), (2, 2)), out)  # over both pieces
    assert torch.equal(out, tensors["a"][2:4, 1:3].double())


@pytest.mark.parametrize("naming", ["ours", "theirs", "unknown"])
def test_imported_as_a_checkpoint_of_ours(tmp_path: Path, naming: str) -> None:
    config = preset("byte-tiny")
    model = Decoder(config)
    ours = {name: torch.randn(each.shape) for name, each in model.named_parameters()}
    theirs = {parts[0].name: ours[name] for name, parts in parts_of_decoder(config).items()}
    folder = save(tmp_path / "dcp", theirs if naming == "theirs" else {"model": ours, "optim": {"m": torch.ones(2)}})
    final = import_dcp(folder, tmp_path / "run", None if naming == "unknown" else config, report=lambda _: None)
    reader = Reader(final)
    assert set(reader.tensor_names()) == {f"parameter.{name}" for name in ours}
    assert reader.state["weights_only"] is True
    assert ("model_config" in reader.state) == (naming != "unknown")
    for name, tensor in ours.items():
        out = torch.empty_like(tensor)
        reader.read_into(f"parameter.{name}", Box.whole(tuple(tensor.shape)), out)
        assert torch.equal(out, tensor)


class Touch:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Shell:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("kind", [Touch, Shell])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pickle_is_not_run(tmp_path: Path, kind: type, protocol: int) -> None:
    mark = tmp_path / "ran"
    data = pickle.dumps({"a": kind(mark)}, protocol=protocol)
    pickle.loads(data)
    assert mark.exists(), "the attack itself must work"
    mark.unlink()
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(MeshwrightError) as caught:
        open_dcp(folder)
    assert caught.value.exit_code == 2
    assert any(name in str(caught.value) for name in ("getattr", "Path.touch", "posix.system"))
    assert "Nothing of it was run" in str(caught.value)
    assert not mark.exists()


def test_a_malicious_tensor_is_not_run(tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", {"a": torch.randn(4)})
    (file,) = (path for path in folder.glob("*.distcp") if path.stat().st_size)
    mark, bad = tmp_path / "ran", io.BytesIO()
    length = file.stat().st_size
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Shell(mark), protocol=2))
        archive.writestr("archive/data/0", bytes(length - 2 * len(bad.getvalue()) - 600))
    file.write_bytes(bytes(length - len(bad.getvalue())) + bad.getvalue())
    with pytest.raises(MeshwrightError, match="system"):
        whole(open_dcp(folder), "a")
    assert not mark.exists()


def forged(folder: Path, change: Callable[[Any], None]) -> None:
    """The same metadata with something else in it; made by torch's own classes."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def storage(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.__dict__.update(fields)

    return change


def chunk(**fields: Any) -> Callable[[Any], None]:
    return lambda metadata: metadata.state_dict_metadata["a"].chunks[0].__dict__.update(fields)


CASES: dict[str, tuple[Callable[[Any], None], str]] = {
    "parent": (storage(relative_path="../x"), "'../x', which is not a plain file name"),
    "absolute": (storage(relative_path="/etc/passwd"), "not a plain file name"),
    "missing file": (storage(relative_path="other.distcp"), "is missing"),
    "negative place": (storage(offset=-1), "impossible place"),
    "beyond the file": (storage(offset=10**9), "cut short"),
    "too few bytes": (storage(length=7), "a chunk of 48 bytes that is stored in 7"),
    "not an archive": (storage(length=99), "is not a tensor as torch saves it"),
    "compressed": (storage(transform_descriptors=["zstd"]), "transformed"),
    "stored nowhere": (lambda metadata: metadata.storage_data.clear(), "stored nowhere"),
    "gap": (chunk(sizes=torch.Size([2, 3])), "hold 6 of its 12 elements"),
    "outside": (chunk(sizes=torch.Size([9, 3])), "has a chunk at"),
    "other shape": (
        lambda m: (m.state_dict_metadata["a"].__dict__.update(size=torch.Size([3, 4])), chunk(sizes=(3, 4))(m)),
        "holds torch.FloatStorage of shape",
    ),
    "dtype": (
        lambda m: m.state_dict_metadata["a"].properties.__dict__.update(dtype=torch.float16),
        "the metadata says float16",
    ),
    "complex": (
        lambda m: m.state_dict_metadata["a"].properties.__dict__.update(dtype=torch.complex64),
        "torch.complex64",
    ),
    "not metadata": (lambda m: m.__dict__.update(state_dict_metadata=[1]), "is not the metadata"),
    "other class": (lambda m: m.__dict__.update(planner_data=OrderedDict.fromkeys), "names 'builtins.getattr'"),
}


@pytest.mark.parametrize("case", CASES)
def test_metadata_that_lies(tmp_path: Path, case: str) -> None:
    folder = save(tmp_path / "dcp", {"a": torch.randn(4, 3)})
    change, said = CASES[case]
    forged(folder, lambda metadata: None)
    assert whole(open_dcp(folder), "a").shape == (4, 3)
    forged(folder, change)
    with pytest.raises(MeshwrightError) as caught:
        whole(open_dcp(folder), "a")
    assert caught.value.exit_code == 2
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x04",
        b"\x80\x04N",
        b"e.",
        b"h\x05.",
        b"]N(u.",
        b"\x80\x02cos\nsystem\n.",
        b"(" * 1000 + b"t" * 1000 + b".",
        b"N" + b"\x85" * 100_000 + b"}" + b"0" + b".",
    ],
    ids=range(10),
)
def test_streams_that_are_no_metadata(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(MeshwrightError):
        open_dcp(tmp_path)


def test_plain_values_come_out_as_they_went_in() -> None:
    value = {"a": [1, -2, 3.5, None, True, 1 << 40], "b": {"c": ("x", (), "y")}, 7: "é" * 300}
    for protocol in (2, 3, 4, 5):
        assert parse_pickle(pickle.dumps(value, protocol=protocol), (), "here") == value
    ordered = pickle.dumps(OrderedDict(a=1), protocol=4)
    assert parse_pickle(ordered, {"collections.OrderedDict"}, "here") == {"a": 1}
    made = parse_pickle(pickle.dumps(Path("x"), protocol=4), {"pathlib.PosixPath"}, "here")
    assert (made.name, made.arguments) == ("pathlib.PosixPath", ("x",))
