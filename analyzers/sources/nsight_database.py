"""Reads the tables of an Nsight Systems export without trusting it: any SQLite file may be named like one.

The file is opened read-only and immutable; only plain tables are read, only columns that are stored, and SQL functions
that its schema might call are refused. Which tables and columns there are depends on the version and on what was
recorded (schema 2.x to 3.25): what is missing reads as ``MISSING`` or as no rows.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from ppdiag.errors import BadRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

MAGIC = b"SQLite format 3\0"
MISSING = -1
"""Value of a number that is NULL, or whose column does not exist."""
LEAST_ROW_BYTES = 8
"""A damaged file may lead SQLite to a page again and again: no table has more rows than the file has room for."""
MOST_ROWS = 50_000_000
MOST_TEXT = 512
"""Longer names are cut."""
MOST_BLOB_BYTES = 4096
MOST_INSTRUCTIONS_PER_BYTE = 200
"""Of SQLite's machine, over one table: reading one row takes some tens. More is no reading of a file."""
BETWEEN_CHECKS = 100_000
_ALLOWED_FUNCTIONS = ("like", "glob", "substr")
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_PRAGMA)
_LONG = frozenset({"text", "jsonText", "binaryData", "value", "name"})
"""Columns whose values are cut; the others hold numbers."""
_AT_ONCE = 500


class Database:
    """One export.

    Raises:
        BadRecord: it is no SQLite database.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut: list[str] = []
        """Tables of which only the first rows were read: the file is cut off or damaged, or leads round in circles."""
        self._size = path.stat().st_size
        self._connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)
        self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
        self._connection.execute("PRAGMA trusted_schema=OFF")
        self._connection.execute("PRAGMA cell_size_check=ON")
        self._connection.set_authorizer(_authorise)
        self._connection.set_progress_handler(self._check, BETWEEN_CHECKS)
        self._checks = 0
        try:
            self._columns = self._read_schema()
        except BadRecord:
            self.close()
            raise

    def close(self) -> None:
        """Gives the file back."""
        self._connection.close()

    def has(self, table: str) -> bool:
        """Whether there is such a table."""
        return table in self._columns

    def has_column(self, table: str, column: str) -> bool:
        """Whether there is such a table, and a stored column of this name in it."""
        return column in self._columns.get(table, ())

    def numbers(self, table: str, columns: Sequence[str], where: str = "") -> np.ndarray:
        """Whole numbers of a table, one int64 field a column; ``MISSING`` where there is none.

        Raises:
            BadRecord: the file is damaged.
        """
        dtype = np.dtype([(column, np.int64) for column in columns])
        if not self.has(table):
            return np.empty(0, dtype)
        numbers = [self._number(table, column) for column in columns]
        try:
            return np.fromiter(self._select(table, numbers, where), dtype)
        except TypeError:  # in a damaged row there is a NULL where SQLite believes that none can be
            rows = self._select(table, numbers, where)
            return np.fromiter((tuple(MISSING if n is None else n for n in row) for row in rows), dtype)

    def rows(self, table: str, columns: Sequence[str], where: str = "") -> Iterator[tuple[object, ...]]:
        """Rows of a table as they are, long texts and blobs cut; None where a column does not exist.

        Raises:
            BadRecord: the file is damaged.
        """
        if self.has(table):
            yield from self._select(table, [self._value(table, column) for column in columns], where)

    def texts(self, ids: Iterable[int]) -> dict[int, str]:
        """Texts of the table of strings, by id.

        Raises:
            BadRecord: the file is damaged.
        """
        wanted = sorted({int(i) for i in ids if i >= 0})
        found: dict[int, str] = {}
        if not (self.has_column("StringIds", "id") and self.has_column("StringIds", "value")):
            return found
        columns = ['"id"', f'substr("value",1,{MOST_TEXT})']
        for at in range(0, len(wanted), _AT_ONCE):
            part = ",".join(map(str, wanted[at : at + _AT_ONCE]))
            rows = self._select("StringIds", columns, f"id IN ({part})")
            found |= {i: text for i, text in rows if isinstance(i, int) and isinstance(text, str)}
        return found

    def _number(self, table: str, column: str) -> str:
        if not self.has_column(table, column):
            return str(MISSING)
        return f'CASE WHEN "{column}" IS NULL THEN {MISSING} ELSE CAST("{column}" AS INTEGER) END'

    def _value(self, table: str, column: str) -> str:
        if not self.has_column(table, column):
            return "NULL"
        return f'substr("{column}",1,{MOST_BLOB_BYTES})' if column in _LONG else f'"{column}"'

    def _select(self, table: str, expressions: Sequence[str], where: str) -> Iterator[tuple[object, ...]]:
        """Rows of a query over one table, no more than the file has room for."""
        self._checks = 0
        most = min(MOST_ROWS, self._size // LEAST_ROW_BYTES + 1)
        condition = f" WHERE {where}" if where else ""
        query = f'SELECT {", ".join(expressions)} FROM "{table}"{condition} LIMIT {most + 1}'  # noqa: S608  (names of ours)
        done = 0
        try:
            for row in self._connection.execute(query):
                if done >= most:
                    self.cut.append(table)
                    return
                done += 1
                yield row
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            if not done:
                raise self._bad(f"its table {table} cannot be read ({error})") from error
            self.cut.append(table)

    def _read_schema(self) -> dict[str, frozenset[str]]:
        """Stored columns of each plain table: no views, no virtual tables, no computed columns."""
        try:
            tables = self._connection.execute(
                "SELECT name, substr(sql,1,64) FROM sqlite_master WHERE type = 'table' LIMIT 1000"
            ).fetchall()
            return {
                name: frozenset(
                    column[1] for column in self._connection.execute(f'PRAGMA table_xinfo("{name}")') if not column[6]
                )
                for name, sql in tables
                if isinstance(name, str) and name.isidentifier() and str(sql).upper().startswith("CREATE TABLE")
            }
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the message may quote bytes of the file
            raise self._bad(f"it cannot be read as a SQLite database ({error})") from error

    def _bad(self, what: str) -> BadRecord:
        return BadRecord(
            f"{self.path}: expected an export of Nsight Systems, but {' '.join(what.split())}; "
            "export it again: nsys export --type sqlite REPORT.nsys-rep"
        )

    def _check(self) -> int:
        """Ends a query that takes far more than reading the file takes."""
        self._checks += 1
        return int(self._checks * BETWEEN_CHECKS > max(self._size, 1 << 16) * MOST_INSTRUCTIONS_PER_BYTE)


def _authorise(action: int, first: str | None, second: str | None, *_: object) -> int:
    """What a query may do: read, and call the functions that we call."""
    if action == sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_OK if second in _ALLOWED_FUNCTIONS else sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_PRAGMA:
        return sqlite3.SQLITE_OK if first == "table_xinfo" else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY
