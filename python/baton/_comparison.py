"""How far the results of two computations are apart."""

import math
from dataclasses import dataclass

from baton._arguments import count

# Rows that `print` shows of many.
_SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """How far one tensor of Baton is from that of PyTorch."""

    name: str
    """`loss`, `output`, `evaluated` (the output in evaluation mode), `grad.<parameter>` or `buffer.<name>`, with the names of
    the state dict."""
    absolute: float
    """Largest |baton - torch| of an element; NaN if exactly one of them is NaN."""
    relative: float
    """`absolute` divided by the largest |torch|; 0 if both are all zeros, infinite if only PyTorch's are."""


@dataclass(frozen=True)
class Comparison:
    """What one step of a model computes in Baton, compared with PyTorch; `print` shows a table."""

    rows: tuple[Difference, ...]
    """All tensors, the worst first."""
    atol: float
    """Largest absolute difference that counts as equal."""
    threads: int
    """Threads of both sides."""
    switched_off: tuple[str, ...] = ()
    """Random layers that were switched off, by their path in the model."""

    @property
    def worst(self) -> Difference:
        """The tensor that is farthest apart."""
        return self.rows[0]

    @property
    def is_equal(self) -> bool:
        """Whether no element differs by more than `atol`."""
        return all(row.absolute <= self.atol for row in self.rows)  # False for NaN

    def __str__(self) -> str:
        verdict = "equal" if self.is_equal else "DIFFERENT"
        tensors, threads = count(len(self.rows), "tensor"), count(self.threads, "thread")
        lines = [f"{verdict}: {tensors}, at most {self.atol:g} apart allowed, {threads}"]
        if self.switched_off:
            layers = count(len(self.switched_off), "random layer")
            lines.append(f"without {layers}: {_shortened(self.switched_off)}")
        width = max([len("tensor"), *(len(row.name) for row in self.rows[:_SHOWN])])
        lines.append(f"{'tensor':{width}}  {'absolute':>9}  {'relative':>9}")
        for row in self.rows[:_SHOWN]:
            lines.append(f"{row.name:{width}}  {row.absolute:9.1e}  {row.relative:9.1e}")
        if len(self.rows) > _SHOWN:
            lines.append(f"… and {len(self.rows) - _SHOWN} more, no farther apart")
        return "\n".join(lines)


def comparison(rows: list[Difference], atol: float, threads: int, switched_off: list[str]) -> Comparison:
    """Sorts the rows, the worst first, and NaN before all; equal ones stay in their order."""
    ordered = sorted(rows, key=lambda row: (math.isnan(row.absolute), row.absolute, row.relative), reverse=True)
    return Comparison(tuple(ordered), atol, threads, tuple(switched_off))


def _shortened(names: tuple[str, ...], most: int = 3) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
