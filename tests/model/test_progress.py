import io
import logging

import pytest
from tqdm.asyncio import tqdm_asyncio

from server.model.progress import Progress, download_bar, part, weights_counted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_a_bar_for_each_thing() -> None:
    stream = Terminal()
    told: list[tuple[str, float]] = []
    with Progress(lambda doing, fraction: told.append((doing, fraction)), stream) as progress:
        progress("converting", 0.25)
        progress("converting", 1.7)
        progress("loading", -1.0)
    assert told == [("converting", 0.25), ("converting", 1.0), ("loading", 0.0)]
    shown = stream.getvalue()
    assert "converting  25% |" in shown
    assert "converting 100% |" in shown
    assert "loading   0% |" in shown
    assert shown.endswith("\n")


def test_no_terminal_gets_one_line_for_each_thing(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "server.model.progress"), Progress(lambda *told: None, stream) as progress:
        for fraction in (0.0, 0.5, 1.0):
            progress("converting", fraction)
        progress("loading", 0.0)
    assert caplog.messages == ["converting", "loading"]
    assert stream.getvalue() == ""


def test_part_of_a_whole() -> None:
    told: list[tuple[str, float]] = []
    tick = part(lambda doing, fraction: told.append((doing, fraction)), "x", 0.2, 0.6)
    for fraction in (0.0, 0.5, 1.0):
        tick(fraction)
    assert [fraction for _, fraction in told] == pytest.approx([0.2, 0.4, 0.6])


def test_transformers_bars_are_given_back() -> None:
    from transformers.utils import logging as hf_logging

    ticks: list[float] = []
    with weights_counted(ticks.append):
        assert list(hf_logging.tqdm(["a", "b", "c", "d"], desc="Loading weights")) == ["a", "b", "c", "d"]
        assert list(hf_logging.tqdm(["e"], desc="Something else", disable=True)) == ["e"]
    assert ticks == [0.25, 0.5, 0.75, 1.0]
    assert list(hf_logging.tqdm(["f"], desc="Loading weights", disable=True)) == ["f"]
    assert ticks == [0.25, 0.5, 0.75, 1.0]


def test_download_counts_bytes_of_a_growing_total_and_draws_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    ticks: list[float] = []
    bar_class = download_bar(ticks.append)
    assert issubclass(bar_class, tqdm_asyncio)
    files, bytes_ = bar_class(total=3, desc="files"), bar_class(total=0, unit="B", desc="bytes")
    files.update(1)
    bytes_.total = 200
    bytes_.update(50)
    bytes_.total = 400
    bytes_.update(50)  # less of the new total than before: progress never goes back
    bytes_.update(300)
    bytes_.close()
    assert ticks == [0.25, 0.25, 1.0]
    assert capsys.readouterr() == ("", "")
