"""Reads an answer in LaTeX without its fonts. Called by the reward `math` and for maj@k."""

from __future__ import annotations

import re

_FONTS = (
    "text textbf textit textrm textsf texttt textnormal textsc textup textsl textmd"
    " mathbf mathrm mathit mathsf mathtt mathnormal mathcal mathbb mathfrak mathscr bold bm boldsymbol pmb"
    " mbox hbox emph underline operatorname ensuremath bf rm it sf tt"
)
_OPTIONS, _COLOR, _INSIDE = r"\s*(?:\[[^][]*\])*\s*", r"\{[^{}]*\}\s*", r"[^{}]"
for _ in range(3):  # braces within braces
    _INSIDE = rf"(?:[^{{}}]|\{{{_INSIDE}*\}})"
_FONT = re.compile(
    rf"\\(?:(?:{_FONTS.replace(' ', '|')})\s*|(?:textcolor|colorbox|color){_OPTIONS}{_COLOR}|fcolorbox{_OPTIONS}(?:{_COLOR}){{2}})"
    rf"\{{({_INSIDE}*)\}}"
)
_SWITCH = re.compile(rf"\\color{_OPTIONS}{_COLOR}")
_SIZE = re.compile(
    r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])\s*"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SPACE = re.compile(r"\\[,;:! ]|[{}]")
_WORD = re.compile(r"[A-Za-z]{2}")
_UNIT = re.compile(r"\s*([-−+$\\]*\d[\d.,/]*(?<![.,/]))([^\d]*[A-Za-z][^\d]*)")  # 42 apples
_FRAME = re.compile(rf"\\(?:boxed|fbox|framebox){_OPTIONS}(?=\{{)")


def without_fonts(text: str) -> str:
    """Return LaTeX with numbers taken out of font commands, and boxes of text mode as \\boxed.

    Example: \\fbox{\\mathbf{42}} is \\boxed{42}, and \\text{42 cm} is 42\\text{ cm}. Words stay:
    \\text{ cm}, \\text{(A)}.
    """
    text, before = _FRAME.sub(r"\\boxed", _SIZE.sub(" ", text)), ""
    text = re.sub(r"~(?!=)", " ", text.replace("°", r"^\circ"))
    while text != before:  # fonts within fonts
        text, before = _FONT.sub(_content, text), text
    return _SWITCH.sub("", text)


def _content(font: re.Match[str]) -> str:
    plain = _COMMAND.sub("", font[1])
    if any(c.isdigit() for c in plain) and not _WORD.search(plain):
        return font[1]
    with_unit = _UNIT.fullmatch(_SPACE.sub(" ", plain))
    return rf"{with_unit[1]}\text{{{with_unit[2]}}}" if with_unit else font[0]
