"""Lists of whole numbers as commands take them: `0,2,4-6`."""

from __future__ import annotations

import re

from aura_ros.errors import UserError


def numbers(name: str, text: str, highest: int) -> list[int]:
    """The numbers that a text lists, in its order, each once; empty text gives none.

    Raises UserError naming `name` for anything else than numbers and ranges from 0 to `highest`.
    """
    found: dict[int, None] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not low <= high <= highest:
            raise UserError(
                f"{name} '{part}' is not allowed; give numbers or ranges from 0 to {highest}, as 0,2,4-6"
            )
        found.update(dict.fromkeys(range(low, high + 1)))
    return list(found)
