"""What NCCL says of its calls in NVTX ranges of an Nsight Systems export: communicator, bytes, peer.

The payload is a structure whose layout two tables of the export describe. In ``binaryData`` (exports with
``--include-blobs=true``) 32 bytes lie before it: domain, schema, size and offset of the payload as 64-bit numbers; in
``jsonText`` (``--include-json=true``) it is spelt out. Source: NCCL's nvtx_payload_schemas.h and nvtx.h, NVTX 3's
payload extension, the export schema of Nsight Systems 2026.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from ppdiag.model import Collective, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppdiag.analyzers.sources.nsight_database import Database

CALLS: dict[str, tuple[Kind, int]] = {
    "ncclSend": (Kind.SEND, 0),
    "ncclRecv": (Kind.RECV, 0),
    "ncclAllReduce": (Kind.COLLECTIVE, Collective.ALL_REDUCE),
    "ncclAllGather": (Kind.COLLECTIVE, Collective.ALL_GATHER),
    "ncclReduceScatter": (Kind.COLLECTIVE, Collective.REDUCE_SCATTER),
    "ncclBroadcast": (Kind.COLLECTIVE, Collective.BROADCAST),
    "ncclBcast": (Kind.COLLECTIVE, Collective.BROADCAST),
    "ncclReduce": (Kind.COLLECTIVE, Collective.REDUCE),
    "ncclAlltoAll": (Kind.COLLECTIVE, Collective.ALL_TO_ALL),
    "ncclGather": (Kind.COLLECTIVE, Collective.GATHER),
    "ncclScatter": (Kind.COLLECTIVE, Collective.SCATTER),
}
"""Calls that launch work."""
INITS = ("ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommSplit")
"""Calls that say which rank of a communicator a process is."""
UNKNOWN = -1
HEADER = struct.Struct("<QQQQ")
_TYPES = {5: "<i", 6: "<I", 7: "<q", 8: "<Q", 9: "<q", 10: "<Q", 15: "<i", 16: "<I", 17: "<q", 18: "<Q", 22: "<Q"}
"""Whole numbers among the entry types of NVTX's payload extension; ``size_t`` and ``long`` as on 64-bit Linux."""
_COMMUNICATOR = "NCCL communicator ID"
_BYTES = ("Message size [bytes]", "Bytes")
_PEER = "Peer rank"
_RANKS = ("No. of ranks", "nranks")
_RANK = ("Rank", "myrank")
_NUMBER_IN_NAME = 1 << 63

Layout = dict[int, list[tuple[str, str, int]]]
"""By schema, its entries: name, struct code, offset."""


class Payload(NamedTuple):
    """What a call's payload says; ``UNKNOWN`` where it does not."""

    communicator: int = UNKNOWN
    size_bytes: int = UNKNOWN
    peer: int = UNKNOWN
    """As a rank of the communicator."""
    ranks: int = UNKNOWN
    rank: int = UNKNOWN


def layouts(database: Database) -> Layout:
    """The layout of each payload schema, as far as it has whole numbers."""
    found: dict[int, dict[int, tuple[str, str, int]]] = defaultdict(dict)
    columns = ("schemaId", "idx", "type", "name", "offset")
    for schema, index, kind, name, offset in database.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", columns):
        if isinstance(schema, int) and isinstance(index, int) and isinstance(name, str) and kind in _TYPES:
            place = offset if isinstance(offset, int) and offset >= 0 else 0  # NULL: the first one
            found[schema][index] = (name, _TYPES[int(str(kind))], place)
    return {schema: list(entries.values()) for schema, entries in found.items()}


def payload_of(blob: object, text: object, layout: Layout) -> Payload:
    """The payload of one call, from its bytes, else from its JSON."""
    values: Mapping[str, object] = {}
    if isinstance(blob, bytes) and len(blob) > HEADER.size:
        _, schema, _, _ = HEADER.unpack_from(blob)
        values = _unpack(blob[HEADER.size :], layout.get(schema, []))
    elif isinstance(text, str):
        values = _from_json(text)
    number = {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    return Payload(
        communicator=number.get(_COMMUNICATOR, UNKNOWN),
        size_bytes=_first(number, _BYTES),
        peer=number.get(_PEER, UNKNOWN),
        ranks=_first(number, _RANKS),
        rank=_first(number, _RANK),
    )


def _first(number: Mapping[str, int], names: tuple[str, ...]) -> int:
    return next((number[name] for name in names if 0 <= number.get(name, UNKNOWN) < _NUMBER_IN_NAME), UNKNOWN)


def _unpack(data: bytes, entries: list[tuple[str, str, int]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, code, offset in entries:
        if offset + struct.calcsize(code) <= len(data):
            found[name] = struct.unpack_from(code, data, offset)[0]
    return found


def _from_json(text: str) -> dict[str, object]:
    """The values of a payload in JSON; those of one nested object too."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    nested = [inner for inner in value.values() if isinstance(inner, dict)]
    return {**value, **{name: item for inner in nested for name, item in inner.items()}}
