"""Starts the programs that a wheel carries: `baton`, `baton-coordinator` and `baton-worker`.

A program becomes this process, so that signals and the exit code are its own. Its libraries are those of PyTorch, which
pip may have put into another folder than this package.
"""

import contextlib
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

# Laid out as in an image: bin, recipes, assets.
_FOLDER = Path(__file__).with_name("_dist")
# Libraries of another version have other symbols, or other bits.
TORCH = "2.11"
_BAD_INPUT = 2


def main() -> NoReturn:
    """The entry point of every program; the name of the command chooses which."""
    name = Path(sys.argv[0]).name
    program = _FOLDER / "bin" / name
    try:
        environment = {**os.environ, **_libraries(os.environ.get("LD_LIBRARY_PATH", ""))}
        os.execve(program, [name, *sys.argv[1:]], environment)
    except OSError as error:
        _refuse(f"{program} does not start: {error.strerror}: this wheel is for Linux on x86-64 with glibc")
    except ValueError as error:
        _refuse(str(error))


def _refuse(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(_BAD_INPUT)


def _libraries(path: str) -> dict[str, str]:
    """The variable with the folders of libraries. Without PyTorch a job can still be controlled.

    Raises ValueError if PyTorch is of another version.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("torch")
        if not version.startswith(f"{TORCH}."):
            raise ValueError(f"PyTorch {version} is installed, and Baton needs {TORCH}: pip install 'torch=={TORCH}.*'")
    torch = Path(spec.submodule_search_locations[0])
    # The compiler of kernels, and NCCL.
    nvidia = sorted(torch.parent.glob("nvidia/*/lib"))
    folders = [torch / "lib", *nvidia]
    return {"LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *filter(None, [path])])}
