"""CIFAR-10 and CIFAR-100: both formats with small generated files, and the real files if available."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.registry import dataset
from plateaux.data.sources import InMemorySource

cifar10, cifar100 = dataset.get("cifar10"), dataset.get("cifar100")
REAL = os.environ.get("PLATEAUX_DATA", "")
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (12, 3072), dtype=np.uint8)
LABELS = np.arange(12) % 10
FINE, COARSE = np.arange(12) * 7, np.arange(12)
TRAIN10 = [f"data_batch_{i}" for i in range(1, 6)]


def write_binary10(root: Path) -> None:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir()
    records = np.concatenate([LABELS[:, None].astype(np.uint8), IMAGES], 1)
    for i, name in enumerate(TRAIN10):
        records[2 * i : 2 * i + 2].tofile(folder / f"{name}.bin")
    records[10:].tofile(folder / "test_batch.bin")
    (folder / "batches.meta.txt").write_text("\n".join(f"class {i}" for i in range(10)) + "\n\n")


def write_pickles10(root: Path, protocol: int) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    parts = {name: slice(2 * i, 2 * i + 2) for i, name in enumerate(TRAIN10)} | {"test_batch": slice(10, 12)}
    for name, rows in parts.items():
        contents = {"data": IMAGES[rows], "labels": LABELS[rows].tolist(), "batch_label": name}
        (folder / name).write_bytes(pickle.dumps(contents, protocol=protocol))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {i}" for i in range(10)]}))
    return folder


def tensors(source: Any) -> tuple[Tensor, Tensor]:
    assert isinstance(source, InMemorySource)
    assert isinstance(source.x, Tensor)
    return source.x, source.y


def test_binary_records_are_read_as_images_and_labels(tmp_path: Path) -> None:
    write_binary10(tmp_path)
    data = cifar10(root=str(tmp_path))
    x, y = tensors(data.train)
    assert torch.equal(x, torch.from_numpy(IMAGES[:10]).view(-1, 3, 32, 32))
    assert y.tolist() == LABELS[:10].tolist()
    assert data.labels[3] == "class 3"
    assert data.remarks == ("10 of 50,000 train images", "2 of 10,000 test images")
    assert len(cifar10(root=str(tmp_path), limit=3, test_limit=1).train) == 3


def test_a_range_of_images_is_selected(tmp_path: Path) -> None:
    write_binary10(tmp_path)
    data = cifar10(root=str(tmp_path), start=4, limit=3, test_start=1)
    x, y = tensors(data.train)
    assert torch.equal(x, torch.from_numpy(IMAGES[4:7]).view(-1, 3, 32, 32))
    assert y.tolist() == LABELS[4:7].tolist()
    assert tensors(data.test)[1].tolist() == LABELS[11:].tolist()
    with pytest.raises(RecipeError, match="start = 10 leaves out all 10 samples"):
        cifar10(root=str(tmp_path), start=10)
    with pytest.raises(RecipeError, match="test_start = 2 leaves out all 2 samples"):
        cifar10(root=str(tmp_path), test_start=2)


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_any_protocol_equal_the_binary_format(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "a").mkdir()
    write_binary10(tmp_path / "a")
    write_pickles10(tmp_path, protocol)
    binary, pickles = cifar10(root=str(tmp_path / "a")), cifar10(root=str(tmp_path))
    assert binary.train.fingerprint() == pickles.train.fingerprint()
    assert binary.test.fingerprint() == pickles.test.fingerprint()
    assert binary.labels == pickles.labels
    assert "md5" in pickles.remarks[-1]


def test_python_2_pickles_are_read(tmp_path: Path) -> None:
    folder = write_pickles10(tmp_path, 2)
    pixels = IMAGES[10:].tobytes()
    # Opcodes as Python 2 wrote them: byte strings (T, U) for names and pixels, numpy.core for the module.
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x02M\x00\x0c\x86"
        b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + len(pixels).to_bytes(4, "little")
        + pixels
        + b"tb"
    )
    (folder / "test_batch").write_bytes(b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x00K\x01eu.")
    x, y = tensors(cifar10(root=str(tmp_path)).test)
    assert torch.equal(x, torch.from_numpy(IMAGES[10:]).view(-1, 3, 32, 32))
    assert y.tolist() == [0, 1]


class Malicious:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("function", [os.system, eval, getattr, np.load, __import__])
def test_a_malicious_pickle_is_rejected_and_not_executed(tmp_path: Path, function: Any, protocol: int) -> None:
    folder = write_pickles10(tmp_path, 2)
    trace = tmp_path / "trace"
    (folder / "test_batch").write_bytes(pickle.dumps(Malicious(function, f"touch {trace}"), protocol=protocol))
    with pytest.raises(DataError, match="malicious"):
        cifar10(root=str(tmp_path))
    assert not trace.exists()


@pytest.mark.parametrize(
    "contents",
    [
        b"not a pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"data": IMAGES[:2]}),
        pickle.dumps({"data": IMAGES[:2], "labels": [0]}),
        pickle.dumps({"data": IMAGES[:2], "labels": [0, 10]}),
        pickle.dumps({"data": IMAGES[:2].astype(float), "labels": [0, 1]}),
        pickle.dumps({"data": [1, 2], "labels": [0, 1]}),
        pickle.dumps({"data": IMAGES[:2], "labels": [0, 1]})[:-2000],
    ],
)
def test_a_damaged_pickle_is_a_data_error(tmp_path: Path, contents: bytes) -> None:
    (write_pickles10(tmp_path, 2) / "test_batch").write_bytes(contents)
    with pytest.raises(DataError):
        cifar10(root=str(tmp_path))


@pytest.mark.parametrize("coarse", [False, True])
def test_cifar100_has_fine_and_coarse_labels_in_both_formats(tmp_path: Path, coarse: bool) -> None:
    binary, pickles = tmp_path / "cifar-100-binary", tmp_path / "b" / "cifar-100-python"
    binary.mkdir()
    pickles.mkdir(parents=True)
    columns = [COARSE[:, None].astype(np.uint8), FINE[:, None].astype(np.uint8)]
    records = np.concatenate([*columns, IMAGES], 1)
    for name, rows in (("train", slice(0, 8)), ("test", slice(8, 12))):
        records[rows].tofile(binary / f"{name}.bin")
        contents = {"data": IMAGES[rows], "fine_labels": FINE[rows].tolist(), "coarse_labels": COARSE[rows].tolist()}
        (pickles / name).write_bytes(pickle.dumps(contents))
    one, two = cifar100(root=str(tmp_path), coarse=coarse), cifar100(root=str(tmp_path / "b"), coarse=coarse)
    assert one.train.fingerprint() == two.train.fingerprint()
    x, y = tensors(one.train)
    assert torch.equal(x, torch.from_numpy(IMAGES[:8]).view(-1, 3, 32, 32))
    assert y.tolist() == (COARSE if coarse else FINE)[:8].tolist()
    assert one.classes == (20 if coarse else 100)


def test_a_file_with_an_incomplete_record_is_rejected(tmp_path: Path) -> None:
    write_binary10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin.*3073"):
        cifar10(root=str(tmp_path))


def test_the_error_for_a_missing_data_set_names_files_folder_and_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLATEAUX_DATA", str(tmp_path))
    with pytest.raises(DataError) as raised:
        cifar10()
    for part in ("cifar-10-batches-bin", str(tmp_path), "kriz/cifar.html", "PLATEAUX_DATA", "data.root"):
        assert part in str(raised.value)
    write_binary10(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4\.bin"):
        cifar10()


def test_mean_and_std_can_be_overridden(tmp_path: Path) -> None:
    write_binary10(tmp_path)
    data = cifar10(root=str(tmp_path), mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    assert data.mean == (0.485, 0.456, 0.406)
    with pytest.raises(ValueError, match="3 channels"):
        cifar10(root=str(tmp_path), mean=[0.5])


@pytest.mark.skipif(
    not (Path(REAL) / "cifar-10-batches-bin").is_dir(), reason="PLATEAUX_DATA has no cifar-10-batches-bin"
)
def test_the_real_cifar10_is_complete_and_has_the_documented_mean_and_std() -> None:
    data = cifar10(root=REAL)
    x, y = tensors(data.train)
    assert data.remarks == ()
    assert y.bincount().tolist() == [5000] * 10
    assert tensors(data.test)[1].bincount().tolist() == [1000] * 10
    flat = x[::10].double().div(255).transpose(0, 1).flatten(1)
    assert torch.allclose(flat.mean(1), torch.tensor(data.mean).double(), atol=5e-3)
    assert torch.allclose(flat.std(1), torch.tensor(data.std).double(), atol=5e-3)


@pytest.mark.skipif(not (Path(REAL) / "cifar-100-binary").is_dir(), reason="PLATEAUX_DATA has no cifar-100-binary")
def test_the_real_cifar100_reports_missing_images_in_its_remarks() -> None:
    data = cifar100(root=REAL)
    assert (len(data.train) == 50_000) == (data.remarks == ())
    assert len(data.labels) == 100
    assert tensors(data.test)[1].bincount().tolist() == [100] * 100
