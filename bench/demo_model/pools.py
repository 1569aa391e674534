"""Values that fill objects, tool calls and stories: names, cities, words, and words that mean nothing.

Each pool has values that are copied in held-out problems only, so that copying is examined and not remembering.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from bench.demo_model import tables_nature, tables_words, tables_world
from bench.demo_model.novel_words import WordMaker, foreign

_NAMES = """
Mia Noah Emma Liam Olivia Ben Anna Paul Clara Max Lena Tom Sara Leo Nina Felix Eva Oscar Julia Adam Maria David
Laura Peter Sophie Hugo Alice Jack Ruby Sam Zoe Carl Ida Emil Rosa Ivan Olga Yuki Hana Ken Aisha Omar Leila Amir
Priya Ravi Chen Mei Jin Kofi Ama Zara Diego Lucia Pablo Carmen Marco Gina Luca Elsa Nils Freya Erik Astrid Jonas
Greta Victor Irene Simon Judith Martin Helen George Kate Robert Susan Frank Linda Henry Alex Robin Chris Dana
"""
_UNSEEN_NAMES = """
Tobias Marlene Quentin Isadora Bruno Wanda Ruben Sigrid Milo Petra Anton Thea Caspar Nadia Edgar
Annika Bartholomew Beatrice Cedric Daphne Dorothy Dmitri Ezekiel Fatima Florence Gareth Giovanni Gwendolyn Harriet
Hector Ignacio Ingrid Jasmine Joaquin Kaspar Katarzyna Leopold Lorenzo Mahmoud Margaret Matilda Natasha Nikolai
Octavia Ophelia Percival Philippa Rashid Rosalind Salvatore Seraphina Siobhan Svetlana Tamara Theodore Ursula
Valentina Vincent Winifred Xavier Yasmin Zachary
"""
_CITIES = """
Paris London Berlin Rome Madrid Vienna Oslo Tokyo Cairo Lima Prague Warsaw Dublin Athens Lisbon Boston Chicago
Seattle Denver Munich Hamburg Zurich Geneva Milan Naples Lyon Bordeaux Seville Porto Bergen Gothenburg Turku
Krakow Delhi Mumbai Shanghai Osaka Kyoto Seoul Hanoi Bangkok Sydney Melbourne Toronto Montreal Vancouver Nairobi
Lagos Accra Tunis Dakar Bogota Quito Santiago Moscow Kyiv Minsk Riga Helsinki Stockholm Copenhagen Amsterdam
"""
_UNSEEN_CITIES = """
Valencia Leipzig Antwerp Houston Dallas Nagoya Busan Perth Calgary Tampere Aarhus Salzburg Bologna
Aberdeen Albuquerque Avignon Bilbao Birmingham Bradford Braga Bristol Brno Cologne Cordoba Dortmund Durban Eindhoven
Espoo Florence Fukuoka Gdansk Ghent Glasgow Graz Grenoble Guadalajara Hobart Innsbruck Izmir Jaipur Karachi Kobe
Linz Malmo Manchester Marseille Medellin Memphis Nuremberg Odense Palermo Phoenix Plymouth Poznan Rotterdam Sapporo
Stuttgart Surat Toulouse Trieste Trondheim Uppsala Utrecht Varna Verona Wellingborough Wroclaw Yokohama
"""
_WORDS = """
red green blue yellow black white orange purple small large fast slow new old warm cold bright dark soft hard
apple bread milk cheese coffee tea sugar rice salt water book lamp chair table phone laptop pencil paper bottle
garden river forest mountain beach island bridge tower museum school office market station kitchen music dance
football chess tennis running swimming reading cooking painting travel history science art nature space ocean
"""
_UNSEEN_WORDS = """
violin castle harbor blanket ladder mirror hammer pepper candle pillow meadow wagon marble anchor
acorn almond archery avocado bagpipe balcony bamboo blueprint bracelet broccoli bucket burgundy calendar carpet
cathedral chimney cinnamon compass crimson cushion dagger diamond emerald envelope escalator falcon fiddle fountain
gadget gallery ginger goblet gravel hedgehog helmet indigo jacket jigsaw kettle lantern lavender maroon microscope
mosaic necklace oatmeal origami paddle parachute pottery pumpkin quilt raspberry saffron sandal scaffold sculpture
shovel skateboard sparrow spinach submarine telescope thimble trampoline turquoise typewriter umbrella velvet
voucher walnut whistle wrench yodeling zeppelin
"""


# Common words that are in no table. Templates use many.
_COMMON = """
able about account action active actor after again age air album alert amount angry annual area arm army art artist
attack audio aunt author away back bag bake ball bank bar base basic bath battle beach bean beauty bed beer begin
bell belt best big bike bill bird bitter block blood board boat body bonus boot boss box boxing boy brain branch bread
break brick brief bright broad broken budget bug build bus business busy button buyer cable cafe cake call camera camp
captain car care cash chain chance charge cheap check chef chief chicken choice circle city class client climb clock
close cloth cloud club coach coast coat code coin cold color common company contact content cook cool copy corner cost
count country course court cover cow crazy cream credit crew crowd custom daily damage danger data date dear debt deep
delay delta demo design desk detail device diary diet dinner direct dirt doctor dollar draft dream dress driver drop
dust duty east easy echo edge editor effect email empty energy engine entry error estate event exact exam example
exit expert export extra eye fabric face fact factory fair fall false fan farm farmer fashion favor fee feed field
figure file film final fire fit flag flash flat flight floor flow fog folder food fool form forward frame free fresh
front fruit fuel full fun game gap gas gate gear gift girl goal goods grand grape grass gray great group guard guest
guide gym hair half hand happy hardware hat head health heart heat heavy height hello hiking hobby hole holiday home
honey hope hotel hour huge human hunter idea image index input insect invoice jacket jam jazz job joint joke judge
juice junior jury just key kid kind king kiss knee label lady lake land lawyer lazy leader league leg legal lemon
lesson level light limit line link lion list local lock logic login logo long loop lorry lost loud love lucky lunch
machine magic mail main manager map mark master match math meal meat media meeting member memo memory menu message
metal meter middle mind mine minor minute mixed mobile model modern money month mood morning motor mouse mouth movie
narrow nation natural neat neck nerve net new news nice noise normal north nose note notice novel nurse object offer
oil open option orange order organ other oval oven owner pack page pain pair palace panel paper parent park part
partner party path pay peace peak person pet phone photo piano picture piece pilot pink pipe place plain plan plant
plastic play player plenty plug pocket poem poet point police pool poor pop port post power press price pride prince
print prize problem product profit project proof public pump pupil purple push quality queen quick quiet quiz race
rack radio rain rapid rare rate reader ready real record recipe region report rescue result review reward rich ride
ring road robot rock role roof room root rope rose round route royal rubber rule runner rural sad safe sail sailor
salad sale sample sand sauce scale scene score screen script season seat second secret senior sense series service
session shadow shape share shelf shell ship shirt shop short show shower sign signal silent simple singer sister site
size skill skin sky sleep slice slide slim smart smile smoke snack snow social sock soda sofa soil soldier solid song
sound soup source south spare speed spell spend sport spot square staff stage stamp standard start state status steam
steel step stick stock stone store storm story strange street strong student studio study style sudden suit sunny
surface surfer sweet swim switch system table tail tall tank tape target task taste tax taxi teacher team tennis tent
test text theater theme thick thin third ticket tidy tiger tiny tip title today toe tomorrow tone tool top topic total
touch tour track trade trail train trainer tray treat tree trip truck trust truth twin type ugly uncle unit update
upper urban user usual valley value van vendor version video view village visit voice volume vote waiter wall war
warning wash watch wave way wealth web wedding week weird west wheel wide wild wind window wine wing winner wire wise
wolf wooden wool work worker world worry writer wrong yard year yellow young youth zero zone
"""
# Words of the requests themselves. As values they could not be distinguished from the request.
_STRUCTURE = """
true false null on off and or with of in to as is the a an are be it that this for from by at named called who whose has
have his her not no name city age json key keys value values set field fields also please
"""


@dataclass(frozen=True, slots=True)
class Pool:
    """The values of one part. Those of `held_out` parts are never copied in training, in no case of letters."""

    names: tuple[str, ...]
    cities: tuple[str, ...]
    words: tuple[str, ...]
    held_out: bool


TRAINED = Pool(tuple(_NAMES.split()), tuple(_CITIES.split()), tuple(_WORDS.split()), held_out=False)
HELD_OUT = Pool(
    tuple(_UNSEEN_NAMES.split()), tuple(_UNSEEN_CITIES.split()), tuple(_UNSEEN_WORDS.split()), held_out=True
)


def _other_cases(pool: Pool) -> Pool:
    """The values in cases that are not usual for them."""
    names = (*map(str.lower, pool.names), *map(str.upper, pool.names))
    cities = (*map(str.lower, pool.cities), *map(str.upper, pool.cities))
    words = (*map(str.capitalize, pool.words), *map(str.upper, pool.words))
    return Pool(names, cities, words, pool.held_out)


HELD_OUT_CASES = _other_cases(HELD_OUT)
HELD_OUT_VALUES = frozenset(value.lower() for value in (*HELD_OUT.names, *HELD_OUT.cities, *HELD_OUT.words))
_FORBIDDEN = HELD_OUT_VALUES | frozenset(_STRUCTURE.split())


def _real_words() -> tuple[str, ...]:
    """Every single word of the fact tables and the common ones, without the held-out values."""
    tables = (tables_nature, tables_words, tables_world)
    named = [value for table in tables for name, value in vars(table).items() if not name.startswith("__")]
    text = " ".join([_COMMON, *(value for value in named if isinstance(value, str))]).replace("|", " ")
    words = {word for word in text.split() if word.isalpha() and word.isascii() and len(word) > 1}
    return tuple(sorted(word for word in words if word.lower() not in _FORBIDDEN))


REAL_WORDS = _real_words()
_MAKER = WordMaker(
    [word.lower() for word in (*REAL_WORDS, *TRAINED.names, *TRAINED.cities, *TRAINED.words) if len(word) > 2]
)


def made_up(rng: Random) -> str:
    """A word that means nothing, for copying, in lower case."""
    word = _MAKER.make(rng)
    while word in _FORBIDDEN:
        word = _MAKER.make(rng)
    return word


def _in_some_case(word: str, rng: Random, *, capital: bool) -> str:
    """Mostly in the case that is usual for it."""
    roll = rng.random()
    if roll < 0.78:
        return word.capitalize() if capital else word
    if roll < 0.86:
        return word if capital else word.capitalize()
    if roll < 0.91:
        return word.upper()
    if roll < 0.94:
        return word[:1].upper() + word[1:3].lower() + word[3:].capitalize()
    if roll < 0.97:
        return f"{word}-{made_up(rng)}".title() if capital else f"{word}{rng.choice('-_')}{made_up(rng)}"
    return f"{word}{rng.choice(('', '-', '_'))}{rng.randrange(1000)}"


def _value(rng: Random, own: tuple[str, ...], pool: Pool, *, capital: bool) -> str:
    """In training, three values in ten are the pool's own; the others are real words or, mostly, made up."""
    roll = rng.random()
    if pool.held_out or roll < 0.3:
        word = rng.choice(own)
        return word if pool.held_out or rng.random() < 0.85 else _in_some_case(word.lower(), rng, capital=capital)
    if roll < 0.33:
        word = foreign(rng)
        return word.capitalize() if capital else word
    return _in_some_case(rng.choice(REAL_WORDS).lower() if roll < 0.5 else made_up(rng), rng, capital=capital)


def name(rng: Random, pool: Pool) -> str:
    """A person's name."""
    return _value(rng, pool.names, pool, capital=True)


def city(rng: Random, pool: Pool) -> str:
    """A place."""
    return _value(rng, pool.cities, pool, capital=True)


def word(rng: Random, pool: Pool) -> str:
    """A word, mostly in lower case."""
    return _value(rng, pool.words, pool, capital=False)


def phrase(rng: Random, pool: Pool, longest: int = 4) -> str:
    """One to `longest` words, now and then the same one again."""
    words = [word(rng, pool)]
    while len(words) < longest and rng.random() < 1 - 1 / longest:
        words.append(rng.choice(words) if rng.random() < 0.08 else word(rng, pool))
    return " ".join(words)


def full_name(rng: Random, pool: Pool) -> str:
    """A first name and a last name."""
    return f"{name(rng, pool)} {name(rng, pool)}"
