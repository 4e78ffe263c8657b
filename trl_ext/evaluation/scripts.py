"""Find the script that a text is written in, such as Latin or Han."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import regex

from ..upstream.scripts import UNSPACED as UNSPACED

SCRIPTS = (
    "no letters",
    *("Latin", "Han", "Kana", "Hangul", "Cyrillic", "Arabic", "Devanagari", "Bengali", "Greek", "Hebrew", "Thai"),
    *("Tamil", "Telugu", "Georgian", "Armenian", "Ethiopic", "Khmer", "Lao", "Myanmar", "Tibetan"),
    "another",
)
CODES = 0x110000  # code points of Unicode


def main_scripts(texts: Sequence[str]) -> np.ndarray:
    """Return each text's most frequent script, (N,), as an index into `SCRIPTS`; 0 for a text without letters."""
    codes, owner = characters_of(texts)
    found = np.bincount(owner * len(SCRIPTS) + _table()[codes], minlength=len(texts) * len(SCRIPTS))
    counts = found.reshape(len(texts), len(SCRIPTS))
    counts[:, 0] = 0
    return counts.argmax(1)


def characters_of(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays: the code points of all texts, and for each code point the index of its text in `texts`."""
    joined = "".join(texts).encode("utf-32-le", "surrogatepass")
    return np.frombuffer(joined, np.uint32), np.repeat(np.arange(len(texts)), [*map(len, texts)])


@cache
def _table() -> np.ndarray:
    """
    Return the script of each Unicode code point, as an index into `SCRIPTS`.

    Each letter has a script. So has a mark, such as a vowel sign, of a script that `SCRIPTS` names. All others have 0.
    """
    table = np.zeros(CODES, np.int64)
    characters = "".join(map(chr, range(CODES)))
    table[[ord(letter) for letter in regex.findall(r"\p{L}", characters)]] = len(SCRIPTS) - 1
    for place, script in enumerate(SCRIPTS[1:-1], 1):
        names = r"\p{Hiragana}\p{Katakana}" if script == "Kana" else rf"\p{{{script}}}"
        letters = regex.findall(rf"[[{names}]&&[\p{{L}}\p{{M}}]]", characters, regex.V1)
        table[[ord(letter) for letter in letters]] = place
    return table
