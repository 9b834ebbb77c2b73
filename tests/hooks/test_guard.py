from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.hooks import guard

if TYPE_CHECKING:
    import pytest


def test_a_probe_that_fails_is_switched_off_and_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    switched_off = []
    guard.register("probe", lambda: switched_off.append("probe"))
    for _ in range(3):
        guard.failed("probe", ValueError("of ours"))
    assert switched_off == ["probe"]
    assert capsys.readouterr().err.splitlines() == [
        "ppdiag: probe: ValueError: of ours; this part of the recording is off, the job goes on"
    ]


def test_a_listener_hears_of_the_faults_before_it_too() -> None:
    heard: list[tuple[str, str]] = []
    guard.failed("early", ValueError("one"))
    guard.listen(lambda probe, error: heard.append((probe, error)))
    guard.failed("late", ValueError("two"))
    assert heard == [("early", "ValueError: one"), ("late", "ValueError: two")]


def test_nothing_escapes_even_if_switching_off_fails_and_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    guard.register("probe", lambda: 1 // 0)  # type: ignore[arg-type]
    guard.listen(lambda *_: 1 // 0)  # type: ignore[arg-type]
    guard.failed("probe", ValueError("of ours"))
