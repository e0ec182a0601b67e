"""Reads an answer in LaTeX without its fonts. Called by the reward `math` and for maj@k."""

from __future__ import annotations

import re

_FONTS = (
    "text textbf textit textrm textsf texttt textnormal textsc textup textsl textmd"
    " mathbf mathrm mathit mathsf mathtt mathnormal mathcal mathbb mathfrak mathscr bold bm boldsymbol pmb"
    " mbox hbox emph underline operatorname ensuremath bf rm it sf tt tiny small large Large huge Huge"
)
_OPTIONS, _COLOR, _INSIDE = r"\s*(?:\[[^][]*\])*\s*", r"\{[^{}]*\}\s*", r"[^{}]"
for _ in range(3):  # braces within braces
    _INSIDE = rf"(?:[^{{}}]|\{{{_INSIDE}*\}})"
_FONT = re.compile(
    rf"\\(?:(?:{_FONTS.replace(' ', '|')})\s*|(?:textcolor|colorbox|color){_OPTIONS}{_COLOR}|fcolorbox{_OPTIONS}(?:{_COLOR}){{2}})"
    rf"\{{({_INSIDE}*)\}}"
)
_SWITCH = re.compile(rf"\\color{_OPTIONS}{_COLOR}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2}")
_FRAME = re.compile(rf"\\(?:fbox|framebox){_OPTIONS}(?=\{{)")


def without_fonts(text: str) -> str:
    """Return LaTeX with numbers taken out of font commands, and boxes of text mode as \\boxed.

    Example: \\fbox{\\mathbf{42}} is \\boxed{42}. Words stay: \\text{ cm}, \\text{(A)}.
    """
    text, before = _FRAME.sub(r"\\boxed", text), ""
    while text != before:  # fonts within fonts
        text, before = _FONT.sub(_content, text), text
    return _SWITCH.sub("", text)


def _content(font: re.Match[str]) -> str:
    plain = _COMMAND.sub("", font[1])
    is_number = any(c.isdigit() for c in plain) and not _WORD.search(plain)
    return font[1] if is_number else font[0]
