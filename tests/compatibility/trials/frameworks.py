"""What holds in frameworks: scripts of examples/, each two real ranks of its own."""

from __future__ import annotations

import functools

from tests.compatibility.table import Absent, trial, version
from tests.support.launching import ROOT, launch

FRAMEWORKS = "Frameworks"


def example(name: str) -> None:
    """Both ranks come to the end with the same bits, and have learned."""
    if name == "trainer_ddp" and [int(part) for part in version().split(".")] < [2, 6]:
        raise Absent("transformers itself resumes with torch >= 2.6 only; training went well")
    outcome = launch("torch", 2, [str(ROOT / "examples" / f"{name}.py")], limit=240, compiler=True)
    told = outcome.told("example")
    assert outcome.code == 0 and not outcome.orphans and len(told) == 2, outcome.tail
    assert told[0] == told[1], f"replicas drifted apart: {told}"
    assert told[0]["accuracy"] > 0.8 and told[0].get("resumed", True) is True, told[0]


for what, name, needs in (
    ("several optimizers and one `ddp_hook`", "two_optimizers_ddp", ()),
    ("Accelerate, and `save_state`, `load_state`", "accelerate_resume", ["accelerate"]),
    ("Lightning, and `ckpt_path`", "lightning_resume", ["lightning"]),
    ("Lightning Fabric", "fabric_ddp", ["lightning"]),
    ("HF Trainer, and `resume_from_checkpoint`", "trainer_ddp", ["transformers", "accelerate"]),
):
    trial(FRAMEWORKS, what, needs=["sklearn", *needs], note=f"[`examples/{name}.py`](../examples/{name}.py)")(
        functools.partial(example, name)
    )
