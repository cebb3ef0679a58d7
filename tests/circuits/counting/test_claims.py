"""The published figures beside ours: rules on planted numbers, and the command on small models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from circuits.counting import claims, paper
from circuits.counting.claims import CLAIMS, CONTROL, FAILS, HOLDS, UNMEASURED, Claim, Shown
from circuits.counting.display import percent
from interp.errors import InputError


def _interval(key: str, value: float, half: float = 0.005) -> dict:
    return {key: value, f"{key}.low": value - half, f"{key}.high": value + half, f"{key}.n": 400}


def _claim(judge, *keys: str) -> Claim:
    return Claim("it", "100 %", "-", tuple(Shown(key, key) for key in keys), judge, "a rule")


@pytest.mark.parametrize(
    ("value", "said"),
    [(1.0, HOLDS), (0.987, HOLDS), (0.98, FAILS), (0.91, HOLDS), (0.906, HOLDS), (0.89, FAILS)],
)
def test_a_range_is_reached_by_an_interval_that_meets_it(value, said):
    ends = (0.99, 1.0) if value > 0.95 else (0.9, 0.91)
    assert claims.reaches("a", *ends)(_interval("a", value)) == said


@pytest.mark.parametrize(
    ("half", "said"), [(0.07, HOLDS), (0.08, UNMEASURED), (0.3, UNMEASURED), (0.01, FAILS)]
)
def test_an_interval_that_is_wide_may_fail_and_cannot_hold(half, said):
    assert claims.reaches("a", 0.5, 0.55)(_interval("a", 0.6, half)) == said
    assert claims.reaches("a", 0.0, 0.2)(_interval("a", 0.6, 0.3)) == FAILS


def test_all_parts_must_hold():
    both = claims.every(claims.reaches("a", 0.99, 1.0), claims.reaches("b", 0.99, 1.0))
    one = _interval("a", 1.0)
    assert both(one | _interval("b", 1.0)) == HOLDS
    assert both(one | _interval("b", 0.9)) == both(_interval("b", 0.9) | one) == FAILS
    assert both(one | _interval("b", 0.9, 0.2)) == UNMEASURED
    assert both(_interval("a", 0.5) | _interval("b", 0.9, 0.2)) == FAILS


def test_a_control_that_fails_and_a_need_that_is_not_met_change_the_verdict():
    right, wrong = _interval("a", 1.0), _interval("a", 0.5)
    judge = claims.reaches("a", 0.99, 1.0)
    assert claims.controlled(judge, lambda _: True)(right) == HOLDS
    assert claims.controlled(judge, lambda _: False)(right) == CONTROL
    assert claims.controlled(judge, lambda _: False)(wrong) == FAILS
    assert claims.needing(judge, lambda _: True)(wrong) == FAILS
    assert claims.needing(judge, lambda _: False)(right) == UNMEASURED


def test_seeds_that_disagree_are_named():
    claim = _claim(claims.reaches("a", 0.99, 1.0), "a")
    seeds = {0: _interval("a", 1.0), 1: _interval("a", 0.5), 2: _interval("a", 1.0), 3: {}}
    assert claims.verdict(claim, {0: seeds[0], 2: seeds[2]}) == HOLDS
    assert claims.verdict(claim, seeds) == (
        f"{HOLDS} (seed 0, 2); {FAILS} (seed 1); {UNMEASURED} (seed 3)"
    )


def _judged(word: str):
    (claim,) = [claim for claim in CLAIMS if word in claim.claim]
    return claim.judge


@pytest.mark.parametrize(
    ("gap", "untrained", "said"),
    [(0.0, 0.0, CONTROL), (0.0, 0.502, CONTROL), (0.0, 2.0, HOLDS), (1.0, 0.0, FAILS)],
)
def test_no_vision_gap_says_little_where_an_untrained_encoder_has_none(gap, untrained, said):
    metrics = _interval("vision_gap.untrained.ve", untrained)
    for regime in ("id", "ve", "fe"):
        metrics |= _interval(f"vision_gap.{regime}", gap)
    assert _judged("vision gap 0")(metrics) == said


@pytest.mark.parametrize(
    ("excess", "said"), [(0.3, CONTROL), (0.0, FAILS), (-0.2, FAILS), (None, UNMEASURED)]
)
def test_different_heads_are_judged_against_the_baselines(excess, said):
    metrics = {} if excess is None else _interval("heads.excess", excess)
    assert _judged("Seeing and reading")(metrics) == said


@pytest.mark.parametrize(
    ("vision", "text", "said"),
    [(0.0, 1.0, HOLDS), (0.0, 0.5, UNMEASURED), (0.2, 1.0, FAILS), (0.2, 0.5, UNMEASURED)],
)
def test_pictures_of_unseen_counts_fail_only_where_text_knows_the_words(vision, text, said):
    metrics = _interval("accuracy.vision.ve", vision) | _interval("accuracy.text.ve", text)
    assert _judged("Pictures of unseen counts")(metrics) == said


@pytest.mark.parametrize(
    ("vision", "text", "said"),
    [(0.0, 0.0, CONTROL), (0.0, 0.87, CONTROL), (0.0, 1.0, HOLDS), (0.2, 0.0, FAILS)],
)
def test_failing_beyond_both_says_nothing_of_pictures_where_text_fails_too(vision, text, said):
    metrics = _interval("accuracy.vision.fe", vision) | _interval("accuracy.text.fe", text)
    assert _judged("Pictures of counts beyond both")(metrics) == said
    near = _interval("comparison.vision.fe", 0.46 + vision)
    near |= _interval("comparison.text.fe", 0.55 + 0.4 * text)
    assert _judged("near chance beyond both")(near) == said


@pytest.mark.parametrize(
    ("published", "lost", "text", "said"),
    [
        (0.95, 0.3, 1.0, CONTROL),
        (0.95, 0.044, 1.0, HOLDS),
        (0.95, 0.046, 1.0, CONTROL),
        (0.897, 0.0, 1.0, HOLDS),
        (0.89, 0.0, 1.0, FAILS),
        (0.95, 0.0, 0.6, UNMEASURED),
    ],
)
def test_far_pairs_are_told_from_near_ones(published, lost, text, said):
    metrics = _interval("comparison.vision.ve", published)
    metrics |= _interval("comparison.gap.ve.beyond_id", lost)
    metrics |= _interval("comparison.text.ve.near", text)
    assert _judged("still compares")(metrics) == said


@pytest.mark.parametrize(
    ("black", "white", "said"), [(1.0, 1.0, HOLDS), (1.0, 0.4, CONTROL), (0.6, 1.0, FAILS)]
)
def test_masking_is_read_beside_white_stones(black, white, said):
    metrics: dict = {}
    for k in (1, 2, 3, 4):
        metrics |= _interval(f"masking.vision.black.k{k}", black)
        metrics |= _interval(f"masking.vision.white.k{k}", white)
    assert _judged("k up to 4")(metrics) == said


def test_the_language_gap_must_jump_and_attractors_must_exceed_right_answers():
    jump = _interval("language_gap.id", 0.0) | _interval("language_gap.ve", 3.0)
    jump |= _interval("language_gap.text.ve", 0.0)
    assert _judged("language gap")(jump) == HOLDS
    assert _judged("language gap")(jump | _interval("language_gap.ve", 0.2)) == FAILS
    assert _judged("language gap")(jump | _interval("language_gap.id", 0.6)) == FAILS
    assert _judged("language gap")(jump | _interval("language_gap.text.ve", 0.6)) == UNMEASURED
    places = ("edge", "last_decade", "small")
    none = {k: v for p in places for k, v in _interval(f"topology.excess.ve.{p}", -0.1).items()}
    assert _judged("attractors")(none) == FAILS
    for place in places:  # one that draws more than text is enough
        for excess, said in ((0.006, CONTROL), (0.004, FAILS)):
            one = _interval(f"topology.excess.ve.{place}", excess)
            assert _judged("attractors")(none | one) == said


@pytest.mark.parametrize(
    ("last", "value", "said"),
    [(49, 0.99, HOLDS), (49, 0.0, FAILS), (120, 0.0, UNMEASURED), (99, 0.97, FAILS)],
)
def test_text_beyond_the_taught_is_not_judged_where_answers_need_three_digits(last, value, said):
    metrics = {**_interval("accuracy.text.fe", value), "fe.last": last}
    assert _judged("Text goes beyond")(metrics) == said


@pytest.fixture(scope="module")
def measured(tmp_path_factory, small_subject, write_models) -> tuple[paper.Config, dict]:
    """The command on two folders of small models, with few examples."""
    root = tmp_path_factory.mktemp("paper")
    models = tuple(str(write_models(small_subject, root / name)) for name in ("one", "two"))
    config = paper.Config(out=root / "new" / "runs", models=models, per_count=2)
    return config, paper.run(config)


def test_every_number_on_the_page_is_a_metric_of_the_diagnosis(measured, small_subject):
    config, found = measured
    page = (config.out / "findings.md").read_text()
    for name in ("one", "two"):
        saved = json.loads((config.out / name / "metrics.json").read_text())
        own = {k.removeprefix("seed_4."): v for k, v in saved.items()}
        for claim in CLAIMS:
            assert f"## {claim.claim}" in page
            for shown in claim.shown:
                assert f"| {name} | {shown.what} | {shown.written(own, shown.key)} |" in page
        assert found[name][4]["accuracy.vision.ve"] == own["accuracy.vision.ve"]
        assert found[name][4]["fe.last"] == small_subject.world.regimes["fe"][-1]
    assert paper.command(config) in page


def test_a_diagnosis_that_is_there_is_not_made_again_and_another_one_is(measured):
    config, found = measured
    before = (config.out / "one" / "config.json").read_bytes()
    told = []
    again = paper.run(config, lambda what, share: told.append(what))
    assert again == found and told == []
    assert (config.out / "one" / "config.json").read_bytes() == before
    with pytest.raises(KeyboardInterrupt):
        paper.run(replace(config, per_count=3), _interrupt)
    assert (config.out / "one" / "config.json").read_bytes() == before


def _interrupt(what: str, share: float) -> None:
    raise KeyboardInterrupt


def test_a_preset_without_examples_of_a_regime_is_not_judged_there(measured):
    _, found = measured
    part = {k: v for k, v in found["one"][4].items() if ".fe" not in k}
    (claim,) = [claim for claim in CLAIMS if claim.published == "FE 0 %"]
    assert claims.verdict(claim, {0: part}) == UNMEASURED


def test_the_overview_has_a_row_for_every_claim_and_the_large_model(measured):
    table = claims.overview(measured[1])
    assert len(table.rows) == len(CLAIMS) + len(claims.ELSEWHERE)
    assert {row[3] for row in table.rows[-2:]} == {UNMEASURED}
    assert {row[3] for row in table.rows} <= {HOLDS, CONTROL, FAILS, UNMEASURED}


def test_every_claim_is_counted_once_under_its_verdict_or_as_one_on_which_seeds_differ(measured):
    one = measured[1]["one"][4]
    words = claims.verdict(CLAIMS[0], {4: one})
    other = {**one, **_interval("accuracy.vision.id", 1.0 if words == FAILS else 0.5)}
    table = claims.tally({"same": {4: one}, "mixed": {4: one, 5: other}})
    same, mixed = ({row[0]: int(row[i]) for row in table.rows} for i in (1, 2))
    assert sum(same.values()) == sum(mixed.values()) == len(CLAIMS)
    said = [claims.verdict(claim, {4: one}) for claim in CLAIMS]
    assert same == {w: said.count(w) for w in (HOLDS, CONTROL, FAILS, UNMEASURED)} | {
        "seeds differ": 0
    }
    assert mixed == {**same, words: same[words] - 1, "seeds differ": 1}


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ((), "name at least one"),
        (("tiny", "tiny"), "tiny and tiny would both be written to tiny"),
        (("tiny", "a/tiny/"), "tiny and a/tiny/ would both be written to tiny"),
        (("a/b", "a/c/../b"), "a/b and a/c/../b would both be written to b"),
    ],
)
def test_models_have_different_names(tmp_path, models, said):
    with pytest.raises(InputError, match=said):
        paper.run(paper.Config(out=tmp_path, models=models))


@pytest.mark.parametrize(
    ("model", "said"), [("nope", "no preset and no folder"), ("paper-original", "it ships none")]
)
def test_a_model_that_is_not_there_is_refused_before_another_is_measured(tmp_path, model, said):
    with pytest.raises(InputError, match=said):
        paper.run(paper.Config(out=tmp_path, models=("tiny", model)), _interrupt)
    assert list(tmp_path.iterdir()) == []


def test_models_that_are_broken_and_places_that_are_taken_are_refused_before_anything_is_measured(
    tmp_path, small_subject, write_models
):
    folder = write_models(small_subject, tmp_path / "other")
    config = paper.Config(out=tmp_path / "runs", models=("tiny", str(folder)))
    (config.out / "findings.md").mkdir(parents=True)
    with pytest.raises(InputError, match="findings.md is a folder"):
        paper.run(config, _interrupt)
    (config.out / "findings.md").rmdir()
    (config.out / "other").mkdir()
    (config.out / "other" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds something that is not a run \(notes.txt\)"):
        paper.run(config, _interrupt)
    (folder / "truth" / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(InputError, match="does not match its card"):
        paper.run(replace(config, out=tmp_path / "else"), _interrupt)
    with pytest.raises(KeyboardInterrupt):  # what is in order is measured
        paper.run(replace(config, out=tmp_path / "else", models=("tiny",)), _interrupt)


def test_a_run_is_no_place_for_the_findings(measured):
    config, _ = measured
    with pytest.raises(InputError, match="is a run of its own: take another --out"):
        paper.run(replace(config, out=config.out / "one"), _interrupt)


def test_a_folder_is_named_by_where_it_leads(tmp_path, monkeypatch, small_subject, write_models):
    folder = write_models(small_subject, tmp_path / "other")
    monkeypatch.chdir(folder / "number")
    (diagnosis,) = paper._diagnoses(paper.Config(out=tmp_path / "runs", models=("..",))).values()
    assert diagnosis.out == tmp_path / "runs" / "other" and diagnosis.model == ".."


def test_the_page_says_the_whole_command_and_names_stay_in_their_cells(measured):
    config = replace(
        measured[0], models=("a|b c", "tiny"), out=Path("x y"), data_seed=3, device="cuda"
    )
    assert paper.command(config) == (
        "python -m circuits counting paper --models 'a|b c' tiny --per-count 2 --data-seed 3"
        " --device cuda --out 'x y'"
    )
    (seeds,) = {"one": measured[1]["one"]}.values()
    page = paper.page(config, {"a|b\nc": seeds})
    assert "| claim | published | other accounts | a\\|b c |" in page.splitlines()


def test_presets_with_other_seeds_stand_in_one_table(measured):
    (seeds,) = {"one": measured[1]["one"]}.values()
    both = {"one": {0: seeds[4], 4: seeds[4]}, "two": seeds}
    row = claims.ours(both).rows
    assert claims.ours(both).columns == ["claim", "preset", "ours", "seed 0", "seed 4"]
    said = percent(seeds[4], "accuracy.vision.id")
    assert row[0][1:] == ["one", "pictures, ID, %", said, said]
    assert row[1] == ["", "two", "pictures, ID, %", "-", said]
