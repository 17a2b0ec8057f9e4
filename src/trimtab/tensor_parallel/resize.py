"""How a rank leaves part of its units or columns out; the verbs (`set_resize`, `clear_resize`, `resized`,
`watch_resize`) are in `trimtab.runtime.resize`, because choosing is a plan's work.
"""

from __future__ import annotations
