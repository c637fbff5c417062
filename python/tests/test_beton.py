"""Writing and reading .beton files."""

import json
import os
import pickle
from hashlib import sha256

import baton
import numpy as np
import pytest
from ffcv_files import value_of, written_by_ffcv


def image(seed, height=5, width=7):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


class Tensor:
    """As PyTorch's, which is not here."""

    def __init__(self, value):
        self.value = np.array(value, dtype=np.float32)

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self.value


class Pairs:
    """A map-style dataset that ends by its length alone."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return image(number), number % 3


def write(tmp_path, samples, fields=None, **options):
    path = tmp_path / "set.beton"
    baton.write_beton(path, samples, fields, **options)
    return baton.BetonDataset(path)


def test_images_and_labels_of_a_dataset_are_read_as_they_were_written(tmp_path):
    dataset = write(tmp_path, Pairs())
    assert (len(dataset), dataset.fields) == (4, ("image", "label"))
    for number, (found, label) in enumerate(dataset):
        assert np.array_equal(found, image(number)) and label == number % 3
    assert np.array_equal(dataset[-1][0], image(3))


class Stream:
    """As an IterableDataset of PyTorch's with a length: its base class defines `__getitem__`."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        raise NotImplementedError

    def __iter__(self):
        return ((image(number), number) for number in range(4))


def test_a_dataset_that_can_only_be_iterated_over_is_not_indexed(tmp_path):
    assert [label for _, label in write(tmp_path, Stream())] == [0, 1, 2, 3]


class Keyed(Pairs):
    """Does not end as Python's iteration by number needs it."""

    def __getitem__(self, number):
        return image(number), {0: 0, 1: 1, 2: 2, 3: 0}[number]


class Bar:
    """As tqdm's."""

    def __init__(self, iterable):
        self.iterable, self.came_to_its_end = iterable, False

    def __iter__(self):
        yield from self.iterable
        self.came_to_its_end = True


def test_a_dataset_within_a_progress_bar_ends_by_its_length(tmp_path):
    for samples, labels in ((Keyed(), [0, 1, 2, 0]), (Stream(), [0, 1, 2, 3])):
        bar = Bar(samples)
        assert [label for _, label in write(tmp_path, bar)] == labels
        assert bar.came_to_its_end and bar.iterable is samples


def test_values_of_every_kind_are_read_as_they_were_written(tmp_path):
    samples = [
        {
            "image": image(1, height=1 + number),
            "float": np.float32(0.5 * number),
            "int": np.int16(-number),
            "flag": number == 1,
            "tensor": Tensor([[1.5, number]]),
            "bits": np.array([[True], [False]]),
            "bytes": b"\0ab" * number,
            "json": {"n": number, "name": "ä"},
            "text": "",
            "one": Tensor(number + 0.25),
        }
        for number in range(3)
    ]
    dataset = write(tmp_path, iter(samples))
    assert dataset.fields == tuple(samples[0])
    for number in range(3):
        found, sample = dict(zip(dataset.fields, dataset[number], strict=True)), samples[number]
        assert np.array_equal(found["image"], sample["image"])
        assert (found["float"], found["int"], found["flag"]) == (0.5 * number, -number, int(number == 1))
        assert np.array_equal(found["tensor"], [[1.5, number]]) and found["tensor"].dtype == np.float32
        assert np.array_equal(found["bits"], sample["bits"])
        assert (found["bytes"], found["json"], found["text"]) == (sample["bytes"], sample["json"], "")
        assert found["one"] == number + 0.25


def test_an_array_or_tensor_of_one_number_is_a_number(tmp_path):
    values = {
        "float": (np.array([0.5]), 0.5),
        "int": (np.array([7], dtype=np.uint8), 7),
        "flag": (np.array([True]), 1),
        "tensor": (Tensor([1.5]), 1.5),
        "scalar": (Tensor(1.5), 1.5),
    }
    sample = {name: value for name, (value, _) in values.items()} | {"array": Tensor([[1.5]])}
    *found, array = write(tmp_path, [sample])[0]
    assert found == [expected for _, expected in values.values()]
    assert [type(value) for value in found] == [float, int, int, float, float]
    assert array.shape == (1, 1) and array.dtype == np.float32


def test_samples_do_not_cross_pages(tmp_path):
    size = 1 << 21
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (900, 1000), dtype=np.uint8) for _ in range(5)]
    dataset = write(tmp_path, [(array, 0) for array in arrays], ("signal", "label"), page_size=size)
    assert dataset.path.stat().st_size == 4 * size + 5 * 24
    assert all(np.array_equal(found, array) for (found, _), array in zip(dataset, arrays, strict=True))


def test_fields_are_chosen_and_transformed_and_a_worker_opens_the_file_itself(tmp_path):
    path = write(tmp_path, Pairs()).path
    dataset = baton.BetonDataset(path, ["label"], transforms={"label": str})
    assert pickle.loads(pickle.dumps(dataset))[2] == dataset[2] == ("2",)
    with pytest.raises(ValueError, match=r"has no field 'target'; it has image, label"):
        baton.BetonDataset(path, ["target"])
    with pytest.raises(IndexError, match="has 4 samples, and none with number 4"):
        dataset[4]


def _stored(value):
    return value.tobytes() if isinstance(value, np.ndarray) else json.dumps(value).encode() + b"\0"


@pytest.mark.parametrize(
    "name", ["a_raw", "f2_layouts", "f4_scalars_only", "f5_empty_bytes", "f_allfields", "h2_retry"]
)
def test_files_that_ffcv_wrote_have_the_values_it_stored(tmp_path, name):
    """All but JPEGs, which need Pillow: with_torch/test_beton_jpeg.py."""
    dataset, samples = written_by_ffcv(tmp_path, name)
    assert len(dataset) == len(samples)
    compared = 0
    for number, sample in enumerate(samples):
        for field, expected in sample["fields"].items():
            if isinstance(expected, dict) and expected.get("mode") == "jpg":
                continue
            found = value_of(dataset, number, field)
            if not isinstance(expected, dict):
                assert found == expected
            else:
                stored = found if isinstance(found, bytes) else _stored(found)
                assert sha256(stored).hexdigest() == expected["stored_sha256"]
            compared += 1
    assert compared >= len(samples)


class OfPillow:
    """An image of Pillow, which is not installed here."""

    def __init__(self, mode):
        self.mode = mode

    def convert(self, mode):
        raise AssertionError(f"{self.mode} is converted to {mode}")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "there are no samples"),
        ([(1, 2, 3)], r"sample 0 has 3 values, and there are 2 names in fields"),
        ([7], "sample 0 is a int: a tuple or a dictionary is needed"),
        ([(1, 2), (1, 2.5)], r"sample 1, label: a float, and the first one is an integer"),
        ([(np.zeros(3), 0), (np.zeros(4), 0)], r"sample 1, image: an array of <f8 with shape \(4,\)"),
        ([(image(0), [1, 2])], "sample 0, label: a list cannot be stored: give a number, an array"),
        ([(np.zeros((2, 0)), 0)], r"an array of float64 with shape \(2, 0\) cannot be stored"),
        ([(np.zeros(3, dtype=complex), 0)], "an array of complex128"),
        ([(np.zeros(3, dtype=np.longdouble), 0)], "an array of float128"),
        ([(np.array(["a"]), 0)], r"an array of <U1 with shape \(1,\) cannot be stored"),
        ([(1, 1 << 63)], "label: 9223372036854775808 has more than 64 bits"),
        ([(OfPillow("I;16"), 0)], "sample 0, image: an image of mode I;16 has more than 8 bits per value"),
        ([(OfPillow("F"), 0)], r"mode F has more than 8 bits per value.*np\.asarray"),
        ([({"a" * 17: 1})], "a name is 1 to 16 visible ASCII characters"),
        ([{"a": 1}, {"b": 1}], "sample 1 has no a"),
        ([{"a": {"b": float("nan")}}], "sample 0, a: JSON has no NaN"),
        ([(np.zeros(2_000_000), 0)], r"sample 0 has 16,000,000 bytes, more than a page of 8,388,608: give a larger"),
    ],
)
def test_what_cannot_be_stored_is_named_and_an_older_file_stays(tmp_path, samples, message):
    path = write(tmp_path, Pairs()).path
    before = path.read_bytes()
    with pytest.raises((ValueError, TypeError), match=message):
        baton.write_beton(path, samples)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["set.beton"]


def test_a_target_that_is_no_file_and_a_name_that_is_there_twice_are_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (pipe, tmp_path):
        with pytest.raises(ValueError, match="exists and is not a regular file"):
            baton.write_beton(target, Pairs())
    with pytest.raises(FileNotFoundError, match="missing is not a folder: make it first"):
        baton.write_beton(tmp_path / "missing/set.beton", Pairs())
    with pytest.raises(ValueError, match="a name is there twice"):
        write(tmp_path, Pairs(), ("a", "a"))
    assert os.listdir(tmp_path) == ["pipe"]


def test_only_an_older_data_set_is_replaced(tmp_path):
    notes, older = tmp_path / "notes.txt", tmp_path / "set.data"
    notes.write_text("hours of work")
    with pytest.raises(ValueError, match="exists and is not a"):
        baton.write_beton(notes, Pairs())
    assert notes.read_text() == "hours of work"
    older.touch()
    for _ in range(2):
        assert baton.write_beton(older, Pairs()) == 4


def test_a_sample_has_a_whole_number(tmp_path):
    dataset = write(tmp_path, Pairs())
    for number in (1.5, "a", slice(0, 2)):
        with pytest.raises(TypeError):
            dataset[number]
    assert dataset[np.int64(1)][1] == 1


def test_options_out_of_range_are_refused(tmp_path):
    for options in ({"jpeg_quality": 0}, {"jpeg_quality": 101}, {"page_size": 3 << 20}, {"page_size": 4096}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} = .*: must be"):
            write(tmp_path, Pairs(), **options)


def test_files_that_are_damaged_are_refused(tmp_path):
    path = write(tmp_path, Pairs()).path
    whole = path.read_bytes()
    cases = [
        (b"", "is no .beton file"),
        (b"\x89PNG" + whole[4:], "is no .beton file of version 2"),
        (whole[:16] + bytes(8) + whole[24:], "is unfinished: its writer was interrupted"),
        (whole[:2] + b"\xff\xff" + whole[4:], "its fields end after the file"),
        (whole[: len(whole) // 2], "it ends before its table of values"),
        (whole[:-1], "it ends in the middle of its table of values"),
        (whole[:24] + b"\xff" + whole[25:], "of a class of its own"),
    ]
    for damaged, message in cases:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            baton.BetonDataset(path)
    path = write(tmp_path, [({"word": "salt"}, 1)], ("about", "label")).path
    path.write_bytes(path.read_bytes().replace(b'{"word"', b"[[word["))
    with pytest.raises(ValueError, match="sample 0, about: the JSON is damaged"):
        baton.BetonDataset(path)[0]
