"""The report: its numbers and its games, from whole and from partial folders; the page parsed, and in Chromium."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import call
from plotly.offline import get_plotlyjs

from tools import report
from tools.games import load_game
from tools.games.taboo import ATTACKER_BREAKS, ATTACKER_WINS, DEFENDER_WINS, TIED
from tools.matches.stats import count_matches, result_rows
from tools.pages import page
from tools.pages.contents import SAMPLE, GameSample, marked, read_folder
from utils import UserError, write_json, write_records

TABOO, TWENTY_QUESTIONS = load_game("taboo"), load_game("twenty_questions")
SELF_PLAY = {ATTACKER_WINS: 6, DEFENDER_WINS: 8, ATTACKER_BREAKS: 4, TIED: 2}
NASTY = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><!-- \u2028 &lt; 'lemon'"
LINK = "<a href='https://x.example'>x</a> <b>b</b> &lt;i&gt;"


def played(outcomes: Mapping[str, int], game=TABOO, **more) -> list[dict]:
    """So many games of each outcome, each with a word of its own; the second message is empty, both are cut off."""
    history = [{"role": game.roles[0], "content": "Hello!"}, {"role": game.roles[1], "content": ""}]
    shared = {"game": game.name, "max_turns": 5, "history": history, "length": 2}
    shared |= {"replies": [{"finish_reason": "length"}] * 2}
    ends = [outcome for outcome, number in outcomes.items() for _ in range(number)]
    return [shared | {"target_word": f"word{n}", "outcome": end} | more for n, end in enumerate(ends)]


def met(first: str, second: str, outcomes: Mapping[str, int], game=TABOO, words: str = "w") -> list[dict]:
    """The same of a match; `first` has the first role."""
    return played(outcomes, game, **dict(zip(game.roles, (first, second), strict=True)), words=words, seed=0)


def make_match(folder: Path, games: list[dict], players: list[str], game=TABOO, against: str | None = None) -> Path:
    """Write what tools/evaluate_games.py leaves of these games."""
    write_records(folder / "games_results.json", games)
    settings = {"players": players, "against": against, "game": {"path": game.name}}
    results = {"settings": settings, "results": list(result_rows(count_matches(games, game)))}
    write_json(folder / "matches.json", results | {"games_path": "games_results.json"})
    return folder


def make_loop(folder: Path) -> Path:
    """Write a finished run of two epochs."""
    write_json(folder / "settings.json", {"settings": {"MODEL": "tiny", "EPOCHS": "2"}, "finished": True})
    for name, metric in (("imitation", "kl"), ("epoch1", "policy_loss"), ("epoch2", "policy_loss")):
        entries = [{"step": step, "loss": 1 / step, metric: 0.1} for step in (1, 2, 3)]
        write_json(folder / name / "model/trainer_state.json", {"log_history": [*entries, {"step": 3}]})
        write_json(folder / name / "model/train_results.json", {"train_loss": 1.0})  # named like a file of games
    for number in (1, 2):
        epoch = folder / f"epoch{number}"
        write_records(epoch / "episodes/words_results.json", played(SELF_PLAY))
        games = []
        for words in ("played", "held_out"):
            games += met(epoch.name, "imitation", {ATTACKER_WINS: 5 + number, TIED: 5 - number}, words=words)
            games += met("imitation", epoch.name, {ATTACKER_BREAKS: 4, DEFENDER_WINS: 6}, words=words)
        make_match(epoch / "eval", games, ["imitation", epoch.name], against="imitation")
    return folder


@pytest.fixture
def output(tmp_path) -> Path:
    return make_loop(tmp_path / "demo")


def points(traces: list[dict]) -> dict[str, list]:
    """The points (x, y) of each line, by its name."""
    return {trace["name"]: list(zip(trace["x"], trace["y"], strict=True)) for trace in traces}


# Games.


def test_all_games_are_counted(output):
    plays = read_folder(output, TABOO).plays
    (_, ends, _), (_, lengths, _), (_, faults, _), (_, facts, _) = page.play_charts(plays)  # one game a word
    shares = {outcome: number / 20 for outcome, number in SELF_PLAY.items()}
    assert points(ends) == {outcome: [("epoch1", share), ("epoch2", share)] for outcome, share in shares.items()}
    assert points(lengths)["all games"] == [("epoch1", 2), ("epoch2", 2)]
    found = points(faults)
    right = SELF_PLAY.get(DEFENDER_WINS, 0) / 20
    assert points(facts)["right guesses"] == [("epoch1", right), ("epoch2", right)]
    assert found["empty"][1] == ("epoch2", 1 / 2) and found["cut off at the token limit"][1] == ("epoch2", 1)


def test_word_dependence_is_shown_where_words_have_several_games():
    sample = GameSample(TWENTY_QUESTIONS)  # a game without facts of its own
    for episode in 2 * played({TWENTY_QUESTIONS.outcomes[0].name: 3}, TWENTY_QUESTIONS):
        sample.add(episode)
    *_, (title, dependence, _) = page.play_charts([("epoch1", sample)])
    assert title.startswith("Word dependence")
    role = TWENTY_QUESTIONS.roles[0]
    assert points(dependence)[role] == [("epoch1", sample.word_dependence()[role])] == [("epoch1", 0)]


@pytest.mark.parametrize("match, outcome", [("substring", ATTACKER_WINS), ("word", TIED)])
def test_a_stored_outcome_counts_and_a_released_game_without_one_is_judged(tmp_path, match, outcome):
    history = [{"role": "attacker", "content": "Hello!"}, {"role": "defender", "content": "We start."}]
    game = {"history": history, "target_word": "art", "max_turns": 1}
    write_json(tmp_path / "im_sampling_words_results.json", [game, game | {"outcome": DEFENDER_WINS, "length": 2}])
    made = read_folder(tmp_path, load_game("taboo", match=match))
    assert [(game["outcome"], game["length"]) for game in made.games] == [(outcome, 2), (DEFENDER_WINS, 2)]
    assert made.plays[0][1].outcomes == {outcome: 1, DEFENDER_WINS: 1}


def test_the_sample_is_bounded_has_all_outcomes_and_is_drawn_from_all_games():
    sample = GameSample(TABOO)
    for number, game in enumerate(played({TIED: 2000})):
        sample.add(game | {"outcome": ATTACKER_WINS} if number % 500 == 250 else game)
    shown = sample.sampled()
    assert Counter(game["outcome"] for game in shown) == {ATTACKER_WINS: 4, TIED: SAMPLE / 4}
    numbers = [game["number"] for game in shown]
    assert numbers == sorted(numbers) and {250, 750, 1250, 1750} < set(numbers)
    assert 700 < sum(numbers) / len(numbers) < 1300  # uniform: 1000 with a standard error of 79


def test_the_target_word_and_guesses_are_marked():
    assert marked(TABOO, "art", "") == []
    assert marked(TABOO, "city", "Many cities.") == [["", "Many "], ["secret", "cities"], ["", "."]]
    found = marked(TABOO, "dog", "I know the word! It is a dog")
    assert found == [["guess", "I know the word! It is a "], ["secret guess", "dog"]]


# Folders.


def test_a_finished_run_is_reported_whole_and_an_unfinished_one_says_what_is_missing(output):
    made = read_folder(output, TABOO)
    assert made.missing == [] and made.name == "demo"
    found = [(source["name"], source["games"]) for source in made.sources]
    assert found == [(f"epoch{k}, {kind}", n) for k in (1, 2) for kind, n in (("self-play", 20), ("match", 40))]
    charts = {title: points(traces) for title, traces, _ in page.training_charts(made.logs)}
    assert list(charts) == ["loss", "policy_loss", "kl"]
    assert charts["loss"]["epoch1"] == [(1, 1), (2, 1 / 2), (3, 1 / 3)] and list(charts["kl"]) == ["imitation"]
    write_json(output / "settings.json", {"settings": {"EPOCHS": "3"}, "finished": False})
    shutil.rmtree(output / "epoch2/model")
    missing = read_folder(output, TABOO).missing
    assert missing == ["self-play of epoch3: not finished", "training of epoch2, epoch3: not finished"]


def test_points_by_epoch_are_those_of_the_match_beside_imitation_against_itself(output):
    rows = [
        row
        for epoch in ("epoch1", "epoch2")
        for row in json.loads((output / epoch / "eval/matches.json").read_text())["results"]
        if row["player"] == epoch and row["seed"] is None
    ]
    # In self-play the attacker has 6 wins and half of 2 ties of 20 games.
    equals = {"in both roles": 0.5, "as attacker": 0.35, "as defender": 0.65}
    charts = page.match_charts(read_folder(output, TABOO))
    assert [title for title, *_ in charts] == [f"Points {role} against imitation" for role in equals]
    for (_, traces, layout), role, equal in zip(charts, ("both", *TABOO.roles), equals.values(), strict=True):
        assert [trace["name"] for trace in traces] == ["words: all", "words: played", "words: held_out"]
        for trace in traces:
            own = [row for row in rows if row["role"] == role and trace["name"] == f"words: {row['words']}"]
            bars = trace["error_y"]
            columns = zip(trace["x"], trace["y"], bars["arrayminus"], bars["array"], own, strict=True)
            for x, y, below, above, row in columns:
                assert (x, y) == (row["player"], row["points"])
                assert [y - below, y + above] == pytest.approx(row["points_interval"])
        dashed = layout["shapes"][0]
        assert (dashed["name"], dashed["y0"]) == ("imitation against itself, in self-play", pytest.approx(equal))
    alone = [game for words in ("played", "held_out") for game in met(*["imitation"] * 2, {TIED: 9}, words=words)]
    make_match(output / "imitation/eval", alone, ["imitation"], against="imitation")
    for _, _, layout in page.match_charts(read_folder(output, TABOO)):
        assert (layout["shapes"][0]["name"], layout["shapes"][0]["y0"]) == ("imitation against itself", 0.5)


@pytest.mark.parametrize(
    "outcome, other, expected",
    [
        (ATTACKER_WINS, DEFENDER_WINS, "new scores more than old: 100.0% [88.6, 100.0] of the points in both roles"),
        (DEFENDER_WINS, ATTACKER_WINS, "new scores less than old: 0.0% [0.0, 11.4] of the points"),
        (TIED, TIED, "new cannot be told from old: 50.0% [33.2, 66.8] of the points"),
    ],
)
def test_the_verdict_says_who_is_better_with_the_numbers(tmp_path, outcome, other, expected):
    make_match(tmp_path, met("new", "old", {outcome: 30}) + met("old", "new", {other: 30}), ["old", "new"])
    first, second = page.verdict(read_folder(tmp_path, TABOO))
    assert first.startswith(expected) and first.endswith("where equals score 50.0%, in 60 games.")
    assert second.startswith("It scores as attacker ") and ", as defender " in second
    wins, ties, losses = (f"{100.0 * (outcome == each):.1f}%" for each in (ATTACKER_WINS, TIED, DEFENDER_WINS))
    assert f"({wins} wins, {ties} ties, {losses} losses)" in first and f"({wins} wins, {ties} ties" in second


def test_players_who_all_met_have_a_verdict_and_one_alone_is_compared_with_nobody(tmp_path):
    games = [game for one in "abc" for other in "abc" if one != other for game in met(one, other, {TIED: 1})]
    made = read_folder(make_match(tmp_path / "all", games, ["a", "b", "c"]), TABOO)
    assert page.verdict(made)[0].startswith("c cannot be told from a: 50.0% [") and page.match_charts(made) == []
    made = read_folder(make_match(tmp_path / "alone", met("a", "a", {ATTACKER_WINS: 3}), ["a"]), TABOO)
    assert page.verdict(made)[0] == "a played itself only."


def test_a_folder_beside_the_epochs_is_no_epoch(output):
    (output / "epoch2").rename(output / "epoch1_old2")
    assert [name for name, _ in read_folder(output, TABOO).plays] == ["epoch1"]


def test_parts_of_a_run_have_a_page(output):
    rows = [
        {"model": model, "benchmark": name, "value": 40.0, "stderr": error}
        for model, name, error in (("base", "ARC-e", 2.0), ("base", "PIQA", None), ("epoch2", "ARC-e", 2.0))
    ]
    write_json(output / "reasoning/results.json", {"results": rows})
    for part in ("epoch1/episodes", "imitation/model", "reasoning"):
        printed = call(report.main, output / part).output
        assert printed.startswith("No match was played") and (output / part / "report.html").is_file()
    table = page.reasoning_table(read_folder(output / "reasoning", TABOO).reasoning)
    assert "<tr><td>base</td><td>40.0 ± 2.0</td><td>40.0</td></tr>" in table
    assert "<tr><td>epoch2</td><td>40.0 ± 2.0</td><td>-</td></tr>" in table


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("other.json", "{}", "no games, training, matches or scores"),
        ("a_b_c_results.json", '[{"history": []}]', "a_b_c_results.json: record 1: "),
        ("trainer_state.json", '{"log_hist', "trainer_state.json: not JSON"),
    ],
)
def test_bad_input_is_refused_by_its_name(tmp_path, name, content, named):
    (tmp_path / name).write_text(content)
    refused = call(report.main, tmp_path, status=2)
    assert named in refused.errors and not (tmp_path / "report.html").exists()


def test_another_game_is_reported_with_its_own_roles_outcomes_and_points(tmp_path):
    """In 20 Questions both players gain the point or none does: 25% of these games, which equals score too."""
    ends = {outcome.name: 1 for outcome in TWENTY_QUESTIONS.outcomes}
    write_records(tmp_path / "epoch1/episodes/im_sampling_x_results.json", played(ends, TWENTY_QUESTIONS))
    games = met("epoch1", "imitation", ends, TWENTY_QUESTIONS) + met("imitation", "epoch1", ends, TWENTY_QUESTIONS)
    make_match(tmp_path / "epoch1/eval", games, ["imitation", "epoch1"], TWENTY_QUESTIONS, against="imitation")
    with pytest.raises(UserError, match="pass --game with the one that was played"):  # self-play
        read_folder(tmp_path, TABOO)
    made = read_folder(tmp_path, TWENTY_QUESTIONS)
    assert points(page.play_charts(made.plays)[0][1]) == {outcome: [("epoch1", 0.25)] for outcome in ends}
    for _, traces, layout in page.match_charts(made):
        assert points(traces)["words: w"] == [("epoch1", 0.25)] and layout["shapes"][0]["y0"] == 0.25
    first, second = page.verdict(made)
    assert first == "Both players of a game always got the same points, so matches rank nobody."
    assert "as guesser 25.0% [" in second and "as answerer 25.0% [" in second
    noted = {game["messages"][0]["notes"].split(" · ")[0] for game in made.games if game["source"] == 1}
    assert noted == {"guesser, epoch1", "guesser, imitation"}
    styles = [tuple(style.values()) for style in page.outcome_styles(TWENTY_QUESTIONS).values()]
    assert len(set(styles)) == len(styles)  # outcomes of one colour have other dashes


def test_matches_of_another_game_are_shown_under_its_own_name(output):
    ends = {outcome.name: 1 for outcome in TWENTY_QUESTIONS.outcomes}
    shutil.rmtree(output / "epoch1/eval")
    games = met("epoch2", "imitation", ends, TWENTY_QUESTIONS) + met("imitation", "epoch2", ends, TWENTY_QUESTIONS)
    make_match(output / "epoch2/eval", games, ["imitation", "epoch2"], TWENTY_QUESTIONS, against="imitation")
    made = read_folder(output, TABOO)
    assert [source["name"] for source in made.sources] == ["epoch1, self-play", "epoch2, self-play"]
    first, second = page.verdict(made)
    assert "a game at twenty_questions always" in first and "as guesser 25.0% [" in second
    assert [title for title, *_ in page.match_charts(made)][1] == "Points as guesser against imitation"
    assert "<h2>Matches of twenty_questions</h2>" in page.page_html(made)


# The page.


@pytest.fixture(scope="module")
def nasty(tmp_path_factory) -> Path:
    """The page of a run whose words, messages and names of players hold markup."""
    folder = make_loop(tmp_path_factory.mktemp("nasty"))
    contents = [NASTY.replace("lemon", "fruit"), "", "A lemonade.", "I know the word! It is `lemon`!"]
    history = [{"role": TABOO.roles[place % 2], "content": text} for place, text in enumerate(contents)]
    game = {"target_word": "lemon", "max_turns": 5, "history": history, "outcome": ATTACKER_BREAKS, "length": 3}
    game |= {"attacker": f"new {LINK}", "defender": f"old {NASTY}", "words": LINK, "seed": 0}
    other = game | {"attacker": game["defender"], "defender": game["attacker"]}
    for epoch in ("epoch1", "epoch2"):
        shutil.rmtree(folder / epoch / "eval")
    make_match(folder / "eval", [game, other], [game["defender"], game["attacker"]])
    call(report.main, folder)
    return folder / "report.html"


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
    parsed = Scripts(nasty.read_text(encoding="utf-8"))
    assert parsed.loaded == ["data:,"]
    assert parsed.scripts.count(get_plotlyjs()) == 1
    assert sum(len(script) for script in parsed.scripts) < 1.2 * len(get_plotlyjs())
    assert not any("window.hacked" in script for script in parsed.scripts if "<script" in script)
    data = next(json.loads(script) for script in parsed.scripts if script.startswith('{"outcomes"'))
    shown = next(game for game in data["games"] if game["source"] == 0)
    assert "".join(text for _, text in shown["messages"][0]["parts"]) == NASTY.replace("lemon", "fruit")
    assert page.plain(LINK) == "&lt;a href='https://x.example'&gt;x&lt;/a&gt; &lt;b&gt;b&lt;/b&gt; &amp;lt;i&amp;gt;"


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
    assert texts("h2") == ["Matches", "Games", "Training", "Games to read"]
    assert len(texts("figure")) == len(texts(".plot-container")) == 3 + 4 + 3
    assert f"words: {LINK}" in texts(".legendtext") and f"new {LINK}" in texts(".xtick text")
    assert len(texts("#list option")) == 42
    browser.find_element("css selector", "#source option[value='0']").click()
    assert texts("#found") == ["2 of 42 games"]
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
