"""Prompts of a wanted length out of common words, and how many tokens a word is for the server at hand."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

# Common English words that usual BPE vocabularies hold whole, with their leading space: about one token each.
WORDS: Final = tuple(
    """
    about above across act add after again air all along also always animal answer any area around ask away back base be because bed
    before began best better between big bird black blue boat body book both box boy bring brother brown build busy call came can car care
    carry cat cause change check child city class clean clear close cloud cold color come common company complete contain cook corner
    cost could count country course cover cross cry cut dark day decide deep develop did direct do dog door down draw drive drop dry early
    earth east easy eat end engine enough even ever every example eye face fact fall family far farm fast father feel feet few field
    figure fill final find fine fire first fish five fly follow food foot force form found four free friend from front full game gave
    general get girl give go gold good great green ground group grow had half hand happy hard has have he head hear heart heat heavy help
    her here high hill him his hold home horse hot hour house how hundred idea if inch interest into island it just keep kind king knew
    know land language large last late laugh law lead learn leave left less let letter life light like line list listen little live long
    look lot love low machine made main make man many map mark may mean measure men might mile mind minute miss money moon more morning
    most mother mountain mouth move much music must my name near need never new next night no north note nothing notice now number object
    ocean of off often oil old on once one only open or order other our out over own page paper part pass pattern people person picture
    piece place plain plan plane plant play point poor port pose power press problem produce product pull put question quick rain ran
    reach read ready real record red remember rest right river road rock room round rule run said same saw say school science sea second
    see seem self sentence serve set several shape she ship short should show side simple since sing sit six size sleep slow small snow
    so some song soon sound south space special spell stand star start state stay step still stood stop story street strong study such
    sun sure surface system table take talk teach tell ten test than that the their them then there these they thing think this those
    thought thousand three through time to together told too took top toward town travel tree true try turn two under unit until up use
    usual very voice vowel wait walk want war warm was watch water way we week weight well went were west what wheel when where which
    while white who whole why wide will wind with wonder wood word work world would write year yes yet you young your
    """.split()
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tokens of a prompt of n words: `fixed + n * per_word`. `fixed` is mostly the chat template."""

    per_word: float = 1.0
    fixed: float = 0.0

    def words(self, tokens: int, *, with_fixed: bool = True) -> int:
        """Words that make about so many tokens, at least one."""
        return max(1, round((tokens - (self.fixed if with_fixed else 0.0)) / self.per_word))


def text(rng: random.Random, num_words: int) -> str:
    """That many random words."""
    return " ".join(rng.choices(WORDS, k=num_words))


async def calibrate(prompt_tokens: Callable[[str], Awaitable[int | None]], seed: int) -> Calibration | None:
    """Asks the server for the length of two prompts; `prompt_tokens` gives the usage of one. None: the server does not say."""
    rng = random.Random(f"calibration {seed}")
    few, many = 40, 240
    a, b = await prompt_tokens(text(rng, few)), await prompt_tokens(text(rng, many))
    if a is None or b is None or b <= a:
        return None
    per_word = (b - a) / (many - few)
    return Calibration(per_word, a - few * per_word)
