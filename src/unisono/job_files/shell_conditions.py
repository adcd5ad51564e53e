"""The conditions of shell scripts whose values are known, and the branches that they take."""

from __future__ import annotations

import operator
import re

_TEST = re.compile(r"\[\[?\s+(.*?)\s+\]\]?")
_OF_TEXTS = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_OF_NUMBERS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def condition_of(text: str) -> bool | None:
    """Returns the value of a condition whose variables are replaced; None if it is not known.

    >>> condition_of('[[ "fp8" == "fp8" ]] && [ 8 -gt 4 ]'), condition_of('[ -z "$A" ]')
    (True, None)
    """
    for separator, sure in (("||", True), ("&&", False)):
        parts = text.split(separator)
        if len(parts) > 1:
            values = [condition_of(part) for part in parts]
            if sure in values:
                return sure
            return None if None in values else not sure
    found = _TEST.fullmatch(text.strip())
    if not found or "$" in text:
        return None
    words = [word.strip("\"'") for word in found[1].split()]
    try:
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") == (words[0] == "-z")
        if len(words) == 3 and words[1] in _OF_TEXTS:
            return bool(_OF_TEXTS[words[1]](words[0], words[2]))
        if len(words) == 3 and words[1] in _OF_NUMBERS:
            return bool(_OF_NUMBERS[words[1]](int(words[0]), int(words[2])))
    except ValueError:
        return None
    return None


class Branches:
    """The branches of a script that contain the current line."""

    def __init__(self) -> None:
        self._open: list[tuple[bool | None, bool]] = []
        """For each open statement, if its current branch is taken, and if an earlier one was."""

    def enter(self, line: str) -> bool:
        """Reads a line, with variables replaced. Returns True if it begins or ends a branch."""
        word = re.match(r"\w*", line)
        name = word[0] if word else ""
        condition = re.split(r";\s*(?:then|do)\b|;$", line[len(name) :])[0].strip()
        if name == "if":
            value = condition_of(condition)
            self._open.append((value, value is True))
        elif name in ("for", "while", "until", "case"):
            self._open.append((None, False))
        elif name in ("elif", "else") and self._open:
            value, done = self._open[-1]
            now = condition_of(condition) if name == "elif" else True
            if done:
                now = False
            elif value is None or now is None:
                now = None
            self._open[-1] = (now, done or now is True)
        elif name in ("fi", "done", "esac") and self._open:
            self._open.pop()
        else:
            return False
        if re.search(r"(;|\s)(fi|done|esac)$", line) and self._open:
            self._open.pop()
        return True

    @property
    def taken(self) -> bool | None:
        """True if the current line runs, False if not, None if that is not known."""
        values = [value for value, _ in self._open]
        return False if False in values else None if None in values else True
