"""The counts of games: numbers worked by hand."""

import pytest

from tools.games import load_game
from tools.selfplay.counts import GameCounts

TABOO, QUESTIONS = load_game("taboo"), load_game("twenty_questions")


def reply(tokens: int, finish_reason: str = "stop", *, prompt_cut: bool = False, **paid) -> dict:
    return {"finish_reason": finish_reason, "tokens": tokens, "prompt_cut": prompt_cut} | paid


def game(outcome: str, *texts: str, of=TABOO, **more) -> dict:
    history = [{"role": of.roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return {"target_word": "art", "history": history, "outcome": outcome, "length": len(texts)} | more


GAMES = [
    game("attacker wins", "a", "art", replies=[reply(3), reply(5, "length")]),
    game("defender wins", "a", "", "b", "I know the word! It is `art`!", replies=[reply(1, prompt_cut=True)] * 4),
    game("attacker breaks the rules", "art", replies=[reply(2)]),
    game("tied game"),
]


def counted(games, of=TABOO) -> GameCounts:
    counts = GameCounts(of)
    for one in games:
        counts.add(one)
    return counts


def test_the_summary_of_taboo():
    assert counted(GAMES).as_dict() == {
        "games": 4,
        "outcomes": {"attacker wins": 1, "defender wins": 1, "attacker breaks the rules": 1, "tied game": 1},
        "defender_share_of_decided": 0.5,  # a breach decides nothing here
        "right_guesses": 1 / 4,
        "first_turn_guesses": 0.0,
        "mean_length": 7 / 4,
        "word_dependence": {"attacker": None, "defender": None},
        "no_word_dependence": "all games are about one word",
        "messages": 7,
        "empty_replies": 1,
        "cut_off_replies": 1,
        "cut_prompts": 4,
        "new_tokens": 14,
    }


def test_tokens_of_servers_are_counted_where_servers_played():
    paid = game("tied game", "a", "b", replies=[reply(3, prompt_tokens=40), reply(5)])
    summary = counted([*GAMES, paid]).as_dict()
    assert (summary["server_prompt_tokens"], summary["server_new_tokens"], summary["new_tokens"]) == (40, 3, 22)


def test_a_game_that_nobody_wins_alone_has_no_share_of_decided_ones():
    summary = counted([game("found", "Is it `art`?", of=QUESTIONS)], QUESTIONS).as_dict()
    assert (summary["outcomes"]["found"], summary["answerer_share_of_decided"]) == (1, None)
    assert counted([]).as_dict()["mean_length"] is None


def test_first_turn_guesses_are_right_or_wrong_and_no_other_decisions_at_the_second_message():
    guesses = [game("defender wins", "a", "I know the word! It is `art`!")]
    guesses += [game("attacker wins", "a", "I know the word! It is `music`!")]
    others = [game("attacker wins", "a", "art"), game("defender wins", "a", "b", "c", "I know the word! It is `art`!")]
    summary = counted([*guesses, *others]).as_dict()
    assert (summary["first_turn_guesses"], summary["right_guesses"]) == (2 / 4, 2 / 4)
    assert "first_turn_guesses" not in counted([game("found", "Is it `art`?", of=QUESTIONS)], QUESTIONS).as_dict()


def test_replies_whose_text_has_other_tokens_are_counted_where_tokens_are_known():
    replies = [reply(1, token_ids=[5]), reply(2, token_ids=[6, 7], retokenized=True)]
    assert counted([*GAMES, game("tied game", "a", "b", replies=replies)]).as_dict()["retokenized"] == 1
    assert "retokenized" not in counted(GAMES).as_dict()


def test_a_summary_says_why_it_cannot_tell_how_much_messages_depend_on_the_word():
    one_game_a_word = [game("tied game", "x", "y") | {"target_word": word} for word in ("a", "b")]
    assert "one game a word" in counted(one_game_a_word).as_dict()["no_word_dependence"]
    assert (
        "are equal"
        in counted([*one_game_a_word, game("tied game", "z") | {"target_word": "a"}]).as_dict()["no_word_dependence"]
    )
    known = [game("tied game", "x", "y") | {"target_word": word} for word in ("a", "a", "b")]
    assert "no_word_dependence" not in counted(known).as_dict()


def test_word_dependence_is_1_where_no_two_words_share_a_text_and_0_where_texts_do_not_depend_on_the_word():
    """Of n messages about one word, the pairs are n (n - 1) / 2; a game's own messages count among them."""

    def dependence(*words_and_texts):
        games = [game("tied game", *texts) | {"target_word": word} for word, *texts in words_and_texts]
        return counted(games).as_dict()["word_dependence"]["attacker"]

    assert dependence(("a", "x"), ("a", "x"), ("b", "y"), ("b", "y")) == 1
    assert dependence(("a", "x"), ("a", "x"), ("b", "x"), ("b", "x")) == 0
    # Same word: a-a same, b-b differs: 1 of 2. Different words: 4 pairs, x-x twice: 2 of 4.
    assert dependence(("a", "x"), ("a", "x"), ("b", "x"), ("b", "y")) == 0
    # a: x, x, y: 1 of 3 pairs the same. b: x: none. Different words: 2 of 3.
    assert dependence(("a", "x", "-", "x", "-", "y"), ("b", "x")) == pytest.approx(1 - (2 / 3) / (1 / 3))
    assert dependence(("a", "x"), ("b", "x")) is None  # no pairs about the same word
    assert dependence(("a", "x"), ("a", "y"), ("b", "x")) is None  # none of them is the same
    assert dependence() is None
