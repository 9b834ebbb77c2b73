"""Replacing class attributes of foreign code, and putting them back."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patches:
    """The class attributes that one probe replaced.

    ``restore`` gives back exactly what was in the class before (nothing, where the attribute was inherited). Where
    somebody else has put a wrapper around ours since, theirs stays, and ours passes calls on once the recorder sleeps.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, owner: Any, name: str, wrapper: Any) -> None:
        """Set ``owner.name`` to ``wrapper`` until :meth:`restore`."""
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING), wrapper))
        setattr(owner, name, wrapper)

    def restore(self) -> None:
        """Undo all replacements, last first."""
        while self._replaced:
            owner, name, original, wrapper = self._replaced.pop()
            if vars(owner).get(name) is not wrapper:
                continue
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
