"""Feeds bad recordings to every source: ``python -m tests.fuzz.run --count 1000000``.

Processes read them; the parent ends one that takes over 10 s for one recording or over 1 GiB, and starts another behind
it. What went wrong is printed with the number by which it can be made again:
``python -m tests.fuzz.run --source kineto --first 4711 --count 1``.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from ppdiag.analyzers.sources import SOURCES
from tests.fuzz.check import MOST_MEMORY_BYTES, Watch, memory_bytes, trouble
from tests.fuzz.seeds import seeds_of

MOST_SECONDS = 10
"""Of CPU time, so that a loaded machine makes no difference."""
MOST_WAITED_SECONDS = 120
SHARE = 2000
"""Recordings of one process."""
_POSITION = struct.Struct("<q")


def work(source: str, first: int, count: int, folder: Path) -> None:
    """Reads recordings in this process; leaves its place in ``position`` and what went wrong in ``troubles``."""
    seeds_of(source)
    watch = Watch()
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes() + 2 * MOST_MEMORY_BYTES,) * 2)
    place = os.open(folder / "position", os.O_RDWR | os.O_CREAT)
    with (folder / "troubles").open("a") as troubles:
        for n in range(first, first + count):
            os.pwrite(place, _POSITION.pack(n), 0)
            before = memory_bytes()
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, MOST_WAITED_SECONDS)
            found = trouble(source, n, folder / "recording", watch)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if memory_bytes() - before > MOST_MEMORY_BYTES // 2:
                found += f"\ntook {(memory_bytes() - before) >> 20} MiB more than any before it"
            if found:
                troubles.write(f"--- {source} {n}\n{found}\n")
                troubles.flush()


def spawn(source: str, first: int, count: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.fuzz.run", "--work", str(folder), "--source", source]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen([*command, "--first", str(first), "--count", str(count)], env=environment)


def run_share(source: str, first: int, count: int, folder: Path) -> str:
    """What went wrong in a share; a process that died is followed by another behind the recording that killed it."""
    said = ""
    end = first + count
    while first < end:
        process = spawn(source, first, end - first, folder)
        code = process.wait()
        if code == 0:
            break
        (at,) = _POSITION.unpack((folder / "position").read_bytes()) if (folder / "position").exists() else (first,)
        hung = code in (-signal.SIGPROF, -signal.SIGALRM)
        why = f"over {MOST_SECONDS} s" if hung else f"the process ended with {code}"
        said += f"--- {source} {at}\n{why}\n"
        first = at + 1
    troubles = folder / "troubles"
    return said + (troubles.read_text() if troubles.exists() else "")


def run(sources: list[str], first: int, count: int, workers: int) -> int:
    """Shares all recordings among processes; returns how many went wrong."""
    from concurrent.futures import ThreadPoolExecutor

    shares = []
    for index, source in enumerate(sources):
        own = count // len(sources) + (index < count % len(sources))
        shares += [(source, first + at, min(SHARE, own - at)) for at in range(0, own, SHARE)]
    shares.sort(key=lambda share: share[1])  # all sources in turn
    done: Counter[str] = Counter()
    wrong = 0
    begin = time.monotonic()
    with TemporaryDirectory(prefix="ppdiag-fuzz-") as name, ThreadPoolExecutor(workers) as pool:

        def one(index: int) -> tuple[str, int, str]:
            folder = Path(name) / str(index)
            folder.mkdir()
            source, begin, number = shares[index]
            return source, number, run_share(source, begin, number, folder)

        for source, number, said in pool.map(one, range(len(shares))):
            done[source] += number
            wrong += said.count("--- ")
            print(said, end="", flush=True)
            if sum(done.values()) % (50 * SHARE) < number:
                print(f"{sum(done.values())} recordings, {wrong} went wrong", flush=True)
    for source, number in done.items():
        print(f"{source:24}{number:9} recordings")
    print(f"{sum(done.values())} recordings in {time.monotonic() - begin:.0f} s, {wrong} went wrong")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="of all sources together")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--source", choices=SOURCES.names(), action="append")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args.source[0], args.first, args.count, args.work)
        return
    sys.exit(1 if run(args.source or list(SOURCES.names()), args.first, args.count, args.workers) else 0)


if __name__ == "__main__":
    main()
