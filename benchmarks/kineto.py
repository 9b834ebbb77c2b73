"""Speed and memory of reading traces of torch.profiler, beside json and HolisticTraceAnalysis on the same file.

    python benchmarks/kineto.py [--megabytes 200 --rounds 3] [--peer-python PATH]

The trace is a real one (torch 2.4, two A100) repeated in time. CPU time is that of the reading, without imports; memory
is the peak of a process that does nothing else. ``--peer-python`` names an interpreter that has HolisticTraceAnalysis;
where there is none it is left out, and said. With ``--megabytes 1000`` the peer takes minutes and 6 GB.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
REAL = ROOT / "tests" / "data" / "kineto" / "hta_nccl_parser_config_nccl_data.json.gz"
PERIOD_US = 1_000_000
NUMBERS = re.compile(r'"(ts|correlation|External id)": (\d+(?:\.\d+)?)')
MEASURE = """
import resource, sys, time
{imports}
begin = time.process_time()
{call}
print(time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
READERS = {
    "ppdiag": (
        "from pathlib import Path; from ppdiag.analyzers.sources.kineto.rank import read_rank",
        "read_rank(Path(sys.argv[1]))",
    ),
    "json.load": ("import gzip, json", "json.load((gzip.open if sys.argv[1].endswith('.gz') else open)(sys.argv[1]))"),
}
PEER = (
    "import logging; logging.disable(); from hta.trace_analysis import TraceAnalysis",
    "TraceAnalysis(trace_files={0: sys.argv[1]})",
)


def make(path: Path, megabytes: int) -> None:
    """Writes the real trace again and again, each time later, with numbers of its own."""
    text = gzip.decompress(REAL.read_bytes()).decode()
    begin, end = text.index('"traceEvents": [') + len('"traceEvents": ['), text.rindex("\n  ]")
    head, body, tail = text[:begin], text[begin:end], text[end:]
    pieces = NUMBERS.split(body)
    with path.open("w") as stream:
        stream.write(head)
        for copy in range(max(1, round(megabytes * 1e6 / len(text)))):
            parts = pieces[:]
            for at in range(1, len(parts), 3):
                name, number = parts[at], parts[at + 1]
                later = f"{float(number) + copy * PERIOD_US:.3f}" if name == "ts" else str(int(number) + copy * 100_000)
                parts[at : at + 2] = ("", f'"{name}": {later}')
            stream.write(("," if copy else "") + "".join(parts))
        stream.write(tail)


def measure(reader: tuple[str, str], path: Path, python: str) -> tuple[float, float] | None:
    """CPU seconds and peak MB of one reading; None where it failed."""
    script = MEASURE.format(imports=reader[0], call=reader[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT) if python == sys.executable else ""}
    done = subprocess.run(
        [python, "-c", script, str(path)], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        print(done.stderr.strip()[-300:])
        return None
    cpu, peak = done.stdout.split()[-2:]
    return float(cpu), float(peak)


def table(path: Path, compressed: Path, rounds: int, peer: str | None) -> None:
    megabytes = path.stat().st_size / 1e6
    print(f"{megabytes:.0f} MB ({compressed.stat().st_size / 1e6:.0f} MB compressed), median of {rounds} rounds")
    jobs = [
        ("ppdiag", READERS["ppdiag"], path, sys.executable),
        ("ppdiag, .gz", READERS["ppdiag"], compressed, sys.executable),
    ]
    jobs.append(("json.load", READERS["json.load"], path, sys.executable))
    if peer is None:
        print("HolisticTraceAnalysis is left out: no --peer-python that has it")
    else:
        jobs.append(("HolisticTraceAnalysis", PEER, path, peer))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in jobs}
    for turn in range(rounds):
        for name, reader, file, python in jobs:
            if turn == 0 or python == sys.executable:  # the peer is slow: once
                result = measure(reader, file, python)
                found[name] += [result] if result else []
    own = [statistics.median(column) for column in zip(*found["ppdiag"], strict=True)]
    print(f"{'':24}{'CPU s':>9}{'MB/s':>8}{'peak MB':>9}{'x CPU':>8}{'x peak':>8}")
    for name, results in found.items():
        if results:
            cpu, peak = (statistics.median(column) for column in zip(*results, strict=True))
            print(f"{name:24}{cpu:9.2f}{megabytes / cpu:8.0f}{peak:9.0f}{cpu / own[0]:8.1f}{peak / own[1]:8.1f}")


def folder(path: Path, files: int) -> None:
    """Wall time of a folder with one file a rank, by one process and by one a processor."""
    from ppdiag.analyzers.sources.kineto import workers

    folder = path.parent / "folder"
    folder.mkdir()
    for rank in range(files):
        (folder / f"rank{rank}.json").symlink_to(path)
    paths = sorted(folder.iterdir())
    processors = workers._processors()
    for count in (1, processors):
        workers._processors = lambda count=count: count
        begin, cpu = time.perf_counter(), sum(os.times()[:4])
        records, _ = workers.read_ranks(paths, None)
        wall, cpu = time.perf_counter() - begin, sum(os.times()[:4]) - cpu
        size = path.stat().st_size / 1e6
        print(f"{len(records)} files of {size:.0f} MB, {count} processes: {wall:.1f} s, {cpu:.1f} s of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=100)
    parser.add_argument("--peer-python", metavar="PATH")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory(prefix="ppdiag-bench-") as name:
        path = Path(name) / "trace.json"
        make(path, args.megabytes)
        compressed = path.with_suffix(".json.gz")
        with path.open("rb") as plain, gzip.open(compressed, "wb", 6) as packed:
            while chunk := plain.read(1 << 20):
                packed.write(chunk)
        table(path, compressed, args.rounds, args.peer_python)
        compressed.unlink()
        make(path, 10)
        json.loads(path.read_text())
        folder(path, args.files)


if __name__ == "__main__":
    main()
