"""`dgcopt run`: one command in front of torchrun, horovodrun, mpirun and srun.

It builds the launcher's command line, with settings that are easy to forget, and replaces this process by it. It adds
no protocol. `--dry-run` prints the command.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ..errors import ConfigError
from .agent import Agent, Plan

__all__ = ["Command", "Here", "add_arguments", "hosts_in", "launch", "plan"]

KUBEFLOW = "PET_NNODES"
"""Variable set by Kubeflow's PyTorchJob, together with PET_ variables for torchrun's node rank and rendezvous."""

LAUNCHERS = ("torchrun", "horovodrun", "mpirun", "srun")
PORT, LAST_PORT = 29500, 65535
LOOPBACK = ("localhost", "127.0.0.1", "::1")
GRACE = 10.0
"""Seconds for the other machines' commands to end after one has failed."""

INSTALL = {
    "horovodrun": "bash scripts/install_horovod.sh installs it, or use --launcher torchrun",
    "mpirun": "bash scripts/install_horovod.sh installs it, or use --launcher torchrun",
    "ssh": "it starts ranks on other machines. Install openssh-client, or give the command on each with --nnodes",
    "srun": "it is a part of Slurm: run this in Slurm, or use --launcher torchrun",
}

DESCRIPTION = """\
Starts a training script on several ranks, on this machine or on others. Builds the launcher's command line and replaces
itself by it, so signals and the exit status are the launcher's. Put options before the script.

  dgcopt run -np 4 train.py --config ...                    4 ranks here
  dgcopt run -H node1:2,node2:2 train.py                    on two machines, over ssh
  dgcopt run -np 2 --nnodes 1:4 --max-restarts 3 --rdzv-endpoint node1:29400 train.py
                                                            on each of 1 to 4 machines, elastic
  dgcopt run --launcher horovodrun -np 4 train.py           or mpirun, or srun
  dgcopt run --survive -np 4 train.py                       continue when ranks die, and restart them
  dgcopt run train.py                                       in a pod of Kubeflow's PyTorchJob
"""


@dataclass(frozen=True)
class Host:
    """A machine, and its largest number of ranks."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class Command:
    """A command line, with its additions to the environment."""

    words: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join([*(["env"] if self.env else []), *(f"{k}={v}" for k, v in self.env.items()), *self.words])


def cores() -> int:
    """Return the number of cores that this process may use: its affinity, or a container's share of their time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(bound, int(quota) // int(period)))
    except (OSError, ValueError):  # another system, or "max"
        return bound


@dataclass(frozen=True)
class Here:
    """This machine: its names, cores, environment and programs, and the running Python."""

    names: tuple[str, ...] = ("localhost", "127.0.0.1", socket.gethostname())
    cores: int = field(default_factory=cores)
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    is_root: bool = hasattr(os, "geteuid") and os.geteuid() == 0
    python: str = sys.executable
    folder: str = field(default_factory=os.getcwd)

    def find(self, program: str) -> str:
        """Return the path of a launcher, beside this Python or on the PATH. Raises ConfigError if there is none."""
        path = os.pathsep.join([str(Path(self.python).parent), self.env.get("PATH", "")])
        found = shutil.which(program, path=path)
        if found is None:
            raise ConfigError(f"{program} is not installed here: {INSTALL[program]}")
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `dgcopt run`."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.usage = "dgcopt run [options] train.py ..."
    option = parser.add_argument
    option("-np", type=int, metavar="N", help="total number of ranks; with --nnodes, ranks of this machine")
    option("-H", "--hosts", metavar="HOST:N,...", help="machines, and the largest number of ranks on each")
    option(
        "--hostfile", metavar="FILE", help="file of machines: lines `HOST slots=N` or `HOST:N`, or `HOST` once per rank"
    )
    option(
        "--nnodes", metavar="MIN[:MAX]", help="number of machines; run this command on each; with torchrun or --survive"
    )
    option(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="the first machine and a free port on it; [ADDRESS]:PORT for IPv6",
    )
    option("--max-restarts", type=int, metavar="N", help="number of restarts after failures; torchrun only")
    option("--survive", action="store_true", help="keep the other ranks running when a rank dies: docs/survive.md")
    option("--restart-after", type=float, metavar="S", help="with --survive: seconds until a dead rank restarts")
    option("--launcher", choices=LAUNCHERS, help="default: torchrun, and srun inside a Slurm allocation")
    option(
        "--launcher-args",
        default="",
        metavar="ARGS",
        help='further options for the launcher, as one word; a single one with "=": --launcher-args=--verbose',
    )
    option("--threads", type=int, metavar="N", help="OMP_NUM_THREADS of each rank; default: cores divided by ranks")
    option("--interface", metavar="NAME", help="the network interface of all collectives, such as eth0")
    option("--ssh-port", type=int, metavar="PORT", help="the machines' ssh port")
    option("--dry-run", action="store_true", help="print the command and start nothing")
    option("-m", dest="module", action="store_true", help="the script is a module, as in python -m")
    option("program", nargs=argparse.REMAINDER, help="the script and its arguments")


def hosts_in(text: str) -> list[Host]:
    """Parse machines of `-H`, or of the lines of a hostfile. Raises ConfigError for invalid ones."""
    lines = [line.partition("#")[0].strip() for line in re.split(r"[,\n]", text)]
    hosts: list[Host] = []
    bare: dict[str, int] = {}  # place among the hosts; PBS, LSF and Open MPI name a machine once for each rank
    for line in filter(None, lines):
        # a name that begins with a dash would be an option of ssh, horovodrun or mpirun
        match = re.fullmatch(r"([^\W_][\w.@-]*)(?:(?::|\s+slots\s*=\s*)([1-9][0-9]{0,5}))?", line, re.ASCII)
        if match is None:
            raise ConfigError(
                f"{line!r:.200} names no machine: write HOST:N, or HOST slots=N in a file, with N of 1 or more"
            )
        if match[2] is None and match[1] in bare:
            place = bare[match[1]]
            hosts[place] = Host(match[1], hosts[place].slots + 1)
            continue
        if match[2] is None:
            bare[match[1]] = len(hosts)
        hosts.append(Host(match[1], int(match[2] or 1)))
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{', '.join(twice)} is named twice: give each machine once, with all its ranks")
    if not hosts:
        raise ConfigError("no machine is named: write HOST:N,HOST:N")
    return hosts


def plan(args: argparse.Namespace, here: Here) -> list[Command]:
    """Return the command; with torchrun on several machines, one for each.

    Raises ConfigError for options that are out of range or do not go together, and for a launcher that is missing.
    """
    launcher = args.launcher or ("srun" if "SLURM_JOB_ID" in here.env and not args.nnodes else "torchrun")
    if not args.program or args.program[0].startswith("-"):
        unknown = f"there is no option {args.program[0]}: " if args.program else ""
        raise ConfigError(
            f"{unknown}give the script last, `dgcopt run [options] train.py ...`; its own options follow it"
        )
    if args.program[0].endswith(".py") and not args.module and not (Path(here.folder) / args.program[0]).exists():
        raise ConfigError(f"there is no {args.program[0]} in {here.folder}")
    for name in ("np", "max_restarts", "threads"):
        value = getattr(args, name)
        if value is not None and value < (0 if name == "max_restarts" else 1):
            raise ConfigError(f"{'-np' if name == 'np' else '--' + name.replace('_', '-')} cannot be {value}")
    if args.ssh_port is not None and not 0 < args.ssh_port <= LAST_PORT:
        raise ConfigError(f"--ssh-port {args.ssh_port} is no port: give one from 1 to {LAST_PORT}")
    if launcher != "torchrun" and (args.nnodes or args.max_restarts is not None or args.rdzv_endpoint):
        raise ConfigError(
            f"--nnodes, --rdzv-endpoint and --max-restarts are torchrun's, not {launcher}'s: give the machines by -H; "
            f"elastic Horovod takes --launcher-args '--min-np 2 --host-discovery-script ...'"
        )
    hosts = _hosts(args)
    if args.rdzv_endpoint and not (hosts or args.nnodes or args.survive):
        raise ConfigError("--rdzv-endpoint is for several machines: give their number with --nnodes, or them with -H")
    if args.ssh_port is not None and (args.survive or launcher == "srun" or (launcher == "torchrun" and not hosts)):
        raise ConfigError(
            "--ssh-port is for machines that ranks are started on by ssh: give them with -H or --hostfile"
        )
    if hosts and args.nnodes:
        raise ConfigError("-H starts ranks on other machines, and --nnodes is given on each of them: choose one")
    if hosts and args.np is not None and args.np > sum(host.slots for host in hosts):
        listed = ",".join(map(str, hosts))
        raise ConfigError(f"-np {args.np} are more ranks than {listed} has: {sum(host.slots for host in hosts)}")
    ranks = args.np or sum(host.slots for host in hosts)
    if not ranks and launcher == "torchrun" and KUBEFLOW in here.env:
        told = here.env.get("PET_NPROC_PER_NODE", "1")
        ranks = 1 if told in ("auto", "cpu", "gpu") else _number(here, "PET_NPROC_PER_NODE", 1)
    if not ranks:
        raise ConfigError("say how many ranks: -np N, or -H HOST:N,...")
    most = max((host.slots for host in hosts), default=ranks)
    if launcher == "srun" and not hosts:
        most = -(-ranks // _number(here, "SLURM_NNODES", 1))
    return _BUILD[launcher](args, here, ranks, hosts, _environment(args, here, min(most, ranks)))


def _hosts(args: argparse.Namespace) -> list[Host]:
    if args.hosts and args.hostfile:
        raise ConfigError("give the machines by -H or by --hostfile, not both")
    if args.hostfile:
        try:
            text = Path(args.hostfile).read_text()
        except OSError as error:
            raise ConfigError(f"--hostfile {args.hostfile} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(
                f"--hostfile {args.hostfile!r} is no text file: write a line `HOST slots=N` for each machine"
            ) from error
        return hosts_in(text)
    return hosts_in(args.hosts) if args.hosts else []


def _number(here: Here, name: str, default: int) -> int:
    """Read a whole number from the environment. Raises ConfigError for anything else."""
    text = here.env.get(name, str(default))
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ConfigError(
            f"the environment variable {name} is {text!r:.200}, and must be a whole number of at least 1: correct or "
            f"unset it"
        )
    return int(text)


def _more(args: argparse.Namespace) -> list[str]:
    """Return the words of --launcher-args. Raises ConfigError for an unclosed quote."""
    try:
        return shlex.split(args.launcher_args)
    except ValueError as error:
        raise ConfigError(
            f"--launcher-args {args.launcher_args!r} has an unclosed quote or a lone backslash: close or escape it"
        ) from error


def _environment(args: argparse.Namespace, here: Here, on_one_machine: int) -> dict[str, str]:
    """Return every rank's environment: its number of threads, so that ranks share cores, and the network interface."""
    env = {}
    if args.threads or "OMP_NUM_THREADS" not in here.env:
        env["OMP_NUM_THREADS"] = str(args.threads or max(1, here.cores // on_one_machine))
    if args.interface:
        env |= {"GLOO_SOCKET_IFNAME": args.interface, "NCCL_SOCKET_IFNAME": args.interface}
    return env


def _script(args: argparse.Namespace, here: Here) -> list[str]:
    """Return the program as a command, by this Python if it is a script or module."""
    if args.module:
        return [here.python, "-m", *args.program]
    return [here.python, *args.program] if args.program[0].endswith(".py") else list(args.program)


def _torchrun(
    args: argparse.Namespace, here: Here, ranks: int, hosts: list[Host], env: dict[str, str]
) -> list[Command]:
    env = {**env, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] "}
    # a machine that comes restarts all ranks, in any case; in a pod of an elastic PyTorchJob the variable has the range
    is_elastic = ":" in (args.nnodes or here.env.get(KUBEFLOW, ""))
    if args.max_restarts or is_elastic:  # else restarted ranks get the addresses of lost ones
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    run = [here.python, "-m", "torch.distributed.run"]
    more = ["--tee", "3"]
    more += [] if args.max_restarts is None else ["--max-restarts", str(args.max_restarts)]
    more += _more(args)
    more += ["-m"] if args.module else [] if args.program[0].endswith(".py") else ["--no-python"]
    more += args.program
    if args.nnodes:
        place = ["--nnodes", _range(args.nnodes), "--nproc-per-node", str(ranks)]
        if args.rdzv_endpoint or args.nnodes not in ("1", "1:1"):
            endpoint = _endpoint(args.rdzv_endpoint or "")
            place += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "dgcopt"]
        else:
            place = ["--standalone", "--nproc-per-node", str(ranks)]
        return [Command((*run, *place, *more), env)]
    if args.np is None and not hosts:  # the variables have the number
        return [Command((*run, *more), env)]
    is_here = len(hosts) == 1 and hosts[0].name in here.names and not args.rdzv_endpoint
    if not hosts or is_here:
        return [Command((*run, "--standalone", "--nproc-per-node", str(ranks), *more), env)]
    first, port = hosts[0].name.rpartition("@")[2], PORT  # without the user of ssh
    if args.rdzv_endpoint:
        first, port = _split(_endpoint(args.rdzv_endpoint))
    if len(hosts) > 1 and first in LOOPBACK:
        raise ConfigError(f"other machines cannot reach this one as {first}: name it as they know it, in -H, first")
    commands, shares = [], _shares(hosts, ranks)
    for place_, (name, share) in enumerate(shares):
        nodes = ["--nnodes", str(len(shares)), "--node-rank", str(place_), "--nproc-per-node", str(share)]
        words = [*run, *nodes, "--master-addr", first, "--master-port", str(port), *more]
        local = Command(tuple(words), env)
        commands.append(local if name in here.names else _over_ssh(name, local, args, here))
    return commands


def _shares(hosts: Sequence[Host], ranks: int) -> list[tuple[str, int]]:
    """Return the machines that are needed, in order, and the number of ranks on each."""
    shares = []
    for host in hosts:
        if ranks > 0:
            shares.append((host.name, min(host.slots, ranks)))
            ranks -= host.slots
    return shares


def _over_ssh(host: str, command: Command, args: argparse.Namespace, here: Here) -> Command:
    """Return a command to run by ssh in the same folder, which ends with this one (-tt) and asks for no password."""
    port = ["-p", str(args.ssh_port)] if args.ssh_port else []
    passed = {key: here.env[key] for key in ("PYTHONPATH", "OMP_NUM_THREADS", *_settings(here)) if key in here.env}
    there = f"cd {shlex.quote(here.folder)} && {Command(command.words, {**passed, **command.env})}"
    here.find("ssh")
    return Command(("ssh", "-tt", "-o", "BatchMode=yes", *port, "--", host, there))


def _settings(here: Here) -> list[str]:
    """Return the environment variables to pass to all ranks."""
    return sorted(name for name in here.env if name.startswith(("DGCOPT_", "GLOO_", "NCCL_")))


def _horovodrun(
    args: argparse.Namespace, here: Here, ranks: int, hosts: list[Host], env: dict[str, str]
) -> list[Command]:
    more = _more(args)
    words = [here.find("horovodrun"), "-np", str(ranks)]
    words += ["-H", ",".join(map(str, hosts))] if hosts else []
    words += ["--network-interfaces", args.interface] if args.interface else []
    words += ["-p", str(args.ssh_port)] if args.ssh_port else []
    words += [] if {"--mpi", "--gloo", "--jsrun"} & {*more} else ["--gloo"]
    return [Command((*words, *more, *_script(args, here)), env)]


def _mpirun(args: argparse.Namespace, here: Here, ranks: int, hosts: list[Host], env: dict[str, str]) -> list[Command]:
    """Return Open MPI's command."""
    words = [here.find("mpirun"), "-np", str(ranks), "--bind-to", "none", "--tag-output"]
    words += ["-H", ",".join(map(str, hosts))] if hosts else ["--oversubscribe"]
    words += ["--allow-run-as-root"] if here.is_root else []
    if args.interface:
        words += ["--mca", "btl_tcp_if_include", args.interface, "--mca", "oob_tcp_if_include", args.interface]
    words += ["--mca", "plm_ssh_args", f"-p {args.ssh_port}"] if args.ssh_port else []
    passed = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", *_settings(here)) if hosts else ()
    for name in (*env, *(name for name in passed if name in here.env and name not in env)):
        words += ["-x", name]
    return [Command((*words, *_more(args), *_script(args, here)), env)]


def _srun(args: argparse.Namespace, here: Here, ranks: int, hosts: list[Host], env: dict[str, str]) -> list[Command]:
    if "SLURM_JOB_ID" not in here.env and not args.dry_run:
        raise ConfigError("srun wants an allocation of Slurm: put this command in a script for sbatch, or run salloc")
    words = [here.find("srun"), "--ntasks", str(ranks), "--label", "--kill-on-bad-exit=1"]
    if hosts:  # a machine is named once for each of its ranks
        names = [name for name, share in _shares(hosts, ranks) for _ in range(share)]
        words += ["--distribution", "arbitrary", "--nodelist", ",".join(names)]
    return [Command((*words, *_more(args), *_script(args, here)), env)]


_BUILD = {"torchrun": _torchrun, "horovodrun": _horovodrun, "mpirun": _mpirun, "srun": _srun}


def _range(nnodes: str) -> str:
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", nnodes)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"--nnodes is a number of machines, or MIN:MAX, not {nnodes!r}")
    return nnodes


def _endpoint(endpoint: str, first_port: int = 1) -> str:
    host = r"[^\s:\[\]]+|\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]"  # a name, or an IPv6 address in brackets
    match = re.fullmatch(f"(?:{host}):([0-9]{{1,5}})", endpoint)
    if match is None or not first_port <= int(match[1]) <= LAST_PORT:
        said = f", not {endpoint!r}" if endpoint else ""
        raise ConfigError(f"several machines need --rdzv-endpoint HOST:PORT, their rendezvous{said}")
    return endpoint


def _split(endpoint: str) -> tuple[str, int]:
    """Return host and port, without the brackets around an IPv6 address."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


# -- doing it --------------------------------------------------------------------------------------------------------


def launch(args: argparse.Namespace) -> int:
    """Run the command of the options; return the exit status. A single command replaces this process."""
    if args.survive:
        return survive(args, Here())
    if args.restart_after is not None:
        raise ConfigError("--restart-after goes with --survive")
    commands = plan(args, Here())
    for command in commands:
        print(command, file=sys.stdout if args.dry_run else sys.stderr, flush=True)
    if args.dry_run:
        return 0
    _check_program(args)
    try:
        if len(commands) == 1:
            become(commands[0])
        return run_all(commands)
    except (OSError, ValueError) as error:  # not executable, too long, or with a NUL character
        raise ConfigError(f"{commands[0].words[0]} cannot be started ({error}): correct the command above") from error


def survive(args: argparse.Namespace, here: Here) -> int:
    """Run this machine's ranks under an agent; return the exit status."""
    agent_plan = plan_survivors(args, here)
    print(agent_plan, file=sys.stdout if args.dry_run else sys.stderr, flush=True)
    if args.dry_run:
        return 0
    _check_program(args)
    return Agent(agent_plan).run()


def _check_program(args: argparse.Namespace) -> None:
    """Raise ConfigError if a program that is no script of Python is not on this machine, where it would be started."""
    program = args.program[0]
    if not (args.module or program.endswith(".py") or args.hosts or args.hostfile or shutil.which(program)):
        raise ConfigError(
            f"{program!r:.200} cannot be started (there is no such program here): correct the command above"
        )


def plan_survivors(args: argparse.Namespace, here: Here) -> Plan:
    """Return the plan of this machine's agent. Raises ConfigError for options that do not go together."""
    if args.launcher or args.hosts or args.hostfile or args.max_restarts is not None or args.launcher_args:
        raise ConfigError(
            "--survive starts the ranks itself, without limit: leave --launcher, --launcher-args, -H, --hostfile and "
            "--max-restarts out, and give the command on each machine, with --nnodes N --rdzv-endpoint HOST:PORT"
        )
    if args.restart_after is not None and not 0 <= args.restart_after < math.inf:
        raise ConfigError(f"--restart-after cannot be {args.restart_after}")
    if args.np is None:
        raise ConfigError("--survive needs the number of ranks on this machine: -np N")
    plan(argparse.Namespace(**{**vars(args), "launcher": "torchrun"}), here)  # checks the rest
    machines = args.nnodes or "1"
    if not machines.isdecimal():
        raise ConfigError(f"--survive needs the number of machines as --nnodes N, not {machines!r}")
    endpoint, hosts = ("127.0.0.1", 0), True
    if args.rdzv_endpoint or machines != "1":
        host, port = _split(_endpoint(args.rdzv_endpoint or "", int(machines != "1")))
        if machines != "1" and host in LOOPBACK:  # each machine would host a store of its own, and wait for the others
            raise ConfigError(
                f"other machines cannot reach this one as {host}: name the first one as they know it in --rdzv-endpoint"
            )
        endpoint, hosts = (host, port), _is_here(host, here)
    env = _environment(args, here, args.np)
    after = args.restart_after or 0.0
    return Plan(_script(args, here), args.np, int(machines), endpoint, hosts, env, after)


def _is_here(host: str, here: Here) -> bool:
    """Return True if a host's name or address is this machine's."""
    if host in here.names:
        return True
    with contextlib.suppress(OSError):
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
        for address in addresses:
            family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind((address, 0))
                return True
    return False


def become(command: Command) -> NoReturn:
    """Replace this process, so that signals and the exit status are the launcher's own."""
    os.execvpe(command.words[0], command.words, {**os.environ, **command.env})


def run_all(commands: Sequence[Command]) -> int:
    """Run one command for each machine; return the exit status.

    The first that fails, or cannot be started, ends the others. Raises OSError or ValueError for the latter.
    """
    running: list[subprocess.Popen[bytes]] = []

    def end(*_: object) -> None:
        for process in running:
            process.terminate()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for command in commands:
            running.append(subprocess.Popen(command.words, env={**os.environ, **command.env}))
        while True:
            codes = [process.poll() for process in running]
            failed = next((code for code in codes if code), 0)
            if failed or None not in codes:
                break
            time.sleep(0.1)
    finally:
        end()
        _wait_or_kill(running)
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - failed if failed < 0 else failed


def _wait_or_kill(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for processes that were told to end, and kill those that have not within `GRACE` seconds."""
    deadline = time.monotonic() + GRACE
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
