"""Each W&B sweep file says what W&B's schema allows, and an agent's commands compose with Hydra."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from wandb import wandb_agent

from mhaprune.run.config import CONF_DIR, PruneHeadsConfig, RankHeadsConfig, plain, validate

ROOT = CONF_DIR.parent
NAMES = sorted(path.stem for path in (CONF_DIR / "wandb").glob("*.yaml"))
SCHEMAS = {"rank_heads": RankHeadsConfig, "prune_heads": PruneHeadsConfig}
Expand = Callable[[dict[str, Any], dict[str, Any], str], list[str]]


def sweep(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF_DIR / "wandb" / f"{name}.yaml").read_text())


def combinations(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Every combination of a grid; of a random search those of the ends of its ranges."""
    choices = [each.get("values") or [each["min"], each["max"]] for each in parameters(said)]
    return [dict(zip(said["parameters"], chosen, strict=True)) for chosen in product(*choices)]


def parameters(said: dict[str, Any]) -> list[dict[str, Any]]:
    return list(said["parameters"].values())


@pytest.fixture
def expand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Expand:
    """Let a real agent, which talks to no server and starts nothing, make the command of a run."""
    for variable in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(variable, "")  # the agent sets it; this restores it
    monkeypatch.setenv("WANDB_SWEEP_ID", "a1b2")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setattr(wandb_agent, "AgentProcess", SimpleNamespace)
    agent: Any = wandb_agent.Agent(api=None, queue=None, sweep_id="a1b2")

    def expand(said: dict[str, Any], chosen: dict[str, Any], run_id: str) -> list[str]:
        agent._sweep_command = said["command"]
        values = {name: {"value": value} for name, value in chosen.items()}
        agent._command_run({"run_id": run_id, "args": values, "program": said["program"]})
        return agent._run_processes[run_id].command

    return expand


def composed(program: str, overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose(program, overrides)


def violations(said: dict[str, Any]) -> list[str]:
    """What is wrong with a sweep by the schema in W&B's package `sweeps`."""
    found = find_spec("sweeps")
    if found is None or not found.submodule_search_locations:
        pytest.skip("W&B's schema is in the package sweeps; pip install --no-deps sweeps")
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    place = Path(found.submodule_search_locations[0]) / "config" / "schema.json"
    schema = json.loads(place.read_text())
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(said)]


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_keeps_to_w_and_bs_schema(name):
    assert violations(sweep(name)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"method": "everything"},
        {"parametres": {}},
        {"metric": {"name": "a", "goal": "lower"}},
        {"parameters": {"seed": {"value_list": [1]}}},
        {"parameters": {"heal.lr": {"distribution": "log_uniform_values", "min": 1e-5}}},
    ],
)
def test_the_schema_refuses_a_sweep_that_is_wrong(change):
    assert violations({**sweep("rank_scores"), **change})


@pytest.mark.parametrize("name", NAMES)
def test_each_value_reaches_the_program_and_none_of_them_is_null(name):
    said = sweep(name)
    assert (ROOT / said["program"]).is_file()
    assert said["command"][:3] == ["${env}", "${interpreter}", "${program}"]
    assert said["command"][-1] == "${args_no_hyphens}"
    fixed = {argument.split("=")[0] for argument in said["command"]}
    assert fixed.isdisjoint(said["parameters"])  # a later argument would win over a fixed one
    values = [value for chosen in combinations(said) for value in chosen.values()]
    assert {str(value).lower() for value in values}.isdisjoint({"none", "null", ""})


@pytest.mark.parametrize("name", NAMES)
def test_each_command_of_an_agent_composes_into_a_run_of_its_own(name, expand):
    said, configs = sweep(name), set()
    program = Path(said["program"]).stem
    for number, chosen in enumerate(combinations(said)):
        command = expand(said, chosen, f"run{number}")
        assert command[:3] == ["/usr/bin/env", "python", f"experiments/{program}.py"]
        config = validate(composed(program, command[3:]), SCHEMAS[program])
        made = plain(config)
        assert made["tracker"]["mode"] == "online"
        for key, value in chosen.items():
            if "." in key:
                assert OmegaConf.select(OmegaConf.create(made), key) == value
            elif key in ("model", "score"):
                assert made[key]["name"] == value
            else:
                assert (key, "leave_one_out_iterative" in made[key]["orderings"]) == (
                    *("pruning", value == "iterative"),
                )
        configs.add(json.dumps(made))
    assert len(configs) == len(combinations(said))


def test_runs_that_start_in_the_same_second_have_directories_of_their_own(expand):
    directories = []
    for run_id in ("x1", "x2"):
        [argument] = [
            argument
            for argument in expand(sweep("rank_scores"), {"score": "fisher"}, run_id)
            if argument.startswith("hydra.run.dir=")
        ]
        key, value = argument.split("=")
        directories.append(OmegaConf.create({key: value})[key])
    assert directories == ["runs/sweep_a1b2/x1", "runs/sweep_a1b2/x2"]


def test_the_ablations_are_swept_by_a_key_that_means_the_same_as_the_group():
    kinds = sweep("rank_ablations")["parameters"]["ablation.kind"]["values"]
    assert kinds == ["zero", "mean", "resample"]
    for kind in kinds:
        by_key, by_group = (
            plain(validate(composed("rank_heads", [f"{key}={kind}"]), RankHeadsConfig))
            for key in ("ablation.kind", "ablation")
        )
        assert by_key == by_group


def test_the_scores_that_are_swept_are_all_but_the_measured_effect():
    scores = {path.stem for path in (CONF_DIR / "score").glob("*.yaml")}
    swept = sweep("rank_scores")["parameters"]["score"]["values"]
    assert set(swept) == scores - {"leave_one_out"} and len(set(swept)) == len(swept)


def test_the_healing_sweep_draws_one_order_so_that_its_metric_is_of_that_order(expand):
    said = sweep("heal")
    command = expand(said, combinations(said)[0], "x1")
    pruning = validate(composed("prune_heads", command[3:]), PruneHeadsConfig).pruning
    assert list(pruning.orderings) == ["leave_one_out"] and pruning.random_orders == 0
    assert said["metric"] == {"name": "pruning/most_heads_at_10pct", "goal": "maximize"}
