"""The demo text says how probable it is, and its three relations hold in every story."""

import math
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from mhaprune.text import stories
from mhaprune.text.stories import Cast, Pen, Story

FIRST_STORY_OF_SEED_0 = (
    "In Gopemere lived Miva the singer and Leniso the doctor. "
    "Miva handed the rug to Leniso because he was brave. So Leniso said nothing. "
    "Miva whispered the words "
    "harvest kelp stove falls pepper pig beacon generous glacier clover cat jungle. "
    "Then Leniso repeated the words "
    "harvest kelp stove falls pepper pig beacon generous glacier clover cat jungle. "
    "Miva sold the needle to Leniso because he was friendly. So Leniso made some tea. "
    "Leniso packed the knife, the violin, the blanket, the mirror. "
    "Miva went from Tizowick to Miliford. "
    "Leniso sent the ring to Miva because he was brave. So Leniso made some tea. "
    "At last Miva came back from Miliford to Tizowick."
)
NARRATIVES = list(islice(stories.stories(seed=3, echo_share=0.0), 400))
ECHOES = list(islice(stories.stories(seed=3, echo_share=1.0), 100))


def test_the_first_story_of_seed_0_stays_what_it_is():
    assert next(stories.stories(seed=0)).text == FIRST_STORY_OF_SEED_0


def test_the_log_probability_of_the_first_story_is_the_product_of_its_choices_counted_by_hand():
    syllable = 14 * 5
    man, woman, place = 2 * syllable**2 * 14, 2 * syllable * 14, syllable**2 * 5
    opening = man * woman * 2 * place * 12 * 12
    num_things, num_words = len(stories.OBJECTS), len(stories.WORDS)
    gift = 2 * 6 * num_things * 2 * 16 * 7
    spell, recalled_spell = 2 * 8 * math.perm(num_words, 12), 2
    packed = 2 * 4 * math.perm(num_things, 4)
    journey, recalled_journey = 2 * place * place, 1
    # Six events are always possible, and one more for each thing that waits for its return.
    events = [
        (6, gift),
        (6, spell),
        (7, recalled_spell),
        (6, gift),
        (6, packed),
        (7, journey),
        (8, gift),
        (8, recalled_journey),
    ]
    num_texts = opening * 5 * math.prod(kinds * ways for kinds, ways in events)
    assert next(stories.stories(seed=0)).log_probability == pytest.approx(-math.log(num_texts))


def test_a_seed_names_one_text():
    def first_ten(seed: int) -> list[Story]:
        return list(islice(stories.stories(seed), 10))

    assert first_ten(5) == first_ten(5)
    texts = [story.text for seed in range(10) for story in first_ten(seed)]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("echo_share", "least", "most"), [(0, 0, 0), (0.5, 80, 120), (1, 200, 200)]
)
def test_the_share_of_echoes_is_as_asked(echo_share, least, most):
    told = islice(stories.stories(1, float(echo_share)), 200)
    assert least <= sum(story.log_probability is None for story in told) <= most


# The derivation tree, walked as a whole.


class FixedRandom(random.Random):
    """A stand-in for the random numbers that always gives the same one."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.value = value

    def random(self) -> float:
        return self.value


class ScriptedPen(Pen):
    """Chooses as the script says, then the first option; notes how many options there were.

    Ranges of lengths are replaced by `lengths`, to keep the tree small.
    """

    def __init__(self, script: list[int], lengths: range) -> None:
        super().__init__(random.Random(0))
        self.script, self.lengths = script, lengths
        self.chosen: list[int] = []
        self.num_options: list[int] = []

    def choose(self, options):
        options = self.lengths if isinstance(options, range) else options
        place = len(self.chosen)
        self.chosen.append(self.script[place] if place < len(self.script) else 0)
        self.num_options.append(len(options))
        self.rng = FixedRandom((self.chosen[-1] + 0.5) / len(options))
        return super().choose(options)


def derivations(write: Callable[[Pen], str], lengths: range) -> Iterator[tuple[str, float, float]]:
    """Every way to write: the text, its log-probability by the pen, and its probability."""
    script: list[int] = []
    while True:
        pen = ScriptedPen(script, lengths)
        text = write(pen)
        yield text, pen.log_probability, 1 / math.prod(pen.num_options)
        script, num_options = pen.chosen, pen.num_options
        while script and script[-1] == num_options.pop() - 1:
            script.pop()
        if not script:
            return
        script[-1] += 1


def assert_exact(write: Callable[[Pen], str], lengths: range) -> int:
    """Check that a text has one derivation and its probability; return how many there are."""
    texts, log_probabilities, probabilities = zip(*derivations(write, lengths), strict=True)
    assert len(set(texts)) == len(texts)
    assert math.fsum(math.exp(value) for value in log_probabilities) == pytest.approx(1, abs=1e-9)
    assert math.fsum(probabilities) == pytest.approx(1, abs=1e-9)
    assert log_probabilities == pytest.approx([math.log(value) for value in probabilities])
    return len(texts)


@pytest.fixture
def shrink_lexicons(monkeypatch):
    def shrink(num_words: int, consonants: str) -> None:
        lexicons = (
            "ANIMALS OBJECTS ANIMAL_TRAITS OBJECT_TRAITS PERSON_TRAITS TRADES WEATHER TIMES "
            "POSTURES PREPOSITIONS GIFTS FATES REACTIONS WORDS PLACE_ENDINGS"
        )
        for name in lexicons.split():
            monkeypatch.setattr(stories, name, getattr(stories, name)[:num_words])
        monkeypatch.setattr(stories, "CONSONANTS", consonants)
        monkeypatch.setattr(stories, "VOWELS", "a")

    return shrink


def cast_with_memories() -> Cast:
    return Cast(
        man="Bo",
        woman="Ba",
        lists=[("Bo", "mat, the box"), ("Ba", "lamp")],
        spells=["salt sand", "snow"],
        journeys=[("Ba", "Baford", "Batown"), ("Bo", "Bowick", "Boford")],
    )


@pytest.mark.parametrize(
    ("sentence", "num_derivations"),
    [
        ("tell_rest", 2**7),
        ("tell_gift", 2**6),
        ("tell_list", 2 * (2 + 2)),
        ("tell_spell", 2 * (2 + 2)),
        ("tell_journey", 2 * 8 * 8),
        ("tell_weather", 2 * 2),
        ("recall_list", 1),
        ("recall_spell", 2),
        ("recall_journey", 1),
    ],
)
def test_the_derivations_of_a_sentence_are_unique_and_their_probabilities_exact(
    shrink_lexicons, sentence, num_derivations
):
    shrink_lexicons(num_words=2, consonants="bd")
    tell = getattr(stories, sentence)
    count = assert_exact(lambda pen: tell(pen, cast_with_memories()), lengths=range(1, 3))
    assert count == num_derivations


def test_the_derivations_of_an_opening_are_unique_and_their_probabilities_exact(shrink_lexicons):
    shrink_lexicons(num_words=1, consonants="bd")
    num_names, num_places = 2 * 2 + 2**2 * 2, 2**2
    count = assert_exact(lambda pen: stories.tell_opening(pen)[0], lengths=range(1, 3))
    assert count == num_names**2 * 2 * num_places


@pytest.mark.parametrize(("num_words", "num_events"), [(2, (1,)), (1, (2, 3))])
def test_the_derivations_of_a_narrative_are_unique_and_their_probabilities_exact(
    shrink_lexicons, monkeypatch, num_words, num_events
):
    shrink_lexicons(num_words, consonants="b")
    monkeypatch.setattr(stories, "NUM_EVENTS", num_events)
    monkeypatch.setattr(stories, "person_name", lambda pen, ending: "B" + ending)

    def narrate(pen: Pen) -> str:
        monkeypatch.setattr(stories, "Pen", lambda rng: pen)
        return stories.write_narrative(random.Random(0)).text

    assert assert_exact(narrate, lengths=range(1, num_words + 1)) > 1000


def test_a_generator_that_says_one_text_in_two_ways_is_noticed():
    with pytest.raises(AssertionError):
        assert_exact(lambda pen: pen.choose(("cat", "cat")), lengths=range(1))


# What the words must be like for a text to tell how it was made.


@pytest.mark.parametrize(
    "groups",
    [
        (stories.ANIMALS, stories.OBJECTS),
        (stories.ANIMAL_TRAITS, stories.OBJECT_TRAITS, stories.PERSON_TRAITS),
    ],
    ids=["nouns", "traits"],
)
def test_a_word_says_which_class_it_is_of(groups):
    words = [word for group in groups for word in group]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(
    "name", "TRADES WEATHER TIMES POSTURES PREPOSITIONS GIFTS FATES REACTIONS WORDS".split()
)
def test_no_option_is_offered_twice(name):
    options = getattr(stories, name)
    assert len(set(options)) == len(options)


def test_words_are_made_of_small_letters_only():
    words = [*stories.WORDS, *stories.TRADES, *stories.WEATHER, *stories.TIMES, *stories.GIFTS]
    assert [word for word in words if not re.fullmatch("[a-z]+", word)] == []


# What a reader, or an attention head, can rely on.


def matches(pattern: str) -> list[re.Match[str]]:
    found = [match for story in NARRATIVES for match in re.finditer(pattern, story.text)]
    assert len(found) > 50
    return found


def test_it_is_the_animal_or_the_object_as_the_trait_tells():
    rest = r"The (\w+) \w+ \w+ the (\w+) because it was (\w+)\. So the (\w+) "
    for animal, thing, trait, meant in [match.groups() for match in matches(rest)]:
        assert (animal in stories.ANIMALS, thing in stories.OBJECTS) == (True, True)
        classes = (trait in stories.ANIMAL_TRAITS, trait in stories.OBJECT_TRAITS)
        assert classes == (meant == animal, meant == thing)


def test_he_is_the_one_whose_name_ends_in_o_and_she_the_one_in_a():
    gift = r"(\w+) \w+ the (\w+) to (\w+) because (he|she) was (\w+)\. So (\w+) "
    for giver, thing, taker, pronoun, trait, meant in [match.groups() for match in matches(gift)]:
        assert {giver[-1], taker[-1]} == {"o", "a"}
        assert meant in (giver, taker)
        assert meant[-1] == {"he": "o", "she": "a"}[pronoun]
        assert thing in stories.OBJECTS
        assert trait in stories.PERSON_TRAITS


@pytest.mark.parametrize(
    ("told", "recalled"),
    [
        (r"(?P<who>\w+) packed the (?P<a>.+)", r"Later (?P<who>\w+) unpacked the (?P<a>.+)"),
        (r"\w+ whispered the words (?P<a>.+)", r"Then \w+ repeated the words (?P<a>.+)"),
        (
            r"(?P<who>\w+) went from (?P<a>\w+) to (?P<b>\w+)",
            r"At last (?P<who>\w+) came back from (?P<b>\w+) to (?P<a>\w+)",
        ),
    ],
    ids=["lists", "spells", "journeys"],
)
def test_what_is_recalled_is_the_oldest_that_waits_and_verbatim(told, recalled):
    num_recalled = 0
    for story in NARRATIVES:
        waiting: deque[dict[str, str]] = deque()
        for sentence in story.text.rstrip(".").split(". "):
            if match := re.fullmatch(told, sentence):
                waiting.append(match.groupdict())
            elif match := re.fullmatch(recalled, sentence):
                assert match.groupdict() == waiting.popleft()
                num_recalled += 1
    assert num_recalled > 50


def test_an_echo_says_a_stretch_of_five_words_twice_and_not_how_probable_it_is():
    for echo in ECHOES:
        words = echo.text.split()
        runs = [tuple(words[start : start + 5]) for start in range(len(words) - 4)]
        first = {run: start for start, run in reversed(list(enumerate(runs)))}
        assert any(start >= first[run] + 5 for start, run in enumerate(runs))
        assert echo.log_probability is None


def test_only_narratives_have_a_log_probability():
    assert all(
        story.log_probability is not None and story.log_probability < -50 for story in NARRATIVES
    )
