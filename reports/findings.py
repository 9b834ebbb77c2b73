"""Findings about a command as lines: how bad, which rule, what is so, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ppdiag.reports.fitting import paragraph
from ppdiag.reports.words import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDEST = 110


class Finding(Protocol):
    """What is shown."""

    @property
    def severity(self) -> str: ...  # noqa: D102
    @property
    def rule(self) -> str: ...  # noqa: D102
    @property
    def words(self) -> str: ...  # noqa: D102
    @property
    def fix(self) -> str: ...  # noqa: D102


def render(findings: Sequence[Finding]) -> str:
    """The findings, one paragraph each."""
    return "\n".join(_paragraph(finding) for finding in findings)


def _paragraph(finding: Finding) -> str:
    fix = f". Try: {finding.fix}" if finding.fix else ""
    text = visible(f"{finding.rule}: {finding.words}{fix}.")
    return paragraph(text, WIDEST, first=f"{finding.severity:<9}", rest=" " * 9)
