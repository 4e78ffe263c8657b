"""List scripts of Unicode by their names in the package `regex`."""

# Scripts that put no spaces between words: each of their characters counts as a word
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
