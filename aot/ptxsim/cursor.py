"""A place in PTX text that moves on as it is read."""

from __future__ import annotations

import bisect
import re

from cubinery.aot.ptxsim.syntax import ParseError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s*")


class Cursor:
    """Text, and how far it has been read. `name` is what errors call it."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        # Comments become blanks of the same lines, so positions still count lines.
        self.text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n") or " ", text)
        self.ends = [m.start() for m in re.finditer("\n", self.text)]
        self.at = 0

    def _skip(self) -> bool:
        """Skip blanks; False at the end."""
        m = _SPACE.match(self.text, self.at)
        assert m is not None
        self.at = m.end()
        return self.at < len(self.text)

    def _match(self, pattern: str) -> re.Match[str] | None:
        return self._take(re.compile(pattern))

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        m = pattern.match(self.text, self.at)
        if m is not None:
            self.at = m.end()
        return m

    def _statement(self) -> str:
        """The text up to the next semicolon, which is consumed."""
        end = self.text.find(";", self.at)
        if end < 0:
            raise self._error("a statement does not end")
        statement = self.text[self.at : end].strip()
        self.at = end + 1
        return statement

    def _line(self, at: int) -> int:
        return bisect.bisect_left(self.ends, at) + 1

    def _excerpt(self) -> str:
        return self.text[self.at : self.at + 60].split("\n")[0]

    def _error(self, message: str, line: int = 0) -> ParseError:
        return ParseError(f"{self.name}:{line or self._line(self.at)}: {message}")

    def _skip_braces(self, what: str) -> None:
        """Skip to the end of braces of which the first has been read; `what` they hold."""
        depth = 1
        for m in re.compile(r"[{}]").finditer(self.text, self.at):
            depth += 1 if m[0] == "{" else -1
            if depth == 0:
                self.at = m.end()
                return
        raise self._error(f"{what} is not closed")
