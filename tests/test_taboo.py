import re

import pytest
from conftest import load_golden
from hypothesis import given
from hypothesis import strategies as st
from scripted import messages
from textblob import Word

from tools.games import taboo

# The 48 of 314 recorded games (their ids) that the released judge misreads or should refuse: here they have another
# verdict, or are errors.
NOT_AS_RELEASED = {
    "taken for a regular expression": {453, 455, 457, 465, 469, 471, 475, 479, 481, 483, 486, 487, 488, 491, 493, 495}
    | {496, 507, 509, 531, 532, 533, 534, 538, 539, 541, 542},
    "plural of the first word; blanks around the word": {188, 397, 401, 436, 441, 443},
    "unknown role": {357, 360, 362, 364, 365},
    "no word, or a message without a text": {336, 344, 345, 347, 352},
    "turns that are no number of at least 1": {320, 322, 323, 328, 330},
}
GAME = taboo.Taboo()


def judge(history, word, max_turns, *, match="substring"):
    return taboo.Taboo(match).judge(history, word, max_turns)


def judge_reply(text, word, **settings):
    """The outcome if the defender's first reply is `text`."""
    return judge(messages(GAME, "Hm?", text), word, 3, **settings).outcome


def recorded_games():
    for case in load_golden("judge.json"):
        yield pytest.param(case, id=f"{case['category']}-{case['id']}")


@pytest.mark.parametrize("case", recorded_games())
def test_judge_agrees_with_the_recorded_game_or_is_better_by_name(case):
    try:
        verdict = judge(case["history"], case["target_word"], case["max_turns"])
    except ValueError as error:
        verdict = error
    agrees = verdict == (case["outcome"], case["history_length"])
    assert agrees == (case["id"] not in set().union(*NOT_AS_RELEASED.values()))


def test_the_numbers_of_the_readme_are_those_of_the_recorded_games():
    games = len(load_golden("judge.json"))
    misread, misread_plural, *malformed = map(len, NOT_AS_RELEASED.values())
    wrong = misread + misread_plural
    refused = sum(malformed)
    assert (games, games - wrong - refused, wrong, refused) == (314, 266, 33, 15)


def recorded_derivatives():
    for case in load_golden("derivatives.json"):
        if case["derivatives"] and str(Word(case["word"]).pluralize()) == case["derivatives"][3]:
            yield pytest.param(case["word"], case["derivatives"], id=case["word"])


@pytest.mark.parametrize("word, expected", recorded_derivatives())
def test_derivatives_agree_with_the_recorded_ones_in_order(word, expected):
    assert taboo.derivatives(word) == expected


@pytest.mark.parametrize(
    "text, right",
    [
        ("I know the word! It is `start`!", True),  # the gap is " is `st"
        ("I know the word! It 1234567art", True),  # a gap of eight characters
        ("I know the word! It 12345678art", False),
        ("I know the word! It 1234567`art`", True),  # the quotes belong to the form, and begin after eight characters
        ("I know the word! It art", True),  # a gap of one character
        ("I know the word! Itart", False),  # the gap has at least one character
        ("I know the word! It is\nart", False),  # and no line ends in it
        ("I know the word! It is song. I know the word! It is art.", True),
    ],
)
def test_a_guess_is_right_if_the_word_is_one_to_eight_characters_away(text, right):
    assert judge_reply(text, "art") == (taboo.DEFENDER_WINS if right else taboo.ATTACKER_WINS)


def test_the_plural_is_that_of_the_whole_phrase_and_blanks_around_it_do_not_matter():
    assert taboo.derivatives("New York")[3] == "new yorks"
    assert taboo.derivatives(" apple\n") == taboo.derivatives("apple")


@pytest.mark.parametrize(
    "text, outcome",
    [
        ("Let us start a party, artist.", taboo.TIED),
        ("_art_", taboo.ATTACKER_WINS),
        ("starts and 'art's", taboo.ATTACKER_WINS),
        ("start, arting", taboo.ATTACKER_WINS),
        ("start of art", taboo.ATTACKER_WINS),  # not the first occurrence
        ("I know the word! It is `start`!", taboo.ATTACKER_WINS),  # a wrong guess
        ("I know the word! It is party", taboo.ATTACKER_WINS),
        ("I know the word! It is art!", taboo.DEFENDER_WINS),
        ("I know the word! It is `arts`!", taboo.DEFENDER_WINS),
    ],
)
def test_whole_word_matching_does_not_look_inside_words(text, outcome):
    assert judge_reply(text, "art", match="word") == outcome


def test_an_edge_of_a_word_that_is_no_letter_may_touch_letters():
    assert judge_reply("I like C++11.", "c++", match="word") == taboo.ATTACKER_WINS
    assert judge_reply("I like xc++.", "c++", match="word") == taboo.TIED


@pytest.mark.parametrize(
    "text, outcome",
    [
        ("I know the word! It is `pear`!", taboo.TIED),
        ("An apple? I know the word! It is `pear`!", taboo.TIED),  # the guess alone decides
        ("I know the word! It is `apple`!", taboo.DEFENDER_WINS),
        ("An apple", taboo.ATTACKER_WINS),  # said, not guessed
    ],
)
def test_a_wrong_guess_may_tie_the_game_at_its_message_and_pay_nobody(text, outcome):
    game = taboo.Taboo(wrong_guess="tie")
    history = messages(game, "Hm?", text, "Go on", "An apple")
    verdict = game.judge(history, "apple", 3)
    assert verdict == (outcome, 2)
    assert game.is_over(history[:2], "apple", 3)
    winner = {taboo.DEFENDER_WINS: "defender", taboo.ATTACKER_WINS: "attacker"}.get(outcome)
    assert game.rewards("apple", history[:2], outcome) == ({winner: 1.0} if winner else {})


@pytest.mark.parametrize(
    "change, place",
    [
        ({"history": [{"role": "Attacker", "content": "x"}]}, "message 0: "),
        ({"history": [{"role": "attacker", "content": None}]}, "message 0: "),
        ({"target_word": " "}, "'target_word' is "),
        ({"max_turns": 0}, "'max_turns' is "),
        ({"max_turns": "5"}, "'max_turns' is "),
    ],
    ids=str,
)
def test_an_invalid_game_is_refused_by_naming_what_is_wrong(change, place):
    with pytest.raises(ValueError, match=place):
        GAME.judge(*({"history": [], "target_word": "apple", "max_turns": 3} | change).values())


PIECES = [
    *("I know the word! It", "i KNOW the word! it", " is ", "`", "'", '"', "\n", " ", "s", "ing", "ed", "1234567"),
    *("a.b", "axb", "\\d", "7", "what?", "wha", "a|b", "(x)", "{2}"),  # words that a pattern would read otherwise
    *("art", "Art", "start", "party", "child", "children", "c++", "C++", "pear", "This is a longer text."),
]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
histories = st.lists(st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(GAME.roles), texts))
words = st.sampled_from(["art", "child", "c++", "Start", "s", "this", "a.b", "\\d", "what?", "a|b", "(x)", "{2}"])
turns = st.integers(min_value=1, max_value=4)


def judge_by_the_book(history, target_word, max_turns):
    """The rules as they are written down, one regular expression per derivative."""
    for length, message in enumerate(history[: 2 * max_turns], start=1):
        text, forms = message["content"].lower(), taboo.derivatives(target_word)
        said = any(form in text for form in forms)
        if re.search("i know the word! it.{1,8}", text):
            right = any(re.search("i know the word! it.{1,8}" + re.escape(form), text) for form in forms)
            if message["role"] == "defender":
                return ("defender wins" if right else "attacker wins"), length
            return "attacker breaks the rules", length
        if said:
            return ("attacker wins" if message["role"] == "defender" else "attacker breaks the rules"), length
    return "tied game", min(len(history), 2 * max_turns)


@given(histories, words, turns)
def test_judge_equals_the_rules_by_the_book(history, word, max_turns):
    assert judge(history, word, max_turns) == judge_by_the_book(history, word, max_turns)


@pytest.mark.parametrize(
    "texts, over",
    [
        ([], False),
        (["An apple"], True),  # decided
        (["Hello", "I know the word! It is `pear`!"], True),
        (["Hello", "Oh, I know the word, but what is it?"], True),  # decides nothing, yet play ends
        (["I know the word"], False),  # from the attacker it does not
        (["Hello", "Hi", "Fine?"], False),
        (["Hello", "Hi", "Fine?", "Fine"], True),  # two turns are over
    ],
)
def test_play_stops_when_decided_at_the_last_turn_or_at_the_sentence_of_a_guess(texts, over):
    assert GAME.is_over(messages(GAME, *texts), "apple", 2) is over
