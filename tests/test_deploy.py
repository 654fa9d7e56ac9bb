"""What deploy/ holds: fields that Kubernetes and Kubeflow have, names that fit together, commands that start."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import dgcopt
from dgcopt.launcher.command import Here, add_arguments, plan

ROOT = Path(__file__).parents[1]
DEPLOY, DATA = ROOT / "deploy", ROOT / "tests" / "data" / "kubernetes"
SCHEMAS = [yaml.safe_load(path.read_text()) for path in sorted(DATA.glob("*.yaml"))]
KINDS = {kind: schema for file in SCHEMAS for kind, schema in file["kinds"].items()}
DEFS = {name: schema for file in SCHEMAS for name, schema in file.get("$defs", {}).items()}
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}

MANIFESTS = {
    path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted((DEPLOY / "kubernetes").iterdir())
}
DOCUMENTS = {f"{name} {doc['kind']}": doc for name, docs in MANIFESTS.items() for doc in docs}


def faults(value: Any, schema: dict[str, Any], place: str) -> list[str]:
    """What a strict server would refuse."""
    schema = DEFS.get(schema.get("$ref", ""), schema)
    kind = TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{place} must be of type {schema['type']}, not {value!r}"]
    found = [f"{place} lacks {name}" for name in schema.get("required", ()) if name not in value]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place} must be one of {schema['enum']}, not {value!r}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{place} does not match {schema['pattern']}: {value!r}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{place} is below {schema['minimum']}")
    if kind is dict:
        for name, part in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            found += [f"{place} has no {name}"] if inner is None else faults(part, inner, f"{place}.{name}")
    if kind is list:
        for number, part in enumerate(value):
            found += faults(part, schema["items"], f"{place}[{number}]")
    return found


def of(document: dict[str, Any]) -> list[str]:
    kind = f"{document['apiVersion']} {document['kind']}"
    unknown = [f"there is no {name}" for name in document if name not in ("apiVersion", "kind", "metadata", "spec")]
    metadata = faults(document["metadata"], {"$ref": "metadata"}, "metadata")
    return [*unknown, *metadata, *faults(document["spec"], KINDS[kind], "spec")]


def pods(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pods that it makes, by role."""
    spec = document["spec"]
    replicas = spec.get("pytorchReplicaSpecs") or spec.get("mpiReplicaSpecs") or {}
    found = {role: part["template"] for role, part in replicas.items()}
    if document["kind"] == "TrainingRuntime":
        return {job["name"]: job["template"]["spec"]["template"] for job in spec["template"]["spec"]["replicatedJobs"]}
    return {**found, **({"": spec["template"]} if "template" in spec else {})}


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The containers of all its pods."""
    return [container for pod in pods(document).values() for container in pod["spec"]["containers"]]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_fields_that_there_are(name: str) -> None:
    assert of(DOCUMENTS[name]) == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_field_that_there_is_not_is_found(name: str) -> None:
    """So the test above can fail."""
    document = yaml.safe_load(yaml.safe_dump(DOCUMENTS[name]))
    document["spec"]["replica"] = 1
    assert of(document) == ["spec has no replica"]
    for pod in pods(document).values():
        (container,) = pod["spec"]["containers"]
        del container["image"]
        container["resources"]["limits"]["cpu"] = 4
    assert len(of(document)) == 1 + 2 * len(pods(document))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_volumes(name: str) -> None:
    """Those that are mounted are there, and all claims are the one of runs.yaml."""
    claim = DOCUMENTS["runs.yaml PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in pods(DOCUMENTS[name]).values():
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        mounts = {mount["name"] for part in pod["spec"]["containers"] for mount in part.get("volumeMounts", ())}
        assert mounts == set(volumes)
        for volume in volumes.values():
            assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_manifests_have_the_names_that_operators_require() -> None:
    static, elastic = DOCUMENTS["pytorchjob.yaml PyTorchJob"], DOCUMENTS["pytorchjob-elastic.yaml PyTorchJob"]
    for job in (static, elastic):
        assert all(pod["spec"]["containers"][0]["name"] == "pytorch" for pod in pods(job).values())
    assert (
        set(pods(static)) == {"Master", "Worker"} and static["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] == 1
    )
    policy, workers = elastic["spec"]["elasticPolicy"], elastic["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert set(pods(elastic)) == {"Worker"}, "any may be the first"
    assert policy["minReplicas"] <= workers["replicas"] <= policy["maxReplicas"]
    assert set(pods(DOCUMENTS["mpijob.yaml MPIJob"])) == {"Launcher", "Worker"}
    runtime, job = DOCUMENTS["trainjob.yaml TrainingRuntime"], DOCUMENTS["trainjob.yaml TrainJob"]["spec"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node" and pods(runtime)["node"]["spec"]["containers"][0]["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert job["runtimeRef"]["kind"] == "TrainingRuntime" and job["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["runtimeRef"]["apiGroup"] == runtime["apiVersion"].partition("/")[0]
    assert (
        job["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] and "torch" in runtime["spec"]["mlPolicy"]
    )


def test_pods_find_the_first() -> None:
    service, pods_ = DOCUMENTS["statefulset.yaml Service"], DOCUMENTS["statefulset.yaml StatefulSet"]
    name, labels = service["metadata"]["name"], pods_["spec"]["template"]["metadata"]["labels"]
    assert pods_["spec"]["serviceName"] == name and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == labels == pods_["spec"]["selector"]["matchLabels"]
    (container,) = pods_["spec"]["template"]["spec"]["containers"]
    port = service["spec"]["ports"][0]["port"]
    assert container["ports"][0]["containerPort"] == port
    assert f"--rdzv-endpoint={pods_['metadata']['name']}-0.{name}:{port}" in container["args"]
    assert f"--nnodes={pods_['spec']['replicas']}" in container["args"]


# -- commands --------------------------------------------------------------------------------------------------------


def dry_run(words: list[str], tmp_path: Path, **env: str) -> str:
    """What `dgcopt run` would start, of launchers that are all there."""
    for launcher in ("horovodrun", "mpirun", "srun"):
        (tmp_path / launcher).write_text("#!/bin/sh\n")
        (tmp_path / launcher).chmod(0o755)
    assert words[:2] == ["dgcopt", "run"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    here = Here(("localhost",), 4, {"PATH": "", **env}, True, str(tmp_path / "python"), str(ROOT))
    (command,) = plan(parser.parse_args(words[2:]), here)
    script, *arguments = command.words[command.words.index("train.py") :]
    assert (ROOT / script).exists()
    for argument in (
        word.removeprefix("--config=") for word in arguments if word.startswith(("--config=", "configs/"))
    ):
        assert (ROOT / argument).exists(), argument
    return str(command).replace(f"{tmp_path}/", "")


OPERATOR = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "1"}


@pytest.mark.parametrize(
    ("name", "role", "env", "started"),
    [
        ("pytorchjob.yaml PyTorchJob", "Master", OPERATOR, "python -m torch.distributed.run --tee 3 train.py"),
        ("pytorchjob.yaml PyTorchJob", "Worker", OPERATOR, "python -m torch.distributed.run --tee 3 train.py"),
        ("pytorchjob-elastic.yaml PyTorchJob", "Worker", OPERATOR, "python -m torch.distributed.run --tee 3 train.py"),
        ("trainjob.yaml TrainingRuntime", "node", OPERATOR, "python -m torch.distributed.run --tee 3 train.py"),
        (
            "mpijob.yaml MPIJob",
            "Launcher",
            {},
            "horovodrun -np 4 -H w-0.w.ns.svc:2,w-1.w.ns.svc:2 --gloo python train.py",
        ),
        (
            "statefulset.yaml StatefulSet",
            "",
            {},
            "--nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint dgcopt-0.dgcopt:29400 --rdzv-id dgcopt "
            "--tee 3 --max-restarts 100 train.py",
        ),
    ],
)
def test_entry_commands(name: str, role: str, env: dict[str, str], started: str, tmp_path: Path) -> None:
    (container,) = pods(DOCUMENTS[name])[role]["spec"]["containers"]
    words = [*container["command"], *container["args"]]
    if words[0] == "bash":  # which starts dgcopt run with its arguments
        (first, *_), script = shlex.split(words[2].partition("&&")[0]), words[2]
        assert first == "dgcopt" and script.startswith('dgcopt run "$0" "$@" && ')
        words = ["dgcopt", "run", *words[3:]]
    if "--hostfile" in words:  # as the operator writes it
        hostfile = tmp_path / "hostfile"
        slots = DOCUMENTS[name]["spec"]["slotsPerWorker"]
        hostfile.write_text("".join(f"w-{i}.w.ns.svc slots={slots}\n" for i in range(2)))
        words[words.index("/etc/mpi/hostfile")] = str(hostfile)
    assert started in dry_run(words, tmp_path, **env)


def test_slurm(tmp_path: Path) -> None:
    """Run up to its last command, which is started with the job's numbers."""
    script = DEPLOY / "slurm.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE))
    assert {"nodes", "ntasks-per-node", "cpus-per-task"} <= set(options)
    shown = tmp_path / ".venv" / "bin" / "dgcopt"
    shown.parent.mkdir(parents=True)
    shown.write_text('#!/bin/sh\nprintf "%s\\n" dgcopt "$@"\n')
    shown.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": options["nodes"], "SLURM_CPUS_PER_TASK": options["cpus-per-task"]}
    job["SLURM_NTASKS"] = str(int(options["nodes"]) * int(options["ntasks-per-node"]))
    env = {**os.environ, **job, "SLURM_SUBMIT_DIR": str(tmp_path)}
    run = subprocess.run(["bash", script, "--epochs", "3"], env=env, capture_output=True, text=True, check=True)
    command = dry_run(run.stdout.splitlines(), tmp_path, **job)
    assert command.startswith("env OMP_NUM_THREADS=4 srun --ntasks 8 ") and command.endswith("--resume --epochs 3")


# -- the image -------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def test_dockerfile() -> None:
    """Its shell is bash and each RUN can be read by it; what it copies is there; the scripts use all its arguments."""
    steps = instructions()
    known = {"ARG", "FROM", "SHELL", "RUN", "COPY", "WORKDIR", "ENV", "CMD", "USER"}
    assert {name for name, _ in steps} == known
    assert [name for name, _ in steps[:2]] == ["ARG", "FROM"], "the base is an argument"
    for name, rest in steps:
        if name == "RUN":
            told = subprocess.run(["bash", "-n", "-c", rest], capture_output=True, text=True)
            assert told.returncode == 0 and rest.strip(), told.stderr
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
    body = "\n".join(rest for name, rest in steps if name in ("RUN", "FROM"))
    for argument in (rest.partition("=")[0] for name, rest in steps if name == "ARG"):
        assert f"${argument}" in body or f"${{{argument}" in body, f"{argument} has no effect"
    for needed in ("g++", "make", "patch", "python3-dev", "python3-venv"):  # what the scripts ask for
        assert re.search(rf"\b{re.escape(needed)}(\s|$)", body), needed


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name, those of the stage that it begins from included."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            found[stage] = [*found.get(base, [("FROM", base)])]
        elif found:
            found[stage].append((name, rest))
    return found


USER = 10001


def test_images_run_without_root() -> None:
    for stage in ("plain", "mpijob"):
        assert [rest for name, rest in stages()[stage] if name == "USER"] == [str(USER)], stage
        assert stages()[stage][-1][0] == "USER", "what follows would not be made by root"
        assert any(f"--uid {USER} dgcopt" in rest for name, rest in stages()[stage] if name == "RUN")
    assert [*stages()][-1] == "plain", "the stage that is built if none is named"
    for document in DOCUMENTS.values():
        for pod in pods(document).values():
            rights = pod["spec"]["securityContext"]
            assert rights == {"runAsNonRoot": True, **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), USER)}
            assert all(
                part["securityContext"] == {"allowPrivilegeEscalation": False} for part in pod["spec"]["containers"]
            )


def test_tags_are_pinned() -> None:
    """Those of the images that ours begin from, and ours: of this version, in manifests and on the page."""
    page, dockerfile = (ROOT / "docs" / "deploy.md").read_text(), (DEPLOY / "Dockerfile").read_text()
    bases = re.findall(r"\bBASE=(\S+)", page + dockerfile)
    assert len(bases) == 3 and all(re.search(r":\S*\d+[.-]?\d+", base) for base in bases), bases
    ours = [container["image"] for document in DOCUMENTS.values() for container in containers(document)]
    ours += re.findall(r"docker build .* -t (\S+)", page + dockerfile)
    version = rf"dgcopt:{re.escape(dgcopt.__version__)}(-\w+)?"
    assert len(ours) == 7 + 3 + 3 and [image for image in ours if not re.fullmatch(version, image)] == []


def test_ssh_is_where_it_is_needed() -> None:
    """And no host's key goes unverified: not those of an MPIJob's workers, and least of all others."""
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            assert not re.search(r"StrictHostKeyChecking[ =](no|off|accept-new)", path.read_text()), path
    plain, mpijob = ("\n".join(rest for _, rest in stages()[stage]) for stage in ("plain", "mpijob"))
    assert "openssh-server" in mpijob and "openssh-server" not in plain and "ssh_config" not in plain
    job = DOCUMENTS["mpijob.yaml MPIJob"]["spec"]
    home = job["sshAuthMountPath"]
    assert home == "/home/dgcopt/.ssh"
    config = DEPLOY / "mpijob" / "sshd_config"
    command = pods(DOCUMENTS["mpijob.yaml MPIJob"])["Worker"]["spec"]["containers"][0]["command"]
    assert command == ["/usr/sbin/sshd", "-De", "-f", f"/dgcopt/{config.relative_to(ROOT)}"]
    server = dict(line.split(maxsplit=1) for line in config.read_text().splitlines() if line[0] != "#")
    assert int(server["Port"]) >= 1024, "below, a port is root's"
    assert server["HostKey"] == f"{home}/id_rsa" and server["AuthenticationMethods"] == "publickey"
    if (ssh := shutil.which("ssh")) is None:
        pytest.skip("no ssh to read its config")

    def client(host: str) -> dict[str, str]:
        read = [ssh, "-G", "-F", str(DEPLOY / "mpijob" / "ssh_config"), host]
        shown = subprocess.run(read, capture_output=True, text=True, check=True).stdout
        return dict(line.split(maxsplit=1) for line in shown.splitlines() if " " in line)

    worker, other = client("dgcopt-worker-0.dgcopt.ns.svc"), client("github.com")
    assert worker["port"] == server["Port"] and worker["stricthostkeychecking"] == "true"
    assert worker["identityfile"] == server["HostKey"]
    prints = shlex.split(worker["knownhostscommand"])
    assert prints[-1] == f"{server['HostKey']}.pub"
    key = subprocess.run([shutil.which("sed") or "", prints[1]], input="ecdsa AAAA\n", capture_output=True, text=True)
    assert key.stdout == "* ecdsa AAAA\n", "a line of known_hosts for any of the job's hosts"
    assert other["port"] == "22" and other["stricthostkeychecking"] == "ask" and "knownhostscommand" not in other


def test_dockerfile_makes_the_environment_that_it_uses(tmp_path: Path) -> None:
    """Its second RUN, with a pip that shows what it is asked for."""
    run = [rest for name, rest in instructions() if name == "RUN" and "DGCOPT_TORCH" in rest]
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "venv.sh").write_text((ROOT / "scripts" / "venv.sh").read_text())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *"import torch"*) exit 1;; *install*) echo "$PIP_INDEX_URL $@";; esac\n')
    python.chmod(0o755)
    env = {**os.environ, "TORCH": "torch==9", "INDEX": "https://index"}
    told = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", run[0]], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert "https://index -m pip install --quiet torch==9" in told.stdout
