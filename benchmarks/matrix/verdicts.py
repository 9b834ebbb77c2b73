"""Verdicts on planted faults: real jobs, recorded and analysed, and how many verdicts are right.

    python -m benchmarks.matrix.verdicts [--seed 1] [--only WORDS] [--sample N] [--again | --rescore]

Jobs whose record is in the folder are not run again, so that a run may be interrupted; ``--again`` runs all, and
``--rescore`` none: it judges the records after a change of the analysis. About 30 minutes on two idle cores.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.matrix.cases import Answer, Case, cases
from benchmarks.matrix.jobs import Forge, JobFailed, can_shape_links, forge_of, options, recorded
from ppdiag.analyzers.diagnose import diagnose
from ppdiag.analyzers.sources.run_directory import RunDirectory

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ppdiag.diagnosis import Diagnosis

RIGHT, INCOMPLETE, UNDECIDED, UNSURE, WRONG = "right", "incomplete", "undecided", "wrong, unsure", "wrong, confident"
SCORES = (RIGHT, INCOMPLETE, UNDECIDED, UNSURE, WRONG)
LEAST_RIGHT, MOST_WRONG = 0.95, 0.01


def place_of(found: Diagnosis) -> tuple[int | None, int | None, frozenset[int] | None]:
    """Stage, rank and link (its two ranks: stages go round) of the verdict."""
    verdict = found.verdict
    link = None if verdict.link is None else frozenset(stage % found.job.pp for stage in verdict.link)
    return verdict.stage, verdict.rank, link


def is_complete(found: Diagnosis, right: Answer) -> bool:
    """Whether a verdict of the right cause and place also names what belongs to the answer besides."""
    split = asdict(found.imbalance)
    part = right.part is None or right.part == max(split, key=lambda name: split[name])
    return part and (right.symptom is None or right.symptom in {symptom.id for symptom in found.symptoms})


def score(found: Diagnosis, right: Sequence[Answer]) -> str:
    """One of ``SCORES``. Incomplete is a right cause without all that was planted, and without a wrong place."""
    verdict, place = found.verdict, place_of(found)
    if verdict.confidence == "undecided":
        return UNDECIDED
    same = [answer for answer in right if answer.cause == verdict.cause]
    there = [answer for answer in same if place == (answer.stage, answer.rank, answer.link)]
    if any(is_complete(found, answer) for answer in there):
        return RIGHT
    if there or (same and place == (None, None, None)):
        return INCOMPLETE
    return WRONG if verdict.confidence == "measured" else UNSURE


def results(chosen: Iterable[Case], folder: Path, forge: Forge | None) -> Iterator[tuple[Case, str, Diagnosis]]:
    """Runs, analyses and scores the cases, one by one."""
    for case in chosen:
        try:
            run_dir = recorded(case.job, folder / case.name, forge)
        except JobFailed as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            continue
        if run_dir is not None:
            found = diagnose(RunDirectory().read([run_dir], None))
            yield case, score(found, case.right), found


def show(case: Case, scored: str, found: Diagnosis) -> None:
    print(f"{scored:<16} {case.name:<42} planted: {case.planted}; found: {found.verdict.text}", flush=True)


def table(scores: dict[Case, str]) -> str:
    """Right of all, fault x schedule, and the counts of each score."""
    schedules = list(dict.fromkeys(case.schedule for case in scores))
    lines = ["".join([f"{'right of all':<22}", *(f"{name:>17}" for name in schedules)])]
    for fault in dict.fromkeys(case.fault for case in scores):
        cells = []
        for schedule in schedules:
            own = [scored for case, scored in scores.items() if (case.fault, case.schedule) == (fault, schedule)]
            cells.append(f"{own.count(RIGHT)} of {len(own)}" if own else "-")
        lines.append("".join([f"{fault:<22}", *(f"{cell:>17}" for cell in cells)]))
    count = Counter(scores.values())
    total = len(scores)
    lines += ["", *(f"{name:<18}{count[name]:>5}  {count[name] / max(1, total):7.1%}" for name in SCORES)]
    return "\n".join([*lines, f"{'all':<18}{total:>5}"])


def choose(args: argparse.Namespace) -> list[Case]:
    chosen = [case for case in cases(args.seed) if args.only in case.name]
    if not can_shape_links() and any(case.job.links for case in chosen):
        print("no slow links here: making network namespaces needs root and /dev/net/tun", file=sys.stderr)
        chosen = [case for case in chosen if not case.job.links]
    return random.Random(args.seed).sample(chosen, args.sample) if args.sample else chosen


def main() -> int:
    parser = options(__doc__, "fault-matrix")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--sample", type=int, default=0, help="so many of them, at random")
    args = parser.parse_args()
    scores: dict[Case, str] = {}
    for case, scored, found in results(choose(args), args.folder, forge_of(args)):
        scores[case] = scored
        show(case, scored, found)
    print(f"\n{table(scores)}")
    count = Counter(scores.values())
    good = count[RIGHT] >= LEAST_RIGHT * len(scores) and count[WRONG] <= MOST_WRONG * len(scores)
    return 0 if good and scores else 1


if __name__ == "__main__":
    sys.exit(main())
