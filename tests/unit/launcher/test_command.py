"""`dgcopt run`: which command lines it builds, and what it says of options that cannot be."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dgcopt
from dgcopt.launcher.command import Command, Here, add_arguments, hosts_in, launch, plan, plan_survivors, run_all

RUN = "PY -m torch.distributed.run"
LOG = "env OMP_NUM_THREADS={} 'TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[${{rank}}] '"


@pytest.fixture
def here(tmp_path: Path) -> Here:
    """8 cores, every launcher installed, nothing set."""
    for name in ("horovodrun", "mpirun", "srun", "ssh"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("# two machines\nnode1 slots=2\nnode2:4  # a larger one\n\n")
    (tmp_path / "wrong").write_text("node1 slots=0\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    return Here(("localhost", "node1"), 8, {"PATH": ""}, False, str(tmp_path / "python"), str(tmp_path))


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(line.split())


def built(line: str, here: Here) -> list[str]:
    folder = here.folder
    line = line.replace("HOSTS", f"{folder}/hosts").replace("BINARY", f"{folder}/binary")
    line = line.replace("WRONG", f"{folder}/wrong").replace("--hostfile train", f"--hostfile {folder}/train")
    commands = [str(command) for command in plan(parsed(line), here)]
    return [
        command.replace(here.python, "PY").replace(f"{folder}/", "").replace(folder, "HERE") for command in commands
    ]


def over_ssh(host: str, place: int, share: int, options: str = "", threads: int = 4) -> str:
    there = LOG.format(threads).replace("'", "'\"'\"'")
    where = f"--nnodes 2 --node-rank {place} --nproc-per-node {share} --master-addr node1 --master-port 29500"
    return f"ssh -tt -o BatchMode=yes {options}-- {host} 'cd HERE && {there} {RUN} {where} --tee 3 train.py'"


TABLE = {
    "-np 4 train.py --lr 0.1": [f"{LOG.format(2)} {RUN} --standalone --nproc-per-node 4 --tee 3 train.py --lr 0.1"],
    "-np 16 train.py": [f"{LOG.format(1)} {RUN} --standalone --nproc-per-node 16 --tee 3 train.py"],
    "-np 2 --threads 3 -m package.train -v": [
        f"{LOG.format(3)} {RUN} --standalone --nproc-per-node 2 --tee 3 -m package.train -v"
    ],
    "-np 2 ./program x": [f"{LOG.format(4)} {RUN} --standalone --nproc-per-node 2 --tee 3 --no-python ./program x"],
    "-H localhost:2 train.py": [f"{LOG.format(4)} {RUN} --standalone --nproc-per-node 2 --tee 3 train.py"],
    "-H node1:2,node2:2 train.py": [
        f"{LOG.format(4)} {RUN} --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr node1 --master-port 29500 "
        "--tee 3 train.py",
        over_ssh("node2", 1, 2),
    ],
    "-H me@node1:2,me@node2:2 train.py": [over_ssh("me@node1", 0, 2), over_ssh("me@node2", 1, 2)],
    "-np 3 --hostfile HOSTS --ssh-port 2222 train.py": [
        f"{LOG.format(2)} {RUN} --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr node1 --master-port 29500 "
        "--tee 3 train.py",
        over_ssh("node2", 1, 1, "-p 2222 ", threads=2),
    ],
    "-np 2 -H node1:2,node2:2 train.py": [
        f"{LOG.format(4)} {RUN} --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr node1 --master-port 29500 "
        "--tee 3 train.py"
    ],
    "-np 2 --nnodes 1:4 --max-restarts 3 --rdzv-endpoint node1:29400 train.py": [
        f"{LOG.format(4)} TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {RUN} --nnodes 1:4 --nproc-per-node 2 "
        "--rdzv-backend c10d --rdzv-endpoint node1:29400 --rdzv-id dgcopt --tee 3 --max-restarts 3 train.py"
    ],
    "-np 2 --nnodes 1:4 --rdzv-endpoint node1:29400 train.py": [
        f"{LOG.format(4)} TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {RUN} --nnodes 1:4 --nproc-per-node 2 "
        "--rdzv-backend c10d --rdzv-endpoint node1:29400 --rdzv-id dgcopt --tee 3 train.py"
    ],
    "-np 2 --nnodes 1 --interface eth0 train.py": [
        "env OMP_NUM_THREADS=4 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 "
        f"'TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=[${{rank}}] ' {RUN} --standalone --nproc-per-node 2 --tee 3 train.py"
    ],
    "-np 2 --launcher-args=--role=a train.py": [
        f"{LOG.format(4)} {RUN} --standalone --nproc-per-node 2 --tee 3 --role=a train.py"
    ],
    "--launcher horovodrun -np 2 train.py": ["env OMP_NUM_THREADS=4 horovodrun -np 2 --gloo PY train.py"],
    "--launcher horovodrun -H a:1,b:2 --interface eth0 --ssh-port 22 train.py": [
        "env OMP_NUM_THREADS=4 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 horovodrun -np 3 -H a:1,b:2 "
        "--network-interfaces eth0 -p 22 --gloo PY train.py"
    ],
    "--launcher horovodrun -np 2 --launcher-args=--mpi -m package.train": [
        "env OMP_NUM_THREADS=4 horovodrun -np 2 --mpi PY -m package.train"
    ],
    "--launcher mpirun -np 4 train.py": [
        "env OMP_NUM_THREADS=2 mpirun -np 4 --bind-to none --tag-output --oversubscribe -x OMP_NUM_THREADS PY train.py"
    ],
    "--launcher mpirun -H a:2,b:2 --interface eth0 train.py": [
        "env OMP_NUM_THREADS=4 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 mpirun -np 4 --bind-to none "
        "--tag-output -H a:2,b:2 --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0 -x OMP_NUM_THREADS "
        "-x GLOO_SOCKET_IFNAME -x NCCL_SOCKET_IFNAME -x PATH PY train.py"
    ],
    "--launcher srun --dry-run -H a:1,b:3 train.py": [
        "env OMP_NUM_THREADS=2 srun --ntasks 4 --label --kill-on-bad-exit=1 --distribution arbitrary "
        "--nodelist a,b,b,b PY train.py"
    ],
    "--launcher srun --dry-run -np 3 -H a:2,b:4,c:4 train.py": [
        "env OMP_NUM_THREADS=2 srun --ntasks 3 --label --kill-on-bad-exit=1 --distribution arbitrary "
        "--nodelist a,a,b PY train.py"
    ],
    "-np 2 --nnodes 1 --rdzv-endpoint node1:29400 train.py": [
        f"{LOG.format(4)} {RUN} --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node1:29400 "
        "--rdzv-id dgcopt --tee 3 train.py"
    ],
    "-H localhost:2 --rdzv-endpoint [fd00::1]:29400 train.py": [
        f"{LOG.format(4)} {RUN} --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr fd00::1 "
        "--master-port 29400 --tee 3 train.py"
    ],
    "-np 2 --nnodes 2 --rdzv-endpoint [fd00::1]:29400 train.py": [
        f"{LOG.format(4)} {RUN} --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d "
        "--rdzv-endpoint '[fd00::1]:29400' --rdzv-id dgcopt --tee 3 train.py"
    ],
    "-H localhost:2 --rdzv-endpoint localhost:29400 train.py": [
        f"{LOG.format(4)} {RUN} --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr localhost "
        "--master-port 29400 --tee 3 train.py"
    ],
    "--launcher srun --dry-run -np 4 train.py": [
        "env OMP_NUM_THREADS=2 srun --ntasks 4 --label --kill-on-bad-exit=1 PY train.py"
    ],
}


@pytest.mark.parametrize("line", TABLE)
def test_command_lines(line: str, here: Here) -> None:
    assert built(line, here) == TABLE[line]


def test_in_an_allocation_of_slurm(here: Here) -> None:
    env = {"PATH": "", "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "OMP_NUM_THREADS": "5"}
    there = Here(here.names, here.cores, env, False, here.python, here.folder)
    assert built("-np 4 train.py", there) == ["srun --ntasks 4 --label --kill-on-bad-exit=1 PY train.py"]
    assert built("--launcher torchrun -np 4 --threads 2 train.py", there)[0].startswith("env OMP_NUM_THREADS=2 ")


def test_in_a_pod_of_kubeflow(here: Here) -> None:
    env = {"PATH": "", "PET_NNODES": "4", "PET_NPROC_PER_NODE": "2"}
    pod = Here(here.names, here.cores, env, False, here.python, here.folder)
    assert built("train.py", pod) == [f"{LOG.format(4)} {RUN} --tee 3 train.py"]
    elastic = Here(here.names, here.cores, {**env, "PET_NNODES": "1:4"}, False, here.python, here.folder)
    assert built("train.py", elastic) == [
        f"{LOG.format(4)} TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {RUN} --tee 3 train.py"
    ]


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_settings_reach_other_machines(launcher: str, here: Here) -> None:
    """Else their ranks would take another wire, or other kernels."""
    env = {"PATH": "", "DGCOPT_WIRE": "torch", "NCCL_DEBUG": "INFO", "HOME": "/root"}
    there = Here(here.names, here.cores, env, False, here.python, here.folder)
    last = built(f"--launcher {launcher} -H node1:2,node2:2 train.py", there)[-1]
    assert ("env DGCOPT_WIRE=torch NCCL_DEBUG=INFO " in last) or ("-x DGCOPT_WIRE -x NCCL_DEBUG " in last)
    assert "HOME" not in last


@pytest.mark.parametrize(("launcher", "word"), [("torchrun", "OMP_NUM_THREADS=3"), ("mpirun", "-x OMP_NUM_THREADS")])
def test_a_number_of_threads_that_is_set_reaches_other_machines(launcher: str, word: str, here: Here) -> None:
    """Open MPI leaves it here, and ranks there took all cores each."""
    there = Here(here.names, here.cores, {"PATH": "", "OMP_NUM_THREADS": "3"}, False, here.python, here.folder)
    assert f" {word} " in built(f"--launcher {launcher} -H node1:2,node2:2 train.py", there)[-1]


def test_root_may_use_mpirun(here: Here) -> None:
    root = Here(here.names, here.cores, {"PATH": ""}, True, here.python, here.folder)
    assert "--allow-run-as-root" in built("--launcher mpirun -np 2 train.py", root)[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-np 2", "give the script last"),
        ("train.py", "say how many ranks: -np N, or -H"),
        ("-np 0 train.py", "-np cannot be 0"),
        ("-np 2 --threads 0 train.py", "--threads cannot be 0"),
        ("-np 2 --max-restarts -1 train.py", "--max-restarts cannot be -1"),
        ("-np 2 missing.py", "there is no missing.py in"),
        ("-H a:0 train.py", "'a:0' names no machine: write HOST:N"),
        ("-H a:x train.py", "'a:x' names no machine"),
        ("-H a:1,a:2 train.py", "a is named twice"),
        ("-H , train.py", "no machine is named"),
        ("-H a:1 --hostfile HOSTS train.py", "-H or by --hostfile, not both"),
        ("--hostfile nowhere train.py", "--hostfile nowhere cannot be read: No such file"),
        ("-np 5 -H a:2,b:2 train.py", "-np 5 are more ranks than a:2,b:2 has: 4"),
        ("-H localhost:1,b:1 train.py", "other machines cannot reach this one as localhost"),
        ("-H me@localhost:1,b:1 train.py", "other machines cannot reach this one as localhost"),
        ("-H a:1 --nnodes 2 train.py", "choose one"),
        ("-np 2 --nnodes 4:1 train.py", "MIN:MAX, not '4:1'"),
        ("-np 2 --nnodes 2 train.py", "several machines need --rdzv-endpoint HOST:PORT"),
        ("-np 2 --nnodes 2 --rdzv-endpoint a train.py", "HOST:PORT, their rendezvous, not 'a'"),
        ("-np 2 --launcher mpirun --max-restarts 1 train.py", "are torchrun's, not mpirun's"),
        ("-np 2 --launcher srun train.py", "srun wants an allocation of Slurm"),
        ("--hosts=-oProxyCommand:1 train.py", "'-oProxyCommand:1' names no machine"),
        ("-np 2 --hostfile BINARY train.py", "/binary' is no text file: write a line `HOST slots=N`"),
        ("-np 2 --hostfile a\0b train.py", "'a\\x00b' is no text file"),
        ("-np 2 --hostfile train.py train.py", "no machine is named: write HOST:N"),
        ("-np 2 --hostfile WRONG train.py", "'node1 slots=0' names no machine: write HOST:N"),
        ("-np 2 --rdzv-endpoint a:29400 train.py", "--rdzv-endpoint is for several machines: give their number"),
        ("-np 2 --nnodes 1 --rdzv-endpoint a train.py", "HOST:PORT, their rendezvous, not 'a'"),
        ("-np 2 --nnodes 2 --rdzv-endpoint fd00::1:29400 train.py", "HOST:PORT, their rendezvous, not 'fd00::1:29400'"),
        ("-np 2 --nnodes 2 --rdzv-endpoint [a]:1 train.py", "HOST:PORT, their rendezvous, not '[a]:1'"),
        ("-np 2 --nnodes 2 --rdzv-endpoint a:0 train.py", "HOST:PORT, their rendezvous, not 'a:0'"),
        ("-np 2 --ssh-port 22 train.py", "--ssh-port is for machines that ranks are started on by ssh"),
        ("-np 2 --ssh-port 22 --launcher srun --dry-run train.py", "--ssh-port is for machines"),
        ("-np 2 --ssh-port 65536 train.py", "--ssh-port 65536 is no port: give one from 1 to 65535"),
        ("-np 2 --nnodes 2 --rdzv-endpoint a:65536 train.py", "HOST:PORT, their rendezvous, not 'a:65536'"),
        *(
            (f"-np 2 --launcher {launcher} --dry-run --launcher-args=--x='y train.py", "has an unclosed quote")
            for launcher in ("torchrun", "horovodrun", "mpirun", "srun")
        ),
    ],
)
def test_told_plainly(line: str, words: str, here: Here) -> None:
    with pytest.raises(dgcopt.ConfigError) as error:
        built(line, here)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "value", ["0/x", "0", "", "-1", "two", "\u0662", "1" * 5000], ids=lambda value: repr(value)[:8]
)
@pytest.mark.parametrize("name", ["SLURM_NNODES", "PET_NPROC_PER_NODE"])
def test_variables_told_plainly(name: str, value: str, here: Here) -> None:
    env = {"PATH": "", "SLURM_JOB_ID": "7"} if name == "SLURM_NNODES" else {"PATH": "", "PET_NNODES": "2"}
    there = Here(here.names, here.cores, env | {name: value}, False, here.python, here.folder)
    with pytest.raises(dgcopt.ConfigError) as error:
        built("-np 2 train.py" if name == "SLURM_NNODES" else "train.py", there)
    assert str(error.value).startswith(f"the environment variable {name} is {value!r}"[:90])
    assert "must be a whole number of at least 1: correct or unset it" in str(error.value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_text_of_hosts_is_a_plan_or_a_config_error(data: st.DataObject, here: Here) -> None:
    """A plan, or a ConfigError; in a plan no machine's name can be read as an option, or by a shell."""
    pieces = st.sampled_from(
        ["node1", "a", "-b", "--", ":", "=", " slots=", "2", "0", ",", "\n", "#", ";", "$(x)", "\0"]
    )
    text = data.draw(st.lists(pieces | st.text(max_size=3), max_size=8).map("".join))
    args = parsed("-np 1 train.py")
    if data.draw(st.booleans()):
        args.hosts = text
    else:
        args.hostfile = f"{here.folder}/hosts"
        Path(args.hostfile).write_bytes(text.encode(errors="surrogatepass"))
    try:
        commands = plan(args, here)
    except dgcopt.ConfigError as error:
        assert str(error).count("\n") == 0
        return
    for host in hosts_in(text) if args.hosts else ():
        assert re.fullmatch(r"[A-Za-z0-9][\w.@-]*", host.name)
    for command in commands:
        assert all("\0" not in word for word in command.words)
        if command.words[0] == "ssh":
            assert command.words[-3] == "--"


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun", "srun"])
def test_a_launcher_that_is_not_there(launcher: str, here: Here) -> None:
    (Path(here.folder) / launcher).unlink()
    with pytest.raises(dgcopt.ConfigError, match=f"{launcher} is not installed here: .*--launcher torchrun"):
        plan(parsed(f"--launcher {launcher} --dry-run -np 2 train.py"), here)


def test_no_ssh_starts_nothing(here: Here) -> None:
    """Where it was missed while machines were started, those that had been were left behind."""
    (Path(here.folder) / "ssh").unlink()
    with pytest.raises(dgcopt.ConfigError, match=r"ssh is not installed here: .*--nnodes"):
        plan(parsed("-H node1:1,node2:1 train.py"), here)


def test_hosts() -> None:
    assert list(map(str, hosts_in("a,b:3"))) == ["a:1", "b:3"]
    assert list(map(str, hosts_in("a slots=2\n# none\nb slots = 4"))) == ["a:2", "b:4"]
    assert list(map(str, hosts_in("a\na\nb\na\nc:2\n"))) == ["a:3", "b:1", "c:2"], "as PBS and LSF write it"
    for text in ("a\na slots=2", "a:2,a"):
        with pytest.raises(dgcopt.ConfigError, match="a is named twice: give each machine once"):
            hosts_in(text)


def test_a_dry_run_starts_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert launch(parsed("--dry-run -np 2 ./none")) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "--nproc-per-node 2" in out


def test_a_command_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(dgcopt.ConfigError, match=r"cannot be started \(.*\): correct the command above"):
        launch(parsed("-np 2 ./a\0b"))
    with pytest.raises(dgcopt.ConfigError, match=r"cannot be started \(.*too long.*\)"):
        launch(parsed("-np 2 true " + 2**18 * "x"))  # longer than the kernel takes in one word
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("it is started"))
    for line in ("-np 2 no-such-program", "-np 2 /", "-np 2 --survive no-such-program"):
        with pytest.raises(dgcopt.ConfigError, match=r"cannot be started \(there is no such program here\): correct"):
            launch(parsed(line))


def test_of_several_commands_the_first_that_fails_counts() -> None:
    def python(code: str) -> Command:
        return Command((sys.executable, "-c", code), {"WHAT": "5"})

    start = time.monotonic()
    fails = python("import os, sys; sys.exit(int(os.environ['WHAT']))")
    assert run_all([python("import time; time.sleep(60)"), fails]) == 5
    assert run_all([python("import os; os.kill(os.getpid(), 9)")]) == 137, "as a shell says it"
    assert run_all([python("pass"), python("import time; time.sleep(0.3)")]) == 0
    assert time.monotonic() - start < 30


def test_a_command_that_cannot_be_started_ends_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a line that is too long, for the second of several machines."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **kwargs))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    first = Command((sys.executable, "-c", "import time; time.sleep(60)"))
    try:
        with pytest.raises(OSError, match="no-such-program"):
            run_all([first, first, Command(("no-such-program",)), first])
        assert [process.poll() for process in started] == [-signal.SIGTERM] * 2
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_the_command_itself(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "dgcopt", "run"]
    told = subprocess.run([*run, "-np", "0", "x"], capture_output=True, text=True, env={**os.environ})
    assert told.returncode == 2 and told.stderr == "dgcopt run: -np cannot be 0\n"
    env = {**os.environ, "DGCOPT_KERNELS": "fast"}
    told = subprocess.run([*run[:-1], "compressors"], capture_output=True, text=True, env=env)
    assert told.returncode == 2
    assert told.stderr == 'dgcopt compressors: DGCOPT_KERNELS must be "native" or "torch", not \'fast\'\n'


@pytest.mark.parametrize(
    "line, ranks, machines, endpoint, hosts",
    [
        ("--survive -np 4 train.py --lr 0.1", 4, 1, ("127.0.0.1", 0), True),
        ("--survive -np 2 --nnodes 3 --rdzv-endpoint node1:29400 train.py --lr 0.1", 2, 3, ("node1", 29400), True),
        (
            "--survive -np 2 --nnodes 3 --rdzv-endpoint 192.0.2.7:29400 train.py --lr 0.1",
            2,
            3,
            ("192.0.2.7", 29400),
            False,
        ),
        (
            "--survive -np 2 --nnodes 3 --rdzv-endpoint [2001:db8::7]:29400 train.py --lr 0.1",
            2,
            3,
            ("2001:db8::7", 29400),
            False,
        ),
    ],
)
def test_survivors(line: str, ranks: int, machines: int, endpoint: tuple[str, int], hosts: bool, here: Here) -> None:
    """One agent for each machine; that of the named machine hosts the store."""
    made = plan_survivors(parsed(line), here)
    assert made.words == [here.python, "train.py", "--lr", "0.1"]
    assert (made.ranks, made.machines, made.endpoint, made.hosts) == (ranks, machines, endpoint, hosts)
    assert made.env["OMP_NUM_THREADS"] == str(8 // ranks)


@pytest.mark.parametrize(
    "line, problem",
    [
        ("--survive train.py", "needs the number of ranks on this machine"),
        ("--survive -np 2 --launcher mpirun train.py", "starts the ranks itself"),
        ("--survive -np 2 --max-restarts 3 train.py", "starts the ranks itself"),
        ("--survive -np 2 -H a:1,b:1 train.py", "starts the ranks itself"),
        ("--survive -np 2 --nnodes 1:4 --rdzv-endpoint a:1 train.py", "--nnodes N, not '1:4'"),
        ("--survive -np 2 --nnodes 2 train.py", "need --rdzv-endpoint HOST:PORT"),
        ("--survive -np 2 --restart-after -1 train.py", "--restart-after cannot be -1.0"),
        ("--survive -np 2 --nnodes 2 --rdzv-endpoint a:0 train.py", "HOST:PORT, their rendezvous, not 'a:0'"),
        ("--survive -np 2 --ssh-port 22 train.py", "--ssh-port is for machines that ranks are started on by ssh"),
        ("--survive -np 2 --restart-after nan train.py", "--restart-after cannot be nan"),
        ("--survive -np 2 nothing.py", "there is no nothing.py"),
        ("--survive -np 2 --nnodes 2 --rdzv-endpoint localhost:29400 train.py", "cannot reach this one as localhost"),
    ],
)
def test_survivors_that_cannot_be(line: str, problem: str, here: Here) -> None:
    with pytest.raises(dgcopt.ConfigError, match=problem):
        plan_survivors(parsed(line), here)
