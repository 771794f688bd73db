"""Hugging Face checkpoint directories: `config.json` and safetensors files, read slice by slice and written atomically.

No model is known here: a family hands over the names and shapes it wants and gets back where they lie. Opening a directory
reads headers only, so that every fault of names, shapes and files shows before the first weight is touched.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from longstraw_jax.errors import InputError, LongstrawError, UnsupportedError

Shape = tuple[int, ...]
PathLike = str | os.PathLike

DTYPES = {name: np.dtype(dtype).newbyteorder("<") for name, dtype in {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "C64": np.complex64,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "BOOL": np.bool_,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}.items()}
"""safetensors' names of element types; the files are little-endian."""

_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000
"""The limit of the safetensors format; a longer header is a file of another kind."""


def read_json(path: PathLike) -> dict:
    """A JSON file that holds an object. Raises `InputError` where it is missing, unreadable or holds something else."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; wanted a JSON file there") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); save or download it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}; wanted an object")
    return value


def read_config(directory: PathLike) -> dict:
    """The `config.json` of a checkpoint directory."""
    return read_json(_existing_directory(directory) / "config.json")


def _existing_directory(directory: PathLike) -> Path:
    directory = Path(directory)
    if not directory.is_dir():
        given = "is not a directory" if directory.exists() else "does not exist"
        raise InputError(f"checkpoint directory {directory} {given}; wanted a Hugging Face directory with safetensors files")
    return directory


class _Entry(NamedTuple):
    dtype: np.dtype
    shape: Shape
    start: int  # bytes from the start of the file
    stop: int


class SafetensorsFile:
    """One safetensors file. The header is read and checked at once, the data mapped when the first tensor is read.

    The whole layout is checked against the file's length, because touching a mapped page behind the end of a truncated file
    kills the process instead of raising.
    """

    def __init__(self, path: PathLike):
        self.path = Path(path)
        self._entries = self._read_entries()
        self.shapes: dict[str, Shape] = {name: entry.shape for name, entry in self._entries.items()}
        self.dtypes: dict[str, np.dtype] = {name: entry.dtype for name, entry in self._entries.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A C-contiguous copy of tensor `name` at `index`; only the pages of the file that hold the slice are read."""
        if name not in self._entries:
            raise InputError(f"{self.path} has no tensor {name!r}; wanted one of its {len(self._entries)} tensors")
        dtype, shape, start, stop = self._entries[name]
        if start == stop:  # such a tensor may lie at the very end of the file, where a buffer of no bytes is refused
            return np.array(np.empty(shape, dtype)[index])
        return np.array(np.ndarray(shape, dtype, buffer=self._bytes, offset=start)[index], order="C")

    @cached_property
    def _bytes(self) -> np.ndarray:
        try:
            return np.memmap(self.path, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot map {self.path}: {error}; wanted a readable safetensors file") from None

    def _read_entries(self) -> dict[str, _Entry]:
        header, start, stop = self._read_header()
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, value, start) for name, value in header.items()}
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.start != start:
                raise self._damaged(f"tensor {name!r} starts at byte {entry.start}, the one before it ends at {start}")
            start = entry.stop
        if start != stop:
            raise self._damaged(f"{stop} bytes long, its header describes {start}")
        return entries

    def _read_header(self) -> tuple[dict, int, int]:
        """The header, where the data starts, and the length of the file."""
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if size < _LENGTH_BYTES or not 2 <= length <= min(_LARGEST_HEADER, size - _LENGTH_BYTES):
                    raise self._damaged(f"{size} bytes long, its header would take {length}")
                text = file.read(length)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}; wanted a safetensors file there") from None
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            raise self._damaged("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is no JSON object")
        return header, _LENGTH_BYTES + length, size

    def _entry(self, name: str, value: Any, data_start: int) -> _Entry:
        try:
            kind, shape, (start, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            sound = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise self._damaged(f"tensor {name!r} is described by {value!r}")
        if kind not in DTYPES:
            raise UnsupportedError(f"{self.path}: tensor {name!r} is {kind}; this version reads {', '.join(DTYPES)}")
        if stop - start != math.prod(shape) * DTYPES[kind].itemsize:
            raise self._damaged(f"tensor {name!r} has {stop - start} bytes for {kind} {list(shape)}")
        return _Entry(DTYPES[kind], shape, data_start + start, data_start + stop)

    def _damaged(self, what: str) -> InputError:
        return InputError(f"{self.path} is not a whole safetensors file: {what}; save or download it again")


class SafetensorsDirectory:
    """The weights of a checkpoint directory: `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Where both are there the single file counts, as in transformers. Tensors of a shard that the index leaves out are listed
    too: whether they are surplus is for `match_names` to say.
    """

    def __init__(self, directory: PathLike):
        self.directory = _existing_directory(directory)
        single, index = self.directory / "model.safetensors", self.directory / "model.safetensors.index.json"
        if single.exists():
            self._file_of = {name: file for file in [SafetensorsFile(single)] for name in file.shapes}
        elif index.exists():
            self._file_of = self._open_shards(index)
        else:
            raise InputError(f"{self.directory} has neither {single.name} nor {index.name}; "
                             "wanted a checkpoint saved as safetensors (save_pretrained)")
        self.shapes: dict[str, Shape] = {name: file.shapes[name] for name, file in self._file_of.items()}
        self.dtypes: dict[str, np.dtype] = {name: file.dtypes[name] for name, file in self._file_of.items()}

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of tensor `name` (its name on disk) at `index`, one slice an axis; fewer slices leave later axes whole."""
        if name not in self._file_of:
            raise InputError(f"{self.directory} has no tensor {name!r}; wanted one of its {len(self._file_of)} tensors")
        return self._file_of[name].read(name, index)

    def _open_shards(self, index: Path) -> dict[str, SafetensorsFile]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index} has no weight_map; wanted an object from tensor names to file names")
        for shard in weight_map.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise InputError(f"{index} names the file {shard!r}; wanted the name of a file beside it")
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not (self.directory / shard).exists()]
        if missing:
            raise InputError(f"{self.directory} lacks {_first(missing)} of the {len(shards)} files in {index.name}; "
                             "wanted every one: download them")
        files = {shard: SafetensorsFile(self.directory / shard) for shard in shards}
        astray = [name for name, shard in weight_map.items() if name not in files[shard].shapes]
        if astray:
            raise InputError(f"{index} places {_first(astray)} in {weight_map[astray[0]]}, which does not hold it; "
                             "wanted an index and shards of one checkpoint")
        listed = {name: files[shard] for name, shard in weight_map.items()}
        return {name: file for file in files.values() for name in file.shapes} | listed


class MatchedNames(NamedTuple):
    """`names`: canonical name -> name on disk, in the order wanted. `ignored`: names on disk that were skipped."""

    names: dict[str, str]
    ignored: tuple[str, ...]


def match_names(
    found: Mapping[str, Shape], wanted: Mapping[str, Shape], prefixes: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
) -> MatchedNames:
    """Pairs the wanted tensors with those on disk, by name and shape, all of them or none.

    `prefixes` maps a prefix on disk to the canonical one (`{"model.language_model.": "model."}`); the longest that fits
    counts, and a name that none fits is canonical already. `ignored` are prefixes, on disk or canonical, of tensors that the
    model has no use for, returned for a note; a wanted name is never ignored. Raises `InputError` for any other surplus,
    missing, misshapen or doubled name.
    """
    names: dict[str, str] = {}
    skipped, surplus, doubled = [], [], []
    for name in found:
        canonical = _canonical(name, prefixes or {})
        if canonical in names:
            doubled.append(f"{names[canonical]} and {name}")
        elif canonical in wanted:
            names[canonical] = name
        elif name.startswith(tuple(ignored)) or canonical.startswith(tuple(ignored)):
            skipped.append(name)
        else:
            surplus.append(name)
    missing = [name for name in wanted if name not in names]
    misshapen = [f"{disk} is {list(found[disk])}, wanted {list(wanted[name])}" for name, disk in names.items()
                 if tuple(found[disk]) != tuple(wanted[name])]
    faults = [f"{len(keys)} {kind} ({_first(keys)})" for kind, keys in (
        ("missing", missing), ("unexpected", surplus), ("of another shape", misshapen), ("given twice", doubled)) if keys]
    if faults:
        raise InputError(f"the checkpoint's tensors do not fit the model: {', '.join(faults)}; "
                         "wanted the weights that belong to this config.json")
    return MatchedNames({name: names[name] for name in wanted}, tuple(skipped))


def _canonical(name: str, prefixes: Mapping[str, str]) -> str:
    fitting = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
    return name if fitting is None else prefixes[fitting] + name[len(fitting):]


def _first(names: Collection[str], count: int = 3) -> str:
    """The first few names for a message."""
    more = len(names) - count
    return ", ".join(list(names)[:count]) + (f" and {more} more" if more > 0 else "")


def write_safetensors(path: PathLike, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Writes and re-reads a safetensors file, then moves it to `path`; on any failure what was at `path` stays as it was.

    `metadata` adds to `{"format": "pt"}`, without which transformers and PEFT refuse a file.
    """
    # save_file (0.8.0) writes an array's memory as it lies, so a transpose or a slice comes out wrong without an error.
    # np.ascontiguousarray would be no remedy: it makes a scalar a vector.
    arrays = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    arrays = {name: value.astype(value.dtype.newbyteorder("<"), copy=False) for name, value in arrays.items()}
    for name, value in arrays.items():
        if value.dtype not in DTYPES.values():
            raise UnsupportedError(f"tensor {name!r} is {value.dtype}; safetensors files hold {', '.join(DTYPES)}")

    def write(temporary: Path) -> None:
        save_file(arrays, temporary, metadata={"format": "pt", **(metadata or {})})
        _require_same(SafetensorsFile(temporary), arrays, path)

    _replace(path, write)


def _require_same(file: SafetensorsFile, arrays: Mapping[str, np.ndarray], path: PathLike) -> None:
    for name, value in arrays.items():
        if name not in file.shapes or not _same_bytes(file.read(name), value):
            raise LongstrawError(f"tensor {name!r} of {path} does not read back as it was written, so nothing was replaced; "
                                 "check the disk and the version of safetensors")


def _same_bytes(left: np.ndarray, right: np.ndarray) -> bool:
    """Bytes, not values: a NaN equals itself, and -0.0 differs from 0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return np.array_equal(left.reshape(-1).view(np.uint8), right.reshape(-1).view(np.uint8))


def write_json(path: PathLike, value: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Writes a JSON object, or a list of them, beside `path`, then moves it there."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _replace(path: PathLike, write: Callable[[Path], object]) -> None:
    """Has `write` fill a temporary file beside `path` and moves it over `path` once it is complete and on the disk."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(b"")
        mode = temporary.stat().st_mode  # save_file makes its file private to the user; the user's umask is to decide
        write(temporary)
        temporary.chmod(mode)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}; "
                         "wanted a writable directory with room") from None
    finally:
        with suppress(OSError):
            temporary.unlink()
