"""Token pool, seed and label -> prompts as token ids, the same for both variants, none sharing a prefix with another.

Prompts are token ids, not text: what the server prefills has then exactly the length asked for, whatever its
tokeniser makes of random text. The first tokens of a prompt spell its ordinal within the launch, so that no two
prompts of a launch, warm-ups included, can share a block of the server's prefix cache.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

from abharness.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIN_POOL_TOKENS = 200
"""Fewest distinct token ids that prompts are drawn from; fewer would make them repeat themselves."""

ORDINAL_TOKENS = 4
"""Leading tokens that spell a prompt's ordinal: 200**4 prompts a launch, well inside the smallest cache block (16)."""

POOL_TEXT = """
A request reaches the server as a list of numbers. Each number names one piece of text, and the model turns the whole
list into a guess about what should follow. The first pass over the prompt fills a cache with keys and values, which is
heavy arithmetic and keeps every core of the processor busy. After that, each step adds one more piece, reads the cache
again, and spends most of its time waiting for memory rather than doing sums. Many requests share one step, because
loading the weights once for sixteen rows costs hardly more than loading them for one.

Measuring such a machine is harder than it looks. Clocks rise and fall with heat, other programs wake up, files that
were compiled yesterday are found again today, and a change that seems to save three percent may be nothing but luck. A
careful engineer repeats the run, swaps the order, watches the power meter, and asks whether two equal systems would
have shown the same gap. When the answer is unclear, saying so is better than a confident mistake.

able about above accept across act action active actual add address after again against age ago agree air all allow
almost alone along already also always among amount and angle animal another any apart appear apple apply area arm
around arrive art ask attack author away baby back bad bag balance ball band bank bar base basic bath bear beat
beautiful because bed before begin behind believe below beside best better between beyond big bird black block blood
blue board boat body bone book border born both bottom box boy branch bread break bridge bright bring broad brother
brown build burn bus business but buy call calm camera camp can capital captain car card care carry case catch cause
cell center central century certain chain chair chance change character charge chart check chief child choice choose
church circle city claim class clean clear climb clock close cloth cloud coast code cold collect college color column
come common company compare complete computer condition consider contain content continue control cook cool copper copy
corn corner correct cost cotton could count country couple course court cover create crop cross crowd cry culture
current cut dance danger dark data date daughter day dead deal dear death decide deep degree depend describe desert
design determine develop die differ difficult dinner direct discuss distance divide doctor dog dollar door double doubt
down draw dream dress drink drive drop dry during dust duty each early earn earth ease east eat edge education effect
egg eight either electric element else empty end enemy energy engine enjoy enough enter entire equal even evening event
ever every exact example except excite exercise expect experience explain eye face fact fair fall family famous far
farm fast father favor fear feed feel feet felt field fight figure fill film final find fine finger finish fire firm
first fish fit five flat floor flow flower fly follow food foot force forest form forward four free fresh friend front
fruit full fun game garden gas gather general gentle get girl give glad glass gold gone good govern grand grass gray
great green ground group grow guess guide gun hair half hand happen happy hard hat head hear heart heat heavy height
help here high hill history hit hold hole home hope horse hot hour house how huge human hundred hunt hurry ice idea
image imagine inch include indicate industry inside instant interest iron island issue job join journey judge jump just
keep key kill kind king kitchen knee knife know lady lake land language large last late laugh law lay lead learn least
leave left leg length lesson letter level lie life lift light like line liquid listen little live local long look lost
lot loud love low machine magnet main major make man map mark market mass master match material matter may mean measure
meat medicine meet melody member mention metal method middle might mile milk million mind mine minute miss mix modern
moment money month moon more morning mother motion mountain mouth move much music must name narrow nation nature near
neck need neighbor never new next night nine noise north nose note nothing notice noun number object observe ocean offer
office often oil old once only open operate opposite orange order original other out oxygen page paint pair paper parent
park part party pass past path pattern pay people perhaps period person phrase picture piece place plain plane planet
plant play please point police poor port pose position possible pound practice prepare present president press pretty
print prison private probable problem process produce product program promise proper protect prove provide public pull
purple push put quarter question quick quiet quite race radio rail rain raise range rather reach read ready real reason
receive record red region remember repeat reply report represent require rest result return rich ride right ring river
road rock room root rope rose round row rub rule run safe sail salt same sand save say scale school science score sea
search season seat second section see seed seem select self sell send sense sentence separate serve settle seven several
shall shape share sharp sheet ship shoe shop shore short should shoulder shout show side sight sign silent silver simple
sing single sister sit six size skill skin sky sleep slip slow small smell smile snow social society soft soil soldier
solution son song soon sound south space speak special speech speed spell spend spoke spot spread spring square stage
stand star start state station stay steam steel step stick still stone stop store story straight strange stream street
strong student study subject sudden sugar suit summer sun supply support sure surface surprise sweet swim symbol system
table tail take talk tall teach team tell ten term test thank theory thick thin thing think third thousand three through
throw time tiny title today together tomorrow tone tool top total touch toward town track trade train travel tree
triangle trip trouble truck true trust try tube turn twenty type uncle under unit until usual valley value vary verb
very view village visit voice vowel wait walk wall war warm wash watch water wave wear weather week weight welcome well
west wheel white whole wide wife wild wind window wing winter wire wish woman wonder wood word work world worry write
wrong yard year yellow yes young zero
"""
"""Ordinary English whose token ids prompts are drawn from: words every tokeniser for English knows."""


def build_prompts(
    token_pool: Sequence[int], *, seed: int, label: str, num_prompts: int, input_len: int, first_ordinal: int
) -> list[list[int]]:
    """Draw the prompts of one cell or warm-up: the same for the same arguments, on every machine and Python.

    Args:
        token_pool: Distinct ordinary token ids, in an order that both variants share.
        seed: The experiment's seed.
        label: Names the draw, for example workload, shape and repeat; different labels give different bodies.
        num_prompts: How many.
        input_len: Tokens in each.
        first_ordinal: Ordinal of the first prompt within the launch. Ordinals must not be used twice in a launch: they
            make the leading tokens unique.

    Raises:
        LoadFailed: The pool is too small or repeats ids, the prompts too short, or the ordinals used up.
    """
    base = len(token_pool)
    if base < MIN_POOL_TOKENS or len(set(token_pool)) != base:
        raise LoadFailed(
            f"{len(set(token_pool))} distinct token ids to draw prompts from, {MIN_POOL_TOKENS} are needed"
        )
    if input_len < ORDINAL_TOKENS:
        raise LoadFailed(
            f"input_len {input_len} is too short: {ORDINAL_TOKENS} leading tokens make each prompt unique",
            hint=f"use input_len {ORDINAL_TOKENS} or more",
        )
    if first_ordinal < 0 or first_ordinal + num_prompts > base**ORDINAL_TOKENS:
        raise LoadFailed(f"prompt ordinals {first_ordinal} to {first_ordinal + num_prompts} do not fit {base} tokens")
    draw = random.Random(f"{seed}:{label}")
    prompts = []
    for ordinal in range(first_ordinal, first_ordinal + num_prompts):
        # Least significant digit first: neighbours differ from the very first token on.
        lead = [token_pool[ordinal // base**digit % base] for digit in range(ORDINAL_TOKENS)]
        prompts.append(lead + draw.choices(token_pool, k=input_len - ORDINAL_TOKENS))
    return prompts


def prompt_hash(prompt: Sequence[int]) -> str:
    """SHA-256 of a prompt's token ids as comma-joined decimal text, hexadecimal."""
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()


def prompts_hash(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 over the prompts' hashes, one a line in order: equal in two cells only if they sent the same work."""
    return combined_hash(map(prompt_hash, prompts))


def combined_hash(hashes: Iterable[str]) -> str:
    """The hash of a sequence of prompts from the hashes of its prompts."""
    return hashlib.sha256("\n".join(hashes).encode("utf-8", "surrogatepass")).hexdigest()
