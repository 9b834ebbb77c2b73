"""NCCL's own logs: which transport each connection really used, and what NCCL complained about.

``reader.read_logs`` reads files, ``transports`` asks the result. Only the lines that NCCL writes when it connects a
channel prove a transport; "Using network X" names what was loaded.

Source: the format strings of NCCL 2.8.3 to 2.30.7; each rule of ``rules.py`` and ``known_messages.py`` names its own.
"""
