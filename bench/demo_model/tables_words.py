"""Tables of words: opposites, plurals, past tenses, and words to spell."""

from __future__ import annotations

OPPOSITES = """
hot|cold
big|small
tall|short
fast|slow
old|young
happy|sad
good|bad
light|dark
day|night
up|down
left|right
open|closed
full|empty
hard|soft
wet|dry
rich|poor
loud|quiet
clean|dirty
strong|weak
early|late
near|far
high|low
heavy|lightweight
inside|outside
push|pull
begin|end
win|lose
buy|sell
give|take
love|hate
true|false
yes|no
always|never
above|below
front|back
north|south
east|west
thick|thin
wide|narrow
deep|shallow
sharp|blunt
smooth|rough
simple|complex
safe|dangerous
brave|cowardly
polite|rude
asleep|awake
alive|dead
winter|summer
sweet|sour
before|after
more|less
many|few
first|last
laugh|cry
remember|forget
arrive|leave
friend|enemy
question|answer
war|peace
"""

PLURALS = """
mouse|mice
foot|feet
tooth|teeth
goose|geese
man|men
woman|women
child|children
ox|oxen
person|people
leaf|leaves
knife|knives
wolf|wolves
life|lives
wife|wives
half|halves
shelf|shelves
sheep|sheep
fish|fish
deer|deer
cactus|cacti
baby|babies
city|cities
box|boxes
bus|buses
potato|potatoes
tomato|tomatoes
hero|heroes
cat|cats
dog|dogs
house|houses
book|books
"""

PAST = """
go|went
eat|ate
see|saw
come|came
take|took
give|gave
run|ran
swim|swam
sing|sang
drink|drank
write|wrote
drive|drove
ride|rode
speak|spoke
break|broke
buy|bought
bring|brought
think|thought
catch|caught
teach|taught
sleep|slept
keep|kept
feel|felt
leave|left
make|made
say|said
tell|told
find|found
know|knew
grow|grew
fly|flew
draw|drew
begin|began
win|won
sit|sat
stand|stood
build|built
send|sent
walk|walked
play|played
jump|jumped
look|looked
"""

SPELLING = """
cat dog house apple water bread milk table chair window door garden flower tree river mountain ocean island
bridge street school teacher doctor friend family mother father sister brother baby child morning evening night
summer winter spring autumn music song dance guitar piano paper pencil book story letter number word question
answer color green yellow orange purple black white silver gold iron copper stone wood glass cotton silk
butter cheese sugar salt pepper coffee tea juice banana lemon cherry tomato potato carrot onion rabbit horse
monkey tiger lion elephant giraffe zebra camel whale dolphin shark eagle parrot pigeon penguin turtle snake
frog spider butterfly beetle rocket planet star moon sun cloud rain snow wind storm thunder rainbow
engine computer kitchen bottle spoon knife fork plate basket blanket pillow candle mirror clock hammer ladder
"""
