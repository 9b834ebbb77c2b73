"""Reads what torch.profiler (Kineto) writes: Chrome's trace format, one file a rank, ``.json`` or ``.json.gz``.

``blocks`` cuts a file into whole events, ``decode`` and ``events`` keep those that matter as columns, ``labels`` knows
what the names of annotations say, ``host``, ``host_ops`` and ``device`` find a rank's ops and messages, ``sums`` what
can be said without a pipeline; ``rank`` calls them for a file, ``workers`` for several, ``source`` puts all together.
"""
