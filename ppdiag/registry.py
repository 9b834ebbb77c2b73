"""Lazy tables of plug-ins: ``name: "module:object"``, joined by other people's entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Registry:
    """A table of plug-ins of one kind, loaded when first asked for.

    Args:
        group: entry-point group in which other packages may add rows, e.g. ``ppdiag.sources``.
        table: our own rows, ``name: "module:object"``; they win over entry points of the same name.
    """

    def __init__(self, group: str, table: Mapping[str, str]) -> None:
        self.group = group
        self._table = dict(table)

    def names(self) -> list[str]:
        """All names, ours first, in the table's order."""
        return list(self._rows())

    def load(self, name: str) -> Any:  # noqa: ANN401  (whatever the plug-in is)
        """The plug-in of this name.

        Raises:
            KeyError: there is none.
        """
        # ours need no look at what is installed, which reads a file of each package
        value = self._table[name] if name in self._table else self._rows()[name]
        return EntryPoint(name, value, self.group).load()

    def _rows(self) -> dict[str, str]:
        rows = dict(self._table)
        for point in entry_points(group=self.group):
            rows.setdefault(point.name, point.value)
        return rows
