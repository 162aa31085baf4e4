"""Loaders against small files of the published formats, and against files that are damaged or something else."""

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch

from image_data import FOLDERS, Labelled, compose_numbers, load_split, load_standard, read_cifar_batch, read_idx


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder, train=60, test=20, zipped=False, sides=(4, 5)):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, size in {"train": train, "t10k": test}.items():
        arrays[part] = rng.integers(0, 256, (size, *sides), np.uint8), np.arange(size, dtype=np.uint8) % 3
        for array, name in zip(arrays[part], ("images-idx3-ubyte", "labels-idx1-ubyte"), strict=True):
            content = gzip.compress(idx(array)) if zipped else idx(array)
            (folder / f"{part}-{name}{'.gz' if zipped else ''}").write_bytes(content)
    return arrays


def cifar_pickle(images, labels, key=b"labels", dtype=b"u1"):
    """A pickle as Python 2 and NumPy 1 wrote it."""
    rows, columns = images.shape
    raw = images.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR(K\x01"
        + b"(J" + struct.pack("<i", rows) + b"J" + struct.pack("<i", columns) + b"t"
        + b"cnumpy\ndtype\n(U\x02" + dtype + b"K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U" + bytes([len(key)]) + key + numbers + b"u."


def cifar_batch(size=9, seed=0):
    images = np.random.default_rng(seed).integers(0, 256, (size, 3072), np.uint8)
    return images, [i % 3 for i in range(size)]


def test_digits():
    first, second = load_split("digits", 0), load_split("digits", 1)
    assert [len(part.labels) for part in first] == [1077, 270, 450]
    assert first.train.images.shape == (1077, 1, 8, 8) and first.train.images.dtype == torch.float32
    assert first.train.images.min() == 0 and first.train.images.max() == 1
    assert first.test.images.equal(second.test.images) and not first.train.images.equal(second.train.images)
    assert first.train.labels.bincount().min() >= 100  # every class in proportion


def test_composed_numbers():
    digits = Labelled(torch.arange(10.0).view(10, 1, 1, 1).expand(10, 1, 2, 3), torch.arange(10))  # image i shows i
    images, numbers = compose_numbers(digits, 50, 4)
    assert images.shape == (50, 1, 2, 12)
    shown = images[:, 0, 1, ::3].long()
    assert numbers.tolist() == [int("".join(map(str, row))) for row in shown.tolist()]
    assert images[..., 0].equal(images[..., 2]) and len(numbers.unique()) > 40


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("place", [0, 1])
def test_mnist(name, zipped, place, tmp_path):
    arrays = write_mnist(tmp_path / FOLDERS[name][place], zipped=zipped)
    split = load_split(name, 0, tmp_path)
    assert [len(part.labels) for part in split] == [54, 6, 20]
    images, labels = arrays["t10k"]
    assert split.test.images.mul(255).round().to(torch.uint8).squeeze(1).equal(torch.from_numpy(images))
    assert split.test.labels.equal(torch.from_numpy(labels).long())


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="give the folder of its files by --data-dir"):
        load_split("mnist", 0)
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte or train-images-idx3-ubyte.gz is neither in"):
        load_split("mnist", 0, tmp_path)
    with pytest.raises(ValueError, match="must be digits, mnist"):
        load_split("svhn", 0, tmp_path)


def damaged_idx():
    whole = idx(np.zeros((3, 4, 5), np.uint8))
    yield "truncated", whole[:-1], "59 entries where its header (3, 4, 5) announces 60"
    yield "too long", whole + b"x", "more entries"
    yield "header only", whole[:9], "not an IDX file"
    yield "empty", b"", "not an IDX file"
    yield "foreign", b"<html>not found</html>" * 9, "not an IDX file"
    yield "wrong dimensions", idx(np.zeros(60, np.uint8)), "not an IDX file of bytes with 3 dimensions"
    yield "float entries", b"\0\0\x0d" + whole[3:], "not an IDX file of bytes"
    yield "truncated gzip", gzip.compress(whole)[:-9], "damaged gzip file"
    yield "not gzip after all", b"\x1f\x8b" + b"\xff" * 40, "damaged gzip file"
    yield "wrong checksum", gzip.compress(whole)[:-8] + bytes(4) + gzip.compress(whole)[-4:], "damaged gzip file"
    yield "gzip of a truncated file", gzip.compress(whole[:-1]), "59 entries"


@pytest.mark.parametrize(("content", "message"), [pytest.param(*case[1:], id=case[0]) for case in damaged_idx()])
def test_damaged_idx(content, message, tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_idx(path, 3)
    assert str(path) in str(error.value) and message in str(error.value)


def test_labels_must_match_images(tmp_path):
    write_mnist(tmp_path)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    labels.write_bytes(idx(np.zeros(19, np.uint8)))
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte: 19 labels for 20 images"):
        load_standard("mnist", tmp_path)


def test_cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    batches = [cifar_batch(seed=seed) for seed in range(6)]
    for name, batch in zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], batches, strict=True):
        (folder / name).write_bytes(cifar_pickle(*batch))
    train, test = load_standard("cifar10", tmp_path)
    assert train.images.shape == (45, 3, 32, 32) and test.images.shape == (9, 3, 32, 32)
    assert train.images[9:18].mul(255).round().to(torch.uint8).flatten(1).equal(torch.from_numpy(batches[1][0]))
    assert test.labels.tolist() == batches[5][1]


def test_cifar100_has_fine_labels(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part).write_bytes(cifar_pickle(*cifar_batch(30), key=b"fine_labels"))
    split = load_split("cifar100", 0, tmp_path)
    assert split.test.labels.tolist() == cifar_batch(30)[1]


class Malicious:
    def __reduce__(self):
        return eval, ("1 / 0",)


def foreign_pickles():
    images, labels = cifar_batch()
    whole = cifar_pickle(images, labels)
    yield "truncated", whole[: len(whole) // 2], "truncated"
    yield "no pickle", b"<html>not found</html>", "not a batch of CIFAR"
    yield "code", pickle.dumps(Malicious()), "it asks for builtins.eval"
    yield "other class", pickle.dumps({"data": np.float64(1)}), "it asks for numpy.core.multiarray.scalar"
    yield "list", pickle.dumps([1, 2]), "not a batch of CIFAR"
    yield "other keys", pickle.dumps({b"labels": [1]}), "KeyError: b'data'"
    yield "wrong size", cifar_pickle(images[:, :-1], labels), "not a batch of CIFAR"
    yield "wrong type", cifar_pickle(images, labels, dtype=b"f4"), "has type b'f4', not bytes"
    yield "no array", pickle.dumps({b"data": [1], b"labels": [1]}), "not a batch of CIFAR"


@pytest.mark.parametrize(("content", "message"), [pytest.param(*case[1:], id=case[0]) for case in foreign_pickles()])
def test_foreign_pickles(content, message, tmp_path):
    path = tmp_path / "test_batch"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_cifar_batch(path, b"labels")
    assert str(path) in str(error.value) and message in str(error.value)
