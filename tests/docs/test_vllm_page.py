"""docs/vllm.md names what there is: each option and each counter, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from kvd_client.vllm import options, stats

PAGE = (Path(__file__).resolve().parents[2] / "docs/vllm.md").read_text(encoding="utf-8")


def test_every_option_is_on_the_page() -> None:
    """The table of kv_connector_extra_config is that of the code."""
    table = PAGE.split("in `kv_connector_extra_config`", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(options.Options._fields)
    assert set(options._RULES) == set(options.Options._fields)


def test_every_counter_is_on_the_page() -> None:
    """The table of counters is that of the code."""
    assert set(re.findall(r"^\| `vllm:kvd_(\w+)` \|", PAGE, re.MULTILINE)) == set(stats.NAMES)
