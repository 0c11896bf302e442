"""The manifest of Kubernetes in docs/clusters.md has known fields, with values of their types.

The schema was written by hand, with the fields that the page uses of the MPI operator's custom
resource (v2beta1) and of `Pod` of Kubernetes (v1). It was not compared with their own definitions.
A field of another name is refused.
"""

import copy
import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"

STRING, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
QUANTITY = {"type": "string", "pattern": r"^\d+(Ki|Mi|Gi|m)?$"}


def record(required="", **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def several(items):
    return {"type": "array", "items": items, "minItems": 1}


CONTAINER = record(
    "name image command",
    name=STRING,
    image=STRING,
    command=several(STRING),
    args=several(STRING),
    env=several(record("name value", name=STRING, value=STRING)),
    resources=record("limits", limits=record(cpu=QUANTITY, memory=QUANTITY)),
    volumeMounts=several(record("name mountPath", name=STRING, mountPath=STRING)),
)
VOLUME = record(
    "name emptyDir",
    name=STRING,
    emptyDir=record("", medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
REPLICAS = record(
    "replicas template",
    replicas=COUNT,
    restartPolicy={"enum": ["Never", "OnFailure", "Always", "ExitCode"]},
    template=record(
        "spec", spec=record("containers", containers=several(CONTAINER), volumes=several(VOLUME))
    ),
)
JOB = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "kubeflow.org/v2beta1"},
    kind={"const": "MPIJob"},
    metadata=record("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}),
    spec=record(
        "mpiReplicaSpecs",
        slotsPerWorker=COUNT,
        runPolicy=record(
            "", cleanPodPolicy={"enum": ["Running", "All", "None"]}, backoffLimit=COUNT
        ),
        mpiReplicaSpecs=record("Launcher Worker", Launcher=REPLICAS, Worker=REPLICAS),
    ),
)


@pytest.fixture
def job():
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return yaml.safe_load(text)


def test_fields(job):
    jsonschema.validate(job, JOB)
    wrong = copy.deepcopy(job)
    wrong["spec"]["slotsPerWorkers"] = 8
    with pytest.raises(jsonschema.ValidationError, match="slotsPerWorkers"):
        jsonschema.validate(wrong, JOB)


def test_ranks_have_slots_and_shared_memory(job):
    spec = job["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][kind] for kind in ("Launcher", "Worker"))
    command = launcher["template"]["spec"]["containers"][0]["command"]
    ranks = int(command[command.index("-n") + 1])
    assert ranks == worker["replicas"] * spec["slotsPerWorker"]
    pod = worker["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert volume["emptyDir"]["medium"] == "Memory"
    # The board, and more than a container has by itself for the MPI library.
    mebibytes = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 1024
    assert mebibytes > 64 + (20 + 92 * spec["slotsPerWorker"]) / 1024
