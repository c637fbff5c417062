"""Data sets in `.beton` files, the format of FFCV: written from Python, and read as a PyTorch dataset."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import operator
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# Version, fields, bytes per page, samples, position of the table of allocations.
_HEADER = struct.Struct("<HHIQQ")
_VERSION = 2
# Type, name, arguments.
_DESCRIPTOR = struct.Struct("<B16s1024s")
_FLOAT, _INT, _IMAGE, _BYTES, _ARRAY, _JSON, _TENSOR = range(7)
# An array's arguments: its shape, and the length of the text that names its type.
_SHAPE = struct.Struct("<32QQ")
# Number of the sample, position and bytes of a value.
_ALLOCATION = [("sample", "<u8"), ("pointer", "<u8"), ("size", "<u8")]
_JPEG, _RAW = 0, 1
_LONGEST_SIDE = 65_535
_PAGE_SIZE = 8 << 20


@dataclass(frozen=True)
class _Field:
    """A column of a file."""

    name: str
    type_id: int
    # Of an array.
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def descriptor(self) -> bytes:
        arguments = b""
        if self.type_id == _ARRAY:
            named = json.dumps([["", self.dtype]]).encode()
            arguments = _SHAPE.pack(*self.shape, *[0] * (32 - len(self.shape)), len(named)) + named
        return _DESCRIPTOR.pack(self.type_id, self.name.encode(), arguments)

    @staticmethod
    def described(descriptor: bytes) -> _Field:
        type_id, name, arguments = _DESCRIPTOR.unpack(descriptor)
        shape, dtype = (), ""
        if type_id in (_ARRAY, _TENSOR):
            *axes, length = _SHAPE.unpack_from(arguments)
            shape = tuple(axes[: max((i + 1 for i, axis in enumerate(axes) if axis), default=0)])
            dtype = json.loads(arguments[_SHAPE.size :][:length])[0][1]
        elif type_id > _TENSOR:
            raise ValueError(f"a field has type {type_id}, of a class of its own: only its writer can read it")
        return _Field(name.rstrip(b"\0").decode(), type_id, shape, dtype)

    def cell(self) -> tuple[Any, int]:
        """Type of the value in the table of samples, and its alignment in bytes."""
        if self.type_id == _IMAGE:
            # Packed: position and size are not aligned.
            return [("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("pointer", "<u8")], 1
        if self.type_id in (_BYTES, _JSON):
            return [("pointer", "<u8"), ("size", "<u8")], 1
        return {_FLOAT: "<f8", _INT: "<i8"}.get(self.type_id, [("pointer", "<u8")]), 8


def _row_type(fields: Sequence[_Field]) -> np.dtype[Any]:
    """Type of a row of the table of samples: cells in the order of the fields, aligned as C aligns them."""
    import numpy as np

    offsets, end, widest = [], 0, 1
    for cell, alignment in map(_Field.cell, fields):
        offsets.append(-(-end // alignment) * alignment)
        end = offsets[-1] + np.dtype(cell).itemsize
        widest = max(widest, alignment)
    formats = [np.dtype(field.cell()[0]) for field in fields]
    names = [field.name for field in fields]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": -(-end // widest) * widest})


def write_beton(
    path: str | os.PathLike[str],
    samples: Iterable[Any],
    fields: Sequence[str] | None = None,
    *,
    jpeg_quality: int | None = None,
    page_size: int = _PAGE_SIZE,
) -> int:
    """Writes samples into a `.beton` file, which Baton and FFCV read; returns their number.

        baton.write_beton("train.beton", dataset)  # pairs of image and label
        baton.write_beton("train.beton", tqdm(pairs()), fields=("signal", "target"))

    `samples` is a `torch.utils.data.Dataset` or anything else to iterate over. A sample is a tuple with a value per
    name in `fields` (default: image, label), or a dictionary of its fields. The first sample decides their types:

        Pillow image, or uint8 of shape (height, width, 3)   an RGB image; raw, or JPEG with `jpeg_quality` (1 to 100,
                                                             4:2:0 chroma, by Pillow)
        integer, bool, float, array or tensor of one number  a number; the shape is () or (1,)
        other array or tensor of numbers                     an array; all samples have the same shape and type
        bytes; text, dictionary                              bytes; JSON

    All values of a sample together have at most `page_size` bytes, a power of two. An existing `.beton` file is replaced at
    the end; an error or a kill leaves it as it was.

    Raises ValueError or TypeError with the number of the sample for one that cannot be stored.
    """
    if page_size < 1 << 21 or page_size >= 1 << 32 or page_size & (page_size - 1):
        raise ValueError(f"page_size = {page_size}: must be a power of two, from 2 MiB to 2 GiB")
    if jpeg_quality is not None and not 1 <= jpeg_quality <= 100:
        raise ValueError(f"jpeg_quality = {jpeg_quality}: must be 1 to 100")
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} exists and is not a regular file: give another path")
    if _is_another_file(path):
        raise ValueError(f"{path} exists and is not a .beton file: remove it, or give another path")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder: make it first")
    if fields is not None and len(set(fields)) < len(fields):
        raise ValueError(f"fields = {list(fields)}: a name is there twice")
    # Where the pages begin is known only at the end, with the number of samples.
    with tempfile.TemporaryFile(dir=path.parent) as pages:
        writer = _Writer(pages, page_size, jpeg_quality)
        for number, sample in enumerate(_each(samples)):
            writer.add(number, sample, fields)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                writer.finish(file)
                file.flush()
                os.fsync(file.fileno())
                # A temporary file is its owner's alone; others have the permissions that the user wants.
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    return len(writer.rows)


def _is_another_file(path: Path) -> bool:
    """Whether something is there that is no `.beton` file, neither by its name nor by its beginning, and not empty."""
    if path.suffix == ".beton" or not path.exists():
        return False
    with path.open("rb") as file:
        start = file.read(2)
    return start not in (b"", _VERSION.to_bytes(2, "little"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _each(samples: Iterable[Any]) -> Iterator[Any]:
    """Samples of a dataset that ends by its length alone, also within a progress bar, or of anything else."""
    dataset: Any = samples
    wrapped: Any = getattr(samples, "iterable", None)  # By tqdm.
    if _is_map_style(samples):
        yield from (dataset[number] for number in range(len(dataset)))
    elif _is_map_style(wrapped):
        # The bar itself has to come to the end: cut short, it is shown as failed in a notebook.
        dataset.iterable = _each(wrapped)
        try:
            yield from dataset
        finally:
            dataset.iterable = wrapped
    else:
        yield from samples


def _is_map_style(samples: Any) -> bool:
    """Whether there is no iterator: Python would count up until an IndexError, which such a dataset need not raise."""
    return isinstance(samples, Sized) and hasattr(samples, "__getitem__") and not hasattr(type(samples), "__iter__")


class _Writer:
    """Writes values into pages, and at the end everything into the file. Positions in pages count from the first."""

    def __init__(self, pages: IO[bytes], page_size: int, jpeg_quality: int | None) -> None:
        self.pages = pages
        self.page_size = page_size
        self.jpeg_quality = jpeg_quality
        self.end = 0
        self.fields: list[_Field] = []
        self.rows: list[tuple[Any, ...]] = []
        self.allocations: list[tuple[int, int, int]] = []

    def add(self, number: int, sample: Any, names: Sequence[str] | None) -> None:
        values = _named(number, sample, names or [field.name for field in self.fields])
        if not self.fields:
            self.fields = [_checked(_field(name, value, number)) for name, value in values.items()]
        if list(values) != [field.name for field in self.fields]:
            raise ValueError(f"sample {number} has the fields {list(values)}, and the first one others")
        stored = [self._stored(field, values[field.name], number) for field in self.fields]
        size = sum(len(value) for _, value in stored if value is not None)
        if size > self.page_size:
            raise ValueError(
                f"sample {number} has {size:,} bytes, more than a page of {self.page_size:,}: "
                "give a larger page_size, or for images jpeg_quality"
            )
        if self.end % self.page_size + size > self.page_size:
            self.end = -(-self.end // self.page_size) * self.page_size
            self.pages.seek(self.end)
        row = []
        for cell, value in stored:
            if value is None:
                row.append(cell)
                continue
            row.append(tuple(self.end if part is None else part for part in cell))
            self.allocations.append((number, self.end, len(value)))
            self.pages.write(value)
            self.end += len(value)
        self.rows.append(tuple(row))

    def _stored(self, field: _Field, value: Any, number: int) -> tuple[Any, bytes | None]:
        """The cell, with None in place of the position, and the bytes at that position, if there are any."""
        import numpy as np

        found = _field(field.name, value, number)
        if found != field:
            raise ValueError(f"sample {number}, {field.name}: {_about(found)}, and the first one is {_about(field)}")
        value = _plain(value, f"sample {number}, {field.name}")
        if field.type_id == _IMAGE:
            height, width = value.shape[:2]
            mode, stored = _RAW, np.ascontiguousarray(value).tobytes()
            if self.jpeg_quality is not None:
                mode, stored = _JPEG, _jpeg(value, self.jpeg_quality)
            return (mode, width, height, None), stored
        if field.type_id == _ARRAY:
            return (None,), np.ascontiguousarray(value).astype(field.dtype, copy=False).tobytes()
        if field.type_id in (_BYTES, _JSON):
            try:
                stored = value if field.type_id == _BYTES else json.dumps(value, allow_nan=False).encode() + b"\0"
            except ValueError:
                problem = "JSON has no NaN or infinity, which the value contains"
                raise ValueError(f"sample {number}, {field.name}: {problem}") from None
            return (None, len(stored)), stored
        return value, None

    def finish(self, file: IO[bytes]) -> None:
        import numpy as np

        if not self.rows:
            raise ValueError("there are no samples")
        row_type = _row_type(self.fields)
        table = _HEADER.size + _DESCRIPTOR.size * len(self.fields)
        start = table + row_type.itemsize * len(self.rows)
        pages_end = start
        if self.allocations:
            start = -(-start // self.page_size) * self.page_size
            pages_end = start + -(-self.end // self.page_size) * self.page_size
        rows = np.array(self.rows, dtype=row_type)
        for field in self.fields:
            if field.type_id not in (_FLOAT, _INT):
                rows[field.name]["pointer"] += np.uint64(start)
        allocations = np.array(self.allocations, dtype=_ALLOCATION)
        allocations["pointer"] += np.uint64(start)
        file.write(_HEADER.pack(_VERSION, len(self.fields), self.page_size, len(rows), pages_end))
        file.writelines(field.descriptor() for field in self.fields)
        file.write(rows.tobytes())
        if self.allocations:
            file.seek(start)
            self.pages.seek(0)
            shutil.copyfileobj(self.pages, file, 1 << 20)
            file.truncate(pages_end)
            file.seek(pages_end)
        file.write(allocations.tobytes())


def _named(number: int, sample: Any, names: Sequence[str]) -> dict[str, Any]:
    """The values of a sample by the names of their fields."""
    if isinstance(sample, Mapping):
        if missing := [name for name in names if name not in sample]:
            raise ValueError(f"sample {number} has no {missing[0]}")
        return {name: sample[name] for name in names or sample}
    if not isinstance(sample, tuple | list):
        raise TypeError(f"sample {number} is a {type(sample).__name__}: a tuple or a dictionary is needed")
    names = names or ("image", "label")
    if len(sample) != len(names):
        raise ValueError(f"sample {number} has {len(sample)} values, and there are {len(names)} names in fields")
    return dict(zip(names, sample, strict=True))


def _plain(value: Any, place: str) -> Any:
    """A number, an array, bytes, or JSON."""
    import numpy as np

    if hasattr(value, "convert"):  # Pillow's
        if value.mode.startswith(("I", "F")):
            # Pillow's conversion would clip them: an X-ray of 16 bits becomes white.
            raise TypeError(
                f"{place}: an image of mode {value.mode} has more than 8 bits per value: "
                "scale it to 8 bits, or give np.asarray(image) to store it as an array"
            )
        value = np.asarray(value.convert("RGB"))
    elif hasattr(value, "detach"):  # PyTorch's
        try:
            value = value.detach().cpu().numpy()
        except TypeError:
            raise TypeError(
                f"{place}: a tensor of {value.dtype} cannot be stored: convert it, for example to float32"
            ) from None
    if isinstance(value, np.ndarray) and value.shape == (1,) and value.dtype.kind in "biuf":
        value = value[0]
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    return int(value) if isinstance(value, bool) else value


def _field(name: str, value: Any, number: int) -> _Field:
    """The field that has this value."""
    import numpy as np

    value = _plain(value, f"sample {number}, {name}")
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3:
            if not all(1 <= side <= _LONGEST_SIDE for side in value.shape[:2]):
                raise ValueError(f"sample {number}, {name}: a side of the image is not 1 to {_LONGEST_SIDE:,} pixels")
            return _Field(name, _IMAGE)
        if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.ndim <= 32 and value.shape[-1] > 0:
            return _Field(name, _ARRAY, value.shape, value.dtype.newbyteorder("<").str)
        raise TypeError(f"sample {number}, {name}: an array of {value.dtype} with shape {value.shape} cannot be stored")
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"sample {number}, {name}: {value} has more than 64 bits")
        return _Field(name, _INT)
    for kind, type_id in ((float, _FLOAT), (bytes, _BYTES), ((str, dict), _JSON)):
        if isinstance(value, kind):
            return _Field(name, type_id)
    raise TypeError(
        f"sample {number}, {name}: a {type(value).__name__} cannot be stored: give a number, an array, an image or text"
    )


def _checked(field: _Field) -> _Field:
    if not (1 <= len(field.name) <= 16 and field.name.isascii() and field.name.isprintable() and " " not in field.name):
        raise ValueError(f"field {field.name!r}: a name is 1 to 16 visible ASCII characters")
    return field


def _about(field: _Field) -> str:
    if field.type_id == _ARRAY:
        return f"an array of {field.dtype} with shape {field.shape}"
    return {_FLOAT: "a float", _INT: "an integer", _IMAGE: "an image", _BYTES: "bytes", _JSON: "JSON"}[field.type_id]


def _jpeg(image: Any, quality: int) -> bytes:
    stream = io.BytesIO()
    _pillow().fromarray(image).save(stream, "JPEG", quality=quality, subsampling="4:2:0")
    return stream.getvalue()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("JPEGs need Pillow: pip install pillow") from None
    return Image


class BetonDataset:
    """The samples of a `.beton` file, for PyTorch's DataLoader or to look at: a map-style dataset.

        dataset = baton.BetonDataset("val.beton", transforms={"image": to_tensor})
        image, label = dataset[0]

    A sample is a tuple of the values of `fields` (default: all of the file, in its order): RGB images as uint8 of shape
    (height, width, 3), numbers as int and float, arrays as NumPy's, bytes, JSON as Python values. `transforms` has a
    function per field that is applied to its value. JPEGs are decoded by Pillow; Baton's loader uses a faster decoder,
    whose values differ by a few of 255 levels.

    Raises ValueError for a file that is damaged or unfinished, or a field that it does not have.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Sequence[str] | None = None,
        *,
        transforms: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        self.path = Path(path)
        self.transforms = dict(transforms or {})
        self._open()
        names = [field.name for field in self._all]
        self.fields = tuple(names if fields is None else fields)
        for name in (*self.fields, *self.transforms):
            if name not in names:
                raise ValueError(f"{self.path} has no field {name!r}; it has {', '.join(names)}")

    def __repr__(self) -> str:
        return f"baton.BetonDataset({str(self.path)!r}, {list(self.fields)})"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.path} has {len(self)} samples, and none with number {number}")
        number %= len(self)
        row = self._rows[number]
        by_name = {field.name: field for field in self._all}
        values = ((name, self._value(by_name[name], row[name], number)) for name in self.fields)
        return tuple(self.transforms[name](value) if name in self.transforms else value for name, value in values)

    # A worker of a DataLoader opens the file itself.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        import numpy as np

        with self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _HEADER.size:
                raise ValueError(f"{self.path} is no .beton file")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        version, fields, _, samples, table = _HEADER.unpack_from(self._bytes)
        if version != _VERSION:
            raise ValueError(f"{self.path} is no .beton file of version {_VERSION}")
        if table == 0:
            raise ValueError(f"{self.path} is unfinished: its writer was interrupted")
        start = _HEADER.size + _DESCRIPTOR.size * fields
        if start > size:
            raise ValueError(f"{self.path} is damaged: its fields end after the file")
        descriptors = (self._bytes[at : at + _DESCRIPTOR.size] for at in range(_HEADER.size, start, _DESCRIPTOR.size))
        try:
            self._all = [_Field.described(descriptor) for descriptor in descriptors]
            row_type = _row_type(self._all)
        except (ValueError, LookupError, TypeError, struct.error) as error:
            raise ValueError(f"{self.path}: {error}") from None
        if start + samples * row_type.itemsize > table or table > size:
            raise ValueError(f"{self.path} is damaged: it ends before its table of values")
        self._rows = np.frombuffer(self._bytes, row_type, samples, start)
        count, rest = divmod(size - table, np.dtype(_ALLOCATION).itemsize)
        if rest:
            raise ValueError(f"{self.path} is damaged: it ends in the middle of its table of values")
        allocations = np.frombuffer(self._bytes, _ALLOCATION, count, table)
        # A value without bytes has the position of the next one.
        self._allocations = np.sort(allocations[allocations["size"] > 0], order="pointer")

    def _value(self, field: _Field, cell: Any, number: int) -> Any:
        import numpy as np

        if field.type_id in (_FLOAT, _INT):
            return cell.item()
        pointer = int(cell["pointer"])
        if field.type_id == _IMAGE:
            shape = (int(cell["height"]), int(cell["width"]), 3)
            if cell["mode"] == _RAW:
                stored = self._stored(field, pointer, shape[0] * shape[1] * 3, number)
                return np.frombuffer(stored, np.uint8).reshape(shape)
            stored = self._stored(field, pointer, self._size(pointer), number)
            with contextlib.suppress(OSError):
                image = np.asarray(_pillow().open(io.BytesIO(stored)).convert("RGB"))
                if image.shape == shape:
                    return image
            raise ValueError(f"{self.path}, sample {number}, {field.name}: the JPEG is damaged")
        if field.type_id in (_ARRAY, _TENSOR):
            dtype = np.dtype(field.dtype)
            size = dtype.itemsize * int(np.prod(field.shape, dtype=np.int64))
            return np.frombuffer(self._stored(field, pointer, size, number), dtype).reshape(field.shape)
        stored = self._stored(field, pointer, int(cell["size"]), number)
        if field.type_id != _JSON:
            return stored
        try:
            return json.loads(stored.partition(b"\0")[0])
        except ValueError:
            raise ValueError(f"{self.path}, sample {number}, {field.name}: the JSON is damaged") from None

    def _size(self, pointer: int) -> int:
        """Bytes of the value at a position; 0 if there is none."""
        import numpy as np

        at = int(np.searchsorted(self._allocations["pointer"], np.uint64(pointer)))
        found = self._allocations[at : at + 1]
        return int(found["size"][0]) if len(found) and found["pointer"][0] == pointer else 0

    def _stored(self, field: _Field, pointer: int, size: int, number: int) -> bytes:
        stored = self._bytes[pointer : pointer + size]
        if len(stored) < size:
            raise ValueError(f"{self.path}, sample {number}, {field.name}: the value ends after the file")
        return stored
