from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ppdiag.reports import html
from tests.reports.factory import (
    HOSTILE,
    make_diagnosis,
    make_huge,
    make_late_host,
    make_single,
    make_slow_link,
    make_undecided,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ppdiag.diagnosis import Diagnosis
    from tests.reports.chromium import Chromium, Page

FORWARD, BACKWARD, LATE_SENDER, BUBBLE = (0, 114, 178), (0, 158, 115), (247, 223, 178), (201, 208, 217)
COLOURS = """(() => {
  const canvas = document.getElementById("timeline"), counts = {};
  const part = (from, to) => canvas.getContext("2d").getImageData(0, from, canvas.width, to - from).data;
  const half = Math.round((canvas.height - 26) / 2);
  return [part(0, half), part(half, canvas.height)].map((data) => {
    const counts = {};
    for (let i = 0; i < data.length; i += 4) {
      const key = `${data[i]},${data[i + 1]},${data[i + 2]}`;
      counts[key] = (counts[key] || 0) + 1;
    }
    return counts;
  });
})()"""


def opened(browser: Chromium, path: Path, diagnosis: Diagnosis, **kwargs: Any) -> Page:
    html.write(diagnosis, path / "report.html")
    return browser.open(path / "report.html", **kwargs)


def key(colour: tuple[int, int, int]) -> str:
    return ",".join(map(str, colour))


@pytest.mark.parametrize("make", [make_diagnosis, make_late_host, make_single, make_slow_link, make_undecided])
def test_every_page_loads_alone_and_without_complaint(
    browser: Chromium, tmp_path: Path, make: Callable[[], Diagnosis]
) -> None:
    page = opened(browser, tmp_path, make())
    assert page.complaints() == []
    assert page.requested() == [(tmp_path / "report.html").as_uri()]
    assert page.evaluate("document.querySelectorAll('img').length") == page.evaluate(
        "[...document.querySelectorAll('img')].filter((i) => i.naturalWidth > 0).length"
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_timeline_is_drawn_as_measured_above_and_with_equal_work_below(browser: Chromium, tmp_path: Path) -> None:
    above, below = opened(browser, tmp_path, make_diagnosis()).evaluate(COLOURS)
    # Per rank: F 80 ms (one 160), B 160 ms (one 320) of 568 ms; a late sender is the largest idle part.
    assert above[key(BACKWARD)] / above[key(FORWARD)] == pytest.approx(2, rel=0.1)
    assert above[key(LATE_SENDER)] > above[key(FORWARD)]
    assert key(BUBBLE) not in above
    # Equal work: 8 x 37.5 ms of (8 + 3) x 37.5 ms are work, so 3/11 are bubble.
    work = below[key(BACKWARD)] + below[key(FORWARD)]
    assert below[key(BUBBLE)] / (work + below[key(BUBBLE)]) == pytest.approx(3 / 11, rel=0.15)
    assert key(LATE_SENDER) not in below


def test_nothing_that_the_record_says_runs_in_the_page(browser: Chromium, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, make_diagnosis(text=HOSTILE))
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.evaluate("[...document.images].every((image) => image.src.startsWith('data:image/svg+xml;base64,'))")
    assert page.evaluate("document.scripts.length") == 3
    assert page.evaluate("document.documentElement.dataset.timeline") == "drawn"
    assert page.complaints() == []
    shown = page.evaluate("document.body.innerText")
    assert (
        '</script><img src=x onerror="window.hacked=1">{{7*7}}[red]\\x1b[31mred\\x07\\u202e\\n</style>\'"`${1}' in shown
    )
    assert "\u202e" not in page.evaluate("document.documentElement.outerHTML")


def test_a_hostile_host_is_only_text_where_the_pointer_shows_it(browser: Chromium, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, make_diagnosis(text=HOSTILE))
    point_at_timeline(page, 0.03, 0.12)
    assert page.evaluate("document.getElementById('tip').querySelectorAll('*').length") == 3
    lines = page.evaluate("[...document.getElementById('tip').children].map((line) => line.textContent)")
    assert lines[0] == "F, forward, microbatch 1, stage 0"
    assert lines[1].startswith("10.0 ms, from 10.0 ms to 20.0 ms")
    assert lines[2].startswith('rank 0 on </script><img src=x onerror="window.hacked=1">')
    assert page.evaluate("typeof window.hacked") == "undefined"


def point_at_timeline(page: Page, time: float, height: float) -> None:
    """Point at a share of the step's time and of the canvas' height."""
    page.evaluate("document.getElementById('timeline').scrollIntoView({ block: 'center' })")
    box = page.evaluate(
        "(({ left, top, width, height }) => ({ left, top, width, height }))"
        "(document.getElementById('timeline').getBoundingClientRect())"
    )
    left = 96  # px of row labels
    page.point_at(box["left"] + left + time * (box["width"] - left), box["top"] + height * box["height"])


def test_the_timeline_works_from_the_keyboard(browser: Chromium, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, make_diagnosis())
    page.evaluate("document.getElementById('timeline').focus()")
    picture = "document.getElementById('timeline').toDataURL()"
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
    pictures = [page.evaluate(picture)]
    for pressed in ("+", "ArrowRight", "PageUp", "ArrowDown", "0"):
        page.press(pressed)
        page.evaluate(frame)
        pictures.append(page.evaluate(picture))
    assert len(set(pictures[:5])) == 5
    assert pictures[5] == pictures[0]


def test_a_dark_page_has_dark_ground_and_its_own_charts(browser: Chromium, tmp_path: Path) -> None:
    light, dark = opened(browser, tmp_path, make_diagnosis()), opened(browser, tmp_path, make_diagnosis(), dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    assert (light.evaluate(ground), dark.evaluate(ground)) == ("rgb(245, 246, 248)", "rgb(18, 22, 28)")
    charts = "[...document.images].filter((image) => image.offsetWidth).map((image) => image.className)"
    assert (light.evaluate(charts), dark.evaluate(charts)) == (["on-light"] * 2, ["on-dark"] * 2)
    assert key(FORWARD) not in dark.evaluate(COLOURS)[0]


def test_a_narrow_page_scrolls_its_tables_and_not_itself(browser: Chromium, tmp_path: Path) -> None:
    page = opened(browser, tmp_path, make_diagnosis(text=HOSTILE))
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=False)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_a_million_intervals_stay_within_size_and_time(browser: Chromium, tmp_path: Path) -> None:
    diagnosis = make_huge()
    assert diagnosis.timeline is not None
    assert sum(map(len, (diagnosis.timeline.measured, diagnosis.timeline.idle, diagnosis.timeline.equal_work))) > 1e6
    html.write(diagnosis, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size <= 6_000_000
    # The best of three: the machine's other work is not what is measured.
    times_ms = [first_paint_and_drawing_ms(browser, tmp_path / "report.html") for _ in range(3)]
    print(f"first paint {min(t[0] for t in times_ms):.0f} ms, drawn {min(t[1] for t in times_ms):.0f} ms")
    assert min(drawn_ms for _, drawn_ms in times_ms) <= 1000


def first_paint_and_drawing_ms(browser: Chromium, path: Path) -> tuple[float, float]:
    page = browser.open(path)
    page.wait_for("performance.getEntriesByName('first-contentful-paint').length")
    start = "performance.getEntriesByName('{}')[0].startTime"
    return page.evaluate(start.format("first-contentful-paint")), page.evaluate(start.format("timeline drawn"))


def test_a_failed_write_leaves_the_old_page_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> None:
        raise OSError("no space left on device")

    path = tmp_path / "report.html"
    path.write_text("old")
    monkeypatch.setattr("pathlib.Path.replace", no_space)
    with pytest.raises(OSError, match="no space left"):
        html.write(make_single(), path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_page_without_a_timeline_says_so_and_has_no_script() -> None:
    text = html.page(make_single())
    assert "This diagnosis holds no timeline." in text
    assert "<script" not in text
