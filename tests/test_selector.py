"""One selector says what may be adjusted."""

from __future__ import annotations

import pytest

from trimtab.errors import TrimtabError
from trimtab.selector import ALL, selected, selection_text


def test_words_and_lists() -> None:
    assert selected("auto") == ALL == {"bits", "shares", "precision"}
    assert selected("exact") == {"shares"}
    assert selected("none") == frozenset()
    assert selected("bits, shares") == selected(["shares", "bits"]) == {"bits", "shares"}
    assert selection_text(selected("precision,bits")) == "bits,precision"
    assert selection_text(selected("none")) == "none"


@pytest.mark.parametrize(
    ("adjust", "message"),
    [("bit", "no adjustment 'bit'"), ("bits,exact", "'exact' stands alone"), ("", "''")],
)
def test_what_is_not_there_is_named(adjust: str, message: str) -> None:
    with pytest.raises(TrimtabError, match=message):
        selected(adjust)
