"""The demo text: small English stories from a seeded grammar that attention heads have to work for.

Each narrative makes three relations pay off, those of the usual first lesson on multi-head
attention:

- *what was the previous token*: names and places are several tokens long and made up on the spot;
- *which noun does this pronoun mean*: "The cat sat on the mat because it was tired. So the cat ..."
  (a tired thing is an animal, a dusty thing is an object), and he or she for people, whose names
  end in o or a;
- *where did this word appear before*: names, journeys, lists and spells of unpredictable words come
  back later.

An *echo* is a run of random words in which one stretch comes back verbatim, unannounced.

A narrative's text determines every choice that made it, so its exact log-probability is known: the
sum of `-log(number of options)` over its choices. On average over stories no model can have less
loss than its negative. An echo has no such number (the same words may arise with and without a
repeat), and reports None.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

ANIMALS = (
    "cat dog fox hen owl pig cow goat horse mouse rabbit sheep duck goose frog bear wolf deer "
    "otter badger crow robin swan turtle snail spider beetle donkey pony lamb calf puppy "
    "kitten heron falcon magpie weasel hamster lizard toad"
).split()
OBJECTS = (
    "mat box chair table lamp basket blanket bucket barrel bench bottle bowl broom brush "
    "button candle carpet clock coat cup curtain desk door drum fence flute glove hammer hat "
    "helmet jar kettle key knife ladder letter mirror needle pan pillow plate pot ribbon ring "
    "rope rug saddle sack scarf shelf shoe shovel spoon stool stove sword tent towel tray "
    "trunk vase violin wagon wheel whistle window"
).split()
ANIMAL_TRAITS = (
    "tired hungry sleepy afraid lonely thirsty shy bored angry curious proud clever greedy "
    "jealous nervous restless"
).split()
OBJECT_TRAITS = (
    "dusty hollow wooden painted folded polished rusty broken varnished cracked flat square "
    "empty striped sturdy spotless"
).split()
PERSON_TRAITS = (
    "kind brave gentle honest patient polite generous cheerful loyal wise careful humble "
    "merry grateful stubborn friendly"
).split()
SPELL_WORDS = (
    "amber arrow autumn bridge copper cotton crystal desert dragon eagle ember feather fiddle "
    "flame forest garden ginger glass granite harbor harvest hazel honey hollow island ivory "
    "jungle lantern lemon lilac linen maple marble meadow melon mint moon mountain nutmeg oak "
    "ocean olive onyx orange orchid paper pearl pepper pine planet plum poppy prairie quartz "
    "raven reef river ruby saffron salt sand shadow silver smoke snow spark spice spring star "
    "stone storm summer sugar thistle thunder tiger timber tulip valley velvet violet walnut "
    "water willow winter zebra canyon cedar cinder clover cobalt coral cricket dawn dusk fern "
    "flint frost acorn anchor antler apron arch ash aspen bamboo banner basil bay beacon "
    "birch bloom brass breeze brook cable cactus camel canoe cape cave chalk cherry chestnut "
    "cliff cloak cloud coconut comet compass cork crown daisy delta dew dome dune echo elm "
    "emerald falls fig finch fjord galaxy garnet gate ghost glacier grape gravel hail heath "
    "hill horn iris iron jade jasmine jasper jewel juniper kelp lagoon lake lark laurel leaf "
    "lime lotus magnet mango marsh mist moss myrtle nest nickel oasis opal otter palm peach "
    "pebble petal pewter plume pollen pond pumpkin rain rose sage shell sky slate sleet steam "
    "straw swamp thorn thyme topaz torch tower trail turnip twig vapor vine wave wheat wool"
).split()
TRADES = (
    "baker farmer sailor teacher painter tailor miller potter weaver doctor gardener singer"
).split()
WEATHER = "rainy sunny windy foggy cloudy snowy frosty stormy quiet bright".split()
TIMES = "morning evening afternoon night day week month season".split()
POSTURES = "sat lay slept stood waited rested".split()
PREPOSITIONS = "on under near behind beside against".split()
GIFTS = "gave sold lent sent showed handed".split()
FATES = (
    "was left alone",
    "was seen by all",
    "was soon forgotten",
    "was given a name",
    "had to stay",
    "came first",
)
REACTIONS = (
    "smiled",
    "sang a song",
    "laughed",
    "said nothing",
    "went home",
    "made some tea",
    "began to cry",
)
WORDS = tuple(
    dict.fromkeys(
        [*ANIMALS, *OBJECTS, *ANIMAL_TRAITS, *OBJECT_TRAITS, *PERSON_TRAITS, *SPELL_WORDS]
    )
)

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
PLACE_ENDINGS = ("ton", "ford", "wick", "dale", "mere")
NUM_EVENTS = range(4, 9)

# Seeds of the demo text; none is among those that the demo model was trained on.
EVALUATION_SEED, CALIBRATION_SEED = 1000, 2000


@dataclass(frozen=True)
class Story:
    """One document of the demo text; `log_probability` in nats where known, else None."""

    text: str
    log_probability: float | None


@dataclass
class Pen:
    """Makes the choices of a story and adds up their log-probability in nats."""

    rng: random.Random
    log_probability: float = 0.0

    def choose(self, options: Sequence[T]) -> T:
        """Return one of the options, each equally likely."""
        self.log_probability -= math.log(len(options))
        return options[int(self.rng.random() * len(options))]

    def choose_distinct(self, options: Sequence[str], count: int) -> list[str]:
        """Return `count` different options in random order."""
        left, chosen = list(options), []
        for _ in range(count):
            chosen.append(self.choose(left))
            left.remove(chosen[-1])
        return chosen


@dataclass
class Cast:
    """Who the story is about, and what it may still come back to."""

    man: str
    woman: str
    lists: list[tuple[str, str]] = field(default_factory=list)
    spells: list[str] = field(default_factory=list)
    journeys: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def people(self) -> tuple[str, str]:
        return self.man, self.woman


def syllables(pen: Pen, count: int) -> str:
    return "".join(pen.choose(CONSONANTS) + pen.choose(VOWELS) for _ in range(count))


def person_name(pen: Pen, ending: str) -> str:
    """A made-up name of two or three syllables; men's end in o and women's in a."""
    return (syllables(pen, pen.choose((1, 2))) + pen.choose(CONSONANTS) + ending).capitalize()


def place_name(pen: Pen) -> str:
    return (syllables(pen, 2) + pen.choose(PLACE_ENDINGS)).capitalize()


def tell_rest(pen: Pen, cast: Cast) -> str:
    """An animal rests by an object; a trait that only one of them can have says which "it" is."""
    animal, thing = pen.choose(ANIMALS), pen.choose(OBJECTS)
    start = f"The {animal} {pen.choose(POSTURES)} {pen.choose(PREPOSITIONS)} the {thing}"
    meant, traits = pen.choose(((animal, ANIMAL_TRAITS), (thing, OBJECT_TRAITS)))
    return f"{start} because it was {pen.choose(traits)}. So the {meant} {pen.choose(FATES)}."


def tell_gift(pen: Pen, cast: Cast) -> str:
    """One person gives something to the other, and he or she tells who is meant."""
    giver, taker = pen.choose(((cast.man, cast.woman), (cast.woman, cast.man)))
    start = f"{giver} {pen.choose(GIFTS)} the {pen.choose(OBJECTS)} to {taker}"
    pronoun, meant = pen.choose((("he", cast.man), ("she", cast.woman)))
    trait, reaction = pen.choose(PERSON_TRAITS), pen.choose(REACTIONS)
    return f"{start} because {pronoun} was {trait}. So {meant} {reaction}."


def tell_list(pen: Pen, cast: Cast) -> str:
    """Someone packs a list of things."""
    person = pen.choose(cast.people)
    things = ", the ".join(pen.choose_distinct(OBJECTS, pen.choose(range(3, 7))))
    cast.lists.append((person, things))
    return f"{person} packed the {things}."


def recall_list(pen: Pen, cast: Cast) -> str:
    """The same person unpacks the same things in the same order."""
    person, things = cast.lists.pop(0)
    return f"Later {person} unpacked the {things}."


def tell_spell(pen: Pen, cast: Cast) -> str:
    """Someone says a run of unpredictable words."""
    person = pen.choose(cast.people)
    words = " ".join(pen.choose_distinct(WORDS, pen.choose(range(5, 13))))
    cast.spells.append(words)
    return f"{person} whispered the words {words}."


def recall_spell(pen: Pen, cast: Cast) -> str:
    """Someone repeats the words."""
    return f"Then {pen.choose(cast.people)} repeated the words {cast.spells.pop(0)}."


def tell_journey(pen: Pen, cast: Cast) -> str:
    """Someone travels between two places that were never heard of before."""
    person, origin, goal = pen.choose(cast.people), place_name(pen), place_name(pen)
    cast.journeys.append((person, origin, goal))
    return f"{person} went from {origin} to {goal}."


def recall_journey(pen: Pen, cast: Cast) -> str:
    """The same person goes back the same way."""
    person, origin, goal = cast.journeys.pop(0)
    return f"At last {person} came back from {goal} to {origin}."


def tell_weather(pen: Pen, cast: Cast) -> str:
    return f"It was a {pen.choose(WEATHER)} {pen.choose(TIMES)}."


def tell_opening(pen: Pen) -> tuple[str, Cast]:
    """Introduce a man and a woman, in either order."""
    cast = Cast(man=person_name(pen, "o"), woman=person_name(pen, "a"))
    first, second = pen.choose(((cast.man, cast.woman), (cast.woman, cast.man)))
    place, trade = place_name(pen), pen.choose(TRADES)
    return f"In {place} lived {first} the {trade} and {second} the {pen.choose(TRADES)}.", cast


def possible_events(cast: Cast) -> list[Callable[[Pen, Cast], str]]:
    """What may happen next: anything new, and the return of anything that waits for it."""
    events = [tell_rest, tell_gift, tell_list, tell_spell, tell_journey, tell_weather]
    recalls = [
        (cast.lists, recall_list),
        (cast.spells, recall_spell),
        (cast.journeys, recall_journey),
    ]
    return events + [recall for waiting, recall in recalls if waiting]


def write_narrative(rng: random.Random) -> Story:
    """Write one story whose log-probability is known exactly."""
    pen = Pen(rng)
    opening, cast = tell_opening(pen)
    sentences = [opening]
    for _ in range(pen.choose(NUM_EVENTS)):
        sentences.append(pen.choose(possible_events(cast))(pen, cast))
    return Story(" ".join(sentences), pen.log_probability)


def write_echo(rng: random.Random) -> Story:
    """Write random words and syllables in which a stretch of 5 to 40 comes back verbatim."""
    pen = Pen(rng)

    def babble(least: int, most: int) -> list[str]:
        return [
            pen.choose(WORDS) if rng.random() < 0.8 else syllables(pen, pen.choose((1, 2, 3)))
            for _ in range(rng.randint(least, most))
        ]

    stretch = babble(5, 40)
    words = babble(1, 10) + stretch
    for _ in range(rng.randint(1, 3)):
        words += babble(0, 10) + stretch
    return Story(" ".join(words), None)


def stories(seed: int, echo_share: float = 0.5) -> Iterator[Story]:
    """Yield stories without end: echoes with probability `echo_share`, narratives otherwise."""
    rng = random.Random(seed)
    while True:
        yield write_echo(rng) if rng.random() < echo_share else write_narrative(rng)


def story_texts(seed: int, count: int) -> tuple[str, ...]:
    """Return the first `count` stories of a seed."""
    return tuple(story.text for story in itertools.islice(stories(seed), count))
