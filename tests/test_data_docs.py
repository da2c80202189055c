"""docs/data.md: its snippets run."""

import bz2
import gzip
import os
import re
from pathlib import Path

import pytest

TEXT = Path(__file__).parents[1].joinpath("docs", "data.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.skipif("BILEVAX_DATA" not in os.environ, reason="BILEVAX_DATA is not set")
def test_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.bz2").write_bytes(bz2.compress(b"-1 3:1\n"))
    Path("ratings.csv.gz").write_bytes(gzip.compress(b"userId,movieId,rating,timestamp\n1,2,3.5,4\n"))
    Path("log.csv").write_text("who,page\na,b\na,b\na,c\n")
    names = {"users": [0] * 12, "items": range(12), "ratings": [1] * 12, "times": range(12), "user": 3}
    # The last one is about the network; the large shape takes too long here.
    assert len(SNIPPETS) == 4
    for snippet in SNIPPETS[:-1]:
        exec(snippet.replace('"like-ml-20m"', '"like-ml-1m"'), names)
    assert len(names["wrong"]) == len(names["train"])
    assert len(names["made"].table) == 40_000
    assert names["parts"].test.counts.tolist() == [5]
