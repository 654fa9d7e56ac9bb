"""PerParameter: a compressor for each group of parameters, selected by name patterns."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from ...collectives import Collective, watched
from ...errors import ConfigError
from ...flat.local_shard import as_stepped
from ..base import Compressor, GradientExchange, Source
from ..context import Context
from ..dense import NoCompression
from ..horovod import accept
from ..own_step import updates_add_up

__all__ = ["PerParameter"]

Group = dict[str, Any]
"""A parameter group of an optimizer."""


class Kind(NamedTuple):
    """The kind of a bucket: its pattern, and the kind within that pattern's rule."""

    pattern: str
    inner: Hashable


class PerParameter(Compressor):
    """Rules by name: the first pattern that matches a parameter's name selects its compressor.

        PerParameter({"*.bias": NoCompression(), "fc.*": DGC(0.01), "*": DGC(0.001)})

    Patterns follow `fnmatch`: "*" matches anything, "?" one character, "[ab]" one of these. Rules share no bucket, and
    each applies only to its own parameters: a clip of the whole model covers them, and so does momentum taken over from
    the optimizer, as in DGC. The optimizer steps all other parameters as usual.

    Exchanges are launched during backward if all rules allow it.

    Args:
        rules: a compressor for each pattern, copied; None is {"*": NoCompression()}.
        source: send gradients or updates, for all rules: see `Compressor.source`. "auto" lets each rule decide: in
            front of Adam, biases may be averaged as gradients while updates of other parameters are compressed.

    Costs the cost of each rule for its parameters; each rule has at least one bucket. Raises ConfigError for a value
    that is no compressor or another PerParameter, for a parameter that no pattern matches, for a pattern that is never
    the first match (except a last "*"), and for a mix of gradients and updates in front of an optimizer that may not be
    able to step parameters separately.
    """

    def __init__(self, rules: Mapping[str, Compressor] | None = None, source: Source = "auto") -> None:
        rules = {"*": NoCompression()} if rules is None else rules
        if not isinstance(rules, Mapping) or not rules:
            raise ConfigError(f'PerParameter takes a compressor for each pattern, {{"*": DGC(0.001)}}, not {rules!r}')
        if source not in ("auto", "gradient", "update"):
            raise ConfigError(f'source must be "auto", "gradient" or "update", not {source!r}')
        self.rules: dict[str, Compressor] = {}
        for pattern, rule in rules.items():
            if not isinstance(pattern, str):
                raise ConfigError(f"PerParameter's patterns must be strings, not {pattern!r}")
            try:
                self.rules[pattern] = copy.deepcopy(accept(rule))
            except ConfigError as error:
                raise ConfigError(f"the rule of {pattern!r}: {error}") from None
            if any(isinstance(part, PerParameter) for part in self.rules[pattern].parts()):
                raise ConfigError(
                    f"the rule of {pattern!r} is a PerParameter itself. Put all rules into one PerParameter."
                )
        self._source: Source = "auto"
        if source != "auto":
            self.source = source
        self._seen: dict[str, str] = {}  # the pattern of each name
        self._pattern_of: dict[Tensor, str] = {}
        self._whole: list[Group] | None = None  # the original groups while a step uses split ones
        self._members: list[tuple[Group, list[Tensor]]] = []
        self._follow()

    def _follow(self) -> None:
        rules = self.rules.values()
        overlaps = {rule.overlap for rule in rules}
        self.overlap = "auto" if "auto" in overlaps and False not in overlaps else all(overlaps)
        self.whole_model = any(rule.whole_model for rule in rules)
        self.in_turn = any(rule.in_turn for rule in rules)
        moments = {rule.first_moment for rule in rules if rule.sends == "update"}
        self.first_moment = "residual" if moments == {"residual"} else "optimizer"

    def __repr__(self) -> str:
        source = "" if self._source == "auto" else f", source={self._source!r}"
        return f"PerParameter({self.rules!r}{source})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pattern_of": {}}  # a copy sees its own parameters

    def parts(self) -> Iterator[Compressor]:
        yield self
        for rule in self.rules.values():
            yield from rule.parts()

    # -- rules of parameters and buckets -----------------------------------------------------------------------------

    def pattern_for(self, name: str) -> str:
        """Return the first pattern that matches a parameter's name. Raises ConfigError if none does."""
        for pattern in self.rules:
            if fnmatchcase(name, pattern):
                return pattern
        raise ConfigError(
            f"parameter {name!r} matches none of PerParameter's patterns, {', '.join(map(repr, self.rules))}. Add one, "
            f'or "*" as the last for all remaining parameters.'
        )

    def see_parameters(self, names: Mapping[Tensor, str], others: Iterable[str] = ()) -> None:
        seen = {name: self.pattern_for(name) for name in names.values()}
        if not self._seen:
            self._check_use(list(dict.fromkeys([*seen, *others])))
        self._seen |= seen
        self._pattern_of |= {as_stepped(param): seen[name] for param, name in names.items()}
        for pattern, rule in self.rules.items():
            rule.see_parameters({p: name for p, name in names.items() if seen[name] == pattern})

    def _check_use(self, names: Sequence[str]) -> None:
        """Raise ConfigError for a pattern that is never the first match of these names."""
        for place, pattern in enumerate(self.rules):
            matched = [name for name in names if fnmatchcase(name, pattern)]
            before = list(islice(self.rules, place))
            if not all(any(fnmatchcase(name, earlier) for earlier in before) for name in matched):
                continue
            if matched and pattern == "*" and place == len(self.rules) - 1:
                continue
            if matched:
                raise ConfigError(
                    f"PerParameter's pattern {pattern!r} comes too late: earlier patterns, "
                    f"{', '.join(map(repr, before))}, already match its parameters ({', '.join(matched[:3])}). Put it "
                    f"before them, since the first match applies."
                )
            raise ConfigError(
                f"PerParameter's pattern {pattern!r} matches no parameter. Names are like {', '.join(names[:5])}; if "
                f"they are numbers, give the wrapper model.named_parameters()"
            )

    def kind(self, name: str, param: Tensor) -> Hashable:
        pattern = self.pattern_for(name)
        return Kind(pattern, self.rules[pattern].kind(name, param))

    def _rule_of(self, kind: Hashable) -> tuple[Compressor, Hashable]:
        """Return the rule of a bucket and the kind within it."""
        assert isinstance(kind, Kind)
        return self.rules[kind.pattern], kind.inner

    def _within(self, ctx: Context) -> tuple[Compressor, Context]:
        """Return the rule of a bucket and the context for it."""
        rule, kind = self._rule_of(ctx.kind)
        return rule, ctx.placed(kind=kind)

    # -- gradients or updates ----------------------------------------------------------------------------------------

    @property
    def source(self) -> Source:
        """ "update" if a rule is set to it, else "auto" if a rule decides itself."""
        sources = {rule.source for rule in self.rules.values()}
        return "update" if "update" in sources else "auto" if "auto" in sources else "gradient"

    @source.setter
    def source(self, source: Source) -> None:
        self._source = source
        for rule in self.rules.values():
            rule.source = source

    @property
    def sends(self) -> Literal["gradient", "update"]:
        return "update" if any(rule.sends == "update" for rule in self.rules.values()) else "gradient"

    @property
    def clips_model(self) -> bool:
        """True if a single rule clips: one of several clips its own parameters' norm, not that in `Context.norm`."""
        return len(self.rules) == 1 and all(rule.clips_model for rule in self.rules.values())

    def sends_of(self, kind: Hashable) -> Literal["gradient", "update"]:
        rule, inner = self._rule_of(kind)
        return rule.sends_of(inner)

    def residual_content(self, kind: Hashable) -> str:
        rule, inner = self._rule_of(kind)
        return rule.residual_content(inner)

    def replaces_first_moment(self, step: int) -> bool:
        """Return True once all rules that send updates replace it: a parameter group has one b1."""
        return all(rule.replaces_first_moment(step) for rule in self.rules.values() if rule.sends == "update")

    def as_gradient(self, unsent: Tensor, ctx: Context) -> Tensor:
        rule, mine = self._within(ctx)
        return rule.as_gradient(unsent, mine)

    @property
    def asks_link(self) -> bool:
        return any(rule.asks_link for rule in self.rules.values())

    @property
    def conserves(self) -> bool:
        return all(rule.conserves for rule in self.rules.values())

    def adds_up(self, kind: Hashable) -> bool:
        rule, inner = self._rule_of(kind)
        return rule.adds_up(inner)

    def in_place(self, kind: Hashable) -> bool:
        rule, inner = self._rule_of(kind)
        return not self.whole_model and rule.in_place(inner)

    def set_steps_per_epoch(self, steps: int) -> None:
        for rule in self.rules.values():
            rule.set_steps_per_epoch(steps)

    def prepare(self, grads: Sequence[Tensor], contexts: Sequence[Context]) -> None:
        given = [(grad, *self._within(ctx)) for grad, ctx in zip(grads, contexts, strict=True)]
        for rule in self.rules.values():
            if rule.whole_model:
                rule.prepare(
                    [g for g, owner, _ in given if owner is rule], [c for _, owner, c in given if owner is rule]
                )

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        rule, mine = self._within(ctx)

        def pass_on(_: Collective) -> None:
            ctx.set_peak(mine.peak)

        return (yield from watched(rule.exchange(grad, mine), pass_on))

    def payload_bytes(self, ctx: Context) -> int | None:
        rule, mine = self._within(ctx)
        return rule.payload_bytes(mine)

    # -- the step ----------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        whole = optimizer.param_groups
        try:
            for pattern, rule in self.rules.items():
                optimizer.param_groups = self._groups_of(pattern, whole) or whole
                rule.attach(optimizer)
        finally:
            optimizer.param_groups = whole
        self._follow()
        sends = {pattern: rule.sends for pattern, rule in self.rules.items()}
        updating = [rule for rule in self.rules.values() if rule.sends == "update"]
        if len({rule.first_moment for rule in updating}) > 1:
            raise ConfigError(
                "PerParameter's rules differ in first_moment, but all updates are made with one b1: set "
                'first_moment="residual" in all rules that send updates, or in none'
            )
        if len(set(sends.values())) > 1 and not updates_add_up(optimizer):
            raise ConfigError(
                f"PerParameter's rules send gradients for some parameters and updates for others, {sends}, but "
                f"{type(optimizer).__name__} may not be able to step them separately. Give PerParameter "
                f"source='gradient' or source='update'."
            )

    def _groups_of(self, pattern: str, groups: Sequence[Group]) -> list[Group]:
        """Return parameter groups with only a rule's own parameters."""
        mine = [[p for p in group["params"] if self._pattern_of.get(p) == pattern] for group in groups]
        return [{**group, "params": params} for group, params in zip(groups, mine, strict=True) if params]

    def before_step(self, optimizer: Optimizer) -> list[Tensor]:
        """Prepare each rule's step with groups of its own parameters, so that changed settings apply to them only."""
        self._put_together(optimizer)
        whole, apart = optimizer.param_groups, list[Group]()
        stepped: list[Tensor] = []
        try:
            for pattern, rule in self.rules.items():
                before = self._groups_of(pattern, whole)
                optimizer.param_groups = [dict(group) for group in before]
                stepped += rule.before_step(optimizer) or ()
                pairs = zip(before, optimizer.param_groups, strict=True)
                apart += [new for old, new in pairs if any(new[key] is not value for key, value in old.items())]
        finally:
            optimizer.param_groups = whole
        if apart:
            taken = {param for group in apart for param in group["params"]}
            self._whole, self._members = whole, [(group, group["params"]) for group in whole]
            for group, params in self._members:
                group["params"] = [param for param in params if param not in taken]
            optimizer.param_groups = whole + apart
        return stepped

    def after_step(self, optimizer: Optimizer) -> None:
        for rule in self.rules.values():
            rule.after_step(optimizer)
        self._put_together(optimizer)

    def return_momentum(self, momenta: Mapping[Tensor, Tensor]) -> None:
        for pattern, rule in self.rules.items():
            rule.return_momentum(
                {param: u for param, u in momenta.items() if self._pattern_of[as_stepped(param)] == pattern}
            )

    def _put_together(self, optimizer: Optimizer) -> None:
        """Restore the optimizer's groups after the step."""
        if self._whole is not None:
            optimizer.param_groups, self._whole = self._whole, None
        while self._members:
            group, group["params"] = self._members.pop()
