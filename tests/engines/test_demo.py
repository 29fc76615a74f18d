"""What the demo says of its runs; the runs themselves take a minute and a model (`kvd demo`)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvd.demo import main, model
from kvd.demo.engine import Result

if TYPE_CHECKING:
    import pytest

COLD = Result(
    connected=True,
    prompt_tokens=2060,
    first_token_ms=4000.0,
    total_ms=5000.0,
    tokens_reused=0,
    bytes_reused=0,
    load_ms=1.0,
    load_gb_s=0.0,
    memcpy_gb_s=0.0,
    tokens_stored=2048,
    bytes_stored=94_371_840,
    store_ms=30.0,
    new_tokens=[1, 2, 3],
    text="In October 1871.",
    note="",
)
WARM = COLD._replace(
    first_token_ms=100.0, tokens_reused=2048, bytes_reused=94_371_840, bytes_stored=0
)
WITHOUT = COLD._replace(first_token_ms=3000.0, tokens_stored=0, bytes_stored=0)


def test_a_good_run_is_told_with_its_figures() -> None:
    """The page has the speed-up over the faster computing run, and the answer once."""
    report = main.Report(COLD, WARM, WITHOUT, "kvd 0.1.0")
    assert report.failures == []
    page = main._page(report)
    assert "30.0 times sooner" in page
    assert page.count("In October 1871.") == 1
    assert "FAILED" not in page


def test_each_failure_is_named() -> None:
    """Nothing stored, nothing reused and another answer each fail the demo, in words."""
    cases = {
        "engine A stored nothing: full": (COLD._replace(tokens_stored=0, note="full"), WARM),
        "engine B reused nothing": (COLD, WARM._replace(tokens_reused=0)),
        "the answers differ": (COLD, WARM._replace(new_tokens=[1, 2, 4], text="Never.")),
    }
    for words, (cold, warm) in cases.items():
        report = main.Report(cold, warm, WITHOUT, "")
        assert len(report.failures) == 1
        assert report.failures[0].startswith(words)
        assert f"FAILED: {report.failures[0]}" in main._page(report)


def test_a_missing_model_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the model's package the demo ends with 2 and says what to run."""
    monkeypatch.setattr(model, "NEEDED", ("kvd_no_such_package",))
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    assert main.run(parser.parse_args([])) == 2
    assert "kvd_no_such_package, not installed here: run `make setup`" in capsys.readouterr().err
