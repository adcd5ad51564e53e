"""The manifest for the training operator of Kubernetes, checked against the operator's schema."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
# From the package kubeflow-trainer-api 2.3.0; the file says how.
SCHEMA = json.loads((Path(__file__).parent / "train_job_schema.json").read_text())


@pytest.fixture
def job():
    return yaml.safe_load((ROOT / "examples/train_job.yaml").read_text())


def test_the_manifest_has_the_schema_of_a_train_job(job):
    jsonschema.validate(job, SCHEMA)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")


def test_the_manifest_starts_torchrun_on_the_program_of_its_image(job):
    trainer = job["spec"]["trainer"]
    assert trainer["command"][0] == "torchrun"
    assert (ROOT / "examples" / Path(trainer["args"][0]).name).exists()
    assert all(isinstance(each["value"], str) for each in trainer["env"])
    limits = trainer["resourcesPerNode"]["limits"]
    assert int(limits["cpu"]) >= trainer["numProcPerNode"]


@pytest.mark.parametrize(
    "broken",
    [
        lambda spec: spec["trainer"].update(numNodes="two"),
        lambda spec: spec["trainer"].update(replicas=2),
        lambda spec: spec.pop("runtimeRef"),
        lambda spec: spec["trainer"]["env"].append({"value": "1"}),
    ],
)
def test_the_schema_refuses_another_manifest(job, broken):
    changed = copy.deepcopy(job)
    broken(changed["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, SCHEMA)
