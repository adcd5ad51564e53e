"""Reads the keys of a configuration that has several names for one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.planner.inputs.whole_numbers import switch, whole_number


class ConfigKeys:
    """The keys of a configuration, with the values that missing keys have in its model type."""

    def __init__(
        self, config: Mapping[str, Any], name: str, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name
        self._stated = {key: value for key, value in config.items() if value is not None}
        missing = {key: value for key, value in (defaults or {}).items() if key not in config}
        self._defaults, self._names = missing, frozenset(config)

    def __call__(self, *names: str, default: int | None = None) -> int:
        """Returns the whole number of the first of these keys that is stated.

        A list of equal numbers, one for each layer, is one number. Raises ValueError for other
        values, and if no key is stated and there is no default.
        """
        for values in (self._stated, self._defaults):
            for name in names:
                value = values.get(name)
                if isinstance(value, list) and value and value.count(value[0]) == len(value):
                    value = value[0]
                if value is not None:
                    return whole_number(name, value, least=0)
        if default is None:
            raise ValueError(f"the configuration has no {' or '.join(names)}")
        return default

    def __contains__(self, name: str) -> bool:
        """Returns True if the configuration has the key, also with the value null."""
        return name in self._names

    def get(self, name: str) -> Any:
        """Returns the value of a key, or None."""
        return self._stated.get(name, self._defaults.get(name))

    def flag(self, choice: bool | str) -> bool:
        """Returns a choice of a `ModelType`: True, False, or the value of a key, which is False if
        the key is missing. "!" before the key: the opposite.
        """
        if isinstance(choice, bool):
            return choice
        name = choice.lstrip("!")
        value = self.get(name)
        return value is not None and switch(name, value) != choice.startswith("!")

    def refuse(self, what: str) -> ValueError:
        """Returns the error for a part that `Transformer` cannot express."""
        return ValueError(f"model_type {self.name}: {what} cannot be expressed")
