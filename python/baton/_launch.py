"""Starts the programs that a wheel carries: `baton`, `baton-coordinator` and `baton-worker`.

A program becomes this process, so that signals and the exit code are its own. Its libraries are those of PyTorch, which
pip may have put into another folder than this package.
"""

import contextlib
import hashlib
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
        environment = {"BATON_PYTHON": sys.executable, **os.environ}
        _check_glibc()
        try:
            environment |= _libraries(os.environ.get("LD_LIBRARY_PATH", ""))
        except ValueError:
            # Others need no PyTorch: a job can be controlled whatever is installed, and `baton doctor` says what is not.
            if name == "baton-worker" or sys.argv[1:2] == ["up"]:
                raise
        os.execve(program, [name, *sys.argv[1:]], environment)
    except OSError as error:
        _refuse(f"{program} does not start: {error.strerror}: this wheel is for Linux on x86-64 with glibc")
    except ValueError as error:
        _refuse(str(error))


def _check_glibc() -> None:
    """Ends with a remedy on an older glibc than the programs need: pip checks that for a wheel, and nobody for a tarball.

    Without any glibc they do not start.
    """
    try:
        needed = (_FOLDER / "glibc").read_text().strip()
        has = (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
        older = _numbers(has) < _numbers(needed)
    except (OSError, ValueError):
        return
    if older:
        _refuse(
            f"this machine has glibc {has}, and Baton needs {needed} or newer: use a newer system, or an image of one"
        )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _refuse(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(_BAD_INPUT)


def _libraries(path: str) -> dict[str, str]:
    """The variable with the folders of libraries.

    Raises ValueError if PyTorch is missing or of another version.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"PyTorch is not installed: pip install 'torch=={TORCH}.*'")
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = metadata.version("torch")
        if not version.startswith(f"{TORCH}."):
            raise ValueError(f"PyTorch {version} is installed, and Baton needs {TORCH}: pip install 'torch=={TORCH}.*'")
    torch = Path(spec.submodule_search_locations[0])
    # The compiler of kernels, and NCCL.
    nvidia = sorted(torch.parent.glob("nvidia/*/lib"))
    folders = [torch / "lib", *nvidia, *_nccl(torch.parent)]
    return {"LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *filter(None, [path])])}


def _nccl(site: Path) -> list[Path]:
    """A folder with NCCL by the name that the worker opens; its package has only the one with a version."""
    library = site / "nvidia/nccl/lib/libnccl.so.2"
    if not library.exists() or library.with_name("libnccl.so").exists():
        return []
    digest = hashlib.sha256(str(library).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "baton", f"nccl-{digest}")
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "libnccl.so").symlink_to(library)
    return [cache]
