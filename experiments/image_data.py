"""The data sets of the experiments: scikit-learn's digits, and the standard files of MNIST, Fashion-MNIST and CIFAR.

    digits            ships with scikit-learn: 1797 scans of 8 x 8 pixels
    mnist             train-images-idx3-ubyte, train-labels-..., t10k-images-..., t10k-labels-...; or each with .gz
    fashion-mnist     the same names
    cifar10           cifar-10-batches-py/ with data_batch_1 ... 5 and test_batch
    cifar100          cifar-100-python/ with train and test (fine labels)

`load_split(name, seed, data_dir)` looks for them in the data directory and where torchvision puts them below it. The
test images are always the same; each seed splits the others differently into training and validation images.
"""

import gzip
import math
import pickle
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

FOLDERS = {
    "mnist": ("", "MNIST/raw", "mnist"),
    "fashion-mnist": ("", "FashionMNIST/raw", "fashion-mnist"),
    "cifar10": ("", "cifar-10-batches-py"),
    "cifar100": ("", "cifar-100-python"),
}
VALIDATION, VALIDATION_OF_DIGITS = 0.1, 0.2  # parts of the images that are not for testing; digits are few


class Labelled(NamedTuple):
    """Images in [0, 1], (size, channels, height, width), and their labels, (size,)."""

    images: Tensor
    labels: Tensor

    def take(self, indices: Tensor) -> "Labelled":
        return Labelled(self.images[indices], self.labels[indices])


class Split(NamedTuple):
    """Training and validation images of one seed, and the test images of all seeds."""

    train: Labelled
    validation: Labelled
    test: Labelled


def load_split(name: str, seed: int, data_dir: Path | None = None, images: int | None = None) -> Split:
    """The data set ``name``, split for ``seed``, every class in proportion; at most ``images`` of each part."""
    if name == "digits":
        rest, test = load_digits_fixed()
        train, validation = _stratified(rest, VALIDATION_OF_DIGITS, seed)
    else:
        rest, test = load_standard(name, data_dir)
        train, validation = _stratified(rest, VALIDATION, seed)
    return Split(*(part.take(torch.arange(len(part.labels))[:images]) for part in (train, validation, test)))


def load_digits_fixed() -> tuple[Labelled, Labelled]:
    """scikit-learn's digits; a quarter of them, always the same, is the second part."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    return _stratified(Labelled(images, torch.tensor(digits.target)), 0.25, 0)


def _stratified(data: Labelled, part: float, seed: int) -> tuple[Labelled, Labelled]:
    first, second = train_test_split(
        np.arange(len(data.labels)), test_size=part, stratify=data.labels, random_state=seed
    )
    return data.take(torch.from_numpy(first)), data.take(torch.from_numpy(second))


def compose_numbers(digits: Labelled, size: int, length: int) -> Labelled:
    """Random numbers of ``length`` random digits each, side by side in one image."""
    chosen = torch.randint(len(digits.labels), (size, length))
    images = digits.images[chosen].movedim(1, -2).flatten(-2)  # (size, channels, height, length * width)
    return Labelled(images, digits.labels[chosen] @ 10 ** torch.arange(length - 1, -1, -1))


def load_standard(name: str, data_dir: Path | None) -> tuple[Labelled, Labelled]:
    """Training and test images of a data set whose files the user has."""
    if name not in FOLDERS:
        raise ValueError(f"the data set must be digits, {', '.join(FOLDERS)}, but is {name!r}")
    if data_dir is None:
        raise FileNotFoundError(
            f"{name} does not ship with this experiment: give the folder of its files by --data-dir"
        )
    if name == "cifar10":
        train = [f"data_batch_{i}" for i in range(1, 6)]
        return _read_cifar(name, train, data_dir, b"labels"), _read_cifar(name, ["test_batch"], data_dir, b"labels")
    if name == "cifar100":
        return tuple(_read_cifar(name, [part], data_dir, b"fine_labels") for part in ("train", "test"))
    return _read_mnist(name, "train", data_dir), _read_mnist(name, "t10k", data_dir)


def _find(name: str, data_dir: Path, *files: str) -> Path:
    for folder in FOLDERS[name]:
        for file in files:
            if (data_dir / folder / file).is_file():
                return data_dir / folder / file
    raise FileNotFoundError(f"{name}: {' or '.join(files)} is neither in {data_dir} nor in its usual folder below it")


def _labelled(images: np.ndarray, labels: np.ndarray, path: Path) -> Labelled:
    if len(images) != len(labels):
        raise ValueError(f"{path}: {len(labels)} labels for {len(images)} images")
    return Labelled(torch.from_numpy(images.astype(np.float32) / 255), torch.from_numpy(labels.astype(np.int64)))


def _read_mnist(name: str, part: str, data_dir: Path) -> Labelled:
    stems = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    images, labels = (_find(name, data_dir, stem, f"{stem}.gz") for stem in stems)
    return _labelled(read_idx(images, 3)[:, None], read_idx(labels, 1), labels)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An array of bytes in IDX format, gzip or not: 0, 0, type 8, number of dimensions; the sizes; the entries."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            return _read_idx(gzip.GzipFile(fileobj=file) if zipped else file, dimensions, path)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged gzip file ({error})") from error


def _read_idx(file: BinaryIO, dimensions: int, path: Path) -> np.ndarray:
    header = file.read(4 + 4 * dimensions)
    if header[:4] != bytes([0, 0, 8, dimensions]) or len(header) != 4 + 4 * dimensions:
        raise ValueError(
            f"{path}: not an IDX file of bytes with {dimensions} dimensions (it begins {header[:4].hex()})"
        )
    shape = tuple(int(size) for size in np.frombuffer(header[4:], ">u4"))
    entries = file.read(math.prod(shape) + 1)
    if len(entries) != math.prod(shape):
        found = "more" if len(entries) > math.prod(shape) else len(entries)
        raise ValueError(f"{path}: {found} entries where its header {shape} announces {math.prod(shape)}")
    return np.frombuffer(entries, np.uint8).reshape(shape)


class _PickledArray:
    """Takes the place of a NumPy array in a pickle: stores its state and runs none of NumPy's code."""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state

    def rows(self) -> np.ndarray:
        _, (rows, columns), dtype, fortran, entries = self.state
        if dtype.code not in (b"u1", "u1"):
            raise ValueError(f"its array has type {dtype.code!r}, not bytes")
        return np.frombuffer(entries, np.uint8).reshape(rows, columns, order="F" if fortran else "C")


class _PickledType:
    """Takes the place of a NumPy dtype."""

    def __init__(self, code: object, *arguments: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class _ArraysOnly(pickle.Unpickler):
    """Reads the pickles of CIFAR, made of lists, strings, numbers and arrays; refuses whatever names anything else."""

    def find_class(self, module: str, name: str) -> type:
        module = module.replace("numpy._core", "numpy.core")  # NumPy 2
        match (module, name):
            case ("numpy.core.multiarray", "_reconstruct") | ("numpy", "ndarray"):
                return _PickledArray
            case ("numpy", "dtype"):
                return _PickledType
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which such a file does not need")


def read_cifar_batch(path: Path, labels_key: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images (size, 3, 32, 32) and labels of one batch of CIFAR in its Python version; runs no code from the file."""
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images = batch[b"data"].rows().reshape(-1, 3, 32, 32)
        return images, np.array(batch[labels_key], dtype=np.uint8)
    except Exception as error:  # a foreign or truncated pickle can raise anything
        raise ValueError(f"{path}: not a batch of CIFAR ({type(error).__name__}: {error})") from error


def _read_cifar(name: str, files: list[str], data_dir: Path, labels_key: bytes) -> Labelled:
    paths = [_find(name, data_dir, file) for file in files]
    images, labels = zip(*(read_cifar_batch(path, labels_key) for path in paths), strict=True)
    return _labelled(np.concatenate(images), np.concatenate(labels), paths[-1])
