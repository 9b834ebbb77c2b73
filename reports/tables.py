"""The spans as a table: CSV, or Parquet where pyarrow is there. Written a part at a time."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ppdiag.errors import MissingPackage
from ppdiag.model import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import TextIO

    from ppdiag.exported import Exported

PART = 1 << 18
"""Spans of a part: some 40 MB as a DataFrame."""
KINDS = {int(kind): kind.name for kind in Kind}


def parts(exported: Exported) -> Iterator[pd.DataFrame]:
    """The spans with stages filled in, ``kind`` by name, and ``partner``: the row of the other end of a message."""
    for first in range(0, max(1, len(exported.spans)), PART):
        spans = exported.spans[first : first + PART]
        columns: dict[str, Any] = {name: spans[name] for name in spans.dtype.names or ()}
        columns["kind"] = pd.Categorical(pd.Series(spans["kind"]).map(KINDS), categories=list(KINDS.values()))
        columns["partner"] = exported.partner[first : first + PART]
        yield pd.DataFrame(columns, index=np.arange(first, first + len(spans)))


def write_csv(exported: Exported, stream: TextIO) -> None:
    """Write the spans as CSV, one header line, times in ns."""
    for i, part in enumerate(parts(exported)):
        part.to_csv(stream, header=i == 0, index=False, lineterminator="\n")


def write_parquet(exported: Exported, path: Path) -> None:
    """Write the spans as Parquet, a row group for each part; no file is made where pyarrow is missing.

    Raises:
        MissingPackage: pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  (an extra)
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackage("writing Parquet needs pyarrow; pip install 'ppdiag[parquet]'") from error
    tables = (pa.Table.from_pandas(part, preserve_index=False) for part in parts(exported))
    first = next(tables)
    with path.open("wb") as stream, pq.ParquetWriter(stream, first.schema, compression="zstd") as writer:
        for table in chain([first], tables):
            writer.write_table(table)
