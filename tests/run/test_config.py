"""Every configuration that ships composes, and what a user gets wrong is told in one line."""

import re
import subprocess
import sys
from dataclasses import replace
from inspect import signature
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from mhaprune.run.config import (
    CONF_DIR,
    CompareScoresConfig,
    PruneHeadsConfig,
    RankHeadsConfig,
    plain,
    validate,
)
from mhaprune.run.launch import refuse_used_directory, resumed_directory, run_program
from mhaprune.run.pruning_config import ExportConfig, HealConfig, OrderingConfig, PruningConfig
from mhaprune.scores.catalogue import SCORES

GROUPS = ("model", "dataset", "evaluation", "ablation", "tracker", "score")
NEEDED = {  # what only the user knows
    "model=local": ("model.path=DIR",),
    "dataset=hub": ("dataset.hub_id=A/B", "dataset.revision=C", "dataset.calibration_split=D"),
    "dataset=text": ("dataset.path=FILE",),
}


def choices(group: str) -> list[str]:
    return [f"{group}={path.stem}" for path in sorted((CONF_DIR / group).glob("*.yaml"))]


ALL_CHOICES = [choice for group in GROUPS for choice in choices(group)]
PAIRS = list(product(*map(choices, GROUPS[:2])))
OTHER_GROUPS = list(product(*map(choices, GROUPS[2:5])))
SCORE_CHOICES = choices("score")
COMBINATIONS = [
    (*pair, *others, score)
    for pair, others, score in islice(
        zip(cycle(PAIRS), cycle(OTHER_GROUPS), cycle(SCORE_CHOICES), strict=True),
        max(len(PAIRS), len(OTHER_GROUPS)),
    )
]
"""Every model with every dataset; meanwhile each score, and each combination of the others."""


def composed(*overrides: str, program: str = "rank_heads") -> DictConfig:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose(program, list(overrides))


def validated(*overrides: str) -> RankHeadsConfig:
    return validate(composed(*overrides), RankHeadsConfig)


def validated_comparison(*overrides: str) -> CompareScoresConfig:
    return validate(composed(*overrides, program="compare_scores"), CompareScoresConfig)


@pytest.fixture(scope="module")
def default() -> DictConfig:
    config = composed()
    OmegaConf.set_struct(config, False)  # let unknown keys through to the schema
    return config


def test_the_default_run_needs_no_network_and_no_arguments():
    config = validated()
    assert (config.model.name, config.model.hub_id) == ("demo", None)
    assert (config.dataset.source, config.dataset.hub_id) == ("stories", None)
    assert (config.ablation.kind, config.tracker.mode) == ("zero", "offline")
    assert (config.score.name, config.score.options) == ("leave_one_out", {})
    assert (config.heads, config.seed) == (["L*H*"], 0)


@pytest.mark.parametrize("choice", ALL_CHOICES)
def test_what_a_file_says_is_what_a_program_gets(choice):
    group, name = choice.split("=")
    said = OmegaConf.to_container(OmegaConf.load(CONF_DIR / group / f"{name}.yaml"))
    assert isinstance(said, dict)
    config = plain(validated(choice, *NEEDED.get(choice, ())))
    got = config[group]
    user_says = {override.split("=")[0].split(".")[1] for override in NEEDED.get(choice, ())}
    for key, value in said.items():
        if key != "defaults" and key not in user_says:
            assert got[key] == filled_in(value, config), key


def filled_in(value: object, config: dict[str, Any]) -> object:
    """Put the configuration's own values in for ${group.key}."""
    if isinstance(value, list):
        return [filled_in(each, config) for each in value]
    place = re.fullmatch(r"\$\{(\w+)\.(\w+)\}", value) if isinstance(value, str) else None
    return config[place[1]][place[2]] if place else value


def test_the_combinations_cover_the_groups_that_are_not_paired():
    assert {combination[:2] for combination in COMBINATIONS} == set(PAIRS)
    assert {combination[2:5] for combination in COMBINATIONS} == set(OTHER_GROUPS)
    assert {combination[5] for combination in COMBINATIONS} == set(SCORE_CHOICES)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=",".join)
def test_the_options_of_all_groups_go_together(combination):
    needed = [override for choice in combination for override in NEEDED.get(choice, ())]
    config = validated(*combination, *needed)
    assert combination[0] == f"model={config.model.name}"
    assert combination[1] == f"dataset={config.dataset.name}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nope=1", "nope is not in the configuration; --cfg job shows what is"),
        ("model.nope=1", "model.nope is not in the configuration; --cfg job shows what is"),
        ("seed=x", "seed: Value 'x' of type 'str' could not be converted to Integer"),
        ("seed=-1", "seed=-1 must be at least 0"),
        ("heads=L1H1", "heads is a list; write heads=[...]"),
        ("tracker.tags=a", "tracker.tags is a list; write tracker.tags=[...]"),
        ("model.name=null", "model.name: Incompatible value 'None' for field of type 'str'"),
        ("model.name=${nope}", "model.name: Interpolation key 'nope' not found"),
        ("model.dtype=int8", "model.dtype=int8 is not one of float32, float64, bfloat16"),
        ("model.dtype=bfloat16", "tolerance; use float32 or float64"),
        ("model.device=tpu", "model.device=tpu is not one of auto, cpu, cuda, mps"),
        ("dataset.source=web", "dataset.source=web is not one of stories, hub, text"),
        ("dataset.source=text", "dataset.source=text needs dataset.path"),
        ("dataset.separator=x", "dataset.separator=x is not one of none, eos"),
        ("dataset.calibration_fraction=1", "calibration_fraction=1.0 must lie between 0 and 1"),
        ("evaluation.first_token=x", "evaluation.first_token=x is not one of scored, unscored"),
        ("evaluation.max_windows=1", "evaluation.max_windows=1 must be at least 2"),
        ("evaluation.sampling=x", "evaluation.sampling=x is not one of exhaustive, adaptive"),
        ("evaluation.context_length=0", "evaluation.context_length=0 must be at least 1"),
        ("evaluation.stride=0", "evaluation.stride=0 must be at least 1"),
        ("evaluation.calibration_windows=0", "calibration_windows=0 must be at least 1"),
        ("evaluation.rows_per_batch=0", "evaluation.rows_per_batch=0 must be at least 1"),
        ("evaluation.windows_per_unit=0", "evaluation.windows_per_unit=0 must be at least 1"),
        ("evaluation.resamples=99", "evaluation.resamples=99 must be at least 100"),
        ("evaluation.confidence=1", "evaluation.confidence=1.0 must lie in [0.5, 1)"),
        ("evaluation.tolerance_nats=0", "<= evaluation.critical_nats, got 0.0 and 0.05"),
        ("evaluation.critical_nats=0.001", "<= evaluation.critical_nats, got 0.01 and 0.001"),
        ("ablation.kind=x", "ablation.kind=x is not one of zero, mean, resample, optimal"),
        ("ablation.steps=0", "ablation.steps=0 must be at least 1"),
        ("score.name=null", "score.name: Incompatible value 'None' for field of type 'str'"),
        ("score.options=x", "score.options"),
        ("tracker.mode=x", "tracker.mode=x is not one of offline, online, none"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(default, override, message):
    changed = OmegaConf.merge(default, OmegaConf.from_dotlist([override]))
    assert isinstance(changed, DictConfig)
    with pytest.raises(ValueError) as error:
        validate(changed, RankHeadsConfig)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_stride_above_the_context_is_refused_and_one_equal_to_it_is_not():
    context = "evaluation.context_length=8"
    with pytest.raises(ValueError, match=r"stride=9 is above evaluation.context_length=8; tokens"):
        validated(context, "evaluation.stride=9")
    assert validated(context, "evaluation.stride=8").evaluation.stride == 8


def test_adaptive_sampling_takes_the_whole_text_or_at_least_8_windows():
    adaptive = validated("evaluation=adaptive").evaluation
    assert (adaptive.sampling, adaptive.max_windows) == ("adaptive", None)
    with pytest.raises(ValueError, match=r"^evaluation.max_windows=7 must be at least 8$"):
        validated("evaluation=adaptive", "evaluation.max_windows=7")
    assert validated("evaluation=adaptive", "evaluation.max_windows=8").evaluation.max_windows == 8


def test_several_missing_values_are_named_together():
    with pytest.raises(ValueError, match=r"^no value for dataset.hub_id, dataset.revision; add "):
        validated("dataset=hub")


# The comparison of scores.


@pytest.mark.parametrize("choice", [c for c in ALL_CHOICES if not c.startswith("score=")])
def test_a_comparison_takes_every_choice_too_but_to_measure_adaptively(choice):
    if choice == "evaluation=adaptive":
        with pytest.raises(ValueError, match=r"^scores are judged by exhaustive measuring; use "):
            validated_comparison(choice)
        return
    needed = NEEDED.get(choice, ())
    group = choice.split("=")[0]
    compared, ranked = validated_comparison(choice, *needed), validated(choice, *needed)
    assert plain(compared)[group] == plain(ranked)[group]


def test_a_comparison_is_of_all_scores_with_the_options_of_their_files():
    config = validated_comparison()
    alone = [validated(choice).score for choice in SCORE_CHOICES]
    assert config.scores == {score.name: score.options for score in alone}
    assert [f"score={score.name}" for score in alone] == SCORE_CHOICES
    assert (config.model.name, config.tracker.mode) == ("demo", "offline")
    assert (config.heads, config.seed, config.top_k) == (["L*H*"], 0, None)


def test_the_options_of_every_score_are_all_that_it_has_at_their_defaults():
    for name, options in validated_comparison().scores.items():
        parameters = signature(SCORES[name]).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        if name == "leave_one_out":
            defaults.pop("windows_per_unit")  # changes no number
        assert options.keys() == defaults.keys(), name
        for option, value in options.items():
            default = defaults[option]
            assert value == (list(default) if isinstance(default, tuple) else default), name


def test_a_score_is_left_out_or_added_or_given_other_options():
    config = validated_comparison("~scores.shapley", "scores.integrated_gradients.steps=4")
    assert "shapley" not in config.scores and "random" in config.scores
    assert config.scores["integrated_gradients"] == {"steps": 4}
    assert validated_comparison("+scores.adaptive={}").scores["adaptive"] == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["top_k=0"], "top_k=0 must be at least 1"),
        (["seed=-1"], "seed=-1 must be at least 0"),
        (["evaluation.sampling=adaptive"], "scores are judged by exhaustive measuring; use "),
        (["~scores"], "no scores to compare; give at least one, such as +scores.fisher={}"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(overrides, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        validated_comparison(*overrides)


# Pruning.

PRUNING_CHOICES = choices("pruning")


def validated_pruning(*overrides: str) -> PruneHeadsConfig:
    return validate(composed(*overrides, program="prune_heads"), PruneHeadsConfig)


NOT_OF_PRUNING = [*SCORE_CHOICES, "evaluation=adaptive"]


@pytest.mark.parametrize("choice", [c for c in ALL_CHOICES if c not in NOT_OF_PRUNING])
def test_pruning_takes_every_choice_of_the_other_groups(choice):
    needed = NEEDED.get(choice, ())
    group = choice.split("=")[0]
    pruned, ranked = validated_pruning(choice, *needed), validated(choice, *needed)
    assert plain(pruned)[group] == plain(ranked)[group]


@pytest.mark.parametrize(("choice", "pair"), [*zip(PRUNING_CHOICES, PAIRS, strict=False)])
def test_every_way_to_prune_goes_with_a_model_and_a_dataset(choice, pair):
    needed = [override for each in pair for override in NEEDED.get(each, ())]
    config = validated_pruning(choice, *pair, *needed)
    assert pair == (f"model={config.model.name}", f"dataset={config.dataset.name}")


@pytest.mark.parametrize("choice", PRUNING_CHOICES)
def test_what_a_file_says_of_pruning_is_what_the_program_gets(choice):
    said = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "pruning" / f"{choice[8:]}.yaml"))
    assert isinstance(said, dict)
    pruning = validated_pruning(choice).pruning
    for name, ordering in said.pop("orderings").items():
        assert pruning.orderings[name] == OrderingConfig(**ordering)
    for key, value in said.items():
        if key != "defaults":
            assert getattr(pruning, str(key)) == value, key


def test_orders_that_are_taken_again_come_beside_those_taken_once():
    once = validated_pruning().pruning.orderings
    assert list(once) == ["leave_one_out", "gradient", "activation_norm"]
    assert {(name, o.score, o.rescore_every) for name, o in once.items()} == {
        (name, name, None) for name in once
    }
    for choice, more in (
        ("pruning=greedy", {"greedy": ("leave_one_out", 1)}),
        (
            "pruning=iterative",
            {
                "gradient_iterative": ("gradient", 4),
                "leave_one_out_iterative": ("leave_one_out", 4),
            },
        ),
    ):
        orderings = validated_pruning(choice).pruning.orderings
        assert {name: orderings.pop(name) for name in once} == once
        assert {name: (o.score, o.rescore_every) for name, o in orderings.items()} == more


def test_the_scores_that_heads_are_pruned_by_exist_with_their_options():
    for choice in PRUNING_CHOICES:
        for ordering in validated_pruning(choice).pruning.orderings.values():
            parameters = signature(SCORES[ordering.score]).parameters
            assert ordering.options.keys() <= parameters.keys()


def test_what_pruning_does_by_default_is_the_same_in_the_file_and_in_the_code():
    config = validated_pruning()
    assert replace(config.pruning, orderings={}, ranking="x") == PruningConfig(ranking="x")
    assert (config.export, config.heal) == (ExportConfig(), HealConfig())
    assert (config.savings, config.heads, config.seed) == (False, ["L*H*"], 0)
    assert (config.model.name, config.dataset.name, config.tracker.mode) == (
        *("demo", "stories", "offline"),
    )


def test_an_order_is_left_out_or_added_or_taken_again():
    config = validated_pruning(
        *("~pruning.orderings.gradient", "pruning.orderings.leave_one_out.rescore_every=2"),
        "+pruning.orderings.ig={score: integrated_gradients, options: {steps: 4}}",
    )
    assert config.pruning.orderings == {
        "leave_one_out": OrderingConfig("leave_one_out", {}, 2),
        "activation_norm": OrderingConfig("activation_norm"),
        "ig": OrderingConfig("integrated_gradients", {"steps": 4}),
    }
    sets = validated_pruning("pruning.sets=[[L0H1,L1H2],[L2H*]]").pruning.sets
    assert sets == [["L0H1", "L1H2"], ["L2H*"]]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pruning.directions=[]"], "pruning.directions is empty; give least, most or both"),
        (["~pruning.orderings"], "no order to prune by; give pruning.orderings or pruning.ranking"),
        (["pruning.directions=[up]"], "pruning.directions=up is not one of least, most"),
        (["pruning.random_orders=-1"], "pruning.random_orders=-1 must be at least 0"),
        (["pruning.min_per_layer=-1"], "pruning.min_per_layer=-1 must be at least 0"),
        (["pruning.pairs=-1"], "pruning.pairs=-1 must be at least 0"),
        (["pruning.step=0"], "pruning.step=0 must be at least 1"),
        (["pruning.orderings.gradient.rescore_every=0"], "rescore_every=0 must be at least 1"),
        (["export.form=flat"], "export.form=flat is not one of compact, dense"),
        (["export.num_heads=0"], "export.num_heads=0 must be at least 1"),
        (["export.max_increase=0"], "export.max_increase=0.0 must be above 0"),
        (["export.dir=x"], "export.dir needs either export.num_heads or export.max_increase"),
        (
            ["export.dir=x", "export.num_heads=1", "export.max_increase=0.1"],
            "export.dir needs either export.num_heads or export.max_increase",
        ),
        (["heal.steps=-1"], "heal.steps=-1 must be at least 0"),
        (["heal.windows_per_step=0"], "heal.windows_per_step=0 must be at least 1"),
        (["heal.method=half"], "heal.method=half is not one of full, lora"),
        (["heal.lr=0"], "heal.lr=0.0 must be above 0"),
        (["seed=-1"], "seed=-1 must be at least 0"),
        (["evaluation=adaptive"], "curves are measured exhaustively; use evaluation=default"),
        (
            ["savings=true", "ablation=resample"],
            "a model cannot keep resampled heads; use ablation",
        ),
        (
            ["heal.steps=1", "ablation=resample"],
            "a model cannot keep resampled heads; use ablation",
        ),
        (["savings=true", "pruning.directions=[most]"], "need pruning.directions to contain least"),
    ],
)
def test_pruning_that_cannot_be_done_is_refused_in_one_line(overrides, message):
    with pytest.raises(ValueError) as error:
        validated_pruning(*overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# A directory that holds a run.


def test_a_run_that_is_resumed_must_be_there_and_takes_nothing_else(tmp_path):
    with pytest.raises(ValueError, match=r"no run there \(no .*/\.hydra/config\.yaml\)"):
        resumed_directory(str(tmp_path), [f"resume={tmp_path}"])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").touch()
    assert resumed_directory(str(tmp_path), [f"resume={tmp_path}"]) == tmp_path
    with pytest.raises(ValueError, match=r"leave out seed=1 -m$"):
        resumed_directory(str(tmp_path), ["seed=1", f"resume={tmp_path}", "-m"])


def test_a_directory_that_holds_a_run_is_not_written_over(tmp_path):
    arguments = ["seed=1", f"hydra.run.dir={tmp_path}"]
    refuse_used_directory(arguments)
    (tmp_path / "manifest.json").touch()
    with pytest.raises(ValueError, match=f"go on with it by resume={tmp_path}, or choose another"):
        refuse_used_directory(arguments)
    refuse_used_directory(["seed=1"])


# A program, from its arguments to its exit code.

QUIET = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]
Calls = list[tuple[RankHeadsConfig, Path]]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a program whose task only notes what it was given, or raises what it is told to."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, error: BaseException | None = None) -> Calls:
        calls: Calls = []

        def task(config: RankHeadsConfig, directory: Path) -> None:
            if error is not None:
                raise error
            calls.append((config, directory))

        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        run_program(task, RankHeadsConfig, "rank_heads")
        return calls

    return run


def test_a_task_gets_the_configuration_and_its_own_directory(run, tmp_path):
    [(config, directory)] = run("seed=3", f"hydra.run.dir={tmp_path}/r", *QUIET)
    assert (config, directory) == (validated("seed=3"), tmp_path / "r")
    assert (tmp_path / "r" / ".hydra" / "config.yaml").is_file()


def test_a_resumed_run_gets_the_configuration_it_was_started_with(run, tmp_path):
    [(started, directory)] = run("seed=3", f"hydra.run.dir={tmp_path}/r", *QUIET)
    assert run(f"resume={directory}") == [(started, directory)]


def test_a_sweep_runs_each_job_in_its_own_directory(run, tmp_path):
    jobs = run("-m", "ablation=zero,mean", f"hydra.sweep.dir={tmp_path}/s", *QUIET)
    assert [config.ablation.kind for config, _ in jobs] == ["zero", "mean"]
    names = [directory.relative_to(tmp_path / "s").name for _, directory in jobs]
    assert names == ["0_demo_stories_zero", "1_demo_stories_mean"]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("ablation=nope", "ablation=nope is not one of mean, optimal, resample, zero"),
        ("evaluation.nope=1", "evaluation.nope is not in the configuration; --cfg job shows what"),
        ("a=[", "cannot read a=[: no viable alternative at input '['"),
        ("seed=x", "seed: Value 'x' of type 'str' could not be converted to Integer"),
        ("seed=1,2", "Ambiguous value for argument 'seed=1,2': add -m to run one job for each"),
        ("evaluation.first_token=x", "evaluation.first_token=x is not one of scored, unscored"),
        ("model=local", "no value for model.path; add model.path=..."),
        ("resume=nowhere", "resume=nowhere: no run there (no nowhere/.hydra/config.yaml)"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, capfd, argument, line):
    with pytest.raises(SystemExit) as stop:
        run(argument)
    assert stop.value.code == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.startswith(f"error: {line}")
    assert errors.count("\n") == 1


def test_an_unknown_model_is_answered_by_all_that_there_are(run, capfd):
    with pytest.raises(SystemExit):
        run("model=nope")
    names = ", ".join(choice.removeprefix("model=") for choice in choices("model"))
    assert capfd.readouterr().err == f"error: model=nope is not one of {names}\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("no heads\nmore"), 2, "error: no heads\n"),
        (FileNotFoundError("no file"), 2, "error: no file\n"),
        (ValueError(), 2, "error: ValueError\n"),
        (
            KeyboardInterrupt(),
            130,
            "interrupted; what was measured is kept; go on with: program resume={}/r\n",
        ),
    ],
)
def test_a_task_that_stops_is_one_line_and_an_exit_code(run, capfd, tmp_path, error, code, line):
    with pytest.raises(SystemExit) as stop:
        run("hydra.run.dir=r", *QUIET, error=error)
    assert stop.value.code == code
    assert capfd.readouterr().err == line.format(tmp_path)


def test_our_own_bugs_and_what_is_asked_for_keep_their_traceback(run, monkeypatch):
    with pytest.raises(AssertionError, match="a bug"):
        run("hydra.run.dir=r", *QUIET, error=AssertionError("a bug"))
    monkeypatch.setenv("MHAPRUNE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="a mistake"):
        run("hydra.run.dir=r", *QUIET, error=ValueError("a mistake"))


def test_a_job_that_fails_in_a_sweep_lets_the_others_run(run, capfd, tmp_path):
    with pytest.raises(SystemExit) as stop:
        run("-m", "seed=x,1", "hydra.sweep.dir=s", *QUIET)
    assert stop.value.code == 2
    job, line = capfd.readouterr().err.splitlines()
    assert job == "Error executing job with overrides: ['seed=x']"
    assert line == "error: seed: Value 'x' of type 'str' could not be converted to Integer"
    assert len(list((tmp_path / "s").glob("1_*/.hydra"))) == 1


PROGRAM = """
from mhaprune.run.config import RankHeadsConfig
from mhaprune.run.launch import run_program
run_program(lambda config, directory: print(directory), RankHeadsConfig, "rank_heads")
"""


def test_a_program_of_its_own_says_one_line_too(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "seed=x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: seed: Value 'x'")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_every_combination_of_all_groups_composes():
    some = product(*map(choices, GROUPS[:5]))
    for combination in (
        (*others, score) for others, score in zip(some, cycle(SCORE_CHOICES), strict=False)
    ):
        needed = [override for choice in combination for override in NEEDED.get(choice, ())]
        config = validated(*combination, *needed)
        names = (f"model={config.model.name}", f"dataset={config.dataset.name}")
        assert combination[:2] == names
