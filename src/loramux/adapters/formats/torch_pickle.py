"""What the pickle of a weight file says, worked out without unpickling it.

A pickle is a program for a stack machine. This one has only the instructions with which torch.save
writes a dictionary of tensors, and three calls that it imitates; it imports and calls nothing.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from loramux.adapters.formats.files import MalformedFile
from loramux.adapters.report import printable

MAX_INSTRUCTIONS = 150_000
"""A tensor takes about 30."""

_DTYPE_OF_STORAGE = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}

_DTYPE_OF_NAME = {
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.uint16": "U16",
    "torch.uint32": "U32",
    "torch.uint64": "U64",
}

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip

_BYTES = "torch.storage.UntypedStorage"
_ORDERED_DICT = "collections.OrderedDict"
_TENSOR = "torch._utils._rebuild_tensor_v2"
_TENSOR_OF_BYTES = "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_ALLOWED = {
    _BYTES, _ORDERED_DICT, _TENSOR, _TENSOR_OF_BYTES, _PARAMETER, *_DTYPE_OF_STORAGE,
    *_DTYPE_OF_NAME,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A strided view of a storage; ``offset`` and ``stride`` count elements."""

    dtype: str
    storage: str
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_spanned(self) -> int:
        """Elements of the storage from the view's first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


def read_pickle(what: str, program: bytes) -> Mapping[str, PickledTensor]:
    """The tensors of a pickled dictionary by name.

    Raises MalformedFile for a program that does anything else than build such a dictionary.
    """
    machine = _Machine(what)
    try:
        for number, (instruction, argument) in enumerate(_instructions(io.BytesIO(program))):
            if number == MAX_INSTRUCTIONS:
                raise MalformedFile(
                    f"{what} is too large: its pickle has more than {number} instructions"
                )
            machine.do(instruction, argument)
        result = machine.result()
    except (ValueError, IndexError, KeyError, TypeError, AttributeError):
        raise MalformedFile(f"{what} is corrupt: its pickle cannot be followed") from None
    return _tensors(what, result)


def _instructions(program: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Names and arguments up to the end. Raises KeyError or ValueError where there is none.

    Arguments that the machine does not take are left alone: some are taken to be source code.
    """
    name = ""
    while name != "STOP":
        instruction = _INSTRUCTIONS[program.read(1)]
        name, argument = instruction.name, None
        if name == "GLOBAL":
            argument = f"{_line(program)} {_line(program)}"
        elif name in _WITH_ARGUMENT:
            assert instruction.arg is not None
            argument = instruction.arg.reader(program)
        yield name, argument


def _line(program: BinaryIO) -> str:
    line = program.readline()
    if not line.endswith(b"\n"):
        raise ValueError("the line has no end")
    return line[:-1].decode("ascii")


def _tensors(what: str, result: object) -> dict[str, PickledTensor]:
    if not isinstance(result, dict):
        raise MalformedFile(f"{what} holds no dictionary of tensors")
    for name, value in result.items():
        if not isinstance(name, str) or not isinstance(value, PickledTensor):
            place = f" {printable(name)}" if isinstance(name, str) else ""
            raise MalformedFile(f"{what} holds something that is no tensor{place}")
    return result


@dataclass(frozen=True, slots=True)
class _Name:
    """An object of Python that the program asks for: never imported."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str | None
    """None for plain bytes."""
    key: str
    num_items: int


_INSTRUCTIONS = {info.code.encode("latin-1"): info for info in pickletools.opcodes}
_WITH_ARGUMENT = {
    "PROTO", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "BINUNICODE", "BININT", "BININT1",
    "BININT2", "LONG1",
}  # fmt: skip

_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


class _Machine:
    """The stack and memo of a pickle program."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> object:
        (value,) = self._stack
        return value

    def do(self, instruction: str, argument: Any) -> None:
        """Carry out one instruction; anything unknown is refused by its name."""
        match instruction:
            case "PROTO" | "STOP":
                pass
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                self._stack.append(self._memo[argument])
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                self._stack.append(argument)
            case "MARK":
                self._stack.append(_MARK)
            case "TUPLE":
                self._stack.append(tuple(self._pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._make_tuple(int(instruction[-1]))
            case "EMPTY_TUPLE":
                self._stack.append(())
            case "EMPTY_DICT":
                self._stack.append({})
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                self._stack.append(_CONSTANTS[instruction])
            case "GLOBAL":
                self._name(argument)
            case "BINPERSID":
                self._storage()
            case "REDUCE":
                self._call()
            case "SETITEM":
                value, key = self._stack.pop(), self._stack.pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case "BUILD":
                self._build()
            case _:
                self._refuse(f"the instruction {instruction}")

    def _refuse(self, what_it_does: str) -> NoReturn:
        raise MalformedFile(
            f"{self._what} is a pickle that can run code (unsafe), so it is not read: it uses "
            f"{what_it_does}"
        )

    def _pop_to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError("there is no mark")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _make_tuple(self, size: int) -> None:
        if len(self._stack) < size:
            raise IndexError("the stack is too short")
        items = tuple(self._stack[-size:])
        self._stack[-size:] = [items]

    def _name(self, argument: str) -> None:
        name = argument.replace(" ", ".")
        if name not in _ALLOWED:
            self._refuse(printable(name))
        self._stack.append(_Name(name))

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items belong to a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):  # hashes of numbers could be made to collide
                raise TypeError("names are strings")
            if key in target:
                raise MalformedFile(f"{self._what} is corrupt: a name is there twice (duplicate)")
            target[key] = value

    def _build(self) -> None:
        """Attributes of a dictionary: versions of modules, which say nothing about tensors."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            self._refuse("an object with a state")

    def _storage(self) -> None:
        kind, storage_type, key, _, num_items = self._stack.pop()
        name = storage_type.name if isinstance(storage_type, _Name) else ""
        dtype = _DTYPE_OF_STORAGE.get(name)
        if kind != "storage" or (dtype is None and name != _BYTES):
            raise ValueError("no storage")
        if not isinstance(key, str) or not _sizes((num_items,)):
            raise ValueError("no storage")
        self._stack.append(_Storage(dtype, key, num_items))

    def _call(self) -> None:
        """One of the calls that make a tensor or an empty dictionary.

        What follows the known arguments of a tensor marks it as negated or conjugated: refused.
        """
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, _Name) or not isinstance(arguments, tuple):
            raise TypeError("no call")
        if function.name == _ORDERED_DICT and arguments == ():
            self._stack.append({})
        elif function.name == _TENSOR and not any(arguments[6:]):
            self._stack.append(_tensor(*arguments[:4]))
        elif function.name == _TENSOR_OF_BYTES and not any(arguments[7:]):
            self._stack.append(_tensor(*arguments[:4], dtype=_DTYPE_OF_NAME[arguments[6].name]))
        elif function.name == _PARAMETER and isinstance(arguments[0], PickledTensor):
            self._stack.append(arguments[0])
        else:
            self._refuse(f"a call of {printable(function.name)}")


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, dtype: str | None = None
) -> PickledTensor:
    """Raises ValueError unless the view lies within its storage."""
    if not isinstance(storage, _Storage) or (storage.dtype is None) != (dtype is not None):
        raise ValueError("no tensor")
    if not _sizes((offset,)) or not _sizes(shape) or not _sizes(stride):
        raise ValueError("no place in a storage")
    dtype = dtype or storage.dtype
    assert dtype is not None, "one of the two says it"
    item = 1 if storage.dtype is None else DTYPE_BYTES[dtype]
    num_bytes = storage.num_items * item
    tensor = PickledTensor(dtype, storage.key, num_bytes, offset, shape, stride)
    if len(shape) != len(stride) or math.prod(shape) >= 2**63:
        raise ValueError("shape and stride do not fit")
    if (offset + tensor.num_spanned) * DTYPE_BYTES[dtype] > num_bytes:
        raise ValueError("the view is larger than its storage")
    return tensor


def _sizes(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) <= 16
        and all(type(n) is int and 0 <= n < 2**63 for n in value)
    )
