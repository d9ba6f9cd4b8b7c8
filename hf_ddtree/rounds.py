"""Draft, build and verify, with their failures kept from the text: a round is redone smaller, or plainly."""

import time

import torch

from .acceptance import Accepted
from .budget import AutoBudget
from .context import Context
from .drafting import Draft, Drafter, Request
from .emission import Emissions
from .figures import Figures
from .rules import AcceptanceRule
from .target import Target
from .tree import Tree, check_trees
from .verify_times import key_of, known_or_measured

LEFT = "ddtree_drafter"  # attribute of a target's cache
MOST_FAILURES = 3  # in a row; then the drafter rests for the rest of the call


class SafeRounds:
    """A round up to its verification.

    Args:
        target, drafter, rule: of the call.
        figures: where rounds that fell back are counted.
    """

    def __init__(self, target: Target, drafter: Drafter, rule: AcceptanceRule, figures: Figures):
        self.target, self.drafter, self.rule, self.figures = target, drafter, rule, figures
        self.pending: Context | None = None  # what the drafter has not been told
        self.failures = 0
        self.node_limit: int | None = None
        self.auto: AutoBudget | None = None
        self.chose = False  # whether there was a draft that it chose from, if only to verify none of it
        self.judged = (0.0, 0.0)  # when the last round ended, and seconds of all forwards by then

    @property
    def rests(self) -> bool:
        """Whether the drafter is not asked any more."""
        return self.failures == MOST_FAILURES or not self.figures.emissions.config.tree_budget

    @property
    def budget(self) -> int | None:
        """Nodes that are worth drafting in the coming round; None = as many as the config says."""
        return None if self.auto is None else self.auto.most

    def prepare(self, emissions: Emissions) -> None:
        """After the prefill: what forwards cost is looked up or measured, where budgets depend on it."""
        if emissions.config.tree_budget != "auto" or emissions.remaining < 2:
            return
        target, rows = self.target, len(self.target.rows)
        key = key_of(target.model, rows, target.trees.width, target.forwards.mode)
        times = known_or_measured(key, lambda nodes: self._rehearse(emissions.prompts, nodes), rows)
        self.auto = AutoBudget.recall(target.model, type(self.drafter).__name__, times, rows)

    def judge(self, tree: Tree, accepted: list[Accepted]) -> None:
        """After a commit: what the round cost and brought bears on the next one's budget."""
        now, verify_seconds = time.perf_counter(), self.figures.seconds["verify"]
        (before, verified), self.judged = self.judged, (now, verify_seconds)
        if self.auto is None or self.figures.rounds == 1:
            return
        if not self.chose:
            self.auto.rested()
        else:
            on_cpu = tree.tokens.device.type == "cpu"  # elsewhere the stage ends before the forward does
            self.auto.learn(tree, accepted, now - before, verify_seconds - verified if on_cpu else 0.0)

    def resume(self) -> None:
        """Before the prefill: the drafter goes on from what it left with a cache that was given."""
        left, length = getattr(self.target.cache, LEFT, None), int(self.target.cache.get_seq_length())
        if left is None or not length:
            return
        mask, rows = self.target.prompt_mask, self.figures.rows
        lengths = [length] * rows if mask is None else mask[:, :length].sum(1).tolist()
        try:
            self.pending = self.drafter.resume(left, lengths)
        except Exception as error:
            self._failed("memory of the drafter", error)

    def leave(self) -> None:
        """At the end: the drafter leaves what it knows with the cache; what was learnt of budgets is kept as well."""
        left = None
        if self.auto is not None:
            self.auto.keep(self.target.model, type(self.drafter).__name__, self.figures.rows)
        try:
            left = None if self.rests else self.drafter.leave(self.pending)
        except Exception as error:
            self._failed("memory of the drafter", error)
        setattr(self.target.cache, LEFT, left)

    def learn(self, context: Context) -> None:
        """What was committed, which the drafter is told when it is asked next."""
        if not self.rests:
            self.pending = context if self.pending is None else self.pending.followed_by(context)

    def keep(self, rows: list[int]) -> None:
        """Goes on with those of the live rows."""
        if len(rows) < len(self.target.rows):
            self.target.keep(rows)
            try:
                self.drafter.keep(rows)
            except Exception as error:  # it no longer knows which rows it is asked about
                self._failed("memory of the drafter", error)
                self.failures = MOST_FAILURES
            self.pending = None if self.pending is None else self.pending.keep(rows)

    def draft(self, emissions: Emissions) -> Draft | Tree | None:
        """The drafter's answer; None where it failed or there is nothing to ask."""
        depth = emissions.remaining - 1
        if depth < 1 or self.rests or self.pending is None or (self.auto is not None and self.auto.rests):
            return None
        try:
            drafted = self.drafter.draft(Request(emissions.texts, self.pending, depth, self.rule.noise, self.budget))
            if isinstance(drafted, Tree):
                check_trees(drafted, emissions.roots, self.target.vocab_size)
            elif drafted is not None:
                check_logits(drafted.logits, len(emissions.live))
                drafted = drafted.of_vocabulary(self.target.vocab_size)
                self.figures.broken = self.figures.broken + drafted.logits.amax(-1).isnan().any()
        except Exception as error:
            self._failed("drafter", error)
            return None
        self.pending = None
        return drafted

    def build(self, roots: torch.Tensor, drafted: Draft | Tree | None) -> Tree:
        """The rule's trees; the roots alone where they can't be built."""
        try:
            tree = self.rule.build(roots, drafted, self.budget)
            self.failures = 0 if drafted is not None else self.failures
        except Exception as error:
            self._failed("tree of the drafter", error)
            tree = self.rule.build(roots, None)
        self.chose = self.auto is not None and tree.num_nodes > 1
        if self.auto is not None and self.chose:
            tree = self.rule.cut(tree, self.auto.choose(tree))
        return tree if self.node_limit is None else self.rule.cut(tree, self.node_limit)

    def verify(self, tree: Tree) -> tuple[Tree, torch.Tensor]:
        """The target's logits of as much of the trees as there is memory for, and that much of them."""
        while True:
            try:
                return tree, self.target.verify(tree)
            except (RuntimeError, MemoryError) as error:
                if tree.num_nodes == 1 or not _is_out_of_memory(error):
                    raise
                reason = repr(error)
            self.node_limit = tree.num_nodes // 2
            self.figures.fall_back(
                "memory",
                f"No memory to verify {tree.num_nodes} nodes a row ({reason}): trees are cut to {self.node_limit} for "
                "the rest of this call. The text does not change. Lower `tree_budget` or the batch size.",
            )
            tree = self.rule.cut(tree, self.node_limit)

    def _rehearse(self, prompts: torch.Tensor, nodes: int) -> None:
        """A forward over the prompts' last tokens, again and again, as a chain; raises MemoryError."""
        rows, place = len(self.target.rows), torch.arange(nodes, device=prompts.device)
        known = prompts[:, -nodes:] if prompts.shape[1] else place.expand(rows, -1)  # a prompt of embeddings has none
        parents, depths = (place - 1).clamp(min=0).expand(rows, -1), place.expand(rows, -1)
        tokens = known.repeat(rows // len(known), 1)[:, place % known.shape[1]]
        try:
            self.target.rehearse(Tree(tokens, parents, depths, -depths.double(), depth_bound=nodes - 1))
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise MemoryError(f"no memory for {nodes} nodes") from error

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        self.figures.fall_back(
            "draft",
            f"The {what} failed ({type(self.drafter).__name__}: {error!r}): such rounds are decoded plainly, and after "
            f"{MOST_FAILURES} in a row all that follow. The text does not change, only the speed.",
        )


def check_logits(logits: torch.Tensor, rows: int) -> None:
    """Raises ValueError unless draft logits are [rows, depth, vocab]."""
    if logits.dim() != 3 or len(logits) != rows:
        raise ValueError(f"draft logits are {list(logits.shape)}; they must be [{rows}, depth, vocabulary]")


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an accelerator's or the CPU's allocator says so; the CPU's has no exception of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
