"""The words shared by the training side and the analysis side: kinds of spans, their fields, flags, file names.

Standard library only: the hooks import this module inside the training process before torch is there.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

FORMAT_VERSION = 1


class Kind(IntEnum):
    """What a rank was doing in a span."""

    FORWARD = 1
    """F: the forward of one microbatch through one stage."""
    BACKWARD = 2
    """B: the backward of one microbatch; of the input only where W is split off (then WEIGHT spans exist)."""
    WEIGHT = 3
    """W: the weight gradient of one microbatch, split off its backward."""
    SEND = 4
    """A send to a rank: posted at ``post_ns``; ``start_ns``..``end_ns`` is the wait for it (equal if never waited)."""
    RECV = 5
    """A receive from a rank: posted at ``post_ns``; ``start_ns``..``end_ns`` is the wait for it."""
    COLLECTIVE = 6
    """A collective of a process group: posted at ``post_ns``; ``start_ns``..``end_ns`` is the wait for it."""
    OPTIMIZER = 7
    """One call of ``Optimizer.step``."""
    SCHEDULE = 8
    """One call of a framework's pipeline step (``schedule.step``, ``train_batch``): brackets its ops."""
    INIT = 9
    """A bracket of initialisation traffic (shape exchange, extra forwards): nothing in it is work."""
    HOST = 10
    """Host work with a known cause (garbage collection, data loading); ``op`` says which."""
    LAYER = 11
    """A layer of a stage, in sampled steps; ``seq`` is its number, ``op`` FORWARD or BACKWARD.

    A backward is the moment at which it begins (no length); ``seq`` -1 is the one at which the first layer's ends. The
    source makes ``layers`` facts of them: no trace has any."""


COMPUTE_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT, Kind.OPTIMIZER)
PIPELINE_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
WAIT_KINDS = (Kind.SEND, Kind.RECV, Kind.COLLECTIVE)


class Flag(IntFlag):
    """Facts about one span beyond its kind."""

    INIT = 1
    """Inside an INIT bracket: recorded, but not work."""
    INFERRED = 2
    """Found by the universal layer (module calls, autograd engine), not named by a framework adapter."""
    NEVER_WAITED = 4
    """The message was posted, and no wait for it was seen; start and end equal the post."""
    SYNCHRONOUS = 8
    """The post itself blocked: the wait lies inside the call (``async_op=False`` without a Work)."""
    FAILED = 16
    """The call raised in the user's code."""
    EVALUATION = 32
    """Under ``schedule.eval`` or without gradients: there is no backward."""
    DEVICE = 64
    """``start_ns`` and ``end_ns`` are the device's, on the rank's clock; the host launched it at another time."""


class Collective(IntEnum):
    """``op`` of a COLLECTIVE span."""

    OTHER = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9


class HostCause(IntEnum):
    """``op`` of a HOST span."""

    OTHER = 0
    GC = 1
    DATA = 2
    SYNCHRONISING = 3
    """A call in which the host waits until its device is done."""


class Payload(IntEnum):
    """``op`` of a SEND or RECV span: what the message carries."""

    UNKNOWN = 0
    ACTIVATION = 1
    """Output of a forward; belongs to ``microbatch`` and ``stage`` of the rank's own end."""
    GRADIENT = 2
    """Input gradient of a backward."""


NONE = -1
"""Value of ``stage``, ``chunk``, ``microbatch`` and ``peer`` where they do not apply or are not known."""

SPAN_FIELDS: tuple[tuple[str, str, str], ...] = (
    # name, struct code, numpy type; times are ns on the rank's own clock (perf_counter_ns)
    ("start_ns", "q", "<i8"),
    ("end_ns", "q", "<i8"),
    ("post_ns", "q", "<i8"),  # SEND, RECV, COLLECTIVE: when it was posted; else equal to start_ns
    ("size_bytes", "q", "<i8"),
    ("step", "i", "<i4"),  # counted by the rank: goes up at the first op after an optimizer step
    ("seq", "i", "<i4"),  # SEND, RECV: nth message of (group, src, dst, tag) in this job; COLLECTIVE: nth of the group
    ("peer", "i", "<i4"),  # global rank of the other end of SEND, RECV; root of a rooted collective
    ("tag", "i", "<i4"),
    ("microbatch", "h", "<i2"),
    ("stage", "h", "<i2"),  # counted over all virtual stages
    ("chunk", "h", "<i2"),  # index of the stage among those of its rank
    ("group", "h", "<i2"),  # index in the rank's table of process groups
    ("thread", "h", "<i2"),  # 0 is the thread that recorded first
    ("flags", "H", "<u2"),
    ("kind", "B", "u1"),
    ("op", "B", "u1"),  # Collective, HostCause or Payload
)
"""Fields of a span on disk, in this order, little endian, unpadded. Each file's header repeats them for its readers."""

MOST_LAUNCH_LEAD_MS = 65_000.0
"""The largest half float is 65504."""
DEVICE_SPAN_FIELDS = (
    *(("chunk", "b", "i1") if field[0] == "chunk" else field for field in SPAN_FIELDS),
    ("launch_lead_ms", "e", "<f2"),
)
"""Fields where torch can drive a GPU: 63 bytes, and with its share of a block's frame a span takes no more than 64.

``launch_lead_ms``: how long before ``start_ns`` the host launched a DEVICE span. A half float errs by 0.05 %: a launch
just in time is known well, and one long before need not be.
"""

SPAN_STRUCT = "<" + "".join(code for _, code, _ in SPAN_FIELDS)
DEVICE_SPAN_STRUCT = "<" + "".join(code for _, code, _ in DEVICE_SPAN_FIELDS)

STATE_STRUCT = "<qqqqiiihhhHBB"
"""The state slot of a rank: heartbeat_ns, start_ns of the op it is inside of, post_ns, size_bytes, step, seq, peer,
microbatch, stage, group, flags, kind (0: in no op), status (``RankStatus``)."""


class RankStatus(IntEnum):
    """Last known status of a rank's process, in its state slot."""

    RUNNING = 1
    FINISHED = 2
    """The interpreter reached its exit."""
    RAISED = 3
    """An uncaught exception ended the main thread (``sys.excepthook`` ran)."""
