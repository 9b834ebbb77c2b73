"""The diagnosis as JSON, the public contract ``ppdiag.diagnosis/1``."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import TextIO

    from ppdiag.diagnosis import Diagnosis
    from ppdiag.hang import Hang


def write(diagnosis: Diagnosis | Hang, stream: TextIO) -> None:
    """Write the diagnosis to a text stream, keys in the schema's order, one newline at the end.

    Numbers that JSON cannot hold (NaN, infinity) become null. A stream that is not UTF-8 gets ASCII with escapes.
    """
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").replace("_", "")
    data = _plain(diagnosis.to_dict())
    stream.write(json.dumps(data, indent=2, allow_nan=False, ensure_ascii=encoding != "utf8"))
    stream.write("\n")


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {_plain(key) if isinstance(key, str) else str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        # A host name or argument that was not UTF-8 arrives with lone surrogates, which no encoder takes.
        return value.encode("utf-8", "replace").decode("utf-8")
    return value
