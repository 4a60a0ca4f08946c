"""What is wrong with a configuration: checks of single values, and one line for a user."""

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

EXTRA_OF_LAUNCHER = {
    "joblib": "joblib",
    "submitit_local": "slurm",
    "submitit_slurm": "slurm",
    "ray": "ray",
}
MISTAKES = (ValueError, OSError, HydraException, OmegaConfBaseException)  # of a user


def one_of(key: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ValueError(f"{key}={value} is not one of {', '.join(options)}")


def at_least(key: str, value: float | int | None, least: float | int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{key}={value} must be at least {least}")


def one_line(error: BaseException) -> str:
    """Return the part of an error's message that tells a user what to mend."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, MissingConfigException):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        if group == "hydra/launcher" and option in EXTRA_OF_LAUNCHER:
            install = f"pip install -c constraints.txt -e '.[{EXTRA_OF_LAUNCHER[option]}]'"
            return f"{group}={option} is not installed; get it by {install}"
        if not error.options:
            return lines[0]
        return f"{group}={option} is not one of {', '.join(error.options)}"
    if lines[0].startswith("Ambiguous value"):
        return f"{lines[0]}: add -m to run one job for each, or write [...] for a list"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override}: {lines[0]}"
    if lines[0].startswith("Could not override") or isinstance(error, ConfigKeyError):
        key = getattr(error, "full_key", None) or lines[0].split("'")[1]
        return f"{key} is not in the configuration; --cfg job shows what is"
    where = [line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")]
    if where and "is not a ListConfig" in lines[0]:
        return f"{where[0]} is a list; write {where[0]}=[...]"
    if where and where[0] and where[0] not in lines[0]:
        return f"{where[0]}: {lines[0]}"
    return lines[0]
