"""Small fact tables about animals, things and numbers, one `key|value` a line."""

from __future__ import annotations

COLOURS = """
the sky|blue
the sea|blue
grass|green
snow|white
milk|white
coal|black
blood|red
chocolate|brown
gold|yellow
lavender|purple
ketchup|red
mustard|yellow
a banana|yellow
a lemon|yellow
a tomato|red
a strawberry|red
a cherry|red
a ruby|red
a fire engine|red
a carrot|orange
a pumpkin|orange
a tangerine|orange
an emerald|green
a cucumber|green
a frog|green
a lime|green
a pea|green
spinach|green
a sapphire|blue
a blueberry|blue
a plum|purple
an eggplant|purple
a violet|purple
a flamingo|pink
a piglet|pink
a raven|black
a crow|black
a panther|black
a swan|white
a polar bear|white
salt|white
flour|white
an elephant|gray
a mouse|gray
ash|gray
a chestnut|brown
a coffee bean|brown
soil|brown
the sun|yellow
a sunflower|yellow
"""

# animal|sound|young
ANIMALS = """
cat|meow|kitten
dog|woof|puppy
cow|moo|calf
sheep|baa|lamb
pig|oink|piglet
horse|neigh|foal
duck|quack|duckling
chicken|cluck|chick
goat|bleat|kid
lion|roar|cub
wolf|howl|pup
frog|ribbit|tadpole
owl|hoot|owlet
goose|honk|gosling
donkey|hee-haw|foal
snake|hiss|snakelet
bee|buzz|larva
elephant|trumpet|calf
turkey|gobble|poult
pigeon|coo|squab
bear|growl|cub
deer|bellow|fawn
kangaroo|chortle|joey
swan|trumpet|cygnet
mouse|squeak|pup
"""

# animal|number of legs
LEGS = """
dog|four
cat|four
horse|four
cow|four
elephant|four
frog|four
lizard|four
bird|two
chicken|two
duck|two
penguin|two
human|two
ostrich|two
ant|six
bee|six
beetle|six
butterfly|six
fly|six
spider|eight
scorpion|eight
octopus|zero
snake|zero
fish|zero
worm|zero
crab|ten
lobster|ten
"""

HOMES = """
bee|hive
bird|nest
spider|web
dog|kennel
horse|stable
lion|den
rabbit|burrow
beaver|lodge
pig|sty
ant|anthill
chicken|coop
bear|cave
squirrel|drey
cow|barn
fish|sea
penguin|ice
camel|desert
monkey|jungle
"""

JOBS = """
baker|bakes bread
teacher|teaches pupils
doctor|treats sick people
pilot|flies planes
farmer|grows crops
fisherman|catches fish
painter|paints pictures
writer|writes books
singer|sings songs
tailor|makes clothes
barber|cuts hair
dentist|fixes teeth
plumber|repairs pipes
carpenter|works with wood
firefighter|puts out fires
astronaut|travels into space
gardener|looks after plants
chef|cooks in a restaurant
mechanic|repairs cars
librarian|lends books
vet|treats sick animals
judge|decides in court
shepherd|looks after sheep
sailor|works on a ship
postman|delivers letters
"""

# element|symbol|atomic number
ELEMENTS = """
hydrogen|H|1
helium|He|2
lithium|Li|3
beryllium|Be|4
boron|B|5
carbon|C|6
nitrogen|N|7
oxygen|O|8
fluorine|F|9
neon|Ne|10
sodium|Na|11
magnesium|Mg|12
aluminium|Al|13
silicon|Si|14
phosphorus|P|15
sulfur|S|16
chlorine|Cl|17
argon|Ar|18
potassium|K|19
calcium|Ca|20
scandium|Sc|21
titanium|Ti|22
vanadium|V|23
chromium|Cr|24
manganese|Mn|25
iron|Fe|26
cobalt|Co|27
nickel|Ni|28
copper|Cu|29
zinc|Zn|30
gallium|Ga|31
germanium|Ge|32
arsenic|As|33
selenium|Se|34
bromine|Br|35
krypton|Kr|36
silver|Ag|47
tin|Sn|50
iodine|I|53
xenon|Xe|54
tungsten|W|74
platinum|Pt|78
gold|Au|79
mercury|Hg|80
lead|Pb|82
uranium|U|92
"""

POLYGONS = """
triangle|three
square|four
rectangle|four
pentagon|five
hexagon|six
heptagon|seven
octagon|eight
nonagon|nine
decagon|ten
"""

EMOJI = """
cat|🐱
dog|🐶
mouse|🐭
rabbit|🐰
fox|🦊
bear|🐻
panda|🐼
lion|🦁
cow|🐮
pig|🐷
frog|🐸
monkey|🐵
penguin|🐧
fish|🐟
whale|🐳
butterfly|🦋
bee|🐝
tree|🌳
flower|🌸
sun|🌞
moon|🌙
star|⭐
rainbow|🌈
snowman|⛄
fire|🔥
apple|🍎
banana|🍌
pizza|🍕
cake|🍰
coffee|☕
football|⚽
guitar|🎸
car|🚗
train|🚆
plane|✈️
rocket|🚀
house|🏠
heart|❤️
book|📖
key|🔑
family|👨‍👩‍👧
thumbs up|👍
"""

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    ("January", 31),
    ("February", 28),
    ("March", 31),
    ("April", 30),
    ("May", 31),
    ("June", 30),
    ("July", 31),
    ("August", 31),
    ("September", 30),
    ("October", 31),
    ("November", 30),
    ("December", 31),
)
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"),
    *("eleventh", "twelfth"),
)
SMALL_NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def rows(table: str) -> list[list[str]]:
    """Split a table into its rows of fields."""
    return [line.split("|") for line in table.strip().splitlines()]
