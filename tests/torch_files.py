"""Makes files as torch.save does, byte by byte and without torch."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any, ClassVar

STORAGE_TYPES = {"F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage"}


class Global:
    """Pickles to a name that is imported when the pickle is run."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    """Pickles to a call."""

    def __init__(self, module: str, name: str, *arguments: object) -> None:
        self.function, self.arguments = Global(module, name), arguments


class Storage:
    """Pickles to a persistent id, as torch does for a storage."""

    def __init__(self, key: str, num_items: int, dtype: str = "F32") -> None:
        kind = Global("torch", STORAGE_TYPES[dtype])
        self.id = ("storage", kind, key, "cpu", num_items)


def tensor(
    storage: Storage,
    shape: tuple[int, ...],
    *,
    offset: int = 0,
    stride: tuple[int, ...] | None = None,
) -> Call:
    """The call that makes a view of a storage."""
    if stride is None:
        stride = tuple(_product(shape[i + 1 :]) for i in range(len(shape)))
    hooks = Call("collections", "OrderedDict")
    name = "_rebuild_tensor_v2"
    return Call("torch._utils", name, storage, offset, shape, stride, False, hooks)


def program(value: object) -> bytes:
    """The pickle of ``value``, in the protocol of torch."""
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(value)
    return out.getvalue()


def zipped(
    records: Mapping[str, bytes], folder: str = "archive", compression: int = zipfile.ZIP_STORED
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as file:
        for name, data in records.items():
            file.writestr(f"{folder}/{name}", data)
    return out.getvalue()


def torch_file(value: object, storages: Mapping[str, bytes] = {}, **more: bytes) -> bytes:
    """A whole file; ``more`` are further records."""
    data = {f"data/{key}": content for key, content in storages.items()}
    return zipped({"data.pkl": program(value), "byteorder": b"little", **data, **more})


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


class _Pickler(pickle._Pickler):
    """The pickler in Python can be taught to write names that do not exist."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def persistent_id(self, obj: object) -> object:
        return obj.id if isinstance(obj, Storage) else None

    def save_name(self, obj: Global) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())

    def save_call(self, obj: Call) -> None:
        self.save(obj.function)
        self.save(obj.arguments)
        self.write(pickle.REDUCE)

    dispatch[Global] = save_name
    dispatch[Call] = save_call
