"""What tests of several experiments share."""

import gzip

import pytest


@pytest.fixture
def multi30k(tmp_path):
    """Files named as those of Multi30k; a word of the tests is in no training sentence."""
    words = {"en": ["A man", "walks", "sits", "runs"], "de": ["Ein Mann", "geht", "sitzt", "rennt"]}
    for part, last in (("train", ""), ("val", ""), ("test_2016_flickr", " heute")):
        for language, (who, *verbs) in words.items():
            lines = "".join(f"{who} {verb}{last}.\n" for verb in verbs for _ in range(3))
            (tmp_path / f"{part}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    return tmp_path
