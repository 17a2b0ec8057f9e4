"""What `trimtab.compress` refuses before it asks other ranks."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.codec import Block
from trimtab.control.compression.agreement import agree_to_compress
from trimtab.errors import TrimtabError


@pytest.mark.parametrize(
    ("codec", "overrides", "words"),
    [
        (4, None, "4 is not a codec; give"),
        (Block, None, "is not a codec"),
        (None, {"head.*": 4}, r"overrides\['head\.\*'\] is 4; give a codec such as"),
        (None, ["head.*"], "overrides: expected codecs by pattern of parameter names, got list"),
    ],
)
def test_what_is_no_codec_is_named(codec: Any, overrides: Any, words: str) -> None:
    with pytest.raises(TrimtabError, match=words):
        agree_to_compress(None, codec, overrides, log=None, check=lambda: None)
