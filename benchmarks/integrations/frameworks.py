"""The frameworks that `make integrations` runs, and the environment of each."""

from __future__ import annotations

from dataclasses import dataclass, field

TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework, its packages on PyPI, and its program in `programs/`."""

    name: str
    package: str
    """The package whose version the table states."""
    packages: tuple[str, ...]
    program: str
    launcher: tuple[str, ...] = (
        "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node",
    )  # fmt: skip
    """The module that starts the ranks, with its arguments up to the number of ranks."""
    variables: dict[str, str] = field(default_factory=dict)
    note: str = ""
    """What does not work, and why."""

    @property
    def folder(self) -> str:
        """The folder of the framework's environment."""
        return self.program.removesuffix("_program.py")


FRAMEWORKS = (
    Framework(
        name="Accelerate", package="accelerate", packages=("accelerate", "scikit-learn"),
        program="accelerate_program.py",
    ),
    Framework(
        name="transformers Trainer", package="transformers",
        packages=("transformers[torch]", "scikit-learn"), program="transformers_program.py",
    ),
    Framework(
        name="Lightning", package="lightning", packages=("lightning", "scikit-learn"),
        program="lightning_program.py",
    ),
    Framework(
        name="ignite", package="pytorch-ignite", packages=("pytorch-ignite", "scikit-learn"),
        program="ignite_program.py",
    ),
)  # fmt: skip
