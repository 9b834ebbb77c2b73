"""Makes bad recordings of good ones: bytes, numbers and values of a file are changed, cut, doubled, mixed.

The n-th bad recording of a source is always the same, so that a number is all that it takes to make it again.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from typing import TYPE_CHECKING, Any

from tests.fuzz.seeds import Files, sealed, seeds_of

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBERS: tuple[bytes, ...] = (
    b"0",
    b"-1",
    b"1",
    b"255",
    b"65536",
    b"2147483648",
    b"9223372036854775807",
    b"9223372036854775808",
    b"-9e999",
)
NUMBERS += (
    b"1e308",
    b"NaN",
    b"Infinity",
    b"0.1",
    b"1" * 400,
    b"null",
    b"true",
    b'""',
    b"[]",
    b"{}",
    b'"3"',
    b'"\\ud800"',
)
WORDS: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    2**64,
    1e308,
    "",
    "x",
    "\x00",
    "\ud800",
    "9" * 40,
    [],
    {},
    [[[]]],
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
MOST_GROWTH = 1 << 16


def flip(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        found[chance.randrange(len(found))] = chance.choice((0, 0xFF, 0x22, 0x7B, chance.randrange(256)))
    return bytes(found)


def cut_off(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def cut_out(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data))
    return data[:begin] + data[begin + chance.choice((1, 4, 16, 64, 1024)) :]


def double(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data))
    part = data[begin : begin + chance.choice((1, 16, 256, 4096))]
    return data[:begin] + part * chance.choice((2, 2, 3, 16)) + data[begin:]


def insert(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data))
    part = chance.choice(
        (b"\x00" * 8, b"}, {", b"]", b'"', b"[" * 2000, b'{"a":' * 2000, b"\xff\xfe", b"\n", chance.randbytes(8))
    )
    return data[:begin] + part + data[begin:]


def number(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data))
    found = _NUMBER.search(data, begin) or _NUMBER.search(data)
    return data[: found.start()] + chance.choice(NUMBERS) + data[found.end() :] if found else flip(data, chance)


def swap(data: bytes, chance: random.Random) -> bytes:
    a, b, c = sorted(chance.randrange(len(data)) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def value(data: bytes, chance: random.Random) -> bytes:
    """Changes one value of a JSON file; another mutation where it is none."""
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return number(data, chance)
    place: Any = root
    while isinstance(place, (dict, list)) and place:
        key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or chance.random() < 0.15:
            if chance.random() < 0.2:
                del place[key]
            else:
                place[key] = chance.choice(WORDS)
            break
        place = inner
    return json.dumps(root).encode()


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip,
    cut_off,
    cut_out,
    double,
    insert,
    number,
    swap,
    value,
)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A changed file; of a packed one most often what is in it."""
    if data.startswith(b"\x1f\x8b") and chance.random() < 0.8:
        return gzip.compress(mutated(gzip.decompress(data), chance), 1)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not data:
            break
        changed = chance.choice(BYTES)(data, chance)
        data = changed[: len(data) + MOST_GROWTH]
    return data


def bad_recording(source: str, n: int) -> Files:
    """The n-th bad recording of a source."""
    chance = random.Random(f"{source}:{n}")
    files = dict(chance.choice(seeds_of(source)))
    name = chance.choice(sorted(files))
    if chance.random() < 0.02:
        del files[name]
    elif chance.random() < 0.03:
        other = chance.choice(seeds_of(source))
        files[name] = other[chance.choice(sorted(other))][: len(files[name]) // 2] + files[name]
    else:
        files[name] = mutated(files[name], chance)
        files[name] = sealed(name, files[name]) if chance.random() < 0.7 else files[name]
    return files or {name: b""}
