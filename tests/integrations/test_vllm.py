"""vLLM on CPUs: its groups over Unisono, and weights from a trainer to its workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import small_llama
import torch
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory, factory
from vllm.platforms.cpu import CpuPlatform

from unisono.errors import PeerLostError
from unisono.integrations import vllm_plugin
from unisono.integrations.vllm_replicas import ReplicaClients
from unisono.integrations.vllm_weights import UnisonoTrainerInitInfo

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent
PROGRAMS = Path(small_llama.__file__).parent
VARIABLES = {"UNISONO_REPLACE": "gloo", "OMP_NUM_THREADS": "1", "UNISONO_INTERFACE": "=lo",
             "PYTHONPATH": str(PROGRAMS), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
             "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip


# ---- the entry point


@pytest.fixture
def platform(monkeypatch):
    """Undoes what the plug-in does to vLLM."""
    monkeypatch.setattr(CpuPlatform, "get_device_communicator_cls", _own_communicator)
    for registry in (
        factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory,
    ):  # fmt: skip
        monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    return CpuPlatform


_own_communicator = CpuPlatform.__dict__["get_device_communicator_cls"]


def test_groups_are_served_only_if_asked(platform, monkeypatch):
    own = platform.get_device_communicator_cls()
    monkeypatch.delenv("UNISONO_REPLACE", raising=False)
    vllm_plugin.register()
    assert platform.get_device_communicator_cls() == own
    monkeypatch.setenv("UNISONO_REPLACE", "gloo")
    for _ in range(2):
        vllm_plugin.register()
        assert platform.get_device_communicator_cls().startswith("unisono.")


def test_another_plug_in_keeps_its_communicator(platform, monkeypatch, caplog):
    platform.get_device_communicator_cls = classmethod(lambda cls: "another.Communicator")
    monkeypatch.setenv("UNISONO_REPLACE", "gloo")
    vllm_plugin.register()
    assert platform.get_device_communicator_cls() == "another.Communicator"
    assert "are made by another.Communicator" in caplog.text


def test_a_vllm_without_what_is_needed_goes_on(platform, monkeypatch, caplog):
    monkeypatch.setenv("UNISONO_REPLACE", "gloo")
    monkeypatch.delattr(factory, "WeightTransferTrainerFactory")
    monkeypatch.delattr(platform, "get_device_communicator_cls")
    monkeypatch.setattr("vllm.platforms.interface.Platform.get_device_communicator_cls", None)
    vllm_plugin.register()
    assert caplog.text.count("does not work with this vLLM, which goes on without it") == 2


# ---- groups


def start(script, *arguments, **more):
    """Starts a process of a script of this folder."""
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env={**os.environ, **VARIABLES, **more}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip


def results_of_ranks(tensor, pipeline, hosts):
    """Returns the results of all ranks, which act as ranks of this many hosts."""
    ranks = tensor * pipeline
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [
        start("vllm_ranks.py", rank, ranks, port, tensor, pipeline,
              UNISONO_HOST_ID=f"host{rank * hosts // ranks}")
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        texts = [each.communicate(timeout=250)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    lines = [line for text in texts for line in text.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == ranks, texts
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def values(rank, *shape):
    """Returns the numbers of `vllm_ranks.values`."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 + rank).reshape(shape).float()


def expected_calls(rank, size):
    """Returns the results of `vllm_ranks.collectives`, computed without communication."""

    def total(*shape):
        return sum(values(each, *shape) for each in range(size))

    found = {name: total(3, 4).tolist() for name in ("float32", "bfloat16")}
    found["strided"] = total(4, 6)[:, ::2].tolist()
    for dim in (0, -1):
        joined = torch.cat([values(each, 2, 3) for each in range(size)], dim).tolist()
        found[f"all_gather {dim}"] = joined
        found[f"gather {dim}"] = joined if rank == size - 1 else None
        parts = total(size, 2 * size).chunk(size, dim)
        found[f"reduce_scatter {dim}"] = parts[rank].tolist()
    found["narrow"] = torch.cat([values(each, 2, 3) for each in range(size)]).tolist()
    sizes = [each + 1 for each in range(size)]
    found["all_gatherv"] = [
        torch.cat([values(each, sizes[each], width) for each in range(size)]).tolist()
        for width in (2, 1)
    ]
    found["reduce_scatterv"] = total(sum(sizes), 2).split(sizes)[rank].tolist()
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tensor", "pipeline", "hosts"), [(2, 2, 1), (3, 1, 2)])
def test_all_calls_of_vllms_groups(tensor, pipeline, hosts):
    for rank, found in enumerate(results_of_ranks(tensor, pipeline, hosts)):
        place = rank % tensor
        stage = rank // tensor
        assert found["type"] == "UnisonoCommunicator"
        assert found["ranks"] == [stage * tensor + each for each in range(tensor)]
        assert found["hosts"] == hosts
        assert found["calls"] == expected_calls(place, tensor)
        total = sum(2 * values(each, 2, 3) for each in range(tensor))
        assert found["compiled"] == [(total + 1).tolist(), torch.cat([total] * tensor).tolist()]
        if stage:
            before = rank - tensor
            assert found["passed on"] == {
                "hidden": values(before, 2, 3).tolist(), "empty": [], "step": 7,
                "narrow": values(before, 5).tolist(),
            }  # fmt: skip


# ---- weights


@pytest.fixture(autouse=True)
def registered():
    """Registers the engines in this process, as the program of a trainer does."""
    vllm_plugin.register()


class Replica:
    """A process of vLLM, and its client."""

    def __init__(self, folder, ranks):
        self.process = start("vllm_engine.py", folder, ranks)

    def call(self, method, *arguments):
        """Returns the result of a method of the engine."""
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                answer = json.loads(line.removeprefix("RESULT "))
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer["value"]
        raise RuntimeError("the replica has ended")

    def init_weight_transfer_engine(self, init_info):
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self):
        self.call("start_weight_update")

    def update_weights(self, update_info):
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self.call("finish_weight_update")

    def kill(self):
        """Kills the replica's processes."""
        os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def replicas(tmp_path):
    """Two replicas of vLLM with other weights, of 2 ranks and of 1 rank."""
    folders = [small_llama.save(tmp_path / str(seed), seed) for seed in (0, 1)]
    made = [Replica(folder, ranks) for folder, ranks in zip(folders, (2, 1), strict=True)]
    yield made
    for each in made:
        each.kill()
        each.process.wait()


def on_each(replicas, method):
    """Returns the results of a method of all replicas, which run at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda each: each.call(method), replicas))


@pytest.mark.timeout(600)
def test_replicas_come_and_go_between_updates(replicas):
    first, second = replicas
    of_seed = dict(enumerate(on_each(replicas, "tokens")))
    assert of_seed[0] != of_seed[1]

    trained = small_llama.model(1)
    clients = ReplicaClients([first])
    trainer = WeightTransferTrainerFactory.trainer_init(
        UnisonoTrainerInitInfo(rank=0, timeout_s=60), client=clients, source=ModuleSource(trained)
    )
    trainer.send_weights()  # to the two ranks of one replica
    assert first.call("tokens") == of_seed[1]

    clients.add(second)
    trained.load_state_dict(small_llama.model(0).state_dict())
    trainer.send_weights()  # to both
    assert on_each(replicas, "tokens") == [of_seed[0]] * 2

    second.kill()
    trained.load_state_dict(small_llama.model(1).state_dict())
    trainer.send_weights()  # to the one that is left
    assert clients.clients == (first,)
    assert first.call("tokens") == of_seed[1]

    trainer.shutdown()
    with pytest.raises(RuntimeError, match=r"no connection to a trainer|has closed its end"):
        first.call("start_weight_update")
        first.call("update_weights", {"update_info": {"first": 1, "parts": 1}})


class BrokenSource(ModuleSource):
    """Fails in the middle."""

    def __iter__(self):
        yield from list(super().__iter__())[:5]
        raise OSError("the disk is gone")


@pytest.mark.timeout(600)
def test_an_update_that_fails_can_be_repeated(tmp_path):
    # of one rank: after a failed call vLLM loses count of the answers of several ranks
    replica = Replica(small_llama.save(tmp_path / "model"), 1)
    try:
        before = replica.call("tokens")
        info = UnisonoTrainerInitInfo(rank=0, timeout_s=60)
        broken = WeightTransferTrainerFactory.trainer_init(
            info, client=replica, source=BrokenSource(small_llama.model(1))
        )
        with pytest.raises(OSError, match="the disk is gone"):
            broken.send_weights()
        tokens = []
        for seed in (1, 0):
            trainer = WeightTransferTrainerFactory.trainer_init(
                info, client=replica, source=ModuleSource(small_llama.model(seed))
            )
            trainer.send_weights()
            trainer.shutdown()
            tokens.append(replica.call("tokens"))
        assert tokens[0] != before and tokens[1] == before
    finally:
        replica.kill()


def test_other_ranks_of_the_trainer_only_read_the_source():
    read = []

    class Source(ModuleSource):
        def __iter__(self):
            for name, tensor in super().__iter__():
                read.append(name)
                yield name, tensor

    model = torch.nn.Linear(2, 3)
    engine = WeightTransferTrainerFactory.trainer_init(
        UnisonoTrainerInitInfo(rank=1), client=None, source=Source(model)
    )
    engine.send_weights()
    assert read == ["weight", "bias"]


class Client:
    """A client of one worker, or of none."""

    def __init__(self, fails_in=""):
        self.calls, self._fails_in = [], fails_in

    def __getattr__(self, method):
        def call(*arguments):
            self.calls.append(method)
            if method == self._fails_in:
                raise ConnectionError(f"{method} fails")

        return call


@pytest.mark.parametrize("method", ["start_weight_update", "update_weights"])
def test_errors_of_a_client_are_raised_without_a_wait(method):
    engine = WeightTransferTrainerFactory.trainer_init(
        UnisonoTrainerInitInfo(rank=0),
        client=Client(fails_in=method),
        source=ModuleSource(torch.nn.Linear(2, 3)),
    )
    with pytest.raises(ConnectionError, match=f"{method} fails"):
        engine.send_weights()


def test_an_update_without_workers_is_refused():
    engine = WeightTransferTrainerFactory.trainer_init(
        UnisonoTrainerInitInfo(rank=0), client=Client(), source=ModuleSource(torch.nn.Linear(2, 3))
    )
    with pytest.raises(PeerLostError, match="no worker of vLLM waits for weights"):
        engine.send_weights()


def test_failing_replicas_are_left_out():
    good, bad = Client(), Client(fails_in="update_weights")
    clients = ReplicaClients([bad, good])
    clients.init_weight_transfer_engine({})
    clients.start_weight_update()
    clients.update_weights({})
    clients.finish_weight_update()
    assert clients.clients == (good,)
    assert "finish_weight_update" not in bad.calls and "finish_weight_update" in good.calls
    assert "shutdown_weight_transfer_engine" in bad.calls
    with pytest.raises(PeerLostError, match="no replica of vLLM is left"):
        ReplicaClients([]).start_weight_update()
