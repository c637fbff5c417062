"""Reads the texts of a .beton file that `baton data tokenize` wrote."""

import struct

# Number of fields: tokens and labels (position and size each), number of predicted tokens, largest token.
HEADER, DESCRIPTOR, FIELDS = struct.Struct("<HHIQQ"), 1 + 16 + 1024, 4
ROW = struct.Struct("<QQQQqq")


def count(path):
    """Number of texts in a file."""
    return HEADER.unpack_from(path.read_bytes()[: HEADER.size])[3]


def read(path, count):
    """The first texts of a file: (tokens, labels), lists of numbers."""
    data = path.read_bytes()
    _, fields, _, samples, _ = HEADER.unpack_from(data)
    if fields != FIELDS or count > samples:
        raise SystemExit(f"{path}: {fields} fields and {samples} samples, but {FIELDS} and {count} are needed")
    texts = []
    for sample in range(count):
        tokens, size, labels, *_ = ROW.unpack_from(data, HEADER.size + FIELDS * DESCRIPTOR + sample * ROW.size)
        values = size // 4
        texts.append((struct.unpack_from(f"<{values}I", data, tokens), struct.unpack_from(f"<{values}i", data, labels)))
    return texts
