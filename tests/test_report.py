"""The report: its numbers and its games, from whole and from partial folders; the page parsed, and in Chromium."""

import json
import random
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import call
from plotly.offline import get_plotlyjs

from tools import report
from tools.games import load_game
from tools.games.taboo import ATTACKER, ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED
from tools.matches.stats import count_matches, result_rows
from tools.pages.contents import GameSample, Report, marked, report_of_episodes, report_of_folder
from tools.pages.page import (
    match_charts,
    outcome_styles,
    page_html,
    plain,
    play_charts,
    reasoning_table,
    training_charts,
    verdict,
)
from utils import UserError, write_json, write_records

TABOO, TWENTY_QUESTIONS = load_game("taboo"), load_game("twenty_questions")
OUTCOMES = [outcome.name for outcome in TABOO.outcomes]
WORDS = ("violin", "harbour", "start", "lemon")
NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!-- \u2028 &lt; 'lemon'"
LINK = "<a href='https://x.example'>x</a> <b>b</b> &lt;i&gt;"


# --- a folder as the loop leaves it --------------------------------------------------------------------------------


def make_game(index: int, rng: random.Random) -> dict:
    """A game that ends in one of all ways."""
    word, ending = rng.choice(WORDS), rng.choice(OUTCOMES)
    last = 10 if ending == TIED else 2 * rng.randint(1, 5) - (ending == ATTACKER_BREAKS)
    texts = [rng.choice(["It has four strings.", "Is it old?", "", "Go on."]) for _ in range(last)]
    if ending != TIED:
        texts[-1] = {
            ATTACKER_WINS: f"Do you mean a {word.upper()}?",
            DEFENDER_WINS: f"I know the word! It is `{word}`! That was easy.",
            ATTACKER_BREAKS: f"People love {word}s.",
        }[ending]
    history = [{"role": TABOO.roles[place % 2], "content": text} for place, text in enumerate(texts)]
    outcome, length = TABOO.judge(history, word, 5)
    replies = [{"finish_reason": rng.choice(["stop", "stop", "length"]), "tokens": 9}] * last
    game = {"index": index, "target_word": word, "max_turns": 5, "history": history, "outcome": outcome}
    return game | {"length": length, "replies": replies}


def make_match(folder: Path, games: list[dict], players: list[str], game=TABOO, against: str | None = None) -> Path:
    """What tools/evaluate_games.py leaves of these games."""
    write_records(folder / "games_results.json", games)
    settings = {"players": players, "against": against}
    results = {"settings": settings, "results": list(result_rows(count_matches(games, game)))}
    write_json(folder / "matches.json", results | {"games_path": "games_results.json"})
    return folder


def met(player: str, opponent: str, outcome: str, words: int = 30) -> list[dict]:
    """Games that all end alike; `player` is the attacker."""
    game = {"max_turns": 5, "history": [{"role": ATTACKER, "content": "Hello!"}], "length": 1, "outcome": outcome}
    game |= {"attacker": player, "defender": opponent, "words": "w", "seed": 0}
    return [game | {"target_word": f"word{number}"} for number in range(words)]


def against_imitation(player: str, rng: random.Random) -> list[dict]:
    pairs = dict.fromkeys([(player, "imitation"), ("imitation", player)])
    return [
        make_game(index, rng) | {"attacker": attacker, "defender": defender, "words": words, "seed": 0}
        for words in ("played", "held_out")
        for attacker, defender in pairs
        for index in range(10)
    ]


@pytest.fixture
def output(tmp_path) -> Path:
    """A finished run of two epochs."""
    rng, folder = random.Random(0), tmp_path / "demo"
    write_json(folder / "settings.json", {"MODEL": "tiny", "EPOCHS": "2"})
    for number in range(3):
        stage = folder / (f"epoch{number}" if number else "imitation")
        entries = [{"step": step, "loss": 1 / step, "kl" if not number else "policy_loss": 0.1} for step in (1, 2, 3)]
        write_json(stage / "model/trainer_state.json", {"log_history": [*entries, {"step": 3, "train_loss": 0.5}]})
        write_json(stage / "model/train_results.json", {"train_loss": 0.5})
        if number:
            games = [make_game(index, rng) for index in range(60)]
            write_records(stage / "episodes/im_sampling_words_results.json", games)
            make_match(
                stage / "eval", against_imitation(stage.name, rng), ["imitation", stage.name], against="imitation"
            )
    return folder


def of_run(folder: Path, games: int = 20) -> Report:
    return report_of_folder(folder, TABOO, games)


def points(traces: list[dict]) -> dict[str, list]:
    """[x, value] and, where there is one, the interval of each point, by the name of its line."""
    found = {}
    for trace in traces:
        lines = found[trace["name"]] = [list(pair) for pair in zip(trace["x"], trace["y"], strict=True)]
        if "error_y" in trace:
            bars = zip(trace["error_y"]["arrayminus"], trace["error_y"]["array"], strict=True)
            for point, (below, above) in zip(lines, bars, strict=True):
                point += [point[1] - below, point[1] + above]
    return found


# --- counting and sampling -----------------------------------------------------------------------------------------


def test_all_games_are_counted_with_wilsons_intervals(output):
    made = of_run(output)
    games = json.loads((output / "epoch2/episodes/im_sampling_words_results.json").read_text())
    (_, ends, _), (_, lengths, _), (_, faults, _) = play_charts(made.plays)
    assert list(points(ends)) == OUTCOMES
    for outcome, found in points(ends).items():
        share = sum(game["outcome"] == outcome for game in games) / 60
        assert [found[0][0], *found[1][:2]] == ["epoch1", "epoch2", pytest.approx(share)]
        assert found[1][2] <= share <= found[1][3]
    assert points(lengths)["all games"][1][1] == pytest.approx(sum(game["length"] for game in games) / 60)
    messages = [message for game in games for message in game["history"]]
    cut = sum(reply["finish_reason"] == "length" for game in games for reply in game["replies"])
    found = points(faults)
    assert found["empty"][1][1] == pytest.approx(sum(not message["content"] for message in messages) / len(messages))
    assert found["cut off at the token limit"][1][1] == pytest.approx(cut / len(messages))


def test_a_stored_outcome_counts_and_an_episode_without_one_is_judged():
    history = [{"role": "attacker", "content": "Hello!"}, {"role": "defender", "content": "We start."}]
    game = {"history": history, "target_word": "art", "max_turns": 1}
    for match, outcome in (("substring", ATTACKER_WINS), ("word", TIED)):
        sample = GameSample(load_game("taboo", match=match), 1)
        sample.add(game)
        sample.add(game | {"outcome": DEFENDER_WINS, "length": 2})
        assert sample.outcomes == {outcome: 1, DEFENDER_WINS: 1}


def test_the_sample_is_bounded_has_all_outcomes_and_is_drawn_from_all_games():
    sample = GameSample(TABOO, 160)
    for number in range(2000):
        outcome = ATTACKER_WINS if number % 500 == 250 else TIED
        for game in met("a", "b", outcome, words=1):
            sample.add(game)
    shown = sample.sampled()
    assert Counter(game["outcome"] for game in shown) == {ATTACKER_WINS: 4, TIED: 40}
    numbers = [game["number"] for game in shown]
    assert numbers == sorted(numbers) and {250, 750, 1250, 1750} < set(numbers)
    assert 700 < sum(numbers) / len(numbers) < 1300  # uniform: 1000 with a standard error of 87


@pytest.mark.parametrize(
    "text, word, pieces",
    [
        ("", "art", []),
        ("ART, started", "art", [("secret", "ART"), ("", ", st"), ("secret", "arted")]),
        ("Many cities.", "city", [("", "Many "), ("secret", "cities"), ("", ".")]),
        ("I know the word! It is a dog", "dog", [("guess", "I know the word! It is a "), ("secret guess", "dog")]),
        ("a\x1b[31m\u202eb\n", "dog", [("", "a\\u001b[31m\\u202eb\n")]),  # what a browser would not show
    ],
)
def test_the_target_word_and_guesses_are_marked(text, word, pieces):
    assert marked(TABOO, word, text) == [list(piece) for piece in pieces]


# --- a folder ------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_reported_whole(output):
    made = of_run(output)
    assert made.missing == [] and made.name == "demo"
    found = [(source["name"], source["games"]) for source in made.sources]
    assert found == [(f"epoch{k}, {kind}", n) for k in (1, 2) for kind, n in (("self-play", 60), ("match", 40))]
    assert [title for title, _ in made.settings] == ["settings.json"]
    charts = {title: points(traces) for title, traces, _ in training_charts(made.logs, TABOO)}
    assert list(charts) == ["loss", "policy_loss", "kl"]
    assert charts["loss"]["epoch1"] == [[1, 1], [2, 1 / 2], [3, 1 / 3]] and list(charts["kl"]) == ["imitation"]


ROLES = (("both", "in both roles"), ("attacker", "as attacker"), ("defender", "as defender"))


def test_points_by_epoch_are_those_of_the_match_beside_imitation_against_itself(output):
    def lines() -> dict[str, tuple[dict, list]]:
        _, charts = match_charts(of_run(output))
        return {title: (points(traces), layout["shapes"][0]) for title, traces, layout in charts}

    games = json.loads((output / "epoch1/episodes/im_sampling_words_results.json").read_text())
    ends = Counter(game["outcome"] for game in games)
    own = {"attacker": (ends[ATTACKER_WINS] + ends[TIED] / 2) / len(games), "both": 0.5}
    own["defender"] = 1 - own["attacker"]
    for role, title in ROLES:
        found, dashed = lines()[f"Points {title} against imitation"]
        assert list(found) == ["words: all", "words: played", "words: held_out"]
        for words in ("all", "played", "held_out"):
            for number, epoch in enumerate(("epoch1", "epoch2")):
                rows = json.loads((output / epoch / "eval/matches.json").read_text())["results"]
                key = (epoch, "imitation", words, role, None)
                names = ("player", "opponent", "words", "role", "seed")
                (row,) = (row for row in rows if tuple(row[name] for name in names) == key)
                expected = [row["points"], *row["points_interval"]]
                assert found[f"words: {words}"][number] == [epoch, *(pytest.approx(value) for value in expected)]
        assert (dashed["name"], dashed["y0"]) == ("imitation against itself, in self-play", pytest.approx(own[role]))


@pytest.mark.parametrize(
    "outcome, other, expected",
    [
        (ATTACKER_WINS, DEFENDER_WINS, "new plays better than old: 100.0% [88.6, 100.0] of the points in both roles"),
        (DEFENDER_WINS, ATTACKER_WINS, "new plays worse than old: 0.0% [0.0, 11.4] of the points"),
        (TIED, TIED, "new cannot be told from old: 50.0% [33.2, 66.8] of the points"),
    ],
)
def test_the_verdict_says_who_is_better_with_the_numbers(tmp_path, outcome, other, expected):
    made = of_run(make_match(tmp_path, met("new", "old", outcome) + met("old", "new", other), ["old", "new"]))
    first, second = verdict(made)
    assert first.startswith(expected) and first.endswith("where equals score 50.0%, in 60 games.")
    assert second.startswith("It scores as attacker ") and ", as defender " in second
    assert match_charts(made)[0] == " against old"


def test_a_player_against_itself_is_compared_with_nobody_and_gives_the_line_to_compare_with(tmp_path, output):
    alone = of_run(make_match(tmp_path / "alone", met("imitation", "imitation", ATTACKER_WINS), ["imitation"]))
    assert verdict(alone)[0] == "imitation played itself only."
    games = [
        game | {"words": words} for game in met("imitation", "imitation", TIED) for words in ("played", "held_out")
    ]
    make_match(output / "imitation/eval", games, ["imitation"], against="imitation")
    _, charts = match_charts(of_run(output))
    for _, _, layout in charts:
        assert (layout["shapes"][0]["name"], layout["shapes"][0]["y0"]) == ("imitation against itself", 0.5)


def test_players_who_all_met_stand_side_by_side(tmp_path):
    games = [game for one in "abc" for other in "abc" if one != other for game in met(one, other, TIED, words=1)]
    made = of_run(make_match(tmp_path, games, ["a", "b", "c"]))
    against, charts = match_charts(made)
    assert against == "" and [x for x, *_ in points(charts[0][1])["words: w"]] == ["b – a", "c – a", "c – b"]
    assert verdict(made)[0].startswith("c cannot be told from a: 50.0% [")


def test_parts_of_a_run_have_a_page_and_say_what_they_cannot_tell(output, tmp_path):
    rows = [
        {"model": model, "benchmark": name, "value": value, "stderr": error}
        for model, value, name, error in (("base", 40.0, "ARC-e", 2.0), ("base", 40.0, "PIQA", None))
    ]
    write_json(tmp_path / "reasoning/results.json", {"results": [*rows, rows[0] | {"model": "epoch2"}]})
    for folder in (output / "epoch1/episodes", output / "imitation/model", tmp_path / "reasoning"):
        made = of_run(folder)
        assert verdict(made)[0].startswith("No match was played")
        page_html(made)
    table = reasoning_table(made.reasoning)
    assert "<tr><td>base</td><td>40.0 ± 2.0</td><td>40.0</td></tr>" in table
    assert "<tr><td>epoch2</td><td>40.0 ± 2.0</td><td>-</td></tr>" in table


def test_a_run_in_its_middle_is_reported_with_what_is_missing(output):
    stem = output / "epoch2/episodes/im_sampling_words"
    games = [json.dumps(make_game(index, random.Random(index))) for index in range(8)]
    Path(f"{stem}_results.json").unlink()
    Path(f"{stem}_rank0.jsonl").write_text("\n".join(games[:5]) + "\n" + games[5][:40])  # a line being written
    Path(f"{stem}_rank1.jsonl").write_text("\n".join(games[6:]) + "\n")
    Path(f"{stem}_rank2.jsonl").write_text("")
    shutil.rmtree(output / "epoch2/eval")
    state = output / "epoch1/model/trainer_state.json"
    (output / "epoch1/model/checkpoint-3").mkdir()
    state.rename(output / "epoch1/model/checkpoint-3/trainer_state.json")
    (output / "epoch1/model/train_results.json").unlink()
    (output / "epoch2/model/trainer_state.json").write_text('{"log_hist')
    write_json(output / "settings.json", {"EPOCHS": "20000000"})
    made = of_run(output)
    assert made.sources[2]["games"] == 7
    for line in (
        "epoch1: training has not ended; its curves go to step 3.",
        "epoch2: games are still being played; 7 are there.",
        "epochs 3 to 20000000: not begun.",
    ):
        assert line in made.missing
    assert any("epoch2/model/trainer_state.json: not JSON" in line for line in made.missing)
    assert [name for name, _ in made.logs] == ["imitation", "epoch1"]


# --- files of episodes, and other games ----------------------------------------------------------------------------


def test_files_in_the_released_form_and_of_play_under_way_are_reported(tmp_path):
    games = [make_game(index, random.Random(index)) for index in range(40)]
    released = [{key: game[key] for key in ("history", "target_word", "max_turns")} for game in games]
    write_json(tmp_path / "im_llama2_sampling_all_words_results.json", released)
    (tmp_path / "m_sampling_w_rank0.jsonl").write_text(json.dumps(games[0]) + "\n" + json.dumps(games[1])[:50])
    (tmp_path / "m_sampling_w_rank1.jsonl").touch()
    made = report_of_episodes(sorted(tmp_path.iterdir()), TABOO, 160)
    assert [(source["games"], source["sampled"]) for source in made.sources] == [(40, 40), (1, 1), (0, 0)]
    shown = [(game["word"], game["outcome"], game["length"]) for game in made.games[:40]]
    assert shown == [(game["target_word"], game["outcome"], game["length"]) for game in games]
    page_html(made)


@pytest.mark.parametrize(
    "words, named",
    [
        (["{folder}"], "no games, training, matches or scores"),
        (["{folder}", "--episodes", "x.json"], "give either FOLDER"),
        (["--episodes", "x.json"], "--episodes needs --output"),
        (["--episodes", "{folder}/bad.jsonl", "--output", "{folder}/x.html"], "bad.jsonl:2: 'target_word' is missing"),
        (["--episodes", "{folder}/odd.jsonl", "--output", "{folder}/x.html"], "odd.jsonl:1: 'replies' must be"),
    ],
)
def test_bad_input_is_refused_by_its_name(tmp_path, words, named):
    game = make_game(0, random.Random(0))
    write_records(tmp_path / "bad.jsonl", [game, {"history": []}])
    write_records(tmp_path / "odd.jsonl", [game | {"replies": [1]}])
    refused = call(report.main, *(word.format(folder=tmp_path) for word in words), status=2)
    assert named in refused.errors and not (tmp_path / "x.html").exists()


def question_games() -> list[dict]:
    said = {
        "found": ["Is it hot?", "Yes.", "Is it `tea`?"],
        "answerer says the word": ["Is it hot?", "Yes, it is tea."],
        "no answer": ["Is it hot?", "Perhaps."],
        "not found": ["Is it hot?", "No!"],
    }
    return [
        {"game": "twenty_questions", "target_word": "tea", "max_turns": 20, "outcome": outcome, "length": len(texts)}
        | {"history": [{"role": TWENTY_QUESTIONS.roles[n % 2], "content": text} for n, text in enumerate(texts)]}
        for outcome, texts in said.items()
    ]


def test_another_game_is_reported_with_its_own_roles_outcomes_and_points(tmp_path):
    """In 20 Questions both players gain the point or none does: 25% of these games, which equals score too."""
    write_records(tmp_path / "epoch1/episodes/im_sampling_x_results.json", question_games())
    who = [{"guesser": "epoch1", "answerer": "imitation"}, {"guesser": "imitation", "answerer": "epoch1"}]
    games = [game | pair | {"words": "w", "seed": 0} for game in question_games() for pair in who]
    make_match(tmp_path / "epoch1/eval", games, ["imitation", "epoch1"], TWENTY_QUESTIONS, against="imitation")
    with pytest.raises(UserError, match="--game names the one that was played"):
        of_run(tmp_path)
    made = report_of_folder(tmp_path, TWENTY_QUESTIONS, 10)
    ends = points(play_charts(made.plays)[0][1])
    assert {name: line[0][1] for name, line in ends.items()} == {game["outcome"]: 0.25 for game in question_games()}
    for _, traces, layout in match_charts(made)[1]:
        assert points(traces)["words: w"][0][:2] == ["epoch1", 0.25] and layout["shapes"][0]["y0"] == 0.25
    assert "where equals score 25.0%" in verdict(made)[0]
    noted = {game["messages"][0]["notes"].split(" · ")[0] for game in made.games if game["source"] == 1}
    assert noted == {"guesser, epoch1", "guesser, imitation"}
    styles = [tuple(style.values()) for style in outcome_styles(TWENTY_QUESTIONS).values()]
    assert len(set(styles)) == len(styles)  # outcomes of one colour have other dashes


# --- the page ------------------------------------------------------------------------------------------------------


@pytest.fixture
def nasty(output, tmp_path) -> Path:
    """The page of a run whose words, messages and names of players hold markup."""
    contents = [NASTY.replace("lemon", "fruit"), "", "A lemonade.", "I know the word! It is `lemon`!"]
    history = [{"role": TABOO.roles[place % 2], "content": text} for place, text in enumerate(contents)]
    game = {"target_word": "lemon", "max_turns": 5, "history": history, "outcome": ATTACKER_BREAKS, "length": 3}
    game |= {"attacker": f"new {LINK}", "defender": f"old {NASTY}", "words": LINK, "seed": 0}
    other = game | {"attacker": game["defender"], "defender": game["attacker"]}
    for epoch in ("epoch1", "epoch2"):
        shutil.rmtree(output / epoch / "eval")
    make_match(output / "eval", [game, other], [game["defender"], game["attacker"]])
    call(report.main, output)
    return output / "report.html"


class Scripts(HTMLParser):
    """The script elements of a page, and all attributes that load something."""

    def __init__(self, page: str):
        super().__init__()
        self.scripts, self.loaded, self.inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.inside = tag == "script"
        self.scripts += [""] * self.inside
        self.loaded += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


def test_the_page_loads_nothing_holds_plotly_once_and_escapes_what_players_wrote(nasty):
    page = nasty.read_text(encoding="utf-8")
    parsed = Scripts(page)
    assert parsed.loaded == ["data:,"]
    assert parsed.scripts.count(get_plotlyjs()) == 1 and page.count(get_plotlyjs()[:200]) == 1
    assert not any("window.hacked" in script for script in parsed.scripts if "<script" in script)
    data = next(json.loads(script) for script in parsed.scripts if script.startswith('{"outcomes"'))
    (shown,) = (game for game in data["games"] if game["source"] == 0 and game["number"] == 0)
    assert "".join(text for _, text in shown["messages"][0]["parts"]) == NASTY.replace("lemon", "fruit").replace(
        "\u2028", "\\u2028"
    )
    assert plain(LINK) == "&lt;a href='https://x.example'&gt;x&lt;/a&gt; &lt;b&gt;b&lt;/b&gt; &amp;lt;i&amp;gt;"


@pytest.fixture
def browser(tmp_path):
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
    flags += f"disable-component-update disable-sync window-size=1280,900 user-data-dir={tmp_path / 'browser'}"
    for flag in flags.split():
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver))
    yield driver
    driver.quit()


def test_a_browser_shows_charts_and_games_as_text_without_errors_or_requests(browser, nasty):
    def texts(selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).map((e) => "
        found = browser.execute_script(script + "(e.innerText ?? e.textContent).trim())", selector)
        return [text.replace("\xa0", " ") for text in found]

    browser.get(nasty.as_uri())
    hostile = NASTY.replace("\u2028", "\\u2028")
    assert texts("h2") == [f"Matches against old {hostile}", "Games", "Training", "Games to read", "Settings"]
    assert len(texts("figure")) == len(texts(".plot-container")) == 3 + 3 + 3
    assert f"words: {LINK}" in texts(".legendtext") and f"new {LINK}" in texts(".xtick text")
    assert len(texts("#list option")) == 122
    browser.find_element("css selector", "#source option[value='0']").click()
    assert texts("#found") == ["2 of 122 games"]
    messages = texts(".message")
    assert "</script><script>window.hacked = 1</script><img src=x" in messages[0] and "(empty message)" in messages[1]
    assert "decides: attacker breaks the rules" in messages[2] and texts(".decisive .secret") == ["lemon"]
    assert "not counted" in messages[3] and "decides" not in messages[3]
    browser.find_element("id", "search").send_keys("xyz")
    assert texts("#list option") == [] and "No game" in texts("#game")[0]
    assert browser.execute_script("return window.hacked") is None
    assert browser.find_elements("css selector", "img, figure a, figure b") == []
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith(("chrome:", "data:"))} == {nasty.as_uri()}
