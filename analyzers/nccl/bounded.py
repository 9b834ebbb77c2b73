"""A dict of limited size that counts what it does not take."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """Takes new keys up to a limit; a hostile or endless log must not fill the memory.

    >>> names = Bounded(1)
    >>> names.keep("a", 1), names.keep("a", 2), names.keep("b", 3)
    (None, None, None)
    >>> names, names.dropped
    ({'a': 1}, 1)
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self.dropped = 0

    def keep(self, key: K, value: V) -> None:
        """Remember a value; the first of a key stays."""
        if key not in self:
            self.change(key, value)

    def change(self, key: K, value: V) -> None:
        """Remember a value; the last of a key stays."""
        if key in self or len(self) < self._limit:
            self[key] = value
        else:
            self.dropped += 1
