"""How a config names rewards, and how metrics do."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Reward = Callable[..., Any]

# What the caller of a reward gives by itself: a column or a setting must not have such a name.
RESERVED = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_metric",
    "log_extra",
)


def import_object(path: str) -> Any:
    """Import `package.module.name`, or `name` of a file written as `dir/file.py:name`.

    Raises:
        ValueError: one line, when there is no such module, file or name.

    >>> import_object("jax_grpo.rewards.math.correctness").__name__
    'correctness'
    """
    file, colon, name = path.rpartition(":")
    if colon and file.endswith(".py"):
        if not Path(file).is_file():
            raise ValueError(f"no such file: {file}")
        spec = importlib.util.spec_from_file_location(f"file {file}", file)
        assert spec is not None and spec.loader is not None  # true of every .py file
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # it is a program of the user's
            raise ValueError(f"{file}: {type(error).__name__}: {error}") from error
        where = file
    else:
        where, _, name = path.rpartition(".")
        if not where or not name:
            raise ValueError(f"not a dotted path such as package.module.name: {path!r}")
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name and (where + ".").startswith(error.name + "."):
                raise ValueError(f"no module {error.name!r}, wanted for {path!r}") from error
            raise  # the module is there and misses one of its own
    if not hasattr(module, name):
        raise ValueError(f"{where} has no {name!r}")
    return getattr(module, name)


def known_rewards() -> dict[str, Reward]:
    """The rewards of this package by short name: its public functions of `completions`.

    >>> {"correctness", "unit_tests", "execution_match"} <= known_rewards().keys()
    True
    """
    package = __name__.rpartition(".")[0]
    known: dict[str, Reward] = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if info.name == "contract":  # it calls rewards and has none
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        for name, function in vars(module).items():
            if (
                inspect.isfunction(function)
                and function.__module__ == module.__name__
                and not name.startswith("_")
                and "completions" in inspect.signature(function).parameters
            ):
                known[name] = function
    return known


def resolve(reward: str | Reward, /, **settings: Any) -> Reward:
    r"""Find a reward by short name, dotted path or `file.py:name`, and bind its settings.

    A class is made an instance with the settings; to anything else they are bound with
    `functools.partial`, as the keyword parameters that its signature names. A reward of this
    package is asked about no completions, so that it refuses a bad setting here and now.

    Raises:
        ValueError: one line, for an unknown reward (with the known names) or setting.

    >>> reward = resolve("correctness", reward=2.0)
    >>> reward(prompts=["1+1?"], completions=[r"\boxed{2}"], answer=[2])
    [2.0]
    """
    function: Any = _find(reward) if isinstance(reward, str) else reward
    if inspect.isclass(function):
        try:
            function = function(**settings)
        except TypeError as error:
            raise ValueError(f"the reward {function.__name__!r}: {error}") from error
    elif callable(function) and settings:
        _check_settings(function, settings)
        function = functools.partial(function, **settings)
    if not callable(function):
        raise ValueError(f"the reward {reward!r} is not a function but {type(function).__name__}")
    if isinstance(reward, str) and reward in known_rewards():
        given = ("prompts", "completions", "completion_ids", *columns_of(function))
        try:
            function(**{name: [] for name in given})
        except TypeError as error:  # a setting of another type
            raise ValueError(f"the reward {reward!r} and its settings: {error}") from error
    return function


def columns_of(function: Reward) -> list[str]:
    """The columns of the data that a reward needs: its parameters without a default.

    >>> columns_of(resolve("correctness"))
    ['answer']
    """
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    return [name for name in needed if name not in RESERVED]


def _find(reward: str) -> Any:
    """What a short name or a path stands for."""
    known = known_rewards()
    if reward in known:
        return known[reward]
    if "." in reward:
        return import_object(reward)
    raise ValueError(
        f"unknown reward {reward!r}; known: {', '.join(sorted(known))}, or a path such as "
        "my_package.my_module.my_reward"
    )


def _check_settings(function: Reward, settings: Mapping[str, Any]) -> None:
    """Refuse a setting that the signature does not name: `**columns` would swallow it."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    valid = [name for name in named if name not in RESERVED]
    for name in settings:
        if name not in valid:
            raise ValueError(
                f"the reward {reward_name(function)!r} has no setting {name!r}; "
                f"it has: {', '.join(valid) or 'none'}"
            )


def reward_name(function: Reward) -> str:
    """The name of a reward in metrics: the function's, or the class's of a callable instance.

    >>> reward_name(functools.partial(functools.partial(max), default=1))
    'max'
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def reward_names(functions: Sequence[Reward]) -> list[str]:
    """Names of several rewards, made distinct by a suffix.

    >>> reward_names([max, min, max])
    ['max', 'min', 'max_2']
    """
    names: list[str] = []
    for function in functions:
        name = base = reward_name(function)
        count = 1
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
    return names
