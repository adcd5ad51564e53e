"""Reads the flags of a shell script, an argument list or a YAML list of arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Container, Iterator

from unisono.job_files.arithmetic import value_of
from unisono.job_files.shell_conditions import Branches

_ASSIGNMENT = re.compile(r"(?:export |local |readonly )?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_ARRAY = re.compile(r"\"?\$(?:\{\w+\[[@*]\](?:[^{}]*)\}|@)\"?")
"""References to arrays, whose flags are read where the array is set, and to all arguments."""
_SETTING = re.compile(r"-?\s*([\w.-]+)(?::\s+|\s+=\s+)(.*?),?(?:\s+#.*)?")
"""A line of YAML, or an assignment of Python."""
_ENDS = ("(", ")", ";", "|", "&", "&&", "||", ">", ">>", "2>&1", "then", "do", "else")
_NUMBER = re.compile(r"-?[\d.]")


class ScriptFlags:
    """The flags of a text, by name without dashes, with "_" for "-".

    Variables of the shell are replaced by their values. `values` has the text of each flag, or ""
    for a flag without a value. `unclear` says why the values of other flags are not known: they use
    a variable that the text does not set, or that depends on a condition.
    """

    def __init__(self, text: str, *, names: Container[str], short: Container[str]) -> None:
        """Reads a text. `names` are the names that count as flags without dashes too, as in
        `train.micro_batch_size=1` and `micro_batch_size: 1`, and `short` those with one dash.
        """
        self.values: dict[str, str] = {}
        self.unclear: dict[str, str] = {}
        self._names, self._short = names, short
        self._variables: dict[str, str] = {}
        self._doubtful: set[str] = set()
        branches = Branches()
        for line in _lines(text):
            whole = self._replaced(line)
            is_branch = branches.enter(whole)
            if branches.taken is not False and not is_branch:
                self._read_line(whole, conditional=branches.taken is None)

    def _read_line(self, line: str, *, conditional: bool) -> None:
        found = _SETTING.fullmatch(line)
        if found and (found[1].startswith("--") or _name(found[1]) in self._names):
            self._state(_name(found[1]), found[2].strip("'\""), conditional=conditional)
        else:
            self._read(_words(line), conditional=conditional)

    def _read(self, words: list[str], *, conditional: bool) -> None:
        place = 0
        while place < len(words):
            word = words[place].rstrip(",")
            place += 1
            assigned = _ASSIGNMENT.fullmatch(word)
            name = _name(word)
            if assigned and _name(assigned[1]) not in self._names:
                self._assign(*assigned.groups(), conditional=conditional)
                continue
            if not self._is_flag(word):
                continue
            name, _, value = re.sub(r":$", "", word).partition("=")
            following = []
            while place < len(words) and not value and self._is_value(words[place]):
                following.append(words[place].rstrip(","))
                place += 1
            self._state(_name(name), value or " ".join(following), conditional=conditional)

    def _is_flag(self, word: str) -> bool:
        if re.match(r"--[A-Za-z]|\+{0,2}[A-Za-z]\w*(\.\w+)+=", word):
            return True
        if re.match(r"-[A-Za-z]", word):
            return word[1:] in self._short
        return _name(re.split(r"[=:]", word)[0]) in self._names and bool(re.search(r"[=:]", word))

    def _is_value(self, word: str) -> bool:
        is_dashed = word.startswith("-") and not _NUMBER.match(word)
        return not (is_dashed or word in _ENDS or self._is_flag(word))

    def _assign(self, name: str, more: str, value: str, *, conditional: bool) -> None:
        old = self._variables.get(name)
        if more:
            value = f"{old or ''}{value}"
        elif conditional and old not in (None, value):
            self._doubtful.add(name)
        self._variables[name] = value
        if "--" in value:
            self._read(value.split(), conditional=conditional)

    def _state(self, name: str, value: str, *, conditional: bool) -> None:
        old = self.values.get(name)
        left = _REFERENCE.search(value)
        if left or "$" in value:
            variable = left[1] or left[3] if left else ""
            why = "depends on a condition" if variable in self._doubtful else "is not set"
            self.unclear[name] = f"{value} {why} in the file"
        elif conditional and old is None:
            self.unclear[name] = "depends on a condition in the file"
        elif old not in (None, value):
            self.unclear[name] = f"has the values {old} and {value}"
        self.values[name] = value

    def _replaced(self, line: str) -> str:
        """Returns the line with the values of the variables that are known."""

        def known(found: re.Match[str]) -> str:
            name = found[1] or found[3]
            if name in self._variables and name not in self._doubtful:
                # Flags were read where the variable was set.
                return "" if "--" in self._variables[name] else self._variables[name]
            return found[0] if found[2] is None else found[2]

        def computed(found: re.Match[str]) -> str:
            # In arithmetic, variables need no "$".
            text = re.sub(r"[A-Za-z_]\w*", lambda name: known_name(name[0]), found[1])
            return value_of(text) or found[0]

        def known_name(name: str) -> str:
            return name if name in self._doubtful else self._variables.get(name, name)

        for _ in range(4):  # a value may name other variables
            line = _REFERENCE.sub(known, line)
        return _ARITHMETIC.sub(computed, line)


def _name(word: str) -> str:
    """Returns a flag's name without dashes and without the object that holds it.

    >>> _name("--num-layers"), _name("model.context_parallel_size=2")
    ('num_layers', 'context_parallel_size')
    """
    bare = re.split(r"[=:]", word.lstrip("-+"))[0].replace("-", "_")
    return bare.rsplit(".", 1)[-1]


def _lines(text: str) -> Iterator[str]:
    """Yields the lines, with continued lines as one, and the flags of a batch system's comments."""
    text = re.sub(r"^\s*#(?:SBATCH|PBS)\s+", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    for line in _ARRAY.sub(" ", text.replace("\\\n", " ")).splitlines():
        yield line.strip()


def _words(line: str) -> list[str]:
    try:
        reader = shlex.shlex(line, posix=True, punctuation_chars="();|&")
        reader.whitespace_split, reader.commenters = True, "#"
        words = list(reader)
        # A word in quotation marks may be a flag with its value.
        return [part for each in words for part in (each.split() if each[:2] == "--" else [each])]
    except ValueError:  # a quotation over several lines
        return line.split()
