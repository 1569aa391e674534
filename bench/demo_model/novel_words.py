"""New words made of syllables, of letters, or of pieces of real words.

The model can only copy them letter by letter. Words that begin like a real word and continue differently teach it not
to complete a real word from memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random

# Syllables: a beginning, a vowel and an end.
_STARTS = """
b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kn l m n p ph pl pr qu r s sc sh sk sl sm sn sp st str sw t th tr
tw v w wh y z b c d f g h l m n p r s t
"""
_VOWELS = "a e i o u a e i o a e ai ea ee ie oa oo ou au y ia io"
_STOPS = "n r l s t d m k p th ck ng nd nt rt st ll ss x lm ph g b tch rd rn ls"
_SOUNDS = tuple(tuple(sounds.split()) for sounds in (_STARTS, _VOWELS, _STOPS))
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ACCENTED = "áàâäãåāçčéèêëęíìîïıñńóòôöõøőúùûüůýžšßłđæœ"
_SCRIPTS = (
    "абвгдежзийклмнопрстуфхцчшщыэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "あいうえおかきくけこさしすせそたちつてとなにぬねの",
    "的一是不了人我在有他这中大来上国个到说们为子",
    "가나다라마바사아자차카타파하",
)


def syllables(rng: Random) -> str:
    """One to three syllables."""
    starts, vowels, stops = _SOUNDS
    word = ""
    for _ in range(rng.choice((1, 2, 2, 2, 3))):
        word += (rng.choice(starts) if rng.random() < 0.8 else "") + rng.choice(vowels)
        word += rng.choice(stops) if rng.random() < 0.5 else ""
    return word


def letters(rng: Random) -> str:
    """Any two to eight letters."""
    return "".join(rng.choices(_LETTERS, k=rng.randint(2, 8)))


def foreign(rng: Random) -> str:
    """A word with accents, or of another script."""
    if rng.random() < 0.3:
        return "".join(rng.choices(rng.choice(_SCRIPTS), k=rng.randint(2, 5)))
    word = list(syllables(rng))
    for _ in range(rng.choice((1, 1, 2))):
        word[rng.randrange(len(word))] = rng.choice(_ACCENTED)
    return "".join(word)


class WordMaker:
    """Makes words that resemble real ones: the same order of letters, the same half, or all letters but one."""

    def __init__(self, real: Sequence[str]) -> None:
        """`real` are lower-case words."""
        self._real = tuple(real)
        followers: defaultdict[str, list[str]] = defaultdict(list)
        for word in self._real:
            padded = f"^^{word}$"
            for i in range(2, len(padded)):
                followers[padded[i - 2 : i]].append(padded[i])
        self._followers = dict(followers)
        self._makers: tuple[Callable[[Random], str], ...] = (
            *(syllables, syllables, syllables, syllables, syllables, syllables, letters, letters, letters),
            *(self._like_real, self._like_real, self._like_real, self._like_real, self._like_real),
            *(self._halves, self._halves, self._halves, self._altered, self._altered),
        )

    def make(self, rng: Random) -> str:
        """A word in lower case, of ASCII letters."""
        return rng.choice(self._makers)(rng)

    def _like_real(self, rng: Random) -> str:
        word, last = "", "^^"
        while len(word) < 12:
            letter = rng.choice(self._followers[last])
            if letter == "$":
                if len(word) > 2:
                    break
                word, last = "", "^^"  # too short: another one
                continue
            word, last = word + letter, last[1] + letter
        return word

    def _halves(self, rng: Random) -> str:
        first, second = rng.choices(self._real, k=2)
        return first[: rng.randint(1, max(1, len(first) - 1))] + second[-rng.randint(1, max(1, len(second) - 1)) :]

    def _altered(self, rng: Random) -> str:
        word = rng.choice(self._real)
        i = rng.randrange(len(word))
        return rng.choice(
            (
                word[:i] + rng.choice(_LETTERS) + word[i + 1 :],
                word[:i] + rng.choice(_LETTERS) + word[i:],
                word[:i] + word[i] + word[i:],
                (word[:i] + word[i + 1 :]) or word,
                word[: i + 1] + word[max(0, i - 1) : i] + word[i + 1 :],
            )
        )
