"""Reads pickles of plain data: numbers, texts, lists, tuples, dicts and sets, and nothing that runs code.

Python's own unpickler can be kept from looking up names, but not from what else a file may ask for: one opcode of five
bytes makes it reserve gigabytes for its memo. The few opcodes of plain data are understood here, all others refused, so
that memory and time are bounded by the size of the file. Keys and members of sets are scalars: hashing a tuple that is
nested a million deep would end the process.

Source: the opcodes as ``pickletools`` documents them, protocols 0 to 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MOST_LINE = 1 << 20
"""Numbers and texts of protocol 0 end with their line."""
MOST_NUMBER_BYTES = 64
_SCALARS = (str, bytes, int, float, type(None))


class NotPlain(ValueError):
    """The bytes are no pickle of plain data; the message says why."""


def loads(data: bytes) -> Any:  # noqa: ANN401  (whatever plain data there is)
    """The value that a pickle holds.

    Raises:
        NotPlain: it is cut off or damaged, or asks for more than plain data.

    >>> import pickle
    >>> loads(pickle.dumps({"a": [1, (2.5, None)], "b": {True}}))
    {'a': [1, (2.5, None)], 'b': {True}}
    """
    try:
        return _Reader(data).read()
    except (LookupError, struct.error, UnicodeDecodeError, OverflowError, TypeError) as error:
        raise NotPlain(f"it is cut off or damaged ({type(error).__name__})") from error


class _Reader:
    """A machine with a stack, a stack of marks, and a memo."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:  # noqa: ANN401
        data, actions, memo, push = self.data, _ACTIONS, self.memo, self.stack.append
        while self.at < len(data):
            code = data[self.at]
            self.at += 1
            if code == LONG_BINGET:  # by far the most frequent one: torch writes each text once
                push(memo[int.from_bytes(data[self.at : self.at + 4], "little")])
                self.at += 4
                continue
            if code == BINGET:
                push(memo[data[self.at]])
                self.at += 1
                continue
            if code == STOP:
                return self.stack.pop()
            action = actions.get(code)
            if action is None:
                at = self.at - 1
                raise NotPlain(
                    f"expected plain data, found opcode {bytes([code])!r} at byte {at}; nothing of it was run"
                )
            action(self)
        raise NotPlain("it is cut off")

    def number(self, layout: struct.Struct) -> Any:  # noqa: ANN401
        """The next number of the file."""
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def sized(self, layout: struct.Struct) -> bytes:
        """The next bytes of the file, which begin with their size."""
        size = self.number(layout)
        part = self.data[self.at : self.at + size]
        if size < 0 or len(part) < size:
            raise NotPlain("it is cut off")
        self.at += size
        return part

    def line(self) -> str:
        """The next line of the file."""
        end = self.data.find(b"\n", self.at, self.at + MOST_LINE)
        if end < 0:
            raise NotPlain("it is cut off")
        line = self.data[self.at : end]
        self.at = end + 1
        return line.decode("latin-1")

    def take(self) -> list[Any]:
        """What lies above the last mark, off the stack."""
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def make_tuple(self, start: int) -> None:
        """Makes one tuple of the stack from ``start`` on."""
        if start < 0:
            raise IndexError
        self.stack[start:] = [tuple(self.stack[start:])]

    def append(self, values: list[Any]) -> None:
        """Adds to the list on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Adds keys and values in turn to the dict on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise TypeError
        target.update(zip(map(_scalar, values[::2]), values[1::2], strict=True))

    def add_items(self, values: list[Any]) -> None:
        """Adds to the set on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, set):
            raise TypeError
        target.update(map(_scalar, values))

    def build_dict(self) -> None:
        """Makes a dict of what lies above the last mark."""
        values = self.take()
        self.stack.append({})
        self.set_items(values)

    def skip(self, size: int) -> None:
        """Passes over bytes that say nothing about the value."""
        self.at += size


Action = Callable[[_Reader], object]


def _scalar(value: object) -> object:
    if not isinstance(value, _SCALARS):
        raise NotPlain(f"a {type(value).__name__} as key or member of a set")
    return value


def _whole(line: str) -> int:
    text = line.strip().removesuffix("L")
    if len(text) > MOST_NUMBER_BYTES:
        raise NotPlain(f"a number of {len(text)} digits")
    try:
        return int(text)
    except ValueError:
        raise NotPlain(f"expected a number, found {text[:20]!r}") from None


def _whole_or_bool(line: str) -> int:
    """Protocol 0 writes True and False as the numbers 01 and 00."""
    return {"01": True, "00": False}.get(line.strip(), _whole(line))


def _real(line: str) -> float:
    try:
        return float(line[:MOST_NUMBER_BYTES])
    except ValueError:
        raise NotPlain(f"expected a number, found {line[:20]!r}") from None


def _long(data: bytes) -> int:
    if len(data) > MOST_NUMBER_BYTES:
        raise NotPlain(f"a number of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _old_text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _number(layout: str) -> Action:
    made = struct.Struct(layout)
    return lambda reader: reader.stack.append(reader.number(made))


def _sized(layout: str, meaning: Callable[[bytes], Any]) -> Action:
    made = struct.Struct(layout)
    return lambda reader: reader.stack.append(meaning(reader.sized(made)))


def _line(meaning: Callable[[str], Any]) -> Action:
    return lambda reader: reader.stack.append(meaning(reader.line()))


def _put(layout: str) -> Action:
    made = struct.Struct(layout)

    def put(reader: _Reader) -> None:
        reader.memo[reader.number(made)] = reader.stack[-1]

    return put


def _one_item(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    reader.set_items([key, value])


STOP, BINGET, LONG_BINGET = b".hj"
_BY_CODE: dict[bytes, Action] = {
    b"\x80": lambda reader: reader.skip(1),  # PROTO
    b"\x95": lambda reader: reader.skip(8),  # FRAME
    b"N": lambda reader: reader.stack.append(None),
    b"\x88": lambda reader: reader.stack.append(True),
    b"\x89": lambda reader: reader.stack.append(False),
    b"I": _line(_whole_or_bool),
    b"L": _line(_whole),
    b"F": _line(_real),
    b"J": _number("<i"),
    b"K": _number("<B"),
    b"M": _number("<H"),
    b"G": _number(">d"),
    b"\x8a": _sized("<B", _long),
    b"\x8b": _sized("<i", _long),
    b"V": _line(lambda line: line.encode("latin-1").decode("raw_unicode_escape", "replace")),
    b"X": _sized("<I", _text),
    b"\x8c": _sized("<B", _text),
    b"\x8d": _sized("<Q", _text),
    b"U": _sized("<B", _old_text),
    b"T": _sized("<i", _old_text),
    b"B": _sized("<I", bytes),
    b"C": _sized("<B", bytes),
    b"\x8e": _sized("<Q", bytes),
    b"]": lambda reader: reader.stack.append([]),
    b"}": lambda reader: reader.stack.append({}),
    b")": lambda reader: reader.stack.append(()),
    b"\x8f": lambda reader: reader.stack.append(set()),
    b"(": lambda reader: reader.marks.append(len(reader.stack)),
    b"0": lambda reader: reader.stack.pop(),
    b"1": lambda reader: reader.take(),
    b"2": lambda reader: reader.stack.append(reader.stack[-1]),
    b"a": lambda reader: reader.append([reader.stack.pop()]),
    b"e": lambda reader: reader.append(reader.take()),
    b"l": lambda reader: reader.stack.append(reader.take()),
    b"t": lambda reader: reader.make_tuple(reader.marks.pop()),
    b"\x85": lambda reader: reader.make_tuple(len(reader.stack) - 1),
    b"\x86": lambda reader: reader.make_tuple(len(reader.stack) - 2),
    b"\x87": lambda reader: reader.make_tuple(len(reader.stack) - 3),
    b"s": _one_item,
    b"u": lambda reader: reader.set_items(reader.take()),
    b"d": lambda reader: reader.build_dict(),
    b"\x90": lambda reader: reader.add_items(reader.take()),
    b"\x91": lambda reader: reader.stack.append(frozenset(map(_scalar, reader.take()))),
    b"p": lambda reader: reader.memo.__setitem__(_whole(reader.line()), reader.stack[-1]),
    b"q": _put("<B"),
    b"r": _put("<I"),
    b"\x94": lambda reader: reader.memo.__setitem__(len(reader.memo), reader.stack[-1]),
    b"g": lambda reader: reader.stack.append(reader.memo[_whole(reader.line())]),
}
_ACTIONS = {code[0]: action for code, action in _BY_CODE.items()}
